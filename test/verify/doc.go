// Package verify tests the content of volumes, snapshots and clones in random histories. In each
// history, a writer writes to a volume while the volume is staged again and expanded, and snapshots and
// clones are made. The test compares the volume and every clone and restored volume with what was
// written until then, compares images outside the blocks that the driver reports as allocated or
// changed, and runs the filesystems' own checks. In virtual machines, histories also kill the driver.
//
// The tests run the real driver as root on real filesystems. By default they run a few histories per
// pool; -histories sets the number.
package verify
