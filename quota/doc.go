// Package quota keeps directories to a size by what their filesystem has for it:
// project quota on XFS and ext4, simple quotas on btrfs. It speaks to the kernel
// alone, by quotactl_fd(2) and ioctl_xfs, ioctl_btrfs(2), and never turns quotas on.
package quota
