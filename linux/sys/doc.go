// Package sys makes the system calls that golang.org/x/sys lacks or that need care:
// openat2(2), ioctl(2), quotactl_fd(2), listmount(2) and statmount(2). No other package makes these calls.
//
// Each function makes one call and adds no policy. A failed call on an open file returns an *fs.PathError with the
// name of the call and of the file, other calls an *os.SyscallError; errors.Is finds the errno.
package sys
