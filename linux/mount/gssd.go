package mount

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// gssdName is the name of the process that gets Kerberos tickets for the kernel (rpc.gssd(8)).
const gssdName = "rpc.gssd"

// allProcesses is the identity of the first PID namespace, in which all processes are visible (Linux,
// include/linux/proc_ns.h, PROC_PID_INIT_INO).
const allProcesses = "pid:[4026531836]"

// UsesKerberos reports whether mount flags of NFS require Kerberos.
func UsesKerberos(flags []string) bool {
	o, err := parseNFSOptions(flags)
	return err == nil && o.uses("krb5")
}

// GSSDRuns reports whether rpc.gssd runs in the network namespace of this process. The kernel asks only that one for
// tickets. sure is false if processes can be invisible, as in a container, or if an rpc.gssd runs whose network this process may not
// see (ptrace(2), PTRACE_MODE_READ_FSCREDS): it has capabilities that this process does not have.
func GSSDRuns() (running, sure bool) {
	own, err := os.Readlink("/proc/self/ns/net")
	if err != nil {
		return false, false
	}
	visible, err := os.Readlink("/proc/self/ns/pid")
	_, hidden := os.ReadFile("/proc/1/comm") // an error if /proc is mounted with hidepid
	sure = err == nil && visible == allProcesses && hidden == nil
	names, _ := filepath.Glob("/proc/[0-9]*/comm")
	for _, path := range names {
		name, _ := os.ReadFile(path) // it fails if the process has ended
		if strings.TrimSpace(string(name)) != gssdName {
			continue
		}
		network, err := os.Readlink(filepath.Join(filepath.Dir(path), "ns/net"))
		switch {
		case err == nil && network == own:
			return true, true
		case errors.Is(err, fs.ErrPermission):
			sure = false
		}
	}
	return false, sure
}

// kerberosReason returns the reason of an errno of a mount with Kerberos, or nil if it has another reason. encrypted is true for
// sec=krb5p. The other arguments are the results of GSSDRuns. The errno is EINVAL if the kernel has no credentials yet and rpc.gssd does not
// run, but also if rpcsec_gss_krb5 is missing or for a bad option. Without rpc.gssd it is EACCES afterwards.
func kerberosReason(err error, encrypted, gssdRuns, sure bool) error {
	switch {
	case isAny(err, unix.EACCES, unix.EPERM, unix.EKEYEXPIRED, unix.EINVAL) && !gssdRuns && sure:
		return ErrNoGSSD
	case isAny(err, unix.EACCES, unix.EPERM, unix.EKEYEXPIRED):
		return ErrKerberos
	case isAny(err, unix.EINVAL):
		return ErrKerberosRefused
	case isAny(err, unix.EIO) && encrypted:
		return ErrPrivacy
	}
	return nil
}
