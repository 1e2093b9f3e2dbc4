package testenv

import (
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// Disk creates a blank disk of a size in bytes, a loop device, which exists until the test ends. pull removes
// it earlier, as if it were pulled out.
func Disk(tb testing.TB, size int64, options ...string) (device, image string, pull func()) {
	tb.Helper()
	RequireRoot(tb)
	image = filepath.Join(tb.TempDir(), "disk")
	Run(tb, "truncate", "-s", strconv.FormatInt(size, 10), image)
	device = PlugIn(tb, image, options...)
	return device, image, func() { pullOut(device, image) }
}

// PlugIn creates a disk from an image.
func PlugIn(tb testing.TB, image string, options ...string) (device string) {
	tb.Helper()
	device = strings.TrimSpace(Run(tb, "losetup", append(options, "--direct-io=on", "-f", "--show", image)...))
	// The device may have a partition of the previous disk, if that was still in use when it was pulled.
	_ = exec.Command("delpart", device, "1").Run()
	tb.Cleanup(func() { pullOut(device, image) })
	return device
}

// pullOut removes the partition of a disk, which otherwise remains, and then the disk. A device that no longer
// has the image belongs to another test.
func pullOut(device, image string) {
	has, err := exec.Command("losetup", "--noheadings", "--output", "NAME", "--associated", image).Output()
	if err != nil || !slices.Contains(strings.Fields(string(has)), device) {
		return
	}
	_ = exec.Command("delpart", device, "1").Run()
	_ = exec.Command("losetup", "-d", device).Run()
}
