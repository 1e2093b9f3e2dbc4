package testenv

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
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
	return device, image, func() { pullOut(device, image) }
}

// PlugIn makes a disk of an image.
func PlugIn(tb testing.TB, image string, options ...string) (device string) {
	tb.Helper()
	device = strings.TrimSpace(Run(tb, "losetup", append(options, "--direct-io=on", "-f", "--show", image)...))
	// The device may have a partition of the one before, whose last user went late.
	_ = exec.Command("delpart", device, "1").Run()
	tb.Cleanup(func() { pullOut(device, image) })
	return device
}

// pullOut takes a disk away; its partition goes first, which stays behind else. Without its
// image the device is another's by now.
func pullOut(device, image string) {
	has, err := exec.Command("losetup", "--noheadings", "--output", "NAME", "--associated", image).Output()
	if err != nil || !slices.Contains(strings.Fields(string(has)), device) {
		return
	}
	_ = exec.Command("delpart", device, "1").Run()
	_ = exec.Command("losetup", "-d", device).Run()
}
