package mount

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// inodeBytes is the part of a filesystem in memory that one inode stands for, and
// minInodes the least that it has: the kernel keeps each in memory that does not count
// as the filesystem's.
const (
	inodeBytes = 4096
	minInodes  = 1024
)

// memoryAttributes are of each mount of a filesystem in memory.
const memoryAttributes = unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV

// Memory makes a filesystem of a size in bytes, rounded up to pages, in memory that is
// not swapped out where the kernel can see to that (tmpfs(5), noswap; Linux 6.4). 0 is
// half of the machine's memory. It stands at no path yet; the mount table calls it name.
// Everybody may write to its root.
func Memory(name string, size int64, o Options) (*Detached, error) {
	o.Attr |= memoryAttributes
	words := append(memoryLimits(size), "mode=0777")
	o.Data = slices.Concat(words, []string{"noswap"})
	fs, err := Filesystem(name, memoryType, o)
	if errors.Is(err, ErrBadOption) {
		o.Data = words
		return Filesystem(name, memoryType, o)
	}
	return fs, err
}

const memoryType = "tmpfs"

// memoryLimits are the words that bound a filesystem in memory; of half of the memory,
// the kernel bounds the inodes itself.
func memoryLimits(size int64) []string {
	if size == 0 {
		return []string{"size=50%"}
	}
	return []string{fmt.Sprintf("size=%d", size), fmt.Sprintf("nr_inodes=%d", max(minInodes, size/inodeBytes))}
}

// ResizeMemory gives the filesystem in memory that is mounted at path another size in
// bytes, as Memory does. It fails if more than that is in it.
func ResizeMemory(path string, size int64) error {
	fail := func(op string, err error) error { return &Error{Op: op, Target: path, FSType: memoryType, Err: err} }
	fsfd, err := unix.Fspick(unix.AT_FDCWD, path, unix.FSPICK_CLOEXEC|unix.FSPICK_SYMLINK_NOFOLLOW)
	if err != nil {
		return fail("fspick", err)
	}
	defer unix.Close(fsfd)
	for _, word := range memoryLimits(size) {
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
