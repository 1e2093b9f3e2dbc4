package pool

import (
	"os"

	"golang.org/x/sys/unix"
)

// Undelegated adds to the flags of opening a file in the pool that a server is to
// grant no delegation with it: O_DIRECT, from NFS 4.1 on (Linux, fs/nfs/nfs4proc.c,
// nfs4_map_atomic_open_share). NFS wants no alignment for it.
//
// A delegation is the NFS client's, which all processes of a node are together,
// though each has a mount of its own: what another process of this node writes or
// renames does not recall it. With one a file was seen unchanged for ever, whatever
// actimeo and lookupcache say (tried on Linux 6.1), and a server that delegates
// writes leaves flock(2) to the client, which looks at the own mount only.
func (p *Pool) Undelegated(flag int) int { return flag | p.direct }

// directFor is O_DIRECT for a directory on NFS, else 0.
func directFor(dir *os.File) (int, error) {
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(dir.Fd()), &st); err != nil {
		return 0, err
	}
	if st.Type == unix.NFS_SUPER_MAGIC {
		return unix.O_DIRECT, nil
	}
	return 0, nil
}
