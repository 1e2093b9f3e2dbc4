package nfs

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"syscall"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// prepare is backend.PrepareDirectory on a server, which may take users for others.
func prepare(dir *os.File, made bool, asked volume.DirectoryParameters, record *volume.Directory) error {
	if made {
		before, err := status(dir)
		if err == nil {
			err = checkSquash(dir, before)
		}
		if err != nil {
			return err
		}
	}
	err := backend.PrepareDirectory(dir, made, asked, record)
	var failed *os.PathError
	if errors.As(err, &failed) && failed.Op == "fchown" && (errors.Is(err, syscall.EPERM) || errors.Is(err, syscall.EACCES)) {
		return volume.Errorf(volume.ErrPrecondition, "parameters %s and %s: the server does not let this node give a directory to another owner (%w): export with no_root_squash, or remove them from the class",
			volume.ParamUID, volume.ParamGID, err)
	}
	if err != nil {
		return err
	}
	return given(asked, record)
}

// given refuses a server that says it has done what it has not: one that makes users
// others, or has modes of its own.
func given(asked volume.DirectoryParameters, have *volume.Directory) error {
	for _, c := range []struct {
		key    string
		format string
		asked  *uint32
		have   uint32
	}{
		{volume.ParamMode, "%04o", asked.Mode, have.Mode},
		{volume.ParamUID, "%d", asked.UID, have.UID},
		{volume.ParamGID, "%d", asked.GID, have.GID},
	} {
		if c.asked != nil && *c.asked != c.have {
			return volume.Errorf(volume.ErrPrecondition, "parameter %s="+c.format+": the server gave the directory "+c.format+" instead: have it take users and modes as they are (no_root_squash, no all_squash, no ID mapping, no forced modes), or remove %[1]s from the class",
				c.key, *c.asked, c.have)
		}
	}
	return nil
}

func status(dir *os.File) (st syscall.Stat_t, err error) {
	st.Mode, st.Uid, st.Gid, err = pool.Status(dir)
	return st, err
}

func stat(dir *os.File) (st syscall.Stat_t, err error) {
	if err := syscall.Fstat(int(dir.Fd()), &st); err != nil {
		return st, &os.PathError{Op: "fstat", Path: dir.Name(), Err: err}
	}
	return st, nil
}

// stranger is a user that no server has a reason to treat as another one, as long as
// it tells users apart.
const stranger = 64321

// checkSquash refuses a server that takes this node's root for somebody else and
// leaves the other users as they are: nobody could give a pod's group its volume,
// which the kubelet does as root. A server that makes all users one has no owners
// to give, and works as it is.
func checkSquash(dir *os.File, made syscall.Stat_t) error {
	if int(made.Uid) == os.Geteuid() {
		return nil
	}
	other, err := ownerOfMade(dir, stranger)
	if err != nil {
		return err
	}
	if other == made.Uid {
		return nil
	}
	return volume.Errorf(volume.ErrPrecondition, "the server takes this node's root for user %d: export with no_root_squash, or with all_squash for all users to be one", made.Uid)
}

// ownerOfMade makes a file as another user, removes it again and tells whose it was.
func ownerOfMade(dir *os.File, uid int) (owner uint32, err error) {
	if err := syscall.Fchmod(int(dir.Fd()), 0o777); err != nil {
		return 0, err
	}
	const name = ".trivet-owner"
	path := fmt.Sprintf("/proc/self/fd/%d/%s", dir.Fd(), name)
	err = as(uid, func() error {
		f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
		if err != nil {
			return err
		}
		defer f.Close()
		st, err := stat(f)
		owner = st.Uid
		return err
	})
	if removed := os.Remove(path); !errors.Is(removed, os.ErrNotExist) {
		err = errors.Join(err, removed)
	}
	return owner, err
}

// as runs f with the filesystem identity of another user (setfsuid(2)), which is its
// thread's alone. The thread is not used again: what it gave up is not trusted to be
// back.
func as(uid int, f func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with this goroutine
		if err := errors.Join(syscall.Setfsgid(uid), syscall.Setfsuid(uid)); err != nil {
			done <- err
			return
		}
		done <- f()
	}()
	return <-done
}
