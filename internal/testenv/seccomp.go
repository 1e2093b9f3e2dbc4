package testenv

import (
	"runtime"
	"syscall"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Forbid runs do on a thread of its own, on which system calls with these numbers fail with an errno (seccomp(2)). It stands
// for a kernel that does not have the calls, or for the profile of a container.
func Forbid(tb testing.TB, errno syscall.Errno, numbers []uint32, do func()) {
	tb.Helper()
	RequireRoot(tb)
	program := []unix.SockFilter{{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS}} // loads the number of the call
	for _, number := range numbers {
		program = append(program,
			unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, Jf: 1, K: number},
			unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ERRNO | uint32(errno)})
	}
	program = append(program, unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ALLOW})
	filter := unix.SockFprog{Len: uint16(len(program)), Filter: &program[0]}
	done := make(chan error)
	go func() {
		defer close(done)      // also if do ends this goroutine with FailNow
		runtime.LockOSThread() // never unlocked: the thread ends with this goroutine
		if err := unix.Prctl(unix.PR_SET_SECCOMP, unix.SECCOMP_MODE_FILTER, uintptr(unsafe.Pointer(&filter)), 0, 0); err != nil {
			done <- err
			return
		}
		do()
	}()
	if err := <-done; err != nil {
		tb.Errorf("PR_SET_SECCOMP: %v", err)
	}
	runtime.KeepAlive(program)
}
