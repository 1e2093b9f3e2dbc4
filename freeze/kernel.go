package freeze

import (
	"errors"
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// Numbers that x/sys does not have (uapi/linux/fs.h).
const (
	fiFreeze = 0xc0045877 // FIFREEZE: _IOWR('X', 119, int)
	fiThaw   = 0xc0045878 // FITHAW: _IOWR('X', 120, int)
)

// errNotFrozen is FITHAW's answer for what is not frozen.
var errNotFrozen = unix.EINVAL

// freeze returns when the filesystem is frozen, which takes as long as writing its dirty
// pages. No signal ends it.
func freeze(root *os.File) error { return ioctl(root, fiFreeze) }

func thaw(root *os.File) error { return ioctl(root, fiThaw) }

func ioctl(root *os.File, request uintptr) error {
	for {
		_, _, errno := unix.Syscall(unix.SYS_IOCTL, root.Fd(), request, 0)
		runtime.KeepAlive(root)
		if errno == 0 {
			return nil
		}
		if !errors.Is(errno, unix.EINTR) {
			return errno
		}
	}
}
