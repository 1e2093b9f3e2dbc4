package payload

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/trivet-csi/trivet/mount"
)

// parentMode is of the directories above a volume: pods' content is nobody's but theirs.
const parentMode = 0o750

func (v *volume) setUpOnDisk(content tree) error {
	made, err := v.makeDir()
	if err != nil {
		return err
	}
	err = v.replaceOnDisk(content)
	if err != nil && made {
		err = errors.Join(err, v.remove())
	}
	return err
}

func (v *volume) replaceOnDisk(content tree) error {
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
	return replace(root, content)
}

func (v *volume) setUpInMemory(content tree) error {
	at, err := mount.Inspect(v.path)
	if err != nil {
		return err
	}
	if at.IsMount {
		return v.replaceInMemory(content)
	}
	made, err := v.makeDir()
	if err != nil {
		return err
	}
	err = v.mount(content)
	if err != nil && made {
		err = errors.Join(err, mount.RemoveTarget(v.path))
	}
	return err
}

// mount shows a new filesystem in memory, which has all its content by then.
func (v *volume) mount(content tree) (err error) {
	memory, err := mount.Memory(v.name, room(content), mount.Options{})
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
	if err := replace(root, content); err != nil {
		return err
	}
	return memory.MoveTo(v.path)
}

// replaceInMemory writes only where the descriptor says that it is memory: a path can be
// unmounted the moment after it was looked at.
func (v *volume) replaceInMemory(content tree) error {
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
	if !mount.IsTmpfs(&st) {
		return v.errOtherMount()
	}
	if size := room(content); int64(st.Blocks)*st.Bsize < size {
		if err := mount.ResizeMemory(v.path, size); err != nil {
			return err
		}
	}
	return replace(root, content)
}

func descriptor(f *os.File) string { return fmt.Sprintf("/proc/self/fd/%d", f.Fd()) }

const (
	page    = 4096
	minRoom = 1 << 20
)

// room is what memory takes for two versions of a content, in bytes. A page stands for
// an inode too (mount.Memory): each file counts with one for each part of its path, and
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
func (v *volume) TearDown(context.Context) error {
	if v.onDisk {
		return v.remove()
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
func (v *volume) remove() error {
	root, err := os.OpenRoot(filepath.Dir(v.path))
	if err != nil {
		return ignoreMissing(err)
	}
	defer root.Close()
	return removeAll(root, filepath.Base(v.path))
}
