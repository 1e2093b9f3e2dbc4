package loop

import (
	"os"
	"slices"
	"strings"

	"github.com/trivet-csi/trivet/internal/mountflags"
	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// recoverLostLocks is the kernel parameter nfs.recover_lost_locks (kernel documentation,
// admin-guide/kernel-parameters.txt).
const recoverLostLocks = "/sys/module/nfs/parameters/recover_lost_locks"

// The lock on an image in a shared pool fences a node if the server revokes the lock when the
// node's lease expires, and then refuses writes under that lock. NFS servers do so with version 4.1
// and later, unless this node is configured otherwise.

// checkFencing verifies that locks fence, and registers this node's NFS client identity at the export,
// so that no two nodes have the same identity (ErrPrecondition). It does nothing if the configuration
// leaves fencing to the administrator.
func (b *Backend) checkFencing(p *pool.Pool) error {
	if p.Config().NFS.Fencing == pool.FencingNone {
		return nil
	}
	if err := checkVersion(p, p.Version()); err != nil {
		return err
	}
	if err := checkLocal(p); err != nil {
		return err
	}
	if err := checkRecovery(); err != nil {
		return err
	}
	identity, err := mount.ClientIdentity()
	if err != nil {
		return err
	}
	return p.Export().Register(identity, b.Set.NodeID())
}

// checkVersion refuses NFS versions whose locks do not fence.
func checkVersion(p *pool.Pool, version string) error {
	if p.Config().NFS.Fencing == pool.FencingNone || version >= "4.1" {
		return nil
	}
	return volume.Errorf(volume.ErrPrecondition, "pool %q: locks over NFS %s do not prevent a disconnected node from writing: serve NFS 4.1 or 4.2 and remove nfsvers from mountOptions, or set nfs.fencing: %s and ensure by other means that no two nodes use one volume",
		p.Name(), version, pool.FencingNone)
}

// localLocks are the mount options with which flock(2) is local to the node (nfs(5)).
var localLocks = []string{"nolock", "local_lock=flock", "local_lock=all"}

// checkLocal refuses mount options with locks that are local to the node.
func checkLocal(p *pool.Pool) error {
	for _, word := range mountflags.Split(p.Config().NFS.MountOptions) {
		if slices.Contains(localLocks, word) {
			return volume.Errorf(volume.ErrPrecondition, "pool %q: mountOptions contain %s: other nodes do not see such locks: remove it", p.Name(), word)
		}
	}
	return nil
}

// checkMounted refuses a mount with locks that are local to the node.
func checkMounted(p *pool.Pool, e *mount.Entry) error {
	if p.Config().NFS.Fencing == pool.FencingNone || strings.Contains(e.VFSOptions, "local_lock=none") {
		return nil
	}
	return volume.Errorf(volume.ErrPrecondition, "pool %q: %s is mounted with locks that other nodes do not see (%s): remove lock flags from mountOptions", p.Name(), e.Source, e.VFSOptions)
}

// checkRecovery refuses a kernel that reclaims lost locks, because another node may have held the lock
// meanwhile.
func checkRecovery() error {
	b, err := os.ReadFile(recoverLostLocks)
	if err != nil {
		return volume.Errorf(volume.ErrPrecondition, "cannot determine whether the kernel reclaims lost NFS locks: %w: give the driver the host's /sys", err)
	}
	if s := strings.TrimSpace(string(b)); s != "N" {
		return volume.Errorf(volume.ErrPrecondition, "%s is %s: a node that reconnects would write to a volume that another node uses in the meantime: set it to N", recoverLostLocks, s)
	}
	return nil
}
