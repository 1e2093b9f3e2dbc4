package clone

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/volume"
)

// place is where something is in the tree; the root is in nothing. The paths of all
// directories at once could be more than the memory has.
type place struct {
	in   *place
	name string
}

// String is the path from the root. A long path is shortened in the middle.
func (p *place) String() string {
	const most = 400
	var names []string
	for ; p.in != nil; p = p.in {
		names = append(names, p.name)
	}
	slices.Reverse(names)
	path := strings.Join(names, "/")
	if len(path) > most {
		return path[:most/2] + "…" + path[len(path)-most/2:]
	}
	return path
}

// at says where an error is from.
func (p *place) at(err error) error {
	if err == nil || p.in == nil {
		return err
	}
	return fmt.Errorf("%q: %w", p, err)
}

// directory is one that is being copied.
type directory struct {
	*place
	// src and dst are nil while too many others are open.
	src, dst *os.File
	// st is the source's, made the copy's, as they were when they were first opened.
	st, made unix.Stat_t
	list     listing
}

const dirFlags = unix.O_RDONLY | unix.O_DIRECTORY | unix.O_NOFOLLOW | unix.O_NOATIME

func (d *directory) open(src *os.File, srcName string, dst *os.File, dstName string) (err error) {
	if d.src, err = openat(src, srcName, dirFlags, 0); err != nil {
		return err
	}
	if d.st, err = stat(d.src); err != nil {
		return err
	}
	if d.dst, err = openat(dst, dstName, dirFlags, 0); err != nil {
		return err
	}
	d.made, err = stat(d.dst)
	return err
}

func (d *directory) close() {
	d.src.Close()
	d.dst.Close()
	d.src, d.dst = nil, nil
	d.list.forget()
}

// reopen opens a directory again if it was closed, from one in it.
func (d *directory) reopen(below *directory) (err error) {
	if d.src != nil {
		return nil
	}
	if d.src, err = openAbove(below.src, &d.st); err != nil {
		return err
	}
	d.dst, err = openAbove(below.dst, &d.made)
	return err
}

// openAbove opens the directory that one is in, if it still is the one that it was in:
// else it may be anywhere.
func openAbove(dir *os.File, want *unix.Stat_t) (*os.File, error) {
	f, err := openat2(dir, "..", unix.OpenHow{
		Flags:   dirFlags,
		Resolve: unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS | unix.RESOLVE_NO_XDEV,
	})
	if err != nil {
		return nil, err
	}
	st, err := stat(f)
	if err == nil && (st.Dev != want.Dev || st.Ino != want.Ino) {
		err = volume.Errorf(volume.ErrPrecondition, "it was moved while it was copied: copy again when nobody changes the tree")
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// listing reads the names in a directory. It goes on behind the last one also in a
// directory that was opened anew, as a server of NFS does: an offset of a directory is
// good in every open file of it.
type listing struct {
	buf, rest []byte
	offset    int64
}

// forget gives back what is held in memory.
func (l *listing) forget() { l.buf, l.rest = nil, nil }

// next is the next name, io.EOF behind the last.
func (l *listing) next(dir *os.File) (string, error) {
	const nameAt = unsafe.Offsetof(unix.Dirent{}.Name)
	for {
		if len(l.rest) == 0 {
			if err := l.fill(dir); err != nil {
				return "", err
			}
		}
		e := l.rest[:binary.NativeEndian.Uint16(l.rest[unsafe.Offsetof(unix.Dirent{}.Reclen):])]
		l.rest = l.rest[len(e):]
		l.offset = int64(binary.NativeEndian.Uint64(e[unsafe.Offsetof(unix.Dirent{}.Off):]))
		if name := unix.ByteSliceToString(e[nameAt:]); name != "." && name != ".." {
			return name, nil
		}
	}
}

func (l *listing) fill(dir *os.File) error {
	if l.buf == nil {
		l.buf = make([]byte, 32<<10)
		if _, err := unix.Seek(int(dir.Fd()), l.offset, unix.SEEK_SET); err != nil {
			return fail("lseek", dir, err)
		}
	}
	n, err := unix.ReadDirent(int(dir.Fd()), l.buf)
	for errors.Is(err, unix.EINTR) {
		n, err = unix.ReadDirent(int(dir.Fd()), l.buf)
	}
	if err != nil {
		return fail("getdents64", dir, err)
	}
	if l.rest = l.buf[:n]; n == 0 {
		return io.EOF
	}
	return nil
}
