package payload

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/trivet-csi/trivet/linux/mount"
)

// parentMode is of the directories above a volume: pods' content is nobody's but theirs.
const parentMode = 0o750

func (v *volume) setUpOnDisk(ctx context.Context, content tree) error {
	made, err := v.makeDir()
	if err != nil {
		return err
	}
	err = v.replaceOnDisk(ctx, content)
	if err != nil && made {
		err = errors.Join(err, v.remove(ctx))
	}
	return err
}

func (v *volume) replaceOnDisk(ctx context.Context, content tree) error {
	at, err := mount.Inspect(v.path)
	if err != nil {
		return err
	}
	if at.IsMount {
		return v.errOtherMount()
	}
	root, err := os.OpenRoot(v.path)
	if err != nil {
		return err
	}
	defer root.Close()
	return v.replace(ctx, root, content)
}

func (v *volume) setUpInMemory(ctx context.Context, content tree) error {
	at, err := mount.Inspect(v.path)
	if err != nil {
		return err
	}
	if at.IsMount {
		return v.replaceInMemory(ctx, content)
	}
	made, err := v.makeDir()
	if err != nil {
		return err
	}
	err = v.mount(ctx, content)
	if err != nil && made {
		err = errors.Join(err, mount.RemoveTarget(v.path))
	}
	return err
}

// mount shows a new filesystem in memory, which has all its content by then.
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
	root, err := os.OpenRoot(descriptor(dir))
	if err != nil {
		return err
	}
	defer root.Close()
	if err := v.replace(ctx, root, content); err != nil {
		return err
	}
	return memory.MoveTo(v.path)
}

// replaceInMemory writes only where the descriptor says that it is memory: a path can be
// unmounted the moment after it was looked at.
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
	st, err := mount.Statfs(descriptor(dir))
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

// owns tells whether a filesystem in memory is the volume's. One that has content is: the
// mount table, which knows what it is called, is long.
func (v *volume) owns(root *os.Root) (bool, error) {
	if name, err := root.Readlink(dataLink); err == nil && isVersion(name) {
		return true, nil
	}
	at, err := mount.OnPath(v.path)
	return mount.IsMemory(at, v.name), err
}

func descriptor(f *os.File) string { return fmt.Sprintf("/proc/self/fd/%d", f.Fd()) }

const (
	page    = 4096
	minRoom = 1 << 20
)

// room is what memory takes for two versions of a content, in bytes. A page stands for
// an inode too (mount.MemoryFor): each file counts with one for each part of its path, and
// its link.
func room(content tree) int64 {
	var pages int64
	for key, n := range content {
		pages += int64(len(n.data)/page + strings.Count(key, "/") + 2)
	}
	return max(minRoom, 2*pages*page)
}

// makeDir makes the volume's directory, and tells whether it was not there.
func (v *volume) makeDir() (made bool, err error) {
	if err := os.MkdirAll(filepath.Dir(v.path), parentMode); err != nil {
		return false, err
	}
	err = os.Mkdir(v.path, parentMode)
	if !errors.Is(err, fs.ErrExist) {
		return err == nil, err
	}
	at, err := mount.Inspect(v.path)
	if err == nil && !at.IsDir() {
		err = fmt.Errorf("%s: it is no directory, and not the volume's: remove it", v.path)
	}
	return false, err
}

func (v *volume) errOtherMount() error {
	return fmt.Errorf("%s: what is mounted there is not the volume's: unmount it", v.path)
}

// TearDown removes the volume's content, which is the plugin's own.
func (v *volume) TearDown(ctx context.Context) error {
	if v.onDisk {
		return v.remove(ctx)
	}
	at, err := mount.OnPath(v.path)
	if err == nil && at != nil {
		err = v.unmount(at)
	}
	if err != nil {
		return err
	}
	if err := mount.RemoveTarget(v.path); err != nil {
		return fmt.Errorf("what is still there is not the volume's: look at it, and remove it: %w", err)
	}
	return nil
}

func (v *volume) unmount(at *mount.Entry) error {
	if !mount.IsMemory(at, v.name) {
		return v.errOtherMount()
	}
	return mount.Unmount(v.path)
}

// remove removes what is on disk.
func (v *volume) remove(ctx context.Context) error {
	root, err := os.OpenRoot(filepath.Dir(v.path))
	if err != nil {
		return ignoreMissing(err)
	}
	defer root.Close()
	return removeAll(ctx, root, filepath.Base(v.path))
}
