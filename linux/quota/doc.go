// Package quota limits the size of directories by the mechanism of their filesystem:
// project quota on XFS and ext4, simple quotas on btrfs. It makes system calls only, and
// never switches quotas on.
package quota
