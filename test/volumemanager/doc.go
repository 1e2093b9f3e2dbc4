// Package volumemanager tests the volume manager's binary with directories of manifests, with this
// project's driver, with drivers that misbehave, and with a third-party driver. It compares the
// reported status with the mount table and the files on disk.
//
// The tests need root. The flag -lives sets the number of pods that are run while the manager and the
// driver are killed. The package contains only tests.
package volumemanager
