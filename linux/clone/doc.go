// Package clone copies images and directory trees, shares blocks where the filesystem can,
// and finds what changed between two images.
//
// A copy is complete or an error: nothing is left out silently. The source is a tenant's,
// and nothing in it is trusted.
package clone
