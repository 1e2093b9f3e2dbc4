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
	ioprioWhoProcess = 1 // the calling thread
	ioprioIdle       = 3 << 13
)

// IdleIO gives reads and direct writes of the calling goroutine the idle I/O priority (ioprio_set(2)): they are served when no
// other process uses the disk, if its I/O scheduler supports priorities. The goroutine keeps its thread until it ends,
// and the thread ends with it.
func IdleIO() {
	runtime.LockOSThread()
	_, _, _ = unix.Syscall(unix.SYS_IOPRIO_SET, ioprioWhoProcess, 0, ioprioIdle)
}
