// Package volumemanager runs the volume manager as it is used: the real binary, on
// directories of manifests, with this project's driver, drivers that misbehave, and one
// that nobody here wrote. What it says is compared with the mount table and with what is
// on the disk.
//
// It runs as root. `go test` has time for some lives of pods under kill -9; -lives is for
// as many as one likes. Nothing but tests lives here.
package volumemanager
