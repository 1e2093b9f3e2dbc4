package testenv

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
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

// PlugIn creates a disk (a loop device) from an image. The disk supports discards if the filesystem of the image
// can punch holes. It exists until the test ends.
func PlugIn(tb testing.TB, image string, options ...string) (device string) {
	tb.Helper()
	device = losetup(tb, image, options...)
	for range 100 {
		if !discardsForbidden(tb, device) {
			break
		}
		Run(tb, "losetup", "-d", device)
		removeLoop(tb, device)
		device = losetup(tb, image, options...)
	}
	// The device may still have a partition of a previous disk that was in use when it was removed.
	_ = exec.Command("delpart", device, "1").Run()
	tb.Cleanup(func() { pullOut(device, image) })
	return device
}

func losetup(tb testing.TB, image string, options ...string) (device string) {
	tb.Helper()
	return strings.TrimSpace(Run(tb, "losetup", append(slices.Clone(options), "--direct-io=on", "-f", "--show", image)...))
}

// discardsForbidden reports whether the discards of a loop device were disabled for an earlier image, as those of a
// thick volume are. Linux cannot enable them again.
func discardsForbidden(tb testing.TB, device string) bool {
	tb.Helper()
	limit := func(file string) string {
		b, err := os.ReadFile(filepath.Join("/sys/block", filepath.Base(device), "queue", file))
		if err != nil {
			tb.Fatal(err)
		}
		return strings.TrimSpace(string(b))
	}
	return limit("discard_max_bytes") == "0" && limit("discard_max_hw_bytes") != "0"
}

// removeLoop removes an unbound loop device, unless a process has it open. The kernel creates a new device with the
// number on demand.
func removeLoop(tb testing.TB, device string) {
	tb.Helper()
	number, err := strconv.Atoi(strings.TrimPrefix(device, "/dev/loop"))
	if err != nil {
		tb.Fatal(err)
	}
	control, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	if err != nil {
		tb.Fatal(err)
	}
	defer control.Close()
	_ = unix.IoctlSetInt(int(control.Fd()), unix.LOOP_CTL_REMOVE, number)
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

// PullSCSI removes a SCSI disk, such as sda, and returns a function that attaches it again.
func PullSCSI(tb testing.TB, disk string) (back func()) {
	tb.Helper()
	write := func(path, text string) {
		if err := os.WriteFile(path, []byte(text), 0); err != nil {
			tb.Error(err)
		}
	}
	device, err := filepath.EvalSymlinks("/sys/block/" + disk + "/device")
	if err != nil {
		tb.Fatal(err)
	}
	host := strings.Split(filepath.Base(device), ":")[0]
	write(device+"/delete", "1")
	return func() { write("/sys/class/scsi_host/host"+host+"/scan", "- - -") }
}
