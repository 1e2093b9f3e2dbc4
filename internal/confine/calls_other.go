//go:build !amd64

package confine

// refusedHere contains the refused calls that only this architecture has.
var refusedHere []uint32
