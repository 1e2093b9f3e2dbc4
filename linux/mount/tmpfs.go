package mount

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/internal/crashpoint"
)

// MemoryLimit limits a tmpfs. Bytes is rounded up to pages. Without Inodes the default of the kernel
// applies: half the number of memory pages of the node.
type MemoryLimit struct{ Bytes, Inodes int64 }

// MemoryFor returns a limit with one inode for each 4 KiB, and at least 1024 inodes. The kernel memory of
// an inode does not count towards Bytes.
func MemoryFor(bytes int64) MemoryLimit { return MemoryLimit{bytes, max(1024, bytes/4096)} }

// mountOptions returns the limit as options of tmpfs(5).
func (l MemoryLimit) mountOptions() []string {
	options := []string{fmt.Sprintf("size=%d", l.Bytes)}
	if l.Inodes > 0 {
		options = append(options, fmt.Sprintf("nr_inodes=%d", l.Inodes))
	}
	return options
}

// memoryAttributes are the mount attributes of every tmpfs.
const memoryAttributes = unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV

// Memory creates a detached mount of a new tmpfs. Its source in the mount table is name. Its content is
// not swapped out if the kernel supports noswap (tmpfs(5), Linux 6.4). All users can write to its root.
func Memory(name string, limit MemoryLimit, o Options) (*Detached, error) {
	o.Attr |= memoryAttributes
	options := append(limit.mountOptions(), "mode=0777")
	o.Data = slices.Concat(options, []string{"noswap"})
	fs, err := Filesystem(name, memoryType, o)
	if errors.Is(err, ErrBadOption) {
		o.Data = options
		return Filesystem(name, memoryType, o)
	}
	return fs, err
}

// memoryType is the type of the filesystem.
const memoryType = "tmpfs"

// ResizeMemory changes the limit of the tmpfs that is mounted at path. It fails if the content is larger than
// the limit. Without Inodes the limit of inodes does not change.
func ResizeMemory(path string, limit MemoryLimit) error {
	fail := func(op string, err error) error { return &Error{Op: op, Target: path, FSType: memoryType, Err: err} }
	fsfd, err := unix.Fspick(unix.AT_FDCWD, path, unix.FSPICK_CLOEXEC|unix.FSPICK_SYMLINK_NOFOLLOW)
	if err != nil {
		return fail("fspick", err)
	}
	defer unix.Close(fsfd)
	for _, option := range limit.mountOptions() {
		key, value, _ := strings.Cut(option, "=")
		if err := unix.FsconfigSetString(fsfd, key, value); err != nil {
			return fail("resize", err)
		}
	}
	if err := unix.FsconfigReconfigure(fsfd); err != nil {
		return &Error{Op: "resize", Target: path, FSType: memoryType, Log: kernelLog(fsfd), Err: err}
	}
	return nil
}

// IsMemory reports whether an entry is a tmpfs that Memory created with a name. It returns false for nil.
func IsMemory(e *Entry, name string) bool {
	return e != nil && e.FSType == memoryType && e.Source == name
}

// MemorySource is a tmpfs. Its source in the mount table is Name. Unmounting it discards its content.
type MemorySource struct {
	Name string
	// Size is in bytes.
	Size int64
}

var _ Source = (*MemorySource)(nil)

// String implements Source.
func (m *MemorySource) String() string { return m.Name }

// Close implements Source.
func (*MemorySource) Close() error { return nil }

// Mount implements Source.
func (m *MemorySource) Mount(_ context.Context, target string, o Options) (err error) {
	fs, err := Memory(m.Name, MemoryFor(m.Size), o)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, fs.Close()) }()
	crashpoint.Here(crashpoint.StageMounted)
	return fs.MoveTo(target)
}

// Attributes implements Source.
func (*MemorySource) Attributes(o Options) (Options, error) {
	o.Attr |= memoryAttributes
	return o, nil
}

// Shows implements Source. The tmpfs must have the size of the source.
func (m *MemorySource) Shows(path string) (bool, error) {
	if ok, err := m.Owns(path); !ok || err != nil {
		return false, err
	}
	st, err := Statfs(path)
	return err == nil && int64(st.Blocks) == (m.Size+st.Bsize-1)/st.Bsize, err
}

// Owns implements Source.
func (m *MemorySource) Owns(path string) (bool, error) {
	e, err := OnPath(path)
	return err == nil && m.owns(e), err
}

// Matcher implements Source.
func (m *MemorySource) Matcher([]*Entry) (func(*Entry) bool, error) { return m.owns, nil }

func (m *MemorySource) owns(e *Entry) bool { return IsMemory(e, m.Name) }

// Problems implements Source.
func (*MemorySource) Problems() ([]Problem, error) { return nil, nil }

// Grow implements Source.
func (*MemorySource) Grow() error { return nil }

// Unmount implements Source.
func (*MemorySource) Unmount(ctx context.Context, path string, _ Abandon) error {
	return UnmountIdle(ctx, path)
}

// UnmountLast implements Source.
func (*MemorySource) UnmountLast(ctx context.Context, path string, _ Abandon) error {
	return UnmountIdle(ctx, path)
}
