package confine

import (
	"fmt"
	"os"
	"runtime"
	"slices"
	"unsafe"

	"golang.org/x/sys/unix"
)

// newest is the newest system call that this package knows. Later ones fail as with a kernel that does not have them. The numbers
// of the calls of the x32 ABI are larger, too.
const newest = unix.SYS_RSEQ_SLICE_YIELD

// refused contains the system calls that neither the driver nor its programs use, and that could change the node or other
// processes, or that make a large part of the kernel reachable. It is a list of refused calls, not of allowed ones: a
// call that a program makes only to repair a damaged filesystem could be missing in a list of allowed calls.
var refused = slices.Concat([]uint32{
	// code in the kernel
	unix.SYS_INIT_MODULE, unix.SYS_FINIT_MODULE, unix.SYS_DELETE_MODULE, unix.SYS_KEXEC_LOAD, unix.SYS_KEXEC_FILE_LOAD,
	unix.SYS_BPF,
	// memory, descriptors and namespaces of other processes
	unix.SYS_PTRACE, unix.SYS_PROCESS_VM_READV, unix.SYS_PROCESS_VM_WRITEV, unix.SYS_PROCESS_MADVISE, unix.SYS_KCMP,
	unix.SYS_PIDFD_GETFD, unix.SYS_MIGRATE_PAGES, unix.SYS_MOVE_PAGES, unix.SYS_SETNS,
	// observation of other processes and of the kernel
	unix.SYS_PERF_EVENT_OPEN, unix.SYS_FANOTIFY_INIT, unix.SYS_FANOTIFY_MARK, unix.SYS_SYSLOG, unix.SYS_LOOKUP_DCOOKIE,
	unix.SYS_ACCT,
	// state of the node
	unix.SYS_REBOOT, unix.SYS_SWAPON, unix.SYS_SWAPOFF, unix.SYS_SETTIMEOFDAY, unix.SYS_CLOCK_SETTIME, unix.SYS_ADJTIMEX,
	unix.SYS_CLOCK_ADJTIME, unix.SYS_SETHOSTNAME, unix.SYS_SETDOMAINNAME, unix.SYS_VHANGUP, unix.SYS_NFSSERVCTL,
	// another root directory
	unix.SYS_CHROOT, unix.SYS_PIVOT_ROOT,
	// large parts of the kernel, in which exploitable errors were found
	unix.SYS_USERFAULTFD, unix.SYS_IO_URING_SETUP, unix.SYS_IO_URING_ENTER, unix.SYS_IO_URING_REGISTER,
}, refusedHere)

// architectures contains the architectures of the kernel's ABI (linux/audit.h) by GOARCH.
var architectures = map[string]uint32{"amd64": unix.AUDIT_ARCH_X86_64, "arm64": unix.AUDIT_ARCH_AARCH64}

// RefuseCalls installs a seccomp filter for all threads, with which the refused calls, and calls of 32-bit programs, fail
// with ENOSYS. Programs also get this error from a kernel that does not have a call, and some have another way. The kernel logs
// these calls if auditing is enabled.
func RefuseCalls() error {
	architecture, ok := architectures[runtime.GOARCH]
	if !ok {
		return fmt.Errorf("there is no seccomp filter for the architecture %s", runtime.GOARCH)
	}
	instructions := filter(architecture)
	program := unix.SockFprog{Len: uint16(len(instructions)), Filter: &instructions[0]}
	runtime.LockOSThread() // the thread that installs the filter passes no_new_privs to the others
	defer runtime.UnlockOSThread()
	if err := forbidNewPrivileges(); err != nil {
		return err
	}
	// Before Linux 5.16, a filter without SPEC_ALLOW slows down the process (Documentation/admin-guide/hw-vuln/spectre.rst).
	const flags = unix.SECCOMP_FILTER_FLAG_TSYNC | unix.SECCOMP_FILTER_FLAG_LOG | unix.SECCOMP_FILTER_FLAG_SPEC_ALLOW
	different, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, flags, uintptr(unsafe.Pointer(&program)))
	runtime.KeepAlive(instructions)
	switch {
	case errno != 0:
		return os.NewSyscallError("seccomp", errno)
	case different != 0:
		return fmt.Errorf("seccomp: thread %d has another filter", different)
	}
	return nil
}

// Offsets in struct seccomp_data.
const (
	callOffset         = 0
	architectureOffset = 4
)

// filter returns a program of classic BPF for seccomp(2), which refuses calls and allows all others.
func filter(architecture uint32) []unix.SockFilter {
	program := []unix.SockFilter{
		{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: architectureOffset},
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, Jt: 1, K: architecture},
		{Code: unix.BPF_RET | unix.BPF_K, K: failed},
		{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: callOffset},
		{Code: unix.BPF_JMP | unix.BPF_JGT | unix.BPF_K, Jf: 1, K: newest},
		{Code: unix.BPF_RET | unix.BPF_K, K: failed},
	}
	for _, call := range refused {
		program = append(program,
			unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, Jf: 1, K: call},
			unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: failed})
	}
	return append(program, unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ALLOW})
}

// failed is the result of a refused call.
const failed = unix.SECCOMP_RET_ERRNO | uint32(unix.ENOSYS)
