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

// The image of a shared pool is opened through a mount for its volume alone, with
// a superblock of its own: giving up on a silent server fails what waits in this
// superblock, and nothing else. It stands at a path, so that it outlives the
// process and the next one finds it.

// letGo is how long a mount is waited for that the kernel is about to let go: it
// closes the image of a freed device a moment later.
const letGo = 2 * time.Second

// privatePath is where the mount for a volume's image stands.
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

// mountPrivate mounts a volume's folder for its image alone, and opens it there.
// The volume has no device; what another process may have left at the path goes.
func (b *Backend) mountPrivate(ctx context.Context, p *pool.Pool, id volume.ID) (*os.Root, error) {
	if err := b.unmountPrivate(ctx, id); err != nil {
		return nil, err
	}
	at := b.privatePath(id)
	if err := os.MkdirAll(at, 0o700); err != nil {
		return nil, err
	}
	source := imageSource(p, id.Name)
	m, version, err := mount.MountNFS(ctx, source, 0)
	if err != nil {
		return nil, errors.Join(backend.ExplainMount(err), mount.RemoveTarget(at))
	}
	defer func() { _ = m.Close() }()
	if err := checkVersion(p, version); err != nil {
		return nil, errors.Join(err, mount.RemoveTarget(at))
	}
	dir, err := openRoot(m)
	if err == nil {
		if err = m.MoveTo(at); err == nil {
			return dir, nil
		}
		dir.Close()
	}
	return nil, errors.Join(err, mount.RemoveTarget(at))
}

func openRoot(m *mount.Detached) (*os.Root, error) {
	dir, err := m.OpenRoot()
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	return os.OpenRoot(fmt.Sprintf("/proc/self/fd/%d", dir.Fd()))
}

// unmountPrivate takes away the mount for a volume's image, and its directory. It
// is no error if there is none.
func (b *Backend) unmountPrivate(ctx context.Context, id volume.ID) error {
	at := b.privatePath(id)
	err := retry.For(ctx, letGo, func() (again bool, err error) {
		e, err := privateMount(at)
		if err != nil || e == nil {
			return false, err
		}
		err = mount.Unmount(at)
		// There may be another one below it, and another call may have been faster.
		return err == nil || errors.Is(err, syscall.EBUSY) || errors.Is(err, syscall.EINVAL), err
	})
	if errors.Is(err, syscall.EBUSY) {
		return volume.Errorf(volume.ErrInUse, "volume %s: its image is in use on this node: %w", id, err)
	}
	if err != nil {
		return err
	}
	return mount.RemoveTarget(at)
}

// privateMount is the mount at the path of an image's; nil if there is none.
func privateMount(at string) (*mount.Entry, error) {
	e, err := mount.OnPath(at)
	if errors.Is(err, fs.ErrNotExist) || err == nil && e == nil {
		return nil, nil //nolint:nilnil // no mount is an answer
	}
	if err == nil && !mount.IsNFS(e) {
		err = volume.Errorf(volume.ErrPrecondition, "%s is a mount of type %s, which this driver did not make: unmount it", at, e.FSType)
	}
	return e, err
}

// sweep unmounts what a process of before mounted for images of the pool and did
// not come to attach.
func (b *Backend) sweep(ctx context.Context, p *pool.Pool) {
	log := klog.FromContext(ctx)
	volumes := imageSource(p, "").String() + "/"
	left, err := mount.Table(func(e *mount.Entry) bool {
		return mount.IsNFS(e) && filepath.Dir(e.Mountpoint) == b.Set.MountsDir() && strings.HasPrefix(e.Source, volumes)
	})
	if err != nil {
		log.Error(err, "Looking for mounts of images that were left behind failed")
		return
	}
	for _, e := range left {
		// A mount is not busy with a device that was bound in another container.
		if _, bound, err := b.loops.Find(tagPrefix + filepath.Base(e.Mountpoint)); err != nil || bound {
			continue
		}
		err := mount.Unmount(e.Mountpoint)
		if err == nil {
			err = mount.RemoveTarget(e.Mountpoint)
		}
		if err != nil && !errors.Is(err, syscall.EBUSY) {
			log.Error(err, "Unmounting what was left behind for an image failed", "path", e.Mountpoint)
		}
	}
}

// revalidate has the kernel ask the server for the size of a volume's image, which
// its device takes over. The mount caches no attributes; an open file might.
func (b *Backend) revalidate(id volume.ID) error {
	_, err := os.Lstat(filepath.Join(b.privatePath(id), pool.ImageFile))
	return err
}
