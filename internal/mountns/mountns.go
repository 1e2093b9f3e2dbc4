// Package mountns moves a test program into a separate mount namespace, so that other programs cannot copy its
// mounts. A container that starts copies all mounts of its parent's namespace, and each copy keeps the mounted
// device in use (mount_namespaces(7)). When the last process of the namespace ends, the kernel removes its
// mounts.
package mountns

import (
	"fmt"
	"os"
	"runtime"
	"syscall"

	"golang.org/x/sys/unix"
)

// enteredVariable is set in the environment of the program in the new namespace, and of its children.
const enteredVariable = "TRIVET_MOUNT_NAMESPACE"

// Enter executes the program again, from its start, in a new mount namespace. Mounts do not propagate from it to the
// namespace of the parent process. Enter does nothing if the program already runs in that namespace, or if the user
// is not root, because only root can mount. Call it before all other code, because a thread cannot move other
// threads.
func Enter() error {
	if os.Getenv(enteredVariable) != "" || os.Geteuid() != 0 {
		return nil
	}
	// execve(2) continues in the namespace of the calling thread.
	runtime.LockOSThread()
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("unshare(CLONE_NEWNS): %w: run this program as root with CAP_SYS_ADMIN", err)
	}
	// MS_PRIVATE ends propagation to and from the parent's namespace. MS_SHARED lets mounts propagate to
	// namespaces that are created from this one, as the NFS nodes of tests require.
	for _, propagation := range []uintptr{unix.MS_PRIVATE, unix.MS_SHARED} {
		if err := unix.Mount("", "/", "", unix.MS_REC|propagation, ""); err != nil {
			return fmt.Errorf("setting the propagation of the mounts: %w", err)
		}
	}
	if err := os.Setenv(enteredVariable, "1"); err != nil {
		return err
	}
	if err := syscall.Exec("/proc/self/exe", os.Args, os.Environ()); err != nil {
		return fmt.Errorf("executing this program again: %w", err)
	}
	return nil
}
