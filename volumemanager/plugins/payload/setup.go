package payload

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/linux/sys"
)

// parentMode is the mode of the directories above a volume. It prevents that other users reach the
// content.
const parentMode = 0o750

// setUp creates the volume, or replaces the content of an existing one. If it cannot create the volume,
// it removes what it has created.
func (v *volume) setUp(ctx context.Context, content tree) error {
	at, err := mount.Inspect(v.path)
	switch {
	case err != nil:
		return err
	case at.IsMount && v.onDisk:
		return v.errOtherMount()
	case at.IsMount:
		return v.replaceInMemory(ctx, content)
	case at.Exists && !at.IsDir():
		return fmt.Errorf("%s is not a directory, so it does not belong to the volume: remove it", v.path)
	}
	if err := os.MkdirAll(v.path, parentMode); err != nil {
		return err
	}
	create, undo := v.mount, func(context.Context) error { return mount.RemoveTarget(v.path) }
	if v.onDisk {
		create, undo = v.replaceOnDisk, v.remove
	}
	err = create(ctx, content)
	if err != nil && !at.Exists {
		err = errors.Join(err, undo(ctx))
	}
	return err
}

// replaceOnDisk replaces the content of a volume on disk.
func (v *volume) replaceOnDisk(ctx context.Context, content tree) error {
	root, err := os.OpenRoot(v.path)
	if err != nil {
		return err
	}
	defer root.Close()
	return v.replace(ctx, root, content)
}

// mount creates a filesystem in memory, writes the content to it, and mounts it at the volume's path.
func (v *volume) mount(ctx context.Context, content tree) (err error) {
	memory, err := mount.Memory(v.name, mount.MemoryFor(room(content)), mount.Options{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, memory.Close()) }()
	dir, err := memory.OpenRoot()
	if err != nil {
		return err
	}
	defer dir.Close()
	root, err := os.OpenRoot(sys.Path(dir))
	if err != nil {
		return err
	}
	defer root.Close()
	if err := v.replace(ctx, root, content); err != nil {
		return err
	}
	return memory.MoveTo(v.path)
}

// replaceInMemory replaces the content of a volume in memory. It checks the filesystem of the open
// directory, because the path could be unmounted after a check of the path.
func (v *volume) replaceInMemory(ctx context.Context, content tree) error {
	root, err := os.OpenRoot(v.path)
	if err != nil {
		return err
	}
	defer root.Close()
	dir, err := root.Open(".")
	if err != nil {
		return err
	}
	defer dir.Close()
	st, err := mount.Statfs(sys.Path(dir))
	if err != nil {
		return err
	}
	own, err := v.owns(root)
	if err != nil {
		return err
	}
	if !own || !mount.IsTmpfs(&st) {
		return v.errOtherMount()
	}
	if size := room(content); int64(st.Blocks)*st.Bsize < size {
		if err := mount.ResizeMemory(v.path, mount.MemoryFor(size)); err != nil {
			return err
		}
	}
	return v.replace(ctx, root, content)
}

// owns reports whether the mounted filesystem belongs to the volume: it contains a version, or the mount
// table names the plugin as its source. owns reads the mount table only if there is no version, because
// the table may be long.
func (v *volume) owns(root *os.Root) (bool, error) {
	if name, err := root.Readlink(dataLink); err == nil && isVersion(name) {
		return true, nil
	}
	at, err := mount.OnPath(v.path)
	return mount.IsMemory(at, v.name), err
}

// The size of a page and the minimum size of the filesystem, in bytes.
const (
	page    = 4096
	minRoom = 1 << 20
)

// room returns the memory for two versions of a content, in bytes. Each page of memory also allows one
// inode (mount.MemoryFor), so room adds a page for each part of a file's path, and one for its link.
func room(content tree) int64 {
	var pages int64
	for key, n := range content {
		pages += int64(len(n.data)/page + strings.Count(key, "/") + 2)
	}
	return max(minRoom, 2*pages*page)
}

// errOtherMount is the error about a mount of another program at the volume's path.
func (v *volume) errOtherMount() error {
	return fmt.Errorf("%s: the mount at this path does not belong to the volume: unmount it", v.path)
}

// TearDown removes the volume with its content, which the plugin created.
func (v *volume) TearDown(ctx context.Context) error {
	if v.onDisk {
		return v.remove(ctx)
	}
	at, err := mount.OnPath(v.path)
	switch {
	case err != nil:
		return err
	case at != nil && !mount.IsMemory(at, v.name):
		return v.errOtherMount()
	case at != nil:
		if err := mount.Unmount(v.path); err != nil {
			return err
		}
	}
	if err := mount.RemoveTarget(v.path); err != nil {
		return fmt.Errorf("the remaining files do not belong to the volume: examine and remove them: %w", err)
	}
	return nil
}

// remove removes a volume on disk.
func (v *volume) remove(ctx context.Context) error {
	root, err := os.OpenRoot(filepath.Dir(v.path))
	if err != nil {
		return ignoreMissing(err)
	}
	defer root.Close()
	return removeAll(ctx, root, filepath.Base(v.path))
}
