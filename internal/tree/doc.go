// Package tree walks and removes directories with all that is in them, while somebody may
// change them who is not trusted: no link is followed, nothing that is mounted in them is
// entered, and however deep they are, few descriptors are open.
package tree
