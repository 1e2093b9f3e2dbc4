// Package mount mounts, binds, unmounts and inspects mounts by system calls, without a
// helper process: fsopen(2), fsmount(2), open_tree(2), move_mount(2), mount_setattr(2),
// openat2(2), statx(2), umount2(2). They need Linux 5.12.
//
// The package reads the state of mounts from the kernel and caches nothing. It knows no volumes, and neither
// formats devices nor removes data.
package mount
