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
)

// kind is a kind of volume of this project's driver.
type kind struct {
	name, class, size, larger string
	// more has additional fields of claims.
	more string
	// unlimited is set if the size is not enforced.
	unlimited bool
}

// kinds returns the kinds that this kernel supports. Growing ext4 needs CAP_SYS_RESOURCE.
func kinds() []kind {
	ext4 := "64Mi"
	if testenv.IsWithout("ext4-growth") {
		ext4 = "32Mi"
	}
	return []kind{
		{name: "ext4", class: "ext4", size: "32Mi", larger: ext4},
		{name: "xfs", class: "xfs", size: "320Mi", larger: "640Mi"},
		{name: "btrfs", class: "btrfs", size: "320Mi", larger: "640Mi"},
		{name: "device", class: "ext4", size: "16Mi", larger: "32Mi", more: ", volumeMode: Block"},
		{name: "directory", class: "directory", size: "16Mi", larger: "32Mi", unlimited: true},
	}
}

// TestBackends writes, expands, copies and deletes volumes of each kind of this project's driver.
func TestBackends(t *testing.T) {
	g := newTrivet(t)
	all := kinds()
	g.grow(all, g.fill(all))
	g.copies(all)
	g.dropSnapshots()
	g.wantNothing()
	must(t, g.poolHas(0))
}

// fill starts a pod with a volume of each kind and more volumes, and writes to all.
func (g *ground) fill(all []kind, more ...string) pod {
	g.t.Helper()
	var sources []string
	for _, k := range all {
		sources = append(sources, claim(k.name, k.class, k.size, k.more))
		more = append(more, claimed(k.name))
	}
	g.put("sources", sources...)
	g.put("first", podOf("first", more...))
	first := g.await("first")
	for _, volume := range first {
		write(g.t, volume.Path)
	}
	return first
}

// grow expands the volumes of fill while they are in use, and removes their pod.
func (g *ground) grow(all []kind, first pod) {
	g.t.Helper()
	var grown []string
	for _, k := range all {
		grown = append(grown, claim(k.name, k.class, k.larger, k.more))
	}
	g.put("sources", grown...)
	for _, k := range all {
		g.grows(k, first[k.name].Path)
	}
	g.remove("first")
	g.gone("first")
}

// copies starts a pod with a clone and a restored snapshot of each volume of fill. The volumes are not
// in use, because directories in use cannot be copied.
func (g *ground) copies(all []kind) {
	g.t.Helper()
	var names, snapshots, copies []string
	for _, k := range all {
		snapshots = append(snapshots, g.snapshot(k.name))
		clone, restored := k.name+"-clone", k.name+"-restored"
		copies = append(copies,
			claim(clone, k.class, k.larger, k.more+fmt.Sprintf(", dataSource: {kind: PersistentVolumeClaim, name: %s}", k.name)),
			claim(restored, k.class, k.larger, k.more+fmt.Sprintf(", dataSource: {apiGroup: snapshot.storage.k8s.io, kind: VolumeSnapshot, name: of-%s}", k.name)))
		names = append(names, k.name, clone, restored)
	}
	g.put("snapshots", snapshots...)
	g.put("copies", copies...)
	g.put("second", podOf("second", claimsOf(names)...))
	for name, volume := range g.await("second") {
		wantWritten(g.t, name, volume.Path)
	}
	g.remove("second")
	g.gone("second")
}

func claimsOf(names []string) (volumes []string) {
	for _, name := range names {
		volumes = append(volumes, claimed(name))
	}
	return volumes
}

const precious = "precious"

// write writes to a file of a directory, or to a device.
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

// fileIn returns the file of a directory that tests write, or the device itself.
func fileIn(t *testing.T, path string) string {
	t.Helper()
	info, err := os.Stat(path)
	must(t, err)
	if info.IsDir() {
		return filepath.Join(path, "file")
	}
	return path
}

// grows waits until a claim has its larger size, and checks the size of the volume.
func (g *ground) grows(k kind, path string) {
	g.t.Helper()
	g.claimHas(k.name, k.larger)
	want := resource.MustParse(k.larger)
	info, err := os.Stat(path)
	must(g.t, err)
	switch {
	case k.unlimited: // statfs returns the size of the pool's filesystem
	case !info.IsDir():
		if has := testenv.Run(g.t, "blockdev", "--getsize64", path); has != fmt.Sprint(want.Value()) {
			g.t.Errorf("%s has %s bytes, want %s", k.name, has, k.larger)
		}
	default:
		if has := sizeOf(g.t, path); has < want.Value()*3/4 {
			g.t.Errorf("%s has %d bytes, want %s", k.name, has, k.larger)
		}
	}
}

// snapshot creates a snapshot of a claim's volume through the driver, because the manager takes none. It
// returns the manifests of the snapshot.
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

// handle returns the volume ID of a provisioned volume.
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
