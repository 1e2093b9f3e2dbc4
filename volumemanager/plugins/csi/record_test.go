package csi_test

import (
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	storagev1 "k8s.io/api/storage/v1"

	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/volumemanager/plugins"
	"github.com/trivet-csi/trivet/volumemanager/plugins/plugintest"
)

// mountAll attaches and stages a volume, and publishes it to pod one.
func (h *host) mountAll(t *testing.T, spec *plugins.Spec) (path string) {
	t.Helper()
	attachment := plugintest.Value(h.Attach(t.Context(), spec))(t)
	must(t, h.MountDevice(t.Context(), spec, attachment, plugins.MounterArgs{}))
	return plugintest.Value(h.setUp(t.Context(), t, spec, pod("one"), plugins.MounterArgs{}))(t)
}

// TestRecords: records have the kubelet's paths and keys.
func TestRecords(t *testing.T) {
	testenv.RequireRoot(t)
	h, _ := registeredFake(t)
	spec := persistent(driverName, "pv", "handle")
	path := h.mountAll(t, spec)
	staging := plugintest.Value(h.DeviceMountPath(spec))(t)
	// The SHA-256 hash of "handle".
	const hash = "c2a116aa910d147bd5bdacc2f1cc4430148955f450654ed756e9c93de1b1e1d2"
	if staging != h.Root+"/plugins/kubernetes.io/csi/"+driverName+"/"+hash+"/globalmount" {
		t.Errorf("got staging path %s, want the kubelet's path with the hash %s", staging, hash)
	}
	for dir, want := range map[string]map[string]string{
		filepath.Dir(path):    {"specVolID": "pv", "volumeHandle": "handle", "driverName": driverName, "nodeName": nodeName, "volumeLifecycleMode": "Persistent"},
		filepath.Dir(staging): {"specVolID": "pv", "volumeHandle": "handle", "driverName": driverName},
	} {
		got := map[string]string{}
		b := plugintest.Value(os.ReadFile(filepath.Join(dir, "vol_data.json")))(t)
		must(t, json.Unmarshal(b, &got))
		for key, value := range want {
			if got[key] != value {
				t.Errorf("record in %s: got %s=%q, want %q", dir, key, got[key], value)
			}
		}
	}
	a := h.attachment(t)
	if !a.Status.Attached || a.Status.AttachmentMetadata["device"] != "sda" || *a.Spec.Source.PersistentVolumeName != "pv" || a.Spec.NodeName != nodeName {
		t.Errorf("got attachment %+v, want PersistentVolume pv attached to node %s with device sda", a, nodeName)
	}
	for _, list := range []func() ([]plugins.DeviceMount, error){h.DeviceMounts, h.Attachments} {
		all := plugintest.Value(list())(t)
		if len(all) != 1 || all[0].VolumeName != driverName+"^handle" || all[0].Spec.Name() != "pv" {
			t.Errorf("got volumes %+v, want pv", all)
		}
	}
	h.start(t) // a plugin that knows only the records
	h.waitForStatus(t, "fake-reg.sock", registered)
	h.takeDown(t, pod("one"))
}

// attachment reads the only attachment file.
func (h *host) attachment(t *testing.T) (a storagev1.VolumeAttachment) {
	t.Helper()
	b := plugintest.Value(os.ReadFile(h.attachmentFile(t)))(t)
	must(t, json.Unmarshal(b, &a))
	return a
}

// attachmentFile returns the path of the only attachment file.
func (h *host) attachmentFile(t *testing.T) string {
	t.Helper()
	files := plugintest.Value(filepath.Glob(h.Root + "/volume-manager/attachments/*.json"))(t)
	if len(files) != 1 {
		t.Fatalf("got attachments %v, want one", files)
	}
	return files[0]
}

// TestTornRecord: other records identify a volume whose record is torn.
func TestTornRecord(t *testing.T) {
	testenv.RequireRoot(t)
	h, f := registeredFake(t)
	spec := persistent(driverName, "pv", "handle")
	path := h.mountAll(t, spec)
	staging := plugintest.Value(h.DeviceMountPath(spec))(t)
	tear(t, filepath.Join(filepath.Dir(path), "vol_data.json"))
	tear(t, filepath.Join(filepath.Dir(staging), "vol_data.json"))
	h.takeDown(t, pod("one"))
	if r := lastRequest[csi.NodeUnstageVolumeRequest](f); r.GetVolumeId() != "handle" {
		t.Errorf("got request %v, want volume ID handle", r)
	}
	if r := lastRequest[csi.NodeUnpublishVolumeRequest](f); r.GetVolumeId() != "handle" {
		t.Errorf("got request %v, want volume ID handle", r)
	}
}

// tear makes a record torn.
func tear(t *testing.T, file string) {
	t.Helper()
	must(t, os.WriteFile(file, []byte(`{"volumeHandle":`), 0o600))
}

// TestLostRecord: a mounted volume that no record identifies is not unmounted, and the error contains the
// remedy. Another SetUp of the volume restores its records.
func TestLostRecord(t *testing.T) {
	testenv.RequireRoot(t)
	h, f := registeredFake(t)
	spec := persistent(driverName, "pv", "handle")
	path := h.mountAll(t, spec)
	staging := plugintest.Value(h.DeviceMountPath(spec))(t)
	must(t, os.Remove(filepath.Join(filepath.Dir(path), "vol_data.json")))
	tear(t, filepath.Join(filepath.Dir(staging), "vol_data.json"))
	tear(t, h.attachmentFile(t))

	wantError(t, h.tearDown(t, "pv", pod("one")), "by hand", path)
	staged := plugintest.Value(h.DeviceMounts())(t)
	if len(staged) != 1 {
		t.Fatalf("got device mounts %+v, want one", staged)
	}
	wantError(t, h.UnmountDevice(t.Context(), staged[0].Spec), "by hand", staging)
	if name, err := h.VolumeName(staged[0].Spec); err != nil || name != staged[0].VolumeName {
		t.Errorf("got VolumeName %s, %v; want %s", name, err, staged[0].VolumeName)
	}
	attached := plugintest.Value(h.Attachments())(t)
	wantError(t, h.Detach(t.Context(), attached[0].Spec), "by hand")
	if at := mounts(t, h.Root); len(at) != 2 {
		t.Errorf("got mounts %v, want two", at)
	}

	h.mountAll(t, spec)
	h.takeDown(t, pod("one"))
	if n := f.count("ControllerUnpublishVolume"); n != 1 {
		t.Errorf("got %d calls of ControllerUnpublishVolume, want one", n)
	}
}

// TestNothingMounted: directories without records are removed if nothing is mounted at them.
func TestNothingMounted(t *testing.T) {
	h, _ := registeredFake(t)
	spec := persistent(driverName, "pv", "handle")
	staging := plugintest.Value(h.DeviceMountPath(spec))(t)
	must(t, os.MkdirAll(staging, 0o750))
	must(t, os.MkdirAll(h.Paths().PodVolume("uid-one", h.Name(), "pv")+"/mount", 0o750))
	must(t, os.WriteFile(filepath.Dir(staging)+"/vol_data.json.tmp", nil, 0o600))
	h.takeDown(t, pod("one"))
	wantMissing(t, filepath.Dir(staging))
	wantMissing(t, h.Paths().PodVolume("uid-one", h.Name(), "pv"))
}

// TestContentStays: files at a path that is not mounted are not removed.
func TestContentStays(t *testing.T) {
	testenv.RequireRoot(t)
	h, _ := registeredFake(t)
	spec, p := persistent(driverName, "pv", "handle"), pod("one")
	path := plugintest.Value(h.setUp(t.Context(), t, spec, p, plugins.MounterArgs{}))(t)
	must(t, h.tearDown(t, "pv", p))
	must(t, os.MkdirAll(path, 0o750))
	must(t, os.WriteFile(path+"/data", []byte("precious"), 0o600))
	wantError(t, h.tearDown(t, "pv", p), "not empty")
	if b, err := os.ReadFile(path + "/data"); string(b) != "precious" {
		t.Errorf("got content %q, %v; want precious", b, err)
	}
}

// TestNodeRenamed: Detach uses the node ID to which the volume was attached. A mounted volume is not
// detached.
func TestNodeRenamed(t *testing.T) {
	testenv.RequireRoot(t)
	h, f := registeredFake(t)
	spec := persistent(driverName, "pv", "handle")
	attachment := plugintest.Value(h.Attach(t.Context(), spec))(t)
	must(t, h.MountDevice(t.Context(), spec, attachment, plugins.MounterArgs{}))
	f.stop()
	f.change(func() { f.nodeID = "renamed" })
	f.start(t)
	h.waitForStatus(t, "fake-reg.sock", registeredAs("renamed"))
	_, err := h.Attach(t.Context(), spec)
	wantError(t, err, "remove the pods")
	if n := f.count("ControllerUnpublishVolume"); n != 0 {
		t.Errorf("got %d calls of ControllerUnpublishVolume while the volume was mounted, want none", n)
	}
	must(t, h.UnmountDevice(t.Context(), spec))
	plugintest.Value(h.Attach(t.Context(), spec))(t)
	if r := lastRequest[csi.ControllerUnpublishVolumeRequest](f); r.GetNodeId() != "fake-node" {
		t.Errorf("got request %v, want node fake-node", r)
	}
	must(t, h.Detach(t.Context(), spec))
	if r := lastRequest[csi.ControllerUnpublishVolumeRequest](f); r.GetNodeId() != "renamed" {
		t.Errorf("got request %v, want node renamed", r)
	}
	must(t, h.Detach(t.Context(), spec))
	wantNothingLeft(t, h.Root)
}

// TestPublishedStaysAttached: a volume is neither detached nor deleted while it is published on this
// machine under the name of any PersistentVolume, even after a restart.
func TestPublishedStaysAttached(t *testing.T) {
	testenv.RequireRoot(t)
	for name, tc := range map[string]struct {
		unstaged bool // the driver does not stage volumes
		linked   bool // the path of the root directory contains a symbolic link
		spec     *plugins.Spec
	}{
		"raw device":                             {spec: device(persistent(driverName, "pv", "handle"))},
		"driver that does not stage":             {unstaged: true, spec: persistent(driverName, "pv", "handle")},
		"another PersistentVolume of the handle": {unstaged: true, spec: persistent(driverName, "other", "handle")},
		"root directory with a symbolic link":    {unstaged: true, linked: true, spec: persistent(driverName, "other", "handle")},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHost(t)
			f := newFake(t, h)
			if tc.unstaged {
				f.change(func() { f.nodeCan = nil })
			}
			if tc.linked { // the mount table contains paths without links
				link := filepath.Join(filepath.Dir(h.Root), "link")
				must(t, os.Symlink(".", link))
				h.Root = filepath.Join(link, "root")
			}
			h.startRegistrar(t, "fake-reg.sock", info(driverName, f.path, "1.0.0"))
			h.waitForStatus(t, "fake-reg.sock", registered)
			plugintest.Value(h.Attach(t.Context(), tc.spec))(t)
			unpublish := h.publish(t, tc.spec)
			found := plugintest.Value(h.Attachments())(t)
			wantError(t, h.Detach(t.Context(), found[0].Spec), "handle", h.Root, "remove the pods")
			wantError(t, h.Delete(t.Context(), persistent(driverName, "pv", "handle").PersistentVolume), "handle", h.Root, "remove the pods")
			h.start(t)
			h.waitForStatus(t, "fake-reg.sock", registered)
			wantError(t, h.Detach(t.Context(), found[0].Spec), "handle", h.Root, "remove the pods")
			f.stop()
			f.change(func() { f.nodeID = "renamed" })
			f.start(t)
			h.waitForStatus(t, "fake-reg.sock", registeredAs("renamed"))
			_, err := h.Attach(t.Context(), tc.spec)
			wantError(t, err, "handle", "remove the pods", "restore the node ID")
			if detached, deleted := f.count("ControllerUnpublishVolume"), f.count("DeleteVolume"); detached+deleted > 0 {
				t.Errorf("got %d calls of ControllerUnpublishVolume and %d of DeleteVolume, want none", detached, deleted)
			}
			unpublish()
			h.takeDown(t, pod("one"))
			must(t, h.Delete(t.Context(), tc.spec.PersistentVolume))
		})
	}
}

// publish publishes a filesystem or a raw device to pod one. unpublish undoes this for a raw device; the
// caller unpublishes a filesystem.
func (h *host) publish(t *testing.T, spec *plugins.Spec) (unpublish func()) {
	t.Helper()
	if !spec.Block() {
		plugintest.Value(h.setUp(t.Context(), t, spec, pod("one"), plugins.MounterArgs{}))(t)
		return func() {}
	}
	m := plugintest.Value(h.NewBlockVolumeMapper(spec, pod("one")))(t)
	must(t, m.SetUpDevice(t.Context(), nil))
	must(t, m.MapPodDevice(t.Context()))
	return func() {
		u := plugintest.Value(h.NewBlockVolumeUnmapper(spec.Name(), pod("one").UID))(t)
		must(t, u.UnmapPodDevice(t.Context()))
	}
}

// TestTornStagingRecord: a pod's record identifies a staged volume whose record is torn.
func TestTornStagingRecord(t *testing.T) {
	testenv.RequireRoot(t)
	h, f := registeredFake(t)
	spec := persistent(driverName, "pv", "handle")
	must(t, h.MountDevice(t.Context(), spec, nil, plugins.MounterArgs{}))
	plugintest.Value(h.setUp(t.Context(), t, spec, pod("one"), plugins.MounterArgs{}))(t)
	staging := plugintest.Value(h.DeviceMountPath(spec))(t)
	tear(t, filepath.Join(filepath.Dir(staging), "vol_data.json"))
	staged := plugintest.Value(h.DeviceMounts())(t)
	if len(staged) != 1 || staged[0].VolumeName != driverName+"^handle" || staged[0].VolumeName != h.PodVolumeName("pv", "uid-one", false) {
		t.Errorf("got device mounts %+v, want that of handle", staged)
	}
	must(t, h.tearDown(t, "pv", pod("one")))
	must(t, h.UnmountDevice(t.Context(), staged[0].Spec))
	if r := lastRequest[csi.NodeUnstageVolumeRequest](f); r.GetVolumeId() != "handle" {
		t.Errorf("got request %v, want volume ID handle", r)
	}
	wantNothingLeft(t, h.Root)
}

// TestFoundBeforeRecord: UnmountDevice keeps a directory that DeviceMounts found without a record if a
// record has been written since.
func TestFoundBeforeRecord(t *testing.T) {
	h, f := registeredFake(t)
	spec := device(persistent(driverName, "pv", "handle"))
	data := h.Root + "/plugins/kubernetes.io/csi/volumeDevices/pv/data"
	must(t, os.MkdirAll(data, 0o750))
	found := plugintest.Value(h.DeviceMounts())(t)
	must(t, h.MountDevice(t.Context(), spec, nil, plugins.MounterArgs{}))
	must(t, h.UnmountDevice(t.Context(), found[0].Spec))
	if _, err := os.Stat(data + "/vol_data.json"); err != nil {
		t.Error(err)
	}
	must(t, h.UnmountDevice(t.Context(), spec))
	if n := f.count("NodeUnstageVolume"); n != 1 {
		t.Errorf("got %d calls of NodeUnstageVolume, want one", n)
	}
	wantNothingLeft(t, h.Root)
}

// TestTornAttachmentRemoved: Detach succeeds after a torn record was removed by hand, as its error
// requires.
func TestTornAttachmentRemoved(t *testing.T) {
	h, _ := registeredFake(t)
	plugintest.Value(h.Attach(t.Context(), persistent(driverName, "pv", "handle")))(t)
	file := h.attachmentFile(t)
	tear(t, file)
	found := plugintest.Value(h.Attachments())(t)
	wantError(t, h.Detach(t.Context(), found[0].Spec), "remove the file")
	must(t, os.Remove(file))
	must(t, h.Detach(t.Context(), found[0].Spec))
}

// TestOtherDriver: SetUp refuses an inline volume whose driver or attributes were changed in the manifest
// while it is published, and keeps its record.
func TestOtherDriver(t *testing.T) {
	testenv.RequireRoot(t)
	h, f := registeredFake(t)
	h.startRegistrar(t, "other-reg.sock", info("other.example.com", serveOther(t, h, f), "1.0.0"))
	h.waitForStatus(t, "other-reg.sock", registered)
	for _, name := range []string{driverName, "other.example.com"} {
		h.CSIDrivers[name] = &storagev1.CSIDriver{Spec: storagev1.CSIDriverSpec{VolumeLifecycleModes: []storagev1.VolumeLifecycleMode{storagev1.VolumeLifecycleEphemeral}}}
	}
	p := pod("one")
	path := plugintest.Value(h.setUp(t.Context(), t, inline(driverName, "scratch", nil), p, plugins.MounterArgs{}))(t)
	_, err := h.setUp(t.Context(), t, inline("other.example.com", "scratch", nil), p, plugins.MounterArgs{})
	wantCertain(t, err, driverName, "another name")
	_, err = h.setUp(t.Context(), t, inline(driverName, "scratch", map[string]string{"size": "1Gi"}), p, plugins.MounterArgs{})
	wantCertain(t, err, "undo the change")
	must(t, h.tearDown(t, "scratch", p))
	if n := f.count("NodeUnpublishVolume"); n != 1 || len(mounts(t, path)) > 0 {
		t.Errorf("got %d calls of NodeUnpublishVolume and mounts %v, want one call and no mount", n, mounts(t, path))
	}
}

// serveOther serves a driver with another name than f, and returns its socket.
func serveOther(t *testing.T, h *host, f *fake) string {
	t.Helper()
	other := &fake{
		path: filepath.Join(filepath.Dir(h.Root), "other.sock"), name: "other.example.com", nodeID: f.nodeID, ready: true,
		replaced: map[string]func(context.Context, any) error{}, requests: map[string]any{},
	}
	other.start(t)
	return other.path
}
