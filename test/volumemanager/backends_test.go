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

// kind is a kind of volume of this project's driver. name is the name of the claim, and larger the size to
// which the claim is expanded.
type kind struct {
	name, class, size, larger string
	// more contains additional fields of the claim's spec, each preceded by a comma.
	more string
	// unlimited is set if the size is not enforced, and noCopies if the kind has no snapshots and clones.
	unlimited, noCopies bool
}

// kinds returns the kinds of volumes that are tested. If this machine cannot grow ext4, which needs
// CAP_SYS_RESOURCE, the ext4 volume is not expanded.
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
	m := newMachineWithDriver(t)
	all := kinds()
	m.grow(all, m.fill(all))
	m.copies(all)
	m.deleteSnapshots()
	m.removeAll()
	must(t, m.checkPool(0))
}

// fill starts pod first with a volume of each kind and more volumes, and writes to all of them.
func (m *machine) fill(all []kind, more ...string) pod {
	m.t.Helper()
	var sources []string
	for _, k := range all {
		sources = append(sources, claim(k.name, k.class, k.size, k.more))
		more = append(more, claimed(k.name))
	}
	m.put("sources", sources...)
	m.put("first", podOf("first", more...))
	first := m.await("first")
	for _, volume := range first {
		write(m.t, volume.Path)
	}
	return first
}

// grow expands the volumes of pod first while they are in use, and removes the pod.
func (m *machine) grow(all []kind, first pod) {
	m.t.Helper()
	var grown []string
	for _, k := range all {
		grown = append(grown, claim(k.name, k.class, k.larger, k.more))
	}
	m.put("sources", grown...)
	for _, k := range all {
		m.checkGrown(k, first[k.name].Path)
	}
	m.remove("first")
	m.awaitRemoved("first")
}

// copies starts a pod with the volumes that fill has created, and with a clone and a restored snapshot
// of each that can have them. The copies are requested while the volumes are not in use, because directories in use
// cannot be copied.
func (m *machine) copies(all []kind) {
	m.t.Helper()
	var names, snapshots, copies []string
	for _, k := range all {
		names = append(names, k.name)
		if k.noCopies {
			continue
		}
		snapshots = append(snapshots, m.snapshot(k.name))
		clone, restored := k.name+"-clone", k.name+"-restored"
		copies = append(copies,
			claim(clone, k.class, k.larger, k.more+fmt.Sprintf(", dataSource: {kind: PersistentVolumeClaim, name: %s}", k.name)),
			claim(restored, k.class, k.larger, k.more+fmt.Sprintf(", dataSource: {apiGroup: snapshot.storage.k8s.io, kind: VolumeSnapshot, name: of-%s}", k.name)))
		names = append(names, clone, restored)
	}
	m.put("snapshots", snapshots...)
	m.put("copies", copies...)
	m.put("second", podOf("second", claimsOf(names)...))
	for name, volume := range m.await("second") {
		wantWritten(m.t, name, volume.Path)
	}
	m.remove("second")
	m.awaitRemoved("second")
}

// claimsOf returns the result of claimed for each name.
func claimsOf(names []string) (volumes []string) {
	for _, name := range names {
		volumes = append(volumes, claimed(name))
	}
	return volumes
}

// content is the text that write writes.
const content = "precious"

// write writes content to a file in a directory, or to a device.
func write(t *testing.T, path string) {
	t.Helper()
	f, err := os.OpenFile(fileIn(t, path), os.O_WRONLY|os.O_CREATE|os.O_SYNC, 0o600)
	must(t, err)
	_, err = f.WriteString(content)
	must(t, err)
	must(t, f.Close())
}

// wantWritten fails the test unless the directory or device at path has the content of write. name
// identifies it in the message.
func wantWritten(t *testing.T, name, path string) {
	t.Helper()
	f, err := os.Open(fileIn(t, path))
	must(t, err)
	defer f.Close()
	b := make([]byte, len(content))
	if _, err := f.Read(b); err != nil || string(b) != content {
		t.Errorf("content of %s: got %q, error %v; want %q", name, b, err, content)
	}
}

// fileIn returns the path of a file in a directory, or the path itself if it is a device.
func fileIn(t *testing.T, path string) string {
	t.Helper()
	info, err := os.Stat(path)
	must(t, err)
	if info.IsDir() {
		return filepath.Join(path, "file")
	}
	return path
}

// checkGrown waits until a claim has its larger size, and checks the size of the volume.
func (m *machine) checkGrown(k kind, path string) {
	m.t.Helper()
	m.awaitClaimSize(k.name, k.larger)
	want := resource.MustParse(k.larger)
	info, err := os.Stat(path)
	must(m.t, err)
	switch {
	case k.unlimited: // statfs returns the size of the pool's filesystem
	case !info.IsDir():
		if got := testenv.Run(m.t, "blockdev", "--getsize64", path); got != fmt.Sprint(want.Value()) {
			m.t.Errorf("size of device %s: got %s bytes, want %s", k.name, got, k.larger)
		}
	default:
		if got := sizeOf(m.t, path); got < want.Value()*3/4 {
			m.t.Errorf("size of filesystem %s: got %d bytes, want at least 3/4 of %s", k.name, got, k.larger)
		}
	}
}

// createSnapshot creates a snapshot of a claim's volume with a call of the driver, because the manager
// creates no snapshots. It returns the ID of the snapshot.
func (m *machine) createSnapshot(claim string) (id string) {
	m.t.Helper()
	handle := m.handle("pvc-" + claim)
	request := &csi.CreateSnapshotRequest{Name: "of-" + claim, SourceVolumeId: handle}
	controller := m.controller()
	eventually(m.t, func() error {
		resp, err := controller.CreateSnapshot(m.t.Context(), request)
		id = resp.GetSnapshot().GetSnapshotId()
		return err
	})
	return id
}

// snapshot creates a snapshot of a claim's volume, and returns its manifests.
func (m *machine) snapshot(claim string) (manifests string) {
	m.t.Helper()
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
`, claim, m.createSnapshot(claim))
}

// handle returns the volume ID of a provisioned volume.
func (m *machine) handle(name string) string {
	m.t.Helper()
	resp, err := m.controller().ListVolumes(m.t.Context(), &csi.ListVolumesRequest{})
	must(m.t, err)
	for _, e := range resp.GetEntries() {
		if id := e.GetVolume().GetVolumeId(); strings.Contains(id, name) {
			return id
		}
	}
	m.t.Fatalf("got volumes %v, want one named %s", resp.GetEntries(), name)
	return ""
}

// deleteSnapshots deletes all snapshots of the driver.
func (m *machine) deleteSnapshots() {
	m.t.Helper()
	controller := m.controller()
	resp, err := controller.ListSnapshots(m.t.Context(), &csi.ListSnapshotsRequest{})
	must(m.t, err)
	for _, e := range resp.GetEntries() {
		_, err := controller.DeleteSnapshot(m.t.Context(), &csi.DeleteSnapshotRequest{SnapshotId: e.GetSnapshot().GetSnapshotId()})
		must(m.t, err)
	}
}
