package sys

import (
	"errors"
	"io/fs"
	"os"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// ioctl is ioctl(2) with a pointer. op names the request in the error.
func ioctl(f *os.File, op string, request uint, arg unsafe.Pointer) error {
	for {
		_, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), uintptr(request), uintptr(arg))
		runtime.KeepAlive(f)
		if errno == 0 {
			return nil
		}
		if errno != unix.EINTR {
			return &fs.PathError{Op: op, Path: f.Name(), Err: errno}
		}
	}
}

// ioctlInt is ioctl(2) with a number.
func ioctlInt(f *os.File, op string, request uint, value int) error {
	return wrap(op, f, unix.IoctlSetInt(int(f.Fd()), request, value))
}

// wrap adds the name of the call and of the file to an error. It returns nil if err is nil.
func wrap(op string, f *os.File, err error) error {
	if err == nil {
		return nil
	}
	return &fs.PathError{Op: op, Path: f.Name(), Err: err}
}

// Unsupported reports whether an error means that the kernel, the filesystem or the device does
// not support the call.
func Unsupported(err error) bool {
	return errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.ENOTTY) || errors.Is(err, unix.ENOSYS)
}
