package testenv

import (
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// Disk creates a blank disk (a loop device) with a size in bytes. The disk exists until the test ends, or until
// pull removes it. options are options of losetup(8).
func Disk(tb testing.TB, size int64, options ...string) (device, image string, pull func()) {
	tb.Helper()
	RequireRoot(tb)
	image = filepath.Join(tb.TempDir(), "disk")
	Run(tb, "truncate", "-s", strconv.FormatInt(size, 10), image)
	device = PlugIn(tb, image, options...)
	return device, image, func() { pullOut(device, image) }
}

// PlugIn creates a disk (a loop device) from an image. The disk exists until the test ends.
func PlugIn(tb testing.TB, image string, options ...string) (device string) {
	tb.Helper()
	device = strings.TrimSpace(Run(tb, "losetup", append(options, "--direct-io=on", "-f", "--show", image)...))
	// The device may still have a partition of a previous disk that was in use when it was removed.
	_ = exec.Command("delpart", device, "1").Run()
	tb.Cleanup(func() { pullOut(device, image) })
	return device
}

// pullOut removes the partition of a disk, which would otherwise remain, and then the disk. If the device no
// longer has the image, it belongs to another test and pullOut does nothing.
func pullOut(device, image string) {
	devices, err := exec.Command("losetup", "--noheadings", "--output", "NAME", "--associated", image).Output()
	if err != nil || !slices.Contains(strings.Fields(string(devices)), device) {
		return
	}
	_ = exec.Command("delpart", device, "1").Run()
	_ = exec.Command("losetup", "-d", device).Run()
}
