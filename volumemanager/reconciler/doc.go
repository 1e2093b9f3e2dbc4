// Package reconciler makes what is there of volumes like what is wanted: it takes down
// what is not wanted, brings up what is, and then lets go of what no pod has any more, in
// that order.
//
// It looks at everything each time, and starts operations, one for each volume at a time;
// it waits for none. What it knows of what is there is on disk and in the mount table:
// after a restart all of that counts as possibly there.
package reconciler
