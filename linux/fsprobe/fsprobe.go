// Package fsprobe tests which operations a filesystem supports, in a writable directory of
// it. Each test creates files there, and removes them.
package fsprobe

import (
	"errors"
	"os"
	"runtime"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/linux/sys"
)

const (
	probeFile = "probe"
	otherFile = "probe.other"
	// blockSize is a multiple of every filesystem's block.
	blockSize = 64 << 10
)

// scratch creates a file that done removes.
func scratch(dir *os.Root, name string) (f *os.File, done func(), err error) {
	f, err = dir.OpenFile(name, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return nil, nil, err
	}
	return f, func() {
		f.Close()
		_ = dir.Remove(name)
	}, nil
}

// Clones tells whether files can share blocks (ioctl_ficlone(2)).
func Clones(dir *os.Root) (bool, error) {
	from, done, err := scratch(dir, probeFile)
	if err != nil {
		return false, err
	}
	defer done()
	if err := write(from, 0); err != nil {
		return false, err
	}
	to, done, err := scratch(dir, otherFile)
	if err != nil {
		return false, err
	}
	defer done()
	return supported(sys.ShareBlocks(to, from))
}

// ShowsHoles tells whether the holes of a file can be found (lseek(2), SEEK_DATA).
func ShowsHoles(dir *os.Root) (bool, error) {
	f, done, err := scratch(dir, probeFile)
	if err != nil {
		return false, err
	}
	defer done()
	const hole = 16 * blockSize
	if err := write(f, hole); err != nil {
		return false, err
	}
	data, err := unix.Seek(int(f.Fd()), 0, unix.SEEK_DATA)
	if ok, err := supported(err); !ok {
		return false, err
	}
	return data > 0, nil
}

// Allocates tells whether blocks can be preallocated (fallocate(2)).
func Allocates(dir *os.Root) (bool, error) {
	f, done, err := scratch(dir, probeFile)
	if err != nil {
		return false, err
	}
	defer done()
	return supported(unix.Fallocate(int(f.Fd()), 0, 0, blockSize))
}

// LocksReach tells whether a flock(2) on a file in dir is effective in other, the same
// directory in a mount that shares no cache with that of dir. Then the server has the lock,
// and it is effective on every node.
func LocksReach(dir, other *os.Root) (bool, error) {
	f, done, err := scratch(dir, probeFile)
	if err != nil {
		return false, err
	}
	defer done()
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
}

// ErrNotPermitted means that this process may not act as another user (CAP_SETUID).
var ErrNotPermitted = errors.New("acting as another user is not permitted")

// OwnerOf returns the owner of a file that a user creates: a server may map users to others
// (exports(5), squashing). All users must have write permission for the directory.
func OwnerOf(dir *os.Root, uid int) (owner uint32, err error) {
	type result struct {
		owner uint32
		err   error
	}
	done := make(chan result)
	go func() {
		// setfsuid(2) changes only this thread, which ends with the goroutine.
		runtime.LockOSThread()
		if err := actAs(uid); err != nil {
			done <- result{err: err}
			return
		}
		owner, err := ownerOfNew(dir)
		done <- result{owner, err}
	}()
	r := <-done
	if errors.Is(r.err, ErrNotPermitted) {
		return 0, r.err
	}
	if err := dir.Remove(probeFile); err != nil && r.err == nil {
		r.err = err
	}
	return r.owner, r.err
}

// actAs changes the filesystem user and group of this thread.
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

func write(f *os.File, at int64) error {
	_, err := f.WriteAt(make([]byte, blockSize), at)
	return errors.Join(err, f.Sync())
}

// supported turns the error of an operation that the filesystem does not support into false.
func supported(err error) (bool, error) {
	if sys.Unsupported(err) || errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOLCK) {
		return false, nil
	}
	return err == nil, err
}
