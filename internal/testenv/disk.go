package testenv

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// Disk makes a blank disk of a size in bytes, which is there until the test ends: a
// loop device without a mark of its own. pull takes it away before, as a hand would.
func Disk(tb testing.TB, size int64, options ...string) (device, image string, pull func()) {
	tb.Helper()
	RequireRoot(tb)
	image = filepath.Join(tb.TempDir(), "disk")
	f, err := os.Create(image)
	if err != nil {
		tb.Fatal(err)
	}
	if err := f.Truncate(size); err != nil {
		tb.Fatal(err)
	}
	_ = f.Close()
	device = PlugIn(tb, image, options...)
	return device, image, func() { pullOut(device) }
}

// PlugIn makes a disk of an image.
func PlugIn(tb testing.TB, image string, options ...string) (device string) {
	tb.Helper()
	device = strings.TrimSpace(Run(tb, "losetup", append(options, "--direct-io=on", "-f", "--show", image)...))
	// The device may have a partition of the one before, whose last user went late.
	_ = exec.Command("delpart", device, "1").Run()
	tb.Cleanup(func() { pullOut(device) })
	return device
}

// pullOut takes a disk away; its partition goes first, which stays behind else.
func pullOut(device string) {
	_ = exec.Command("delpart", device, "1").Run()
	_ = exec.Command("losetup", "-d", device).Run()
}
