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

// abortEvery is the time between two calls of umount2(2) with MNT_FORCE. Each makes only those NFS calls fail
// that are waiting at that time.
const abortEvery = 200 * time.Millisecond

// busyWithin is the maximum time for which a mount may stay busy after its dirty pages were discarded.
const busyWithin = 10 * time.Second

// errChanged means that another process unmounted the mount, or mounted over it.
var errChanged = errors.New("another process unmounted this mount, or mounted over it: try again")

// forced holds the forced unmounts in progress by path.
var forced singleflight.Group

// ForceUnmountNFS unmounts the NFS mount at path without waiting for its server. Writes that the server has not
// received are lost. Calls through other mounts of the same filesystem fail, too. If ctx ends before the mount is
// removed, ForceUnmountNFS returns ErrUnmounting, the unmount continues, and another call for the path joins it. The
// error is EBUSY if a process that was not killed has files of the mount open. It is no error if nothing is mounted
// at path.
func ForceUnmountNFS(ctx context.Context, path string) error {
	path = filepath.Clean(path)
	//nolint:contextcheck // the unmount continues after the call, and another call joins it
	result := forced.DoChan(path, func() (any, error) { return nil, forceUnmount(path) })
	select {
	case r := <-result:
		return r.Err
	case <-ctx.Done():
		return fmt.Errorf("%w: %w", ErrUnmounting, ctx.Err())
	}
}

// forceUnmount retries while the mount is busy, because a killed process that waits in close(2) ends only
// after its dirty pages are discarded.
func forceUnmount(path string) error {
	var err error
	for begin := time.Now(); time.Since(begin) < busyWithin; time.Sleep(abortEvery) {
		if err = tryForceUnmount(path); !errors.Is(err, unix.EBUSY) {
			break
		}
	}
	return err
}

// tryForceUnmount discards the dirty pages while a descriptor keeps the mount busy, and unmounts afterwards.
// In another order, the last writes would block the unmounting thread, which no signal interrupts, and a
// detached mount has no path through which they could be aborted.
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

// DetachNFS removes the NFS mount at path without waiting for its server, and aborts no calls. Use it only for
// a mount without dirty pages. A close(2) that waits for the server ends when the server responds again. It is
// no error if nothing is mounted at path.
func DetachNFS(path string) error {
	h, err := holdNFS(filepath.Clean(path))
	if err != nil || h == nil {
		return err
	}
	unix.Close(h.fd)
	return h.unmount(unix.MNT_DETACH)
}

// unmount returns when the mount is detached. It does not wait for umount2(2), because with the last mount of
// a server the kernel also ends the session with the server, which takes minutes if the server does not respond.
func (h *held) unmount(flags int) error {
	unmounted := make(chan error, 1)
	go func() { unmounted <- unix.Unmount(h.path, flags|unix.UMOUNT_NOFOLLOW) }()
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

// AbortNFS repeatedly makes the waiting calls of the NFS mount at path fail, until done returns true or ctx
// ends. It does not unmount. It is no error if nothing is mounted at path.
func AbortNFS(ctx context.Context, path string, done func() bool) error {
	h, err := holdNFS(filepath.Clean(path))
	if err != nil || h == nil {
		return err
	}
	defer unix.Close(h.fd)
	return h.abort(ctx, done)
}

// held is an NFS mount that a descriptor keeps busy, so that MNT_FORCE does not unmount it.
type held struct {
	fd   int
	path string
	at   *Entry // the mount at path
}

// holdNFS opens the NFS mount at path, which keeps the mount busy. It returns nil if nothing is mounted at
// path.
func holdNFS(path string) (*held, error) {
	e, err := OnPath(path)
	if err != nil || e == nil {
		return nil, err
	}
	h := &held{path: path, at: e}
	if !IsNFS(e) {
		return nil, h.fail("umount2 by force", errors.New("only NFS mounts are unmounted by force"))
	}
	// open(2) with O_PATH sends no request to the server.
	if h.fd, err = unix.Open(path, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0); err != nil {
		return nil, h.fail("open", err)
	}
	return h, nil
}

// abort repeatedly makes the waiting calls of a mount fail, until done returns true or ctx ends.
func (h *held) abort(ctx context.Context, done func() bool) error {
	tick := time.NewTicker(abortEvery)
	defer tick.Stop()
	for !done() {
		err := unix.Unmount(h.path, unix.MNT_FORCE|unix.UMOUNT_NOFOLLOW)
		if !errors.Is(err, unix.EBUSY) { // the descriptor keeps the mount busy
			return h.fail("aborting calls by umount2", errors.Join(err, errChanged))
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

// flush writes the dirty pages, or discards them while abort runs. It does not use syncfs(2), because syncfs needs a
// descriptor that is open for reading, and opening one sends a request to the server. Instead flush remounts the
// filesystem, because a remount by mount(2) without data begins with the same sync. mount(2) sends no request, but
// fsconfig(2) does with NFS version 3. The remount keeps the flags of the filesystem. It overwrites the flags of this
// mount, which may differ and are restored at once.
func (h *held) flush() {
	now, _ := ParseFlags([]string{h.at.Options})
	const restored = unix.MOUNT_ATTR_RDONLY | unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV | unix.MOUNT_ATTR_NOEXEC | unix.MOUNT_ATTR_NOSYMFOLLOW
	flags := uintptr(now.Attr & (unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV | unix.MOUNT_ATTR_NOEXEC)) // MS_* have the same values
	if slices.Contains(strings.Split(h.at.VFSOptions, ","), "ro") {
		flags |= unix.MS_RDONLY
	}
	_ = unix.Mount("", fmt.Sprintf("/proc/self/fd/%d", h.fd), "", unix.MS_REMOUNT|flags, "")
	if err := unix.MountSetattr(h.fd, "", unix.AT_EMPTY_PATH, &unix.MountAttr{Attr_set: now.Attr & restored}); err != nil {
		err = h.fail("restoring flags by mount_setattr", err)
		klog.Background().Error(err, "Restoring the flags of an NFS mount during a forced unmount failed", "flags", h.at.Options)
	}
}

// fail returns the error of an operation on the mount.
func (h *held) fail(op string, err error) error {
	return &Error{Op: op, Source: h.at.Source, Target: h.path, FSType: h.at.FSType, Err: err}
}
