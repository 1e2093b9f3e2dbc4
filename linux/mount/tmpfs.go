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

// MemoryLimit limits the bytes, rounded up to pages, and the files of a filesystem in memory. Without
// Inodes the limit of the kernel applies: half the number of pages of the machine.
type MemoryLimit struct{ Bytes, Inodes int64 }

// MemoryFor returns a limit with one file for each page of bytes, and at least 1024 files. The memory
// that the kernel needs for a file does not count for the size of the filesystem.
func MemoryFor(bytes int64) MemoryLimit { return MemoryLimit{bytes, max(1024, bytes/4096)} }

func (l MemoryLimit) words() []string {
	words := []string{fmt.Sprintf("size=%d", l.Bytes)}
	if l.Inodes > 0 {
		words = append(words, fmt.Sprintf("nr_inodes=%d", l.Inodes))
	}
	return words
}

// memoryAttributes are the attributes of every filesystem in memory.
const memoryAttributes = unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV

// Memory creates a filesystem in memory without a path. Its source in the mount table is name. It is not
// swapped out if the kernel supports that (tmpfs(5), noswap, Linux 6.4). All users can write to its
// root.
func Memory(name string, limit MemoryLimit, o Options) (*Detached, error) {
	o.Attr |= memoryAttributes
	words := append(limit.words(), "mode=0777")
	o.Data = slices.Concat(words, []string{"noswap"})
	fs, err := Filesystem(name, memoryType, o)
	if errors.Is(err, ErrBadOption) {
		o.Data = words
		return Filesystem(name, memoryType, o)
	}
	return fs, err
}

const memoryType = "tmpfs"

// ResizeMemory changes the limit of the filesystem in memory that is mounted at path. It fails if the
// content is larger. Without Inodes the limit of files stays.
func ResizeMemory(path string, limit MemoryLimit) error {
	fail := func(op string, err error) error { return &Error{Op: op, Target: path, FSType: memoryType, Err: err} }
	fsfd, err := unix.Fspick(unix.AT_FDCWD, path, unix.FSPICK_CLOEXEC|unix.FSPICK_SYMLINK_NOFOLLOW)
	if err != nil {
		return fail("fspick", err)
	}
	defer unix.Close(fsfd)
	for _, word := range limit.words() {
		key, value, _ := strings.Cut(word, "=")
		if err := unix.FsconfigSetString(fsfd, key, value); err != nil {
			return fail("resize", err)
		}
	}
	if err := unix.FsconfigReconfigure(fsfd); err != nil {
		return &Error{Op: "resize", Target: path, FSType: memoryType, Log: kernelLog(fsfd), Err: err}
	}
	return nil
}

// IsMemory reports whether an entry is a filesystem that Memory created with a name. It returns false
// for nil.
func IsMemory(e *Entry, name string) bool {
	return e != nil && e.FSType == memoryType && e.Source == name
}

// MemorySource is a filesystem in memory. Its source in the mount table is Name. Unmounting removes it.
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

// Shows implements Source: the filesystem must have the size of the source.
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
