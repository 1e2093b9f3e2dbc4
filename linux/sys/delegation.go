package sys

import (
	"os"

	"golang.org/x/sys/unix"
)

// NoDelegation returns the flags with which files below a directory are opened and created, so that the server
// grants no delegation for them: O_DIRECT on NFS (fs/nfs/nfs4proc.c,
// nfs4_map_atomic_open_share; NFS requires no alignment for it), else 0.
//
// A delegation belongs to the NFS client, and all processes of a node are one client, though
// each has a mount of its own. So the server does not recall the delegation when another process of
// this node writes or renames the file, and the file appears unchanged for ever, with any actimeo and
// lookupcache (tried on Linux 6.1). A server with Linux 7.3 also delegates files that the client creates; the client then finds
// the old file after another process has renamed a new one over it. If the server delegates writes, the client
// handles flock(2) itself, for each mount separately, so two processes of a node could hold the same lock.
func NoDelegation(dir *os.File) (int, error) {
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(dir.Fd()), &st); err != nil {
		return 0, wrap("fstatfs", dir, err)
	}
	if st.Type == unix.NFS_SUPER_MAGIC {
		return unix.O_DIRECT, nil
	}
	return 0, nil
}

// NoDelegationIn is NoDelegation for a root.
func NoDelegationIn(root *os.Root) (int, error) {
	dir, err := root.OpenFile(".", os.O_RDONLY|NonBlocking, 0)
	if err != nil {
		return 0, err
	}
	defer dir.Close()
	return NoDelegation(dir)
}
