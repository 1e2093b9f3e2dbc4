// Package crash kills the driver with SIGKILL, at every point that internal/crashpoint names
// and at random moments. It then does what an orchestrator does: it makes the call again, or
// makes the opposite call. The end state is read from the kernel, from the pool's folders and
// by the filesystems' own checkers, not from the driver.
//
// It runs the real binary, as root, on real loop devices and mounts. Nothing
// but tests lives here.
package crash
