package sys

import (
	"runtime"

	"golang.org/x/sys/unix"
)

// OnOwnThread runs do on a thread that ends afterwards, so that do can change attributes of the thread.
func OnOwnThread(do func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with this goroutine
		done <- do()
	}()
	return <-done
}

// Values of linux/ioprio.h.
const (
	ioprioWhoProcess = 1 // with 0, the calling thread
	ioprioClassShift = 13
	ioprioIdle       = 3 << ioprioClassShift
)

// IdleIO gives reads and direct writes of the calling goroutine the idle I/O priority (ioprio_set(2)): they are served when no
// other process uses the disk, if its I/O scheduler supports priorities. The goroutine keeps its thread until it ends,
// and the thread ends with it.
func IdleIO() {
	runtime.LockOSThread()
	_, _, _ = unix.Syscall(unix.SYS_IOPRIO_SET, ioprioWhoProcess, 0, ioprioIdle)
}

// WithIdleIO calls do with the idle I/O priority, and restores the priority of the thread afterwards.
func WithIdleIO(do func() error) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	before, _, errno := unix.Syscall(unix.SYS_IOPRIO_GET, ioprioWhoProcess, 0, 0)
	if errno != 0 || before>>ioprioClassShift == 0 { // kernels report a level without a class, and refuse to set it
		before = 0
	}
	_, _, _ = unix.Syscall(unix.SYS_IOPRIO_SET, ioprioWhoProcess, 0, ioprioIdle)
	defer func() { _, _, _ = unix.Syscall(unix.SYS_IOPRIO_SET, ioprioWhoProcess, 0, before) }()
	return do()
}
