package backendtest

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/trivet-csi/trivet/driver"
	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/linux/blockdev"
)

// growsHere reports whether this machine can grow the kind's filesystem.
func (k Kind) growsHere() bool { return k.FSType != "ext4" || !testenv.IsWithout("ext4-growth") }

// testOnlineGrowth expands a published volume. Repeated calls have the same result.
func testOnlineGrowth(t *testing.T, d *Driver, kind Kind) {
	if kind.FSType == "ext4" {
		testenv.Require(t, "ext4-growth")
	}
	l := newVolume(t, d, kind, multiWriter)
	l.stageAndPublish(t)
	content := pattern(5)
	write(t, l.data(l.target), content)
	for _, size := range []int64{2 * gib, 2 * gib, 3*gib + 64<<20} {
		for range 2 {
			resp, err := l.expand(t.Context(), size)
			must(t, err)
			if resp.GetCapacityBytes() != size || !resp.GetNodeExpansionRequired() {
				t.Errorf("ControllerExpandVolume to %d: got %v, want that size and a node expansion", size, resp)
			}
		}
		for _, path := range []string{l.target, l.staging} {
			resp, err := d.Node.NodeExpandVolume(t.Context(), &csi.NodeExpandVolumeRequest{
				VolumeId: l.id, VolumePath: path, StagingTargetPath: l.staging, VolumeCapability: l.cap,
				CapacityRange: &csi.CapacityRange{RequiredBytes: size},
			})
			must(t, err)
			if resp.GetCapacityBytes() != size {
				t.Errorf("NodeExpandVolume to %d: got %v, want that size", size, resp)
			}
		}
		wantSize(t, l, size)
	}
	wantContent(t, l.data(l.target), content)
	writeBeyond(t, l, 2*gib)
	l.unpublishAndUnstage(t)
	wantFilesystem(t, l, 3*gib+64<<20)
}

// testOfflineGrowth expands a volume that is not staged. The next stage grows the filesystem.
func testOfflineGrowth(t *testing.T, d *Driver, kind Kind) {
	if kind.FSType == "ext4" {
		testenv.Require(t, "ext4-growth")
	}
	l := newVolume(t, d, kind, multiWriter)
	l.stageAndPublish(t)
	content := pattern(6)
	write(t, l.data(l.target), content)
	l.unpublishAndUnstage(t)
	_, err := l.expand(t.Context(), 2*gib)
	must(t, err)
	l.stageAndPublish(t)
	wantSize(t, l, 2*gib)
	wantContent(t, l.data(l.target), content)
	l.unpublishAndUnstage(t)
	wantFilesystem(t, l, 2*gib)
}

// writeBeyond allocates the old size of a volume, and writes after it.
func writeBeyond(t *testing.T, l *testVolume, oldSize int64) {
	t.Helper()
	f, err := os.OpenFile(l.data(l.target), os.O_RDWR, 0)
	must(t, err)
	defer f.Close()
	if !l.kind.Block() {
		must(t, unix.Fallocate(int(f.Fd()), 0, 0, oldSize))
	}
	content := pattern(9)
	_, err = f.WriteAt(content, oldSize)
	must(t, err)
	must(t, f.Sync())
	got := make([]byte, len(content))
	if _, err := f.ReadAt(got, oldSize); err != nil || !bytes.Equal(got, content) {
		t.Errorf("the content after %d bytes differs from the written content: %v", oldSize, err)
	}
}

// wantSize checks the size of the device to the byte, and the sizes that the driver and
// statfs(2) report.
func wantSize(t *testing.T, l *testVolume, size int64) {
	t.Helper()
	device, err := os.Open(deviceOf(t, l))
	must(t, err)
	defer device.Close()
	if got, err := blockdev.Size(device); got != size || err != nil {
		t.Errorf("got a device of %d bytes, want %d: %v", got, size, err)
	}
	stats, err := l.d.Node.NodeGetVolumeStats(t.Context(), &csi.NodeGetVolumeStatsRequest{VolumeId: l.id, VolumePath: l.target})
	must(t, err)
	total := stats.GetUsage()[0].GetTotal()
	if l.kind.Block() {
		if total != size {
			t.Errorf("NodeGetVolumeStats: got %d bytes, want %d", total, size)
		}
		return
	}
	var st unix.Statfs_t
	must(t, unix.Statfs(l.target, &st))
	if total != int64(st.Blocks)*st.Frsize || total < size*9/10 || total > size {
		t.Errorf("NodeGetVolumeStats: got %d bytes, want the %d bytes of statfs(2), and 90%% to 100%% of %d", total, int64(st.Blocks)*st.Frsize, size)
	}
}

// wantFilesystem checks the size of the unmounted filesystem to the byte.
func wantFilesystem(t *testing.T, l *testVolume, size int64) {
	t.Helper()
	if l.kind.Block() {
		return
	}
	l.withImage(t, func(path string) {
		image, err := os.Open(path)
		must(t, err)
		defer image.Close()
		sb, err := blockdev.ReadSuperblock(image, l.kind.FSType)
		if err != nil || sb.Size != size || sb.Dirty {
			t.Errorf("got filesystem %+v, want %d bytes and clean: %v", sb, size, err)
		}
	})
}

// testExpansionRefused: an impossible expansion changes nothing.
func testExpansionRefused(t *testing.T, _ *Driver, kind Kind) {
	d := kind.start(t, "20G", func(*driver.Options) {})
	l := newVolume(t, d, kind, multiWriter)
	before := capacity(t, d, kind)
	for _, tc := range []struct {
		name string
		r    *csi.CapacityRange
		code codes.Code
		says []string
	}{
		{"no range", nil, codes.InvalidArgument, []string{"capacity_range is missing"}},
		{"negative size", &csi.CapacityRange{RequiredBytes: -1}, codes.InvalidArgument, []string{"required_bytes", "-1"}},
		{"limit below required", &csi.CapacityRange{RequiredBytes: 3 * gib, LimitBytes: 2 * gib}, codes.InvalidArgument, []string{"limit_bytes"}},
		{"shrink", &csi.CapacityRange{RequiredBytes: 1, LimitBytes: 2}, codes.OutOfRange, []string{"do not shrink"}},
		{"more than the pool has", &csi.CapacityRange{RequiredBytes: 1 << 50}, codes.OutOfRange, []string{"required_bytes", "room"}},
		{"largest number", &csi.CapacityRange{RequiredBytes: 1<<63 - 1}, codes.OutOfRange, []string{"required_bytes"}},
		{"rounded past the limit", &csi.CapacityRange{RequiredBytes: gib + 1, LimitBytes: gib + 2}, codes.OutOfRange, []string{"multiple"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, err := d.Control.ControllerExpandVolume(t.Context(), &csi.ControllerExpandVolumeRequest{VolumeId: l.id, CapacityRange: tc.r})
			wantCode(t, err, tc.code, tc.says...)
		})
	}
	if after := capacity(t, d, kind); after != before {
		t.Errorf("the refused expansions changed the capacity of the pool from %d to %d", before, after)
	}
	resp, err := l.expand(t.Context(), 1)
	if err != nil || resp.GetCapacityBytes() != gib {
		t.Errorf("expanding a volume that is large enough: got %v, %v; want 1 GiB", resp, err)
	}
	_, err = d.Node.NodeExpandVolume(t.Context(), &csi.NodeExpandVolumeRequest{VolumeId: l.id, VolumePath: l.staging})
	wantCode(t, err, codes.FailedPrecondition, "not staged")
	l.stageAndPublish(t)
	_, err = d.Node.NodeExpandVolume(t.Context(), &csi.NodeExpandVolumeRequest{
		VolumeId: l.id, VolumePath: l.target, CapacityRange: &csi.CapacityRange{RequiredBytes: 9 * gib},
	})
	wantCode(t, err, codes.OutOfRange, "ControllerExpandVolume first")
	for _, path := range []string{"relative/path", filepath.Join(t.TempDir(), "none")} {
		_, err = d.Node.NodeExpandVolume(t.Context(), &csi.NodeExpandVolumeRequest{VolumeId: l.id, VolumePath: path})
		wantCode(t, err, codes.NotFound, path)
	}
}
