// Package fsprobe tests which operations a filesystem supports. Each test creates files in a writable
// directory of the filesystem and removes them.
package fsprobe

import (
	"cmp"
	"errors"
	"os"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/linux/sys"
)

const (
	// probeFile and otherFile are the names of the files that the tests create.
	probeFile = "probe"
	otherFile = "probe.other"
	// blockSize is a multiple of the block size of every filesystem, in bytes.
	blockSize = 64 << 10
)

// withFile runs a test with a new file, which it removes afterwards.
func withFile(dir *os.Root, name string, test func(f *os.File) (bool, error)) (bool, error) {
	f, err := dir.OpenFile(name, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return false, err
	}
	defer func() {
		f.Close()
		_ = dir.Remove(name)
	}()
	return test(f)
}

// Clones reports whether files can share blocks (ioctl_ficlone(2)).
func Clones(dir *os.Root) (bool, error) {
	return withFile(dir, probeFile, func(from *os.File) (bool, error) {
		if err := write(from, 0); err != nil {
			return false, err
		}
		return withFile(dir, otherFile, func(to *os.File) (bool, error) { return supported(sys.ShareBlocks(to, from, 0)) })
	})
}

// ShowsHoles reports whether the holes of a file can be found (lseek(2), SEEK_DATA).
func ShowsHoles(dir *os.Root) (bool, error) {
	return withFile(dir, probeFile, func(f *os.File) (bool, error) {
		if err := write(f, 16*blockSize); err != nil {
			return false, err
		}
		data, err := unix.Seek(int(f.Fd()), 0, unix.SEEK_DATA)
		ok, err := supported(err)
		return ok && data > 0, err
	})
}

// Allocates reports whether blocks can be preallocated (fallocate(2)).
func Allocates(dir *os.Root) (bool, error) {
	return withFile(dir, probeFile, func(f *os.File) (bool, error) {
		return supported(unix.Fallocate(int(f.Fd()), 0, 0, blockSize))
	})
}

// LocksReach reports whether a flock(2) on a file in dir also locks the file in other. other must be the same
// directory in a mount that shares no cache with the mount of dir. On NFS, true means that the server holds the
// lock, so the lock is effective on every node.
func LocksReach(dir, other *os.Root) (bool, error) {
	return withFile(dir, probeFile, func(f *os.File) (bool, error) {
		if ok, err := supported(unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)); !ok {
			return false, err
		}
		same, err := other.OpenFile(probeFile, os.O_RDWR, 0)
		if err != nil {
			return false, err
		}
		defer same.Close()
		err = unix.Flock(int(same.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if errors.Is(err, unix.EWOULDBLOCK) {
			return true, nil
		}
		return false, err
	})
}

// ErrNotPermitted means that this process may not act as another user (CAP_SETUID).
var ErrNotPermitted = errors.New("acting as another user is not permitted")

// OwnerOf creates a file in dir as the user uid and returns the owner of the file. An NFS server may map a
// user to another one (exports(5), squashing). All users must have write permission for dir.
func OwnerOf(dir *os.Root, uid int) (owner uint32, err error) {
	err = sys.OnOwnThread(func() error {
		if err := actAs(uid); err != nil {
			return err
		}
		owner, err = ownerOfNew(dir)
		return err
	})
	if errors.Is(err, ErrNotPermitted) {
		return 0, err
	}
	return owner, cmp.Or(err, dir.Remove(probeFile))
}

// actAs changes the filesystem user and group of this thread (setfsuid(2)).
func actAs(uid int) error {
	for _, set := range []func(int) (int, error){unix.SetfsgidRetGid, unix.SetfsuidRetUid} {
		if _, err := set(uid); err != nil {
			return err
		}
		// setfsuid(2) reports no failure: a second call returns the current value.
		if now, err := set(-1); err != nil || now != uid {
			return errors.Join(ErrNotPermitted, err)
		}
	}
	return nil
}

// ownerOfNew creates a file and returns its owner.
func ownerOfNew(dir *os.Root) (uint32, error) {
	f, err := dir.OpenFile(probeFile, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	var st unix.Stat_t
	err = unix.Fstat(int(f.Fd()), &st)
	return st.Uid, err
}

// write writes zeros to the block at an offset, and makes them durable.
func write(f *os.File, at int64) error {
	_, err := f.WriteAt(make([]byte, blockSize), at)
	return errors.Join(err, f.Sync())
}

// supported returns false and no error if err means that the filesystem does not support the operation.
func supported(err error) (bool, error) {
	if sys.Unsupported(err) || errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOLCK) {
		return false, nil
	}
	return err == nil, err
}
