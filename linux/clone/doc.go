// Package clone copies images and directory trees, shares blocks where the filesystem can,
// and finds what changed between two images.
//
// A function that cannot copy a part of the source returns an error. The package does not trust the content of
// the source, which a tenant may have created and may change at the same time.
package clone
