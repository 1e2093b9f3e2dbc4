// Package verify compares volumes, snapshots and clones with what was written, in random
// histories. A writer runs while snapshots and clones are made. All volumes made of them are
// compared with the written content and its times, with each other by the blocks that the
// driver reports as changed, and checked by the filesystems' own tools. It trusts nothing that
// the driver reports.
//
// It runs the real binary, as root, on real filesystems. `go test` has time for a few
// histories; -histories is for as many as one likes. Nothing but tests lives here.
package verify
