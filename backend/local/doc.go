// Package local is the backend of volumes that are directories of a filesystem of one node. Where
// the filesystem supports it (project quota of XFS and ext4, simple quotas of btrfs), each
// directory is limited to its capacity. Elsewhere the capacity is not enforced.
//
// A volume's directory is `data` in the volume's folder, or the subDir of its class. It is
// bind-mounted at the staging path from a descriptor that was opened beneath the pool, so that no
// link is followed and the mount gives no access to parent directories.
package local
