// Package tree walks and removes directory trees that an untrusted process may change at the same time. It
// follows no symbolic link, enters no mount in a tree, and holds few descriptors and little memory, however
// deep and wide the tree is.
package tree
