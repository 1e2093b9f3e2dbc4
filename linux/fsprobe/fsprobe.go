// Package fsprobe tries what a filesystem can do, in a directory of it that may be
// written to. Each try makes files of its own there and leaves none.
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

// scratch makes a file that is removed when done is called.
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

// Clones tells whether a file can share another's blocks (ioctl_ficlone(2)).
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

// Allocates tells whether space can be taken before it is written (fallocate(2)).
func Allocates(dir *os.Root) (bool, error) {
	f, done, err := scratch(dir, probeFile)
	if err != nil {
		return false, err
	}
	defer done()
	return supported(unix.Fallocate(int(f.Fd()), 0, 0, blockSize))
}

// LocksReach tells whether a flock(2) that is taken in dir is seen in other, the
// same directory by a mount that shares no cache with dir's: then the server has
// it, and every node sees it.
func LocksReach(dir, other *os.Root) (bool, error) {
	f, done, err := scratch(dir, probeFile)
	if err != nil {
		return false, err
	}
	defer done()
	if ok, err := supported(unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)); !ok {
		return false, err
	}
	again, err := other.OpenFile(probeFile, os.O_RDWR, 0)
	if err != nil {
		return false, err
	}
	defer again.Close()
	err = unix.Flock(int(again.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		return true, nil
	}
	return false, err
}

// ErrNotPermitted means: this process may not act for another user (CAP_SETUID).
var ErrNotPermitted = errors.New("acting for another user is not permitted")

// OwnerOf tells whose a file is that a user makes: a server may take users for others
// (exports(5), squashing). The directory must let everybody write.
func OwnerOf(dir *os.Root, uid int) (owner uint32, err error) {
	type answer struct {
		owner uint32
		err   error
	}
	done := make(chan answer)
	go func() {
		// setfsuid(2) is of the thread alone, which ends with this goroutine.
		runtime.LockOSThread()
		if err := become(uid); err != nil {
			done <- answer{err: err}
			return
		}
		owner, err := ownerOfMade(dir)
		done <- answer{owner, err}
	}()
	a := <-done
	if errors.Is(a.err, ErrNotPermitted) {
		return 0, a.err
	}
	if err := dir.Remove(probeFile); err != nil && a.err == nil {
		a.err = err
	}
	return a.owner, a.err
}

// become changes who this thread is to filesystems.
func become(uid int) error {
	for _, set := range []func(int) (int, error){unix.SetfsgidRetGid, unix.SetfsuidRetUid} {
		if _, err := set(uid); err != nil {
			return err
		}
		// setfsuid(2) fails without a word: a second call tells what holds.
		if now, err := set(-1); err != nil || now != uid {
			return errors.Join(ErrNotPermitted, err)
		}
	}
	return nil
}

func ownerOfMade(dir *os.Root) (uint32, error) {
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

// supported tells an operation that a filesystem lacks from one that failed.
func supported(err error) (bool, error) {
	for _, lacking := range []error{unix.EOPNOTSUPP, unix.ENOSYS, unix.ENOTTY, unix.EINVAL, unix.ENOLCK} {
		if errors.Is(err, lacking) {
			return false, nil
		}
	}
	return err == nil, err
}
