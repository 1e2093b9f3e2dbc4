package loop

import (
	"os"
	"slices"
	"strings"

	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// recoverLostLocks is nfs.recover_lost_locks (kernel documentation,
// admin-guide/kernel-parameters.txt).
const recoverLostLocks = "/sys/module/nfs/parameters/recover_lost_locks"

// The lock on an image in a shared pool fences if the server knows whose it is,
// takes it away with the node's lease, and refuses the writes that come with it
// from then on. That is so from NFS 4.1 on, unless this node was told otherwise.

// fence makes sure that locks fence, and that the server can tell this node from
// the others (ErrPrecondition), unless the configuration leaves it to the
// administrator.
func (b *Backend) fence(p *pool.Pool) error {
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

// checkVersion refuses versions of NFS whose locks do not fence.
func checkVersion(p *pool.Pool, version string) error {
	if p.Config().NFS.Fencing == pool.FencingNone || version >= "4.1" {
		return nil
	}
	return volume.Errorf(volume.ErrPrecondition, "pool %q: locks over NFS %s do not keep a node that was cut off from writing: serve NFS 4.1 or 4.2 and remove nfsvers from mountOptions, or set nfs.fencing: %s and make sure otherwise that no two nodes use one volume",
		p.Name(), version, pool.FencingNone)
}

// localLocks are the mount flags that keep flock(2) from the server (nfs(5)).
var localLocks = []string{"nolock", "local_lock=flock", "local_lock=all"}

func checkLocal(p *pool.Pool) error {
	for _, words := range p.Config().NFS.MountOptions {
		for word := range strings.SplitSeq(words, ",") {
			if slices.Contains(localLocks, word) {
				return volume.Errorf(volume.ErrPrecondition, "pool %q: mountOptions have %s: other nodes do not see such locks: remove it", p.Name(), word)
			}
		}
	}
	return nil
}

// checkMounted looks at what the kernel made of the flags.
func checkMounted(p *pool.Pool, e *mount.Entry) error {
	if p.Config().NFS.Fencing == pool.FencingNone || strings.Contains(e.VFSOptions, "local_lock=none") {
		return nil
	}
	return volume.Errorf(volume.ErrPrecondition, "pool %q: %s is mounted with locks that other nodes do not see (%s): remove lock flags from mountOptions", p.Name(), e.Source, e.VFSOptions)
}

// checkRecovery refuses a kernel that takes a lock again that the server gave to
// another node meanwhile.
func checkRecovery() error {
	b, err := os.ReadFile(recoverLostLocks)
	if err != nil {
		return volume.Errorf(volume.ErrPrecondition, "whether lost NFS locks are taken again cannot be seen: %w: give the driver the host's /sys", err)
	}
	if s := strings.TrimSpace(string(b)); s != "N" {
		return volume.Errorf(volume.ErrPrecondition, "%s is %s: a node that was cut off would write again to a volume that another has by now: set it to N", recoverLostLocks, s)
	}
	return nil
}
