package sys

import (
	"os"

	"golang.org/x/sys/unix"
)

// FreeLoop returns the number of an unbound loop device, which the kernel creates if necessary
// (LOOP_CTL_GET_FREE, loop(4)). It returns the same number until the device is bound.
func FreeLoop(control *os.File) (int, error) {
	number, err := unix.IoctlRetInt(int(control.Fd()), unix.LOOP_CTL_GET_FREE)
	return number, wrap("LOOP_CTL_GET_FREE", control, err)
}

// AddLoop creates a loop device (LOOP_CTL_ADD). The error is EEXIST if the device exists.
func AddLoop(control *os.File, number int) error {
	return ioctlInt(control, "LOOP_CTL_ADD", unix.LOOP_CTL_ADD, number)
}

// RemoveLoop removes an unbound loop device (LOOP_CTL_REMOVE). The error is EBUSY while the device is open
// or bound, and ENODEV if the device does not exist.
func RemoveLoop(control *os.File, number int) error {
	return ioctlInt(control, "LOOP_CTL_REMOVE", unix.LOOP_CTL_REMOVE, number)
}

// ConfigureLoop binds a loop device (LOOP_CONFIGURE, Linux 5.8). The error is EBUSY if the device is bound.
func ConfigureLoop(device *os.File, config *unix.LoopConfig) error {
	return wrap("LOOP_CONFIGURE", device, unix.IoctlLoopConfigure(int(device.Fd()), config))
}

// LoopStatus reads the state of a loop device (LOOP_GET_STATUS64). The error is ENXIO if the device is unbound.
func LoopStatus(device *os.File) (*unix.LoopInfo64, error) {
	info, err := unix.IoctlLoopGetStatus64(int(device.Fd()))
	return info, wrap("LOOP_GET_STATUS64", device, err)
}

// SetLoopStatus changes the state of a loop device (LOOP_SET_STATUS64).
func SetLoopStatus(device *os.File, info *unix.LoopInfo64) error {
	return wrap("LOOP_SET_STATUS64", device, unix.IoctlLoopSetStatus64(int(device.Fd()), info))
}

// ResizeLoop gives a loop device the size of its backing file (LOOP_SET_CAPACITY).
func ResizeLoop(device *os.File) error {
	return ioctlInt(device, "LOOP_SET_CAPACITY", unix.LOOP_SET_CAPACITY, 0)
}

// ClearLoop unbinds a loop device (LOOP_CLR_FD). If other descriptors of the device are open, the kernel only sets
// LO_FLAGS_AUTOCLEAR, and unbinds the device when the last one is closed. The error is ENXIO if the device is
// unbound.
func ClearLoop(device *os.File) error {
	return ioctlInt(device, "LOOP_CLR_FD", unix.LOOP_CLR_FD, 0)
}
