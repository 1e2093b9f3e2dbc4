package volumemanager

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/volumemanager"
)

// TestBackends: what this project's driver has on this kernel, through its socket: written
// to, grown while in use, copied, and deleted.
func TestBackends(t *testing.T) {
	g := newTrivet(t)
	kinds := []struct {
		class, size, larger, more string
	}{
		{"ext4", "32Mi", "64Mi", ""},
		{"xfs", "320Mi", "640Mi", ""},
		{"btrfs", "320Mi", "640Mi", ""},
		{"device", "16Mi", "32Mi", ", volumeMode: Block"},
		{"directory", "16Mi", "32Mi", ""},
	}
	var sources, names []string
	for _, k := range kinds {
		class := strings.Replace(k.class, "device", "ext4", 1)
		sources, names = append(sources, claim(k.class, class, k.size, k.more)), append(names, k.class)
	}
	g.put("sources", sources...)
	g.put("first", podOf("first", claimsOf(names)...))
	first := g.await("first")
	for _, k := range kinds {
		write(t, first[k.class].Path)
	}

	var grown, copies, copied []string
	for _, k := range kinds {
		class := strings.Replace(k.class, "device", "ext4", 1)
		size := k.larger
		if class == "ext4" && k.more == "" && withoutExt4Growth() {
			size = k.size
		}
		grown = append(grown, claim(k.class, class, size, k.more))
		clone := claim(k.class+"-clone", class, k.larger, k.more+fmt.Sprintf(", dataSource: {kind: PersistentVolumeClaim, name: %s}", k.class))
		restored := claim(k.class+"-restored", class, k.larger, k.more+fmt.Sprintf(", dataSource: {apiGroup: snapshot.storage.k8s.io, kind: VolumeSnapshot, name: of-%s}", k.class))
		copies, copied = append(copies, clone, restored), append(copied, k.class+"-clone", k.class+"-restored")
	}
	g.put("sources", grown...)
	for _, k := range kinds {
		if k.class == "ext4" && withoutExt4Growth() {
			continue
		}
		g.grows(k.class, first[k.class].Path, k.larger)
	}

	g.remove("first") // a directory in use cannot be copied
	g.gone("first")
	var snapshots []string
	for _, k := range kinds {
		snapshots = append(snapshots, g.snapshot(k.class))
	}
	g.put("snapshots", snapshots...)
	g.put("copies", copies...)
	g.put("second", podOf("second", claimsOf(append(names, copied...))...))
	second := g.await("second")
	for name, volume := range second {
		wantWritten(t, name, volume.Path)
	}
	g.remove("second")
	g.gone("second")
	g.dropSnapshots()
	g.wantNothing()
	must(t, g.poolHas(0))
}

func claimsOf(names []string) (volumes []string) {
	for _, name := range names {
		volumes = append(volumes, claimed(name))
	}
	return volumes
}

// withoutExt4Growth: see the Makefile.
func withoutExt4Growth() bool {
	return strings.Contains(os.Getenv("TRIVET_TEST_WITHOUT"), "ext4-growth")
}

const precious = "precious"

// write writes to a directory, or to a device.
func write(t *testing.T, path string) {
	t.Helper()
	f, err := os.OpenFile(fileIn(t, path), os.O_WRONLY|os.O_CREATE|os.O_SYNC, 0o600)
	must(t, err)
	_, err = f.WriteString(precious)
	must(t, err)
	must(t, f.Close())
}

func wantWritten(t *testing.T, name, path string) {
	t.Helper()
	f, err := os.Open(fileIn(t, path))
	must(t, err)
	defer f.Close()
	b := make([]byte, len(precious))
	if _, err := f.Read(b); err != nil || string(b) != precious {
		t.Errorf("%s has %q, %v", name, b, err)
	}
}

// fileIn is the file of a directory that tests write, or the device itself.
func fileIn(t *testing.T, path string) string {
	t.Helper()
	info, err := os.Stat(path)
	must(t, err)
	if info.IsDir() {
		return filepath.Join(path, "file")
	}
	return path
}

// grows waits until a claim has a size, and its volume too.
func (g *ground) grows(name, path, size string) {
	g.t.Helper()
	want := resource.MustParse(size)
	g.holds(func(s volumemanager.Status) error {
		for _, c := range s.Claims {
			if c.Name == name && c.Capacity == want.String() {
				return nil
			}
		}
		return fmt.Errorf("want %s of %s: %+v", name, size, s.Claims)
	})
	info, err := os.Stat(path)
	must(g.t, err)
	switch {
	case name == "directory": // it has the size of the pool's filesystem
	case !info.IsDir():
		if has := testenv.Run(g.t, "blockdev", "--getsize64", path); has != fmt.Sprint(want.Value()) {
			g.t.Errorf("%s has %s bytes, want %s", name, has, size)
		}
	default:
		if has := sizeOf(g.t, path); has < want.Value()*3/4 {
			g.t.Errorf("%s has %d bytes, want %s", name, has, size)
		}
	}
}

// snapshot makes one of a claim's volume beside the manager, which makes none, and is the
// manifests by which a claim can have it.
func (g *ground) snapshot(claim string) (manifests string) {
	g.t.Helper()
	handle := g.handle("pvc-" + claim)
	request := &csi.CreateSnapshotRequest{Name: "of-" + claim, SourceVolumeId: handle}
	control := g.control()
	var id string
	eventually(g.t, func() error {
		resp, err := control.CreateSnapshot(g.t.Context(), request)
		id = resp.GetSnapshot().GetSnapshotId()
		return err
	})
	return fmt.Sprintf(`
apiVersion: snapshot.storage.k8s.io/v1
kind: VolumeSnapshot
metadata: {name: of-%[1]s}
spec: {source: {volumeSnapshotContentName: of-%[1]s}}
---
apiVersion: snapshot.storage.k8s.io/v1
kind: VolumeSnapshotContent
metadata: {name: of-%[1]s}
spec: {driver: csi.trivet.dev, deletionPolicy: Retain, source: {snapshotHandle: %[2]q}, volumeSnapshotRef: {namespace: default, name: of-%[1]s}}
`, claim, id)
}

// handle is the driver's name of a volume that was provisioned.
func (g *ground) handle(name string) string {
	g.t.Helper()
	resp, err := g.control().ListVolumes(g.t.Context(), &csi.ListVolumesRequest{})
	must(g.t, err)
	for _, e := range resp.GetEntries() {
		if id := e.GetVolume().GetVolumeId(); strings.Contains(id, name) {
			return id
		}
	}
	g.t.Fatalf("no volume %s: %v", name, resp.GetEntries())
	return ""
}

func (g *ground) dropSnapshots() {
	g.t.Helper()
	control := g.control()
	resp, err := control.ListSnapshots(g.t.Context(), &csi.ListSnapshotsRequest{})
	must(g.t, err)
	for _, e := range resp.GetEntries() {
		_, err := control.DeleteSnapshot(g.t.Context(), &csi.DeleteSnapshotRequest{SnapshotId: e.GetSnapshot().GetSnapshotId()})
		must(g.t, err)
	}
}
