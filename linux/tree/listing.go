package tree

import (
	"encoding/binary"
	"errors"
	"io"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// listing reads the names in a directory. If the directory is closed and opened again, the listing continues
// after the last name, because the offset of a directory entry is valid for every open file of the directory
// (getdents64(2)).
type listing struct {
	// buf holds the result of the last getdents64(2). rest is the part of buf that next has not returned yet.
	buf, rest []byte
	// offset is the position in the directory after the last name that next returned (lseek(2)).
	offset int64
}

// forget frees the buffer. The following call of next reads the directory again from offset.
func (l *listing) forget() { l.buf, l.rest = nil, nil }

// next returns the next name and its type (DT_*, readdir(3)), and io.EOF after the last name.
func (l *listing) next(dir *os.File) (name string, kind uint8, err error) {
	const (
		offsetAt = unsafe.Offsetof(unix.Dirent{}.Off)
		lengthAt = unsafe.Offsetof(unix.Dirent{}.Reclen)
		typeAt   = unsafe.Offsetof(unix.Dirent{}.Type)
		nameAt   = unsafe.Offsetof(unix.Dirent{}.Name)
	)
	for {
		if len(l.rest) == 0 {
			if err := l.fill(dir); err != nil {
				return "", 0, err
			}
		}
		e := l.rest[:binary.NativeEndian.Uint16(l.rest[lengthAt:])]
		l.rest = l.rest[len(e):]
		l.offset = int64(binary.NativeEndian.Uint64(e[offsetAt:]))
		if name := unix.ByteSliceToString(e[nameAt:]); name != "." && name != ".." {
			return name, e[typeAt], nil
		}
	}
}

// fill reads the next entries into rest. It returns io.EOF after the last.
func (l *listing) fill(dir *os.File) error {
	if l.buf == nil {
		l.buf = make([]byte, 32<<10)
		if _, err := unix.Seek(int(dir.Fd()), l.offset, unix.SEEK_SET); err != nil {
			return os.NewSyscallError("lseek", err)
		}
	}
	n, err := unix.ReadDirent(int(dir.Fd()), l.buf)
	for errors.Is(err, unix.EINTR) {
		n, err = unix.ReadDirent(int(dir.Fd()), l.buf)
	}
	if err != nil {
		return os.NewSyscallError("getdents64", err)
	}
	if l.rest = l.buf[:n]; n == 0 {
		return io.EOF
	}
	return nil
}
