// Package mountns moves a program that mounts for testing into a separate mount namespace, so that other
// programs cannot copy its mounts: a container that starts copies all mounts of its parent's namespace, and
// each copy keeps its device in use (mount_namespaces(7)). When the last process of the namespace ends, the
// kernel removes all mounts.
package mountns

import (
	"fmt"
	"os"
	"runtime"
	"syscall"

	"golang.org/x/sys/unix"
)

// entered is set for the program that runs in the namespace, and for its children.
const entered = "TRIVET_MOUNT_NAMESPACE"

// Enter runs the program again, from its start, in a new mount namespace whose mounts do not
// propagate to the parent's. It does nothing in that run, and for a user other than root, who cannot mount.
// Call it before all other code, because a thread cannot move other threads.
func Enter() error {
	if os.Getenv(entered) != "" || os.Geteuid() != 0 {
		return nil
	}
	// execve(2) continues in the namespace of the calling thread.
	runtime.LockOSThread()
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("unshare(CLONE_NEWNS): %w: run this as root with CAP_SYS_ADMIN", err)
	}
	// Private cuts the mounts off from the parent's namespace. Shared again, they propagate to
	// the namespaces made from this one, as a test's NFS nodes need.
	for _, propagation := range []uintptr{unix.MS_PRIVATE, unix.MS_SHARED} {
		if err := unix.Mount("", "/", "", unix.MS_REC|propagation, ""); err != nil {
			return fmt.Errorf("set the propagation of the mounts: %w", err)
		}
	}
	if err := os.Setenv(entered, "1"); err != nil {
		return err
	}
	if err := syscall.Exec("/proc/self/exe", os.Args, os.Environ()); err != nil {
		return fmt.Errorf("run this program again: %w", err)
	}
	return nil
}
