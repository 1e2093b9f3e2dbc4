// Package sixthkind is a kind of volume that only the tests serve. The package proves that a kind can
// be added without a change to other packages. docs/writing-a-backend.md explains its code.
//
// A volume is a directory in a directory pool. Nothing limits its size, and it has no
// snapshots.
package sixthkind
