// Package quota limits the size of directories by the mechanism of their filesystem: project quota on XFS and
// ext4, simple quotas on btrfs. A limited directory has an ID, by which the filesystem counts its data: a
// project ID, or the ID of its subvolume on btrfs. The package runs no programs, and never switches quotas on.
package quota
