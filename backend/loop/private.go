package loop

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"k8s.io/klog/v2"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/internal/retry"
	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// The image of a volume in a shared pool is opened through a private mount, which has a
// superblock of its own: aborting the requests to a silent server affects no other volume.
// The mount is at a path, so that it outlives the process and the next process finds it.

// releaseTime is how long to wait for a private mount or the lock of an image: the kernel
// closes the image a moment after it has freed the device.
const releaseTime = 2 * time.Second

// privatePath is the mount point of a volume's private mount.
func (b *Backend) privatePath(id volume.ID) string {
	return filepath.Join(b.Set.MountsDir(), strings.TrimPrefix(b.tag(id), tagPrefix))
}

// imageSource is the folder of a volume on its server.
func imageSource(p *pool.Pool, name string) mount.NFS {
	c := p.Config().NFS
	return mount.NFS{
		Server:  strings.Trim(c.Server, "[]"),
		Path:    path.Join(c.Export, pool.FolderPath(name)),
		Options: append(slices.Clone(c.MountOptions), "nosharecache", "hard", "actimeo=0", "nosuid", "nodev", "noexec"),
	}
}

// mountPrivate creates the private mount of a volume without a device, and opens its root. It
// removes a mount that another process has left at the path.
func (b *Backend) mountPrivate(ctx context.Context, p *pool.Pool, id volume.ID) (*os.Root, error) {
	if err := b.unmountPrivate(ctx, id); err != nil {
		return nil, err
	}
	target := b.privatePath(id)
	if err := os.MkdirAll(target, 0o700); err != nil {
		return nil, err
	}
	source := imageSource(p, id.Name)
	m, version, err := mount.MountNFS(ctx, source, 0)
	if err != nil {
		return nil, errors.Join(backend.ExplainMount(err), mount.RemoveTarget(target))
	}
	defer func() { _ = m.Close() }()
	if err := checkVersion(p, version); err != nil {
		return nil, errors.Join(err, mount.RemoveTarget(target))
	}
	dir, err := openRoot(m)
	if err == nil {
		if err = m.MoveTo(target); err == nil {
			return dir, nil
		}
		dir.Close()
	}
	return nil, errors.Join(err, mount.RemoveTarget(target))
}

func openRoot(m *mount.Detached) (*os.Root, error) {
	dir, err := m.OpenRoot()
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	return os.OpenRoot(fmt.Sprintf("/proc/self/fd/%d", dir.Fd()))
}

// unmountPrivate removes the private mount of a volume, and its mount point. It is no error if
// there is none.
func (b *Backend) unmountPrivate(ctx context.Context, id volume.ID) error {
	target := b.privatePath(id)
	err := retry.For(ctx, releaseTime, func() (again bool, err error) {
		e, err := privateMount(target)
		if err != nil || e == nil {
			return false, err
		}
		err = mount.Unmount(target)
		// Another mount may be below it, or another call may have unmounted it already.
		return err == nil || errors.Is(err, syscall.EBUSY) || errors.Is(err, syscall.EINVAL), err
	})
	if errors.Is(err, syscall.EBUSY) {
		return volume.Errorf(volume.ErrInUse, "volume %s: its image is in use on this node: %w", id, err)
	}
	if err != nil {
		return err
	}
	return mount.RemoveTarget(target)
}

// privateMount is the private mount at a path; nil if there is none.
func privateMount(path string) (*mount.Entry, error) {
	e, err := mount.OnPath(path)
	if errors.Is(err, fs.ErrNotExist) || err == nil && e == nil {
		return nil, nil //nolint:nilnil // no mount is an answer
	}
	if err == nil && !mount.IsNFS(e) {
		err = volume.Errorf(volume.ErrPrecondition, "%s is a mount of type %s, which this driver did not create: unmount it", path, e.FSType)
	}
	return e, err
}

// sweep removes the private mounts of the pool that an earlier process has left without a
// device.
func (b *Backend) sweep(ctx context.Context, p *pool.Pool) {
	log := klog.FromContext(ctx)
	volumes := imageSource(p, "").String() + "/"
	left, err := mount.Table(func(e *mount.Entry) bool {
		return mount.IsNFS(e) && filepath.Dir(e.Mountpoint) == b.Set.MountsDir() && strings.HasPrefix(e.Source, volumes)
	})
	if err != nil {
		log.Error(err, "Listing leftover mounts of images failed")
		return
	}
	for _, e := range left {
		// A device that was bound in another container does not keep the mount busy.
		if _, bound, err := b.Loops.Find(tagPrefix + filepath.Base(e.Mountpoint)); err != nil || bound {
			continue
		}
		err := mount.Unmount(e.Mountpoint)
		if err == nil {
			err = mount.RemoveTarget(e.Mountpoint)
		}
		if err != nil && !errors.Is(err, syscall.EBUSY) {
			log.Error(err, "Unmounting a leftover mount of an image failed", "path", e.Mountpoint)
		}
	}
}

// revalidate makes the kernel request the size of a volume's image from the server, for
// UpdateSize. The mount caches no attributes, but an open file may.
func (b *Backend) revalidate(id volume.ID) error {
	_, err := os.Lstat(filepath.Join(b.privatePath(id), pool.ImageFile))
	return err
}
