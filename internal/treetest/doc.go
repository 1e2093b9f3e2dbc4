// Package treetest creates trees with all kinds of files and attributes that a filesystem supports, and compares
// trees.
package treetest
