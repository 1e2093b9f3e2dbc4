// Package sys makes the system calls that golang.org/x/sys lacks or that need care:
// openat2(2), ioctl(2) and quotactl_fd(2). No other package makes these calls.
//
// Each function makes one call on an open file and adds no policy. A failed call returns an
// *fs.PathError with the name of the call and of the file; errors.Is finds the errno.
package sys
