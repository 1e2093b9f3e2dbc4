package mount

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// MemoryLimit bounds a filesystem in memory: its bytes, rounded up to pages, and its files.
// Without Inodes the kernel's bound holds: half as many as the machine has pages.
type MemoryLimit struct{ Bytes, Inodes int64 }

// MemoryFor is a limit whose files are as many as bytes has pages, and 1024 at least: the
// kernel keeps each in memory that does not count as the filesystem's.
func MemoryFor(bytes int64) MemoryLimit { return MemoryLimit{bytes, max(1024, bytes/4096)} }

func (l MemoryLimit) words() []string {
	words := []string{fmt.Sprintf("size=%d", l.Bytes)}
	if l.Inodes > 0 {
		words = append(words, fmt.Sprintf("nr_inodes=%d", l.Inodes))
	}
	return words
}

// memoryAttributes are of each mount of a filesystem in memory.
const memoryAttributes = unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV

// Memory makes a filesystem in memory that is not swapped out where the kernel can see to
// that (tmpfs(5), noswap; Linux 6.4). It stands at no path yet; the mount table calls it
// name. Everybody may write to its root.
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

// ResizeMemory gives the filesystem in memory that is mounted at path another limit. It
// fails if more than that is in it. Without Inodes their bound stays.
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

// IsMemory tells whether an entry is of a filesystem that Memory made by that name; nil
// is none.
func IsMemory(e *Entry, name string) bool {
	return e != nil && e.FSType == memoryType && e.Source == name
}

// IsMemoryAs tells whether the filesystem in memory at path is as Memory makes it with
// this size and these options.
func IsMemoryAs(path string, size int64, o Options) (bool, error) {
	st, err := Statfs(path)
	if err != nil {
		return false, err
	}
	o.Attr |= memoryAttributes
	return int64(st.Blocks) == (size+st.Bsize-1)/st.Bsize && o.MatchAttr(st.Flags), nil
}
