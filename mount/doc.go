// Package mount mounts, binds, unmounts and looks at mounts, by system call
// and without a process: fsopen(2), fsmount(2), open_tree(2), move_mount(2),
// mount_setattr(2), openat2(2), statx(2), umount2(2). They need Linux 5.12.
//
// What is true of a mount is read from the kernel each time. Nothing here knows
// volumes, and nothing here formats or removes data.
package mount
