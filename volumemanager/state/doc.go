// Package state holds the desired and the actual state of volumes. It starts no operations: package
// reconciler changes the actual state to the desired one.
//
// Nothing here is safe for concurrent use.
package state
