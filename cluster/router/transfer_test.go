package router_test

import (
	"bytes"
	"context"
	"math/rand/v2"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/internal/testenv"
)

// raw requests a raw device.
func raw(req *csi.CreateVolumeRequest) {
	req.VolumeCapabilities = []*csi.VolumeCapability{{
		AccessType: &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}},
		AccessMode: capability().GetAccessMode(),
	}}
}

// image returns the path of the image of a volume in the pool of a node.
func (w *testCluster) image(node, name string) string {
	return filepath.Join(w.dir, node, "volumes", name, "image")
}

// fill writes random content at some offsets of an image, and leaves holes between them.
func fill(t *testing.T, image string, length int, offsets ...int64) {
	t.Helper()
	f, err := os.OpenFile(image, os.O_WRONLY, 0)
	must(t, err)
	defer f.Close()
	for _, at := range offsets {
		b := make([]byte, length)
		source := rand.NewChaCha8([32]byte{byte(at >> 20), byte(at >> 12)})
		_, _ = source.Read(b)
		_, err := f.WriteAt(b, at)
		must(t, err)
	}
	must(t, f.Sync())
}

// wantSameContent fails the test unless an image has the content of another, followed by zeros.
func wantSameContent(t *testing.T, got, want string) {
	t.Helper()
	gotContent, err := os.ReadFile(got)
	must(t, err)
	wantContent, err := os.ReadFile(want)
	must(t, err)
	rest, same := bytes.CutPrefix(gotContent, wantContent)
	if !same || len(bytes.TrimRight(rest, "\x00")) > 0 {
		t.Errorf("%s (%d bytes) differs from %s (%d bytes)", got, len(gotContent), want, len(wantContent))
	}
}

// allocatedBytes returns the disk space of a file.
func allocatedBytes(t *testing.T, path string) int64 {
	t.Helper()
	var st syscall.Stat_t
	must(t, syscall.Stat(path, &st))
	return st.Blocks * 512
}

// TestTransferRaw: a raw volume is restored on another node, byte by byte, with its holes, and may be larger.
func TestTransferRaw(t *testing.T) {
	w := newCluster(t, "a", "b")
	v := w.mustCreateOn("a", "v", raw)
	fill(t, w.image("a", "v"), 5<<19, 0, 8<<20, 20<<20)
	s := w.snapshot("s", v)
	for _, source := range []struct {
		name string
		change
	}{{"from-snapshot", fromSnapshot(s)}, {"from-volume", fromVolume(v)}} {
		for name, size := range map[string]int64{source.name: 32 * mib, source.name + "-larger": 64 * mib} {
			got := w.mustCreate(name, raw, source.change, preferring("b", "a"), sized(size))
			if nodeOf(got) != "b" || got.GetCapacityBytes() != size || got.GetContentSource() == nil {
				t.Errorf("%s: got %v, want %d bytes on node b with a source", name, got, size)
			}
			wantSameContent(t, w.image("b", name), w.image("a", "v"))
			if n := allocatedBytes(t, w.image("b", name)); n > 9*mib {
				t.Errorf("%s: got %d bytes allocated, want the holes of the source", name, n)
			}
			if again := w.mustCreate(name, raw, source.change, preferring("b", "a"), sized(size)); again.GetVolumeId() != got.GetVolumeId() {
				t.Errorf("%s: a retry returned %s, want %s", name, again.GetVolumeId(), got.GetVolumeId())
			}
		}
	}
	w.wantVolumes(map[string]int{"a": 1, "b": 4})
	w.wantNothingReceived("b")
}

// wantNothingReceived waits until no incomplete image is in the pool of a node.
func (w *testCluster) wantNothingReceived(node string) {
	w.t.Helper()
	for _, dir := range []string{"received", "tmp", "trash"} {
		await(w.t, "an empty "+dir, func() bool {
			entries, err := os.ReadDir(filepath.Join(w.dir, node, ".trivet", dir))
			return err == nil && len(entries) == 0 || os.IsNotExist(err)
		})
	}
}

// transferTimeout is longer than any transfer in the tests.
const transferTimeout = time.Minute

// TestTransferFilesystems: a filesystem that is restored or cloned on another node has the content of its source, and another
// identity.
func TestTransferFilesystems(t *testing.T) {
	w := newCluster(t, "a:8Gi", "b:8Gi")
	for fs, size := range map[string]int64{"ext4": 320 * mib, "xfs": 512 * mib} { // a mounted ext4 grows only with CAP_SYS_RESOURCE
		t.Run(fs, func(t *testing.T) {
			w.t = t
			c := backendtest.Kind{FSType: fs}.Capability(csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER)
			as := func(req *csi.CreateVolumeRequest) { req.VolumeCapabilities = []*csi.VolumeCapability{c} }
			v := w.mustCreateOn("a", fs, as, sized(320*mib))
			path := w.stage("a", v, c)
			content := make([]byte, 10<<20)
			_, _ = rand.NewChaCha8([32]byte{}).Read(content)
			must(t, os.WriteFile(filepath.Join(path, "file"), content, 0o640))
			s := w.snapshot(fs, v) // while it is staged
			for name, source := range map[string]change{fs + "-restored": fromSnapshot(s), fs + "-cloned": fromVolume(v)} {
				got := w.mustCreate(name, as, source, preferring("b"), sized(size)).GetVolumeId()
				restored := w.stage("b", got, c)
				b, err := os.ReadFile(filepath.Join(restored, "file"))
				if err != nil || !bytes.Equal(b, content) {
					t.Errorf("%s: got %d bytes, %v, want the content of the source", name, len(b), err)
				}
				var stat syscall.Statfs_t
				must(t, syscall.Statfs(restored, &stat))
				if got := int64(stat.Blocks) * stat.Bsize; got < size*8/10 {
					t.Errorf("%s: the filesystem has %d bytes, want that it has grown to %d", name, got, size)
				}
			}
		})
	}
}

// stage stages a volume on its node until the test ends, and returns the path.
func (w *testCluster) stage(node, id string, c *csi.VolumeCapability) string {
	w.t.Helper()
	path := w.t.TempDir()
	n := w.drivers[node].Node
	_, err := n.NodeStageVolume(w.t.Context(), &csi.NodeStageVolumeRequest{VolumeId: id, StagingTargetPath: path, VolumeCapability: c})
	must(w.t, err)
	w.t.Cleanup(func() {
		_, err := n.NodeUnstageVolume(context.Background(), &csi.NodeUnstageVolumeRequest{VolumeId: id, StagingTargetPath: path})
		if err != nil {
			w.t.Error(err)
		}
	})
	return path
}

var (
	_ = transferTimeout
	_ = codes.OK
	_ = testenv.RequireRoot
)
