// Package verify tests the content of volumes, snapshots and clones in random histories. In each
// history, a writer writes to a volume while snapshots and clones are made. The test compares every
// clone and restored volume with what was written until then, rebuilds images from the blocks that
// the driver reports as allocated or changed, and runs the filesystems' own checks.
//
// The tests run the real driver as root on real filesystems. By default they run a few histories per
// pool; -histories sets the number.
package verify
