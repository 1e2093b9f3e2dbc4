// Package crash kills the driver with SIGKILL, at every point that
// internal/crashpoint names and at random moments, and then does what an
// orchestrator does: it calls again, or goes the other way. What holds at the
// end is asked of the kernel, of the pool's folders and of the filesystems' own
// checkers, not of the driver.
//
// It runs the real binary, as root, on real loop devices and mounts. Nothing
// but tests lives here.
package crash
