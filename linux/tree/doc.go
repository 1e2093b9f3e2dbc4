// Package tree walks and removes directory trees that an untrusted process may change
// meanwhile. It follows no link, enters nothing that is mounted in a tree, and holds few
// descriptors and little memory, however deep and wide the tree is.
package tree
