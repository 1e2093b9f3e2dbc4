// Package treetest makes trees of everything that a filesystem can have in it, and
// compares them.
package treetest
