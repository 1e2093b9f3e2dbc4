package loop_test

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/trivet-csi/trivet/backend/loop"
	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/linux/blockdev"
	"github.com/trivet-csi/trivet/volume"
)

// TestDevices: a volume's device is found by its tag, also after the image was removed.
func TestDevices(t *testing.T) {
	image := filepath.Join(testenv.Filesystem(t, "ext4", "64M"), "image")
	testenv.Run(t, "truncate", "-s", "1M", image)
	f, err := os.OpenFile(image, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	tag := loop.Tag(volume.ID{Backend: "loop", Pool: "p", PoolUUID: "01234567", Name: "devices"})
	device, err := blockdev.AttachLoop(t.Context(), f, blockdev.LoopConfig{SectorSize: 4096, Tag: tag, AutoClear: true})
	if err != nil {
		t.Fatal(err)
	}
	defer device.Close()
	want := loop.Device{Path: blockdev.LoopPath(device.Number), Tag: tag}
	if all, err := loop.Devices(); err != nil || !slices.Contains(all, want) {
		t.Errorf("got devices %+v, %v; want %+v among them", all, err, want)
	}
	if err := os.Remove(image); err != nil {
		t.Fatal(err)
	}
	want.Orphan = true
	if all, err := loop.Devices(); err != nil || !slices.Contains(all, want) {
		t.Errorf("without the image: got devices %+v, %v; want %+v among them", all, err, want)
	}
	findings := loop.Kind.Examine()
	if f := findings[0]; f.Name != "loop control" || f.Advice != "" || f.Unusable {
		t.Errorf("got finding %+v, want loop control without advice", f)
	}
	if f := findings[1]; f.Name != "loop devices" || !strings.Contains(f.Found, want.Path) || f.Advice == "" || f.Unusable {
		t.Errorf("got finding %+v, want loop devices with %s and advice", f, want.Path)
	}
}
