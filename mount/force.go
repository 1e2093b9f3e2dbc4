package mount

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/singleflight"
	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"
)

// abortEvery is the time between two umount2(2) with MNT_FORCE: each ends the
// calls that are waiting then, and what was behind them makes new ones.
const abortEvery = 200 * time.Millisecond

// busyWithin is how long a mount may stay busy after its dirty pages have failed.
const busyWithin = 10 * time.Second

// errNotHeld: somebody else unmounted it, or mounted on top of it.
var errNotHeld = errors.New("the mount changed meanwhile: try again")

// forced are the mounts that are being unmounted by force, by path.
var forced singleflight.Group

// ForceUnmountNFS unmounts the NFS mount at path though its server does not
// answer. Acknowledged writes that the server does not have are lost: the caller
// has decided that. The calls of other mounts of the same filesystem fail with
// it. It returns when the mount is gone, or with ctx: the work then goes on, and
// another call for the path joins it. EBUSY if somebody who lives has files open in
// it. It is no error if nothing is mounted there.
func ForceUnmountNFS(ctx context.Context, path string) error {
	path = filepath.Clean(path)
	result := forced.DoChan(path, func() (any, error) { return nil, forceUnmount(path) }) //nolint:contextcheck // what was begun goes on, and another call joins it
	select {
	case r := <-result:
		return r.Err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// forceUnmount tries again while the mount is busy: a process that was killed, and
// hung in closing a file, ends only when its pages have failed.
func forceUnmount(path string) error {
	var err error
	for begin := time.Now(); time.Since(begin) < busyWithin; time.Sleep(abortEvery) {
		if err = tryForceUnmount(path); !errors.Is(err, unix.EBUSY) {
			break
		}
	}
	return err
}

// tryForceUnmount fails the dirty pages first, with the mount held busy: once it is
// detached no path leads to it, and its last writes would wait for the server in
// the unmounting thread, which no signal reaches.
func tryForceUnmount(path string) error {
	h, err := holdNFS(path)
	if err != nil || h == nil {
		return err
	}
	synced := make(chan struct{})
	go func() { defer close(synced); h.flush() }()
	err = h.abort(context.Background(), func() bool {
		select {
		case <-synced:
			return true
		default:
			return false
		}
	})
	<-synced
	unix.Close(h.fd)
	if err != nil {
		return err
	}
	return h.unmount(unix.MNT_FORCE)
}

// LetGoNFS takes the NFS mount at path away though its server does not answer, and
// makes no call fail: a file that is still being closed there is closed when the
// server is back. It is for a mount on which nothing is dirty. It is no error if
// nothing is mounted there.
func LetGoNFS(path string) error {
	h, err := holdNFS(filepath.Clean(path))
	if err != nil || h == nil {
		return err
	}
	unix.Close(h.fd)
	return h.unmount(unix.MNT_DETACH)
}

// unmount returns when the mount is detached. With the last mount of a server the
// kernel's client says goodbye to it, and that thread waits some minutes in vain.
func (h *held) unmount(how int) error {
	unmounted := make(chan error, 1)
	go func() { unmounted <- unix.Unmount(h.path, how|unix.UMOUNT_NOFOLLOW) }()
	tick := time.NewTicker(abortEvery)
	defer tick.Stop()
	for {
		select {
		case err := <-unmounted:
			if err != nil {
				return h.fail("umount2 without the server", err)
			}
			return nil
		case <-tick.C:
			if e, err := OnPath(h.path); err == nil && (e == nil || e.ID != h.at.ID) {
				return nil
			}
		}
	}
}

// AbortNFS makes the calls that wait at the NFS mount at path fail, again and
// again until done says so or ctx ends. The mount stays. It is no error if nothing
// is mounted there.
func AbortNFS(ctx context.Context, path string, done func() bool) error {
	h, err := holdNFS(filepath.Clean(path))
	if err != nil || h == nil {
		return err
	}
	defer unix.Close(h.fd)
	return h.abort(ctx, done)
}

// held is an NFS mount that is kept busy, so that MNT_FORCE does not unmount it.
type held struct {
	fd   int
	path string
	at   *Entry
}

// holdNFS keeps the mount at path busy; nil if there is none.
func holdNFS(path string) (*held, error) {
	e, err := OnPath(path)
	if err != nil || e == nil {
		return nil, err
	}
	h := &held{path: path, at: e}
	if !IsNFS(e) {
		return nil, h.fail("umount2 by force", errors.New("only NFS mounts are unmounted by force"))
	}
	// With O_PATH the server is asked nothing.
	if h.fd, err = unix.Open(path, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0); err != nil {
		return nil, h.fail("open", err)
	}
	return h, nil
}

// abort ends the waiting calls of a mount until done.
func (h *held) abort(ctx context.Context, done func() bool) error {
	tick := time.NewTicker(abortEvery)
	defer tick.Stop()
	for !done() {
		err := unix.Unmount(h.path, unix.MNT_FORCE|unix.UMOUNT_NOFOLLOW)
		if !errors.Is(err, unix.EBUSY) {
			return h.fail("aborting calls by umount2", errors.Join(err, errNotHeld))
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

// flush writes the dirty pages, or has them fail. syncfs(2) needs a descriptor that is open
// for reading, and opening one asks the server. A remount without data begins with the same
// sync and asks nothing; fsconfig(2) would, with version 3. The remount sets the flags of the
// filesystem, which stay as they are, and those of this mount, which may differ from them and
// are restored at once.
func (h *held) flush() {
	now, _ := ParseFlags([]string{h.at.Options})
	const restored = unix.MOUNT_ATTR_RDONLY | unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV | unix.MOUNT_ATTR_NOEXEC | unix.MOUNT_ATTR_NOSYMFOLLOW
	flags := uintptr(now.Attr & (unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV | unix.MOUNT_ATTR_NOEXEC)) // MS_* have the same values
	if slices.Contains(strings.Split(h.at.VFSOptions, ","), "ro") {
		flags |= unix.MS_RDONLY
	}
	_ = unix.Mount("", fmt.Sprintf("/proc/self/fd/%d", h.fd), "", unix.MS_REMOUNT|flags, "")
	if err := unix.MountSetattr(h.fd, "", unix.AT_EMPTY_PATH, &unix.MountAttr{Attr_set: now.Attr & restored}); err != nil {
		klog.Background().Error(h.fail("restoring flags by mount_setattr", err), "An NFS mount that is being unmounted by force lost its mount flags", "flags", h.at.Options)
	}
}

func (h *held) fail(op string, err error) error {
	return &Error{Op: op, Source: h.at.Source, Target: h.path, FSType: h.at.FSType, Err: err}
}
