// Package reconciler makes the actual state of world match the desired one. Each pass unmounts
// volumes that are not desired, then mounts desired ones, then unmounts and detaches devices that no
// pod uses.
//
// A pass evaluates the whole state and starts operations, one at a time for each volume; it waits
// for none. The actual state is on disk and in the mount table: after a restart, everything found
// there counts as possibly mounted.
package reconciler
