package sys

import (
	"errors"
	"os"
	"runtime"
	"strconv"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// priority returns the I/O priority of a thread of this process; 0 means the calling thread.
func priority(t *testing.T, thread int) uintptr {
	t.Helper()
	p, _, errno := unix.Syscall(unix.SYS_IOPRIO_GET, ioprioWhoProcess, uintptr(thread), 0)
	if errno != 0 && !errors.Is(errno, unix.ESRCH) {
		t.Errorf("ioprio_get: %v", errno)
	}
	return p
}

// TestWithIdleIO: the priority is idle during the call, and that of the thread before is restored, also after a nested call, an error
// and a panic.
func TestWithIdleIO(t *testing.T) {
	const bestEffort = 2<<ioprioClassShift | 3
	for _, before := range []uintptr{0, bestEffort, ioprioIdle} {
		done := make(chan struct{})
		go func() { // on a thread that ends afterwards
			defer close(done)
			runtime.LockOSThread()
			_, _, errno := unix.Syscall(unix.SYS_IOPRIO_SET, ioprioWhoProcess, 0, before)
			if errno != 0 {
				t.Errorf("ioprio_set: %v", errno)
			}
			failed := errors.New("failed")
			err := WithIdleIO(func() error {
				_ = WithIdleIO(func() error { return nil })
				if got := priority(t, 0); got != ioprioIdle {
					t.Errorf("during the call: got priority %#x, want %#x", got, ioprioIdle)
				}
				return failed
			})
			if !errors.Is(err, failed) {
				t.Errorf("got %v, want the error of the function", err)
			}
			func() {
				defer func() { _ = recover() }()
				_ = WithIdleIO(func() error { panic("failed") })
			}()
			if got := priority(t, 0); got != before && (before != 0 || got>>ioprioClassShift != 0) {
				t.Errorf("after the call: got priority %#x, want %#x", got, before)
			}
		}()
		<-done
	}
}

// TestIdleIOThreads: no thread keeps the idle priority when goroutines move between threads.
func TestIdleIOThreads(t *testing.T) {
	var calls sync.WaitGroup
	for range 100 {
		calls.Go(func() {
			for range 20 {
				_ = WithIdleIO(func() error {
					time.Sleep(time.Millisecond) // other goroutines get other threads
					return nil
				})
			}
		})
	}
	calls.Wait()
	threads, err := os.ReadDir("/proc/self/task")
	if err != nil {
		t.Fatal(err)
	}
	for _, thread := range threads {
		id, err := strconv.Atoi(thread.Name())
		if err == nil && priority(t, id) == ioprioIdle {
			t.Errorf("thread %d has the idle priority", id)
		}
	}
}
