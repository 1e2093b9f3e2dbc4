// Package local is the backend of volumes that are directories of a filesystem of one
// node, as fast as that filesystem. Where it can (project quota of XFS and ext4, simple
// quotas of btrfs) each is kept to its capacity; elsewhere that is a number.
//
// A volume's directory is `data` in the volume's folder, or where its class's subDir
// says. It is bound to the staging path from a descriptor that was opened beneath the
// pool: nothing above it is reached through the mount, and no link is followed.
package local
