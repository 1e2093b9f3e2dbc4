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

// prepare is backend.PrepareDirectory, and refuses a server that changes users or modes.
func prepare(dir *os.File, empty bool, requested volume.DirectoryParameters, record *volume.Directory) error {
	if empty {
		_, owner, _, err := pool.Status(dir)
		if err == nil {
			err = checkSquash(dir, owner)
		}
		if err != nil {
			return err
		}
	}
	err := backend.PrepareDirectory(dir, empty, requested, record)
	var failed *os.PathError
	if errors.As(err, &failed) && failed.Op == "fchown" {
		if remedy := chownRemedies[failed.Err]; remedy != "" {
			return volume.Errorf(volume.ErrPrecondition, "parameters %s and %s: the server does not let this node give a directory to another owner (%w): %s, or remove these parameters from the class",
				volume.ParamUID, volume.ParamGID, err, remedy)
		}
	}
	if err != nil {
		return err
	}
	return checkApplied(requested, record)
}

// chownRemedies are the remedies for an errno of fchown(2). NFS 4 can transmit owners as names, as it does with Kerberos. The server
// answers EINVAL for a name that it does not know.
var chownRemedies = map[error]string{
	syscall.EPERM:  "export with no_root_squash",
	syscall.EACCES: "export with no_root_squash",
	syscall.EINVAL: "with NFS 4 and Kerberos, or with nfs4_disable_idmapping=N, create a user and a group with these IDs and the same name on the server and on all nodes",
}

// checkApplied refuses a directory whose mode or owner differs from the request, because the server maps
// users or forces modes.
func checkApplied(requested volume.DirectoryParameters, have *volume.Directory) error {
	for _, c := range []struct {
		key       string
		format    string
		requested *uint32
		have      uint32
	}{
		{volume.ParamMode, "%04o", requested.Mode, uint32(have.Mode)},
		{volume.ParamUID, "%d", requested.UID, have.UID},
		{volume.ParamGID, "%d", requested.GID, have.GID},
	} {
		if c.requested != nil && *c.requested != c.have {
			return volume.Errorf(volume.ErrPrecondition, "parameter %s="+c.format+": the server gave the directory "+c.format+" instead: configure it to keep users and modes (no_root_squash, no all_squash, no ID mapping, no forced modes), or remove %[1]s from the class",
				c.key, *c.requested, c.have)
		}
	}
	return nil
}

// stat is fstat(2).
func stat(dir *os.File) (st syscall.Stat_t, err error) {
	if err := syscall.Fstat(int(dir.Fd()), &st); err != nil {
		return st, &os.PathError{Op: "fstat", Path: dir.Name(), Err: err}
	}
	return st, nil
}

// otherUser is the ID of a user other than root. A server maps this user only if it maps all users.
const otherUser = 64321

// checkSquash refuses a server that maps root but not the other users, because the kubelet, which runs as
// root, could not apply a pod's fsGroup. It accepts a server that maps all users to one. owner is the
// owner of dir, which this process created.
func checkSquash(dir *os.File, owner uint32) error {
	if int(owner) == os.Geteuid() {
		return nil
	}
	other, err := ownerOfNewFile(dir, otherUser)
	if err != nil || other == owner {
		return err
	}
	return volume.Errorf(volume.ErrPrecondition, "the server maps this node's root to user %d: export with no_root_squash, and with Kerberos map the principal of the node to root; or map all users with all_squash", owner)
}

// ownerOfNewFile creates a file as the user uid, removes it, and returns its owner.
func ownerOfNewFile(dir *os.File, uid int) (owner uint32, err error) {
	if err := syscall.Fchmod(int(dir.Fd()), 0o777); err != nil {
		return 0, err
	}
	const name = ".trivet-owner"
	path := fmt.Sprintf("/proc/self/fd/%d/%s", dir.Fd(), name)
	err = runAs(uid, func() error {
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

// runAs runs f with the filesystem identity of another user (setfsuid(2)) on its own thread. The
// thread ends afterwards, so that no other goroutine runs with that identity.
func runAs(uid int, f func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked, so that the thread ends with this goroutine
		if err := errors.Join(syscall.Setfsgid(uid), syscall.Setfsuid(uid)); err != nil {
			done <- err
			return
		}
		done <- f()
	}()
	return <-done
}
