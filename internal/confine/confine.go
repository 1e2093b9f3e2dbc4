// Package confine drops the privileges that the driver and its programs do not need. In Kubernetes, the
// driver of a node must run in a privileged container, which has all capabilities, and to which no seccomp profile applies.
// Processes that this process starts inherit the restrictions.
package confine

import (
	"errors"
	"os"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/linux/sys"
)

// Capability is a capability of a thread (capabilities(7)).
type Capability struct {
	Name   string // without the prefix CAP_
	Number uint
}

// Needed contains the capabilities that the driver needs. test/privileges measures which calls fail without each of them, and
// contains the purpose of each.
var Needed = []Capability{
	{"SYS_ADMIN", unix.CAP_SYS_ADMIN},
	{"CHOWN", unix.CAP_CHOWN},
	{"DAC_OVERRIDE", unix.CAP_DAC_OVERRIDE},
	{"DAC_READ_SEARCH", unix.CAP_DAC_READ_SEARCH},
	{"FOWNER", unix.CAP_FOWNER},
	{"FSETID", unix.CAP_FSETID},
	{"MKNOD", unix.CAP_MKNOD},
	{"SETFCAP", unix.CAP_SETFCAP},
	{"SYS_RESOURCE", unix.CAP_SYS_RESOURCE},
	{"LINUX_IMMUTABLE", unix.CAP_LINUX_IMMUTABLE},
	{"SETUID", unix.CAP_SETUID},
	{"SETGID", unix.CAP_SETGID},
	{"IPC_LOCK", unix.CAP_IPC_LOCK},
	{"SYS_NICE", unix.CAP_SYS_NICE},
	{"NET_BIND_SERVICE", unix.CAP_NET_BIND_SERVICE},
}

// set is a set of capabilities. Bit N is the capability with the number N.
type set uint64

func (s set) has(number uint) bool { return s&(1<<number) != 0 }

// needed returns the set of the needed capabilities.
func needed() (s set) {
	for _, c := range Needed {
		s |= 1 << c.Number
	}
	return s
}

// thread contains the capabilities of a thread, as capget(2) returns them.
type thread [2]unix.CapUserData

// header selects the calling thread, and sets of 64 bits.
func header() *unix.CapUserHeader {
	return &unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
}

// currentThread returns the capabilities of the calling thread.
func currentThread() (t thread, err error) {
	return t, os.NewSyscallError("capget", unix.Capget(header(), &t[0]))
}

func (t thread) effective() set { return set(t[1].Effective)<<32 | set(t[0].Effective) }
func (t thread) permitted() set { return set(t[1].Permitted)<<32 | set(t[0].Permitted) }
func (t thread) inheritable() set {
	return set(t[1].Inheritable)<<32 | set(t[0].Inheritable)
}

// limit removes all capabilities that are not in s.
func (t *thread) limit(s set) {
	for i := range t {
		word := uint32(s >> (32 * i))
		t[i].Effective &= word
		t[i].Permitted &= word
		t[i].Inheritable &= word
	}
}

// names returns the names of the needed capabilities that the thread has.
func (t thread) names() []string {
	names := []string{} // a log in JSON shows nil as null
	for _, c := range Needed {
		if t.permitted().has(c.Number) {
			names = append(names, c.Name)
		}
	}
	return names
}

// deathSignal is the signal that this process gets when its parent ends (PR_SET_PDEATHSIG); 0 if it gets none. Each thread
// has its own, and the main thread, which initializes packages, has that of the process.
var deathSignal = func() (signal int32) {
	_, _, _ = unix.Syscall(unix.SYS_PRCTL, unix.PR_GET_PDEATHSIG, uintptr(unsafe.Pointer(&signal)), 0) // fails only for an invalid pointer
	return signal
}()

// DropCapabilities removes all capabilities that are not needed from all sets of all threads, and returns the names of the
// needed ones that this process has. If it has others, the function executes the program again, from its start and with
// the same arguments, and returns only if that fails. Then the process keeps its capabilities.
//
// A thread cannot change the capabilities of others, and the runtime does that for all threads only in programs without
// cgo (syscall.AllThreadsSyscall). After execve(2), the process has only one thread.
func DropCapabilities() (kept []string, err error) {
	t, err := currentThread()
	if err != nil || (t.permitted()|t.inheritable())&^needed() == 0 {
		return t.names(), err
	}
	path, err := os.Executable() // not /proc/self/exe, which would become the name of the process
	if err != nil {
		return t.names(), err
	}
	return t.names(), sys.OnOwnThread(func() error {
		if err := t.drop(); err != nil {
			return err
		}
		if err := unix.Prctl(unix.PR_SET_PDEATHSIG, uintptr(deathSignal), 0, 0, 0); err != nil {
			return os.NewSyscallError("prctl", err)
		}
		return &os.PathError{Op: "execve", Path: path, Err: syscall.Exec(path, os.Args, os.Environ())}
	})
}

// drop limits all sets of the calling thread, whose capabilities are t. The kernel then also limits the ambient set.
func (t thread) drop() error {
	// Otherwise, execve(2) would give root all capabilities of the bounding set, which only SETPCAP can limit.
	if err := forbidNewPrivileges(); err != nil {
		return err
	}
	if t.effective().has(unix.CAP_SETPCAP) {
		if err := limitBounding(needed()); err != nil {
			return err
		}
	}
	t.limit(needed())
	return os.NewSyscallError("capset", unix.Capset(header(), &t[0]))
}

// limitBounding removes all capabilities that are not in s from the bounding set of the calling thread.
func limitBounding(s set) error {
	for number := uint(0); ; number++ {
		held, err := unix.PrctlRetInt(unix.PR_CAPBSET_READ, uintptr(number), 0, 0, 0)
		if errors.Is(err, unix.EINVAL) { // the kernel has no capability with this number
			return nil
		}
		if err == nil && held == 1 && !s.has(number) {
			err = unix.Prctl(unix.PR_CAPBSET_DROP, uintptr(number), 0, 0, 0)
		}
		if err != nil {
			return os.NewSyscallError("prctl", err)
		}
	}
}

// forbidNewPrivileges ensures that no program gives privileges to the calling thread or to its children when it is executed,
// for example with a set-user-ID bit.
func forbidNewPrivileges() error {
	return os.NewSyscallError("prctl", unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
}
