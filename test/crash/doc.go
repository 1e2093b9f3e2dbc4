// Package crash kills the driver with SIGKILL at every crash point of package internal/crashpoint and
// at random moments. Then it does what a container orchestrator (CO) does: it makes the call again,
// or it makes the call that undoes it. It checks the resulting state with the kernel, the files of the
// pool and the filesystems' own checkers, not with the driver.
//
// The tests run the real driver, as root, on real loop devices and mounts. A driver that is armed with
// a crash point kills itself when it reaches the point.
package crash
