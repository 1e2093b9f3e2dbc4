// Package volumemanager tests the volume manager's binary with directories of manifests, with this
// project's driver, with drivers that misbehave, and with a third-party driver. It compares the
// reported status with the mount table and the files on disk.
//
// It runs as root. The flag -lives sets the number of pods that are run while manager and driver are
// killed. The package contains only tests.
package volumemanager
