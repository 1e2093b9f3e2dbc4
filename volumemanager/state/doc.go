// Package state is what is wanted of volumes, and what is there. It knows no time and
// starts nothing: package reconciler makes the second like the first.
//
// Nothing here is safe for concurrent use.
package state
