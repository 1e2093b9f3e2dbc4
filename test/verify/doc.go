// Package verify takes volumes of known content through random histories: a writer
// runs, snapshots and clones are made meanwhile, volumes of them, and all are compared
// with what was written and when, with each other by the blocks that are said to have
// changed, and checked by the filesystems' own tools. It trusts nothing that the driver
// says.
//
// It runs the real binary, as root, on real filesystems. `go test` has time for a few
// histories; -histories is for as many as one likes. Nothing but tests lives here.
package verify
