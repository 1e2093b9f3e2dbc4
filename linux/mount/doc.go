// Package mount mounts, binds, unmounts and inspects mounts by system calls, without a
// process: fsopen(2), fsmount(2), open_tree(2), move_mount(2), mount_setattr(2),
// openat2(2), statx(2), umount2(2). They need Linux 5.12.
//
// Every answer about a mount is read from the kernel; nothing is remembered. The package
// knows no volumes, and neither formats nor removes data.
package mount
