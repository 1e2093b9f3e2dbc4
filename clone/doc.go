// Package clone copies images and trees of directories, by sharing blocks where the
// filesystem can, and tells what changed between two images.
//
// A copy is all of its source or an error: nothing is left out in silence. What is
// copied is a tenant's, so nothing in it is trusted.
package clone
