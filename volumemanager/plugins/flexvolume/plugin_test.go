package flexvolume_test

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/volumemanager/plugins"
	"github.com/trivet-csi/trivet/volumemanager/plugins/plugintest"
)

const (
	// Cases of the script in install.
	caseInit    = `init) echo '{"status":"Success","capabilities":{"attach":false}}'; exit;;`
	caseMount   = `mount) printf '%s' "$3" >"$0.options"; mount -t tmpfs -o size=1M tmpfs "$2" && ok;;`
	caseUnmount = `unmount) umount "$2" && ok;;`
)

// options returns the options of the last call to mount.
func (m *machine) options() (o map[string]string) {
	m.t.Helper()
	b := plugintest.Value(os.ReadFile(filepath.Join(m.dir, "acme~disk", "disk.options")))(m.t)
	must(m.t, json.Unmarshal(b, &o))
	return o
}

// TestMount: the plugin finds a driver without a restart, passes the arguments that a kubelet passes, and
// mounts the volume at the kubelet's path.
func TestMount(t *testing.T) {
	testenv.RequireRoot(t)
	m := newMachine(t)
	m.Secrets["shop/key"] = &corev1.Secret{Type: "acme/disk", Data: map[string][]byte{"user": []byte("me")}}
	spec := inline("data", corev1.FlexVolumeSource{
		Driver: "acme/disk", FSType: "ext4", Options: map[string]string{"disk": "7"}, SecretRef: &corev1.LocalObjectReference{Name: "key"},
	})
	_, err := m.setUp(spec, plugins.MounterArgs{})
	plugintest.WantError(t, err, "is not installed")
	m.install(caseInit, caseMount, caseUnmount)
	if needs, err := m.of(spec).NeedsAttach(spec); needs || err != nil {
		t.Errorf("NeedsAttach: got %t, %v; want false", needs, err)
	}
	group := int64(1234)
	path := plugintest.Value(m.setUp(spec, plugins.MounterArgs{FSGroup: &group}))(t)
	if want := m.Root + "/pods/" + string(pod.UID) + "/volumes/acme~disk/data"; path != want || plugintest.MountAt(t, path) == nil {
		t.Errorf("got path %s and mount %+v, want a mount at %s", path, plugintest.MountAt(t, path), want)
	}
	if info, err := os.Stat(path); err != nil || info.Sys().(*syscall.Stat_t).Gid != 1234 {
		t.Errorf("got %+v, %v; want group 1234", info, err)
	}
	for key, want := range map[string]string{
		"kubernetes.io/fsType": "ext4", "kubernetes.io/readwrite": "rw", "kubernetes.io/pvOrVolumeName": "data", "disk": "7",
		"kubernetes.io/pod.name": "web", "kubernetes.io/pod.namespace": "shop", "kubernetes.io/pod.uid": string(pod.UID),
		"kubernetes.io/serviceAccount.name": "seller", "kubernetes.io/mounterArgs.FsGroup": "1234", "kubernetes.io/secret/user": "bWU=",
	} {
		if got := m.options()[key]; got != want {
			t.Errorf("got option %s=%q, want %q", key, got, want)
		}
	}
	if len(m.options()) != 10 {
		t.Errorf("got options %v, want 10", m.options())
	}
	plugintest.Value(m.setUp(spec, plugins.MounterArgs{}))(t) // makes no call, because the volume is mounted
	must(t, m.tearDown(path))
	must(t, m.tearDown(path))
	plugintest.WantMissing(t, path)
	m.wantCalls("init", "init", "mount "+path+" OPTIONS", "init", "unmount "+path)
}

// TestGroupOnce: a later call does not change the modes of files in a mounted volume.
func TestGroupOnce(t *testing.T) {
	testenv.RequireRoot(t)
	m := newMachine(t)
	m.install(caseInit, caseMount, caseUnmount)
	spec, group := inline("data", corev1.FlexVolumeSource{Driver: "acme/disk"}), int64(1234)
	path := plugintest.Value(m.setUp(spec, plugins.MounterArgs{FSGroup: &group}))(t)
	key := filepath.Join(path, "key")
	must(t, os.WriteFile(key, nil, 0o600))
	plugintest.Value(m.setUp(spec, plugins.MounterArgs{FSGroup: &group}))(t)
	if info, err := os.Stat(key); err != nil || info.Mode() != 0o600 {
		t.Errorf("got %v, %v; want mode 0600", info, err)
	}
	must(t, m.tearDown(path))
}

// TestChanged: SetUp refuses a changed inline volume while the earlier volume is mounted, even after a
// restart. After TearDown it mounts the changed volume.
func TestChanged(t *testing.T) {
	testenv.RequireRoot(t)
	m := newMachine(t)
	m.install(caseInit, caseMount, caseUnmount)
	withDisk := func(name, disk string) *plugins.Spec {
		return inline(name, corev1.FlexVolumeSource{Driver: "acme/disk", Options: map[string]string{"disk": disk}})
	}
	other := plugintest.Value(m.setUp(withDisk("data-0123456789abcdef", "9"), plugins.MounterArgs{}))(t)
	path := plugintest.Value(m.setUp(withDisk("data", "7"), plugins.MounterArgs{}))(t)
	_, err := m.setUp(withDisk("data", "8"), plugins.MounterArgs{})
	plugintest.WantInvalid(t, err, "source was changed")
	plugintest.Value(m.setUp(withDisk("data", "7"), plugins.MounterArgs{}))(t)
	must(t, mount.Unmount(path)) // by hand
	plugintest.Value(m.setUp(withDisk("data", "8"), plugins.MounterArgs{}))(t)
	_, err = m.setUp(withDisk("data", "7"), plugins.MounterArgs{})
	plugintest.WantInvalid(t, err, "source was changed")
	must(t, m.tearDown(path))
	plugintest.Value(m.setUp(withDisk("data", "7"), plugins.MounterArgs{}))(t)
	must(t, m.tearDown(path))
	must(t, m.tearDown(other))
	plugintest.WantEntries(t, m.Paths().PodPlugin(pod.UID, "acme/disk"), 0)
}

// TestFalseReports: SetUp and TearDown fail if the result of a call contradicts the mount table.
func TestFalseReports(t *testing.T) {
	testenv.RequireRoot(t)
	m := newMachine(t)
	spec := inline("data", corev1.FlexVolumeSource{Driver: "acme/disk"})
	m.install(caseInit, `mount) ok;;`, `unmount) ok;;`)
	path, err := m.setUp(spec, plugins.MounterArgs{})
	plugintest.WantUncertain(t, err, "reported success but nothing is mounted at "+path)
	must(t, m.tearDown(path))
	plugintest.WantMissing(t, path)

	m.install(caseInit, `mount) mount -t tmpfs none "$2"; echo '{"status":"Failure","message":"late"}'; exit 1;;`, `unmount) ok;;`)
	unmountLater(t, path)
	_, err = m.setUp(spec, plugins.MounterArgs{})
	plugintest.WantUncertain(t, err, `"late"`)
	plugintest.WantError(t, m.tearDown(path), "is still mounted")
	m.install(caseInit, caseUnmount)
	must(t, m.tearDown(path))

	m.install(caseInit, `mount) echo '{"status":"Failure","message":"no disk"}'; exit 1;;`)
	_, err = m.setUp(spec, plugins.MounterArgs{})
	plugintest.WantCertain(t, err, "no disk")
	plugintest.WantMissing(t, path)
}

// TestNotInstalled: TearDown of a mounted volume whose driver was removed fails. A directory without a
// mount is removed without the driver.
func TestNotInstalled(t *testing.T) {
	testenv.RequireRoot(t)
	m := newMachine(t)
	spec := inline("data", corev1.FlexVolumeSource{Driver: "acme/disk"})
	m.install(caseInit, caseMount)
	path := plugintest.Value(m.setUp(spec, plugins.MounterArgs{}))(t)
	unmountLater(t, path)
	must(t, os.RemoveAll(filepath.Join(m.dir, "acme~disk")))
	plugintest.WantError(t, m.tearDown(path), "put its executable at "+m.dir+"/acme~disk/disk")
	m.install(caseInit) // a driver without the call unmount
	must(t, m.tearDown(path))
	must(t, os.RemoveAll(filepath.Join(m.dir, "acme~disk")))
	must(t, os.MkdirAll(path, 0o750))
	must(t, m.tearDown(path))
	plugintest.WantMissing(t, path)
}

// TestRefused: NewMounter or SetUp refuses invalid specs before the call mount.
func TestRefused(t *testing.T) {
	m := newMachine(t)
	m.Secrets["shop/key"] = &corev1.Secret{Type: "Opaque"}
	block := persistent(corev1.FlexPersistentVolumeSource{Driver: "acme/disk"})
	mode := corev1.PersistentVolumeBlock
	block.PersistentVolume.Spec.VolumeMode = &mode
	m.install(caseInit, caseMount)
	for _, tc := range []struct {
		spec    *plugins.Spec
		wantErr string
	}{
		{inline("data", corev1.FlexVolumeSource{Driver: "../disk"}), `flexVolume.driver "../disk"`},
		{inline("data", corev1.FlexVolumeSource{Driver: "kubernetes.io/csi"}), `flexVolume.driver "kubernetes.io/csi"`},
		{inline("..", corev1.FlexVolumeSource{Driver: "acme/disk"}), `the volume's name ".."`},
		{inline(strings.Repeat("a", 247), corev1.FlexVolumeSource{Driver: "acme/disk"}), "has 247 bytes"},
		{inline("data", corev1.FlexVolumeSource{Driver: "acme/disk", Options: map[string]string{"kubernetes.io/readwrite": "rw"}}), `flexVolume.options "kubernetes.io/readwrite"`},
		{inline("data", corev1.FlexVolumeSource{Driver: "acme/disk", Options: map[string]string{"Kubernetes.IO/pod.namespace": "other"}}), `flexVolume.options "Kubernetes.IO/pod.namespace"`},
		{inline("data", corev1.FlexVolumeSource{Driver: "acme/disk", SecretRef: &corev1.LocalObjectReference{Name: "key"}}), `has type "Opaque": set it to acme/disk`},
		{block, "volumeMode Block"},
	} {
		_, err := m.setUp(tc.spec, plugins.MounterArgs{})
		plugintest.WantInvalid(t, err, tc.wantErr)
	}
	missing := inline("data", corev1.FlexVolumeSource{Driver: "acme/disk", SecretRef: &corev1.LocalObjectReference{Name: "missing"}})
	if _, err := m.setUp(missing, plugins.MounterArgs{}); !errors.Is(err, plugins.ErrNotFound) {
		t.Errorf("missing Secret: got %v, want ErrNotFound", err)
	}
}

// attachCases returns the cases of a driver that attaches a loop device.
func attachCases(image string) []string {
	return []string{
		`init) ok;;`,
		`getvolumename) echo '{"status":"Success","volumeName":"disk-7"}'; exit;;`,
		`attach) d=$(losetup --show -f ` + image + `) && echo '{"status":"Success","device":"'$d'"}'; exit;;`,
		`waitforattach) echo '{"status":"Success","device":"'$2'"}'; exit;;`,
		`isattached) losetup -n -O NAME -j ` + image + ` | grep -q . && a=true || a=false; echo '{"status":"Success","attached":'$a'}'; exit;;`,
		`detach) losetup -d $(losetup -n -O NAME -j ` + image + `) && ok;;`,
	}
}

// newImage returns an image with an xfs. Its loop devices are freed when the test ends.
func newImage(t *testing.T) string {
	t.Helper()
	image := filepath.Join(t.TempDir(), "image")
	testenv.Run(t, "truncate", "-s", "320M", image)
	testenv.Run(t, "mkfs.xfs", "-q", image)
	t.Cleanup(func() {
		for _, device := range strings.Fields(testenv.Run(t, "losetup", "-n", "-O", "NAME", "-j", image)) {
			testenv.Run(t, "losetup", "-d", device)
		}
	})
	return image
}

// TestAttach: a driver that supports all calls gets the calls that a kubelet makes. After a restart, its
// volumes are found on disk.
func TestAttach(t *testing.T) {
	testenv.RequireRoot(t)
	m := newMachine(t)
	image := newImage(t)
	m.install(append(attachCases(image),
		`mountdevice) mount "$3" "$2" && ok;;`, `unmountdevice) umount "$2" && ok;;`,
		`mount) mount --bind `+m.Root+`/plugins/kubernetes.io/flexvolume/acme/disk/mounts/pv "$2" && ok;;`, caseUnmount,
		`expandvolume) echo '{"status":"Success","volumeNewSize":'$(($4+1))'}'; exit;;`, `expandfs) ok;;`)...)
	spec := persistent(corev1.FlexPersistentVolumeSource{Driver: "acme/disk"})
	p := m.of(spec)
	if needs, err := p.NeedsAttach(spec); !needs || err != nil {
		t.Fatalf("NeedsAttach: got %t, %v; want true", needs, err)
	}
	attachment := plugintest.Value(p.Attach(t.Context(), spec))(t)
	device := attachment["device"]
	must(t, p.MountDevice(t.Context(), spec, attachment, plugins.MounterArgs{}))
	path := plugintest.Value(m.setUp(spec, plugins.MounterArgs{}))(t)
	at := m.Root + "/plugins/kubernetes.io/flexvolume/acme/disk/mounts/pv"
	m.wantCalls("init", "getvolumename OPTIONS", "attach OPTIONS node-1", "waitforattach "+device+" OPTIONS",
		"mountdevice "+at+" "+device+" OPTIONS", "init", "mount "+path+" OPTIONS")

	again := plugintest.Value(m.of(spec).Attach(t.Context(), spec))(t)
	if again["device"] != device {
		t.Errorf("second Attach: got %v, want device %s", again, device)
	}
	m.wantCalls("getvolumename OPTIONS", "isattached OPTIONS node-1", "waitforattach "+device+" OPTIONS")
	m.expand(spec, path, at, device)

	must(t, m.tearDown(path))
	found := m.found()
	must(t, p.UnmountDevice(t.Context(), found))
	must(t, p.UnmountDevice(t.Context(), found))
	must(t, p.Detach(t.Context(), found))
	must(t, p.Detach(t.Context(), found))
	m.wantCalls("unmount "+path, "unmountdevice "+at, "detach pv node-1")
	plugintest.WantMissing(t, at)
	if all, err := m.registry().All(); len(all) != 1 || err != nil {
		t.Errorf("got plugins %v, %v; want that of the driver", all, err)
	}
	if left, err := p.Attachments(); len(left) > 0 || err != nil {
		t.Errorf("got attachments %v, %v; want none", left, err)
	}
}

// expand expands a volume, and requires the calls that a kubelet makes. path is the path of the pod's mount,
// at that of the device mount.
func (m *machine) expand(spec *plugins.Spec, path, at, device string) {
	m.t.Helper()
	p := m.of(spec)
	size, node, err := p.(plugins.ExpandableVolumePlugin).Expand(m.t.Context(), spec.PersistentVolume, resource.MustParse("400Mi"))
	if err != nil || !node || size.Value() != 400<<20+1 {
		m.t.Errorf("Expand: got %v, %t, %v; want one byte more than 400 MiB, and true", size.Value(), node, err)
	}
	must(m.t, p.(plugins.NodeExpandableVolumePlugin).NodeExpand(m.t.Context(), spec, plugins.NodeExpandOptions{Path: path, DeviceMountPath: at, Size: size}))
	m.wantCalls("init", "expandvolume OPTIONS "+at+" 419430400 335544320", "expandfs OPTIONS "+device+" "+at+" 419430401 335544320")
}

// found returns the only volume that a restarted manager finds on disk.
func (m *machine) found() *plugins.Spec {
	m.t.Helper()
	all := plugintest.Value(m.registry().All())(m.t)
	p := all[0].(plugins.AttachableVolumePlugin)
	attached := plugintest.Value(p.Attachments())(m.t)
	mounted := plugintest.Value(p.DeviceMounts())(m.t)
	if len(attached) != 1 || len(mounted) != 1 || attached[0].VolumeName != mounted[0].VolumeName {
		m.t.Fatalf("got attachments %v and device mounts %v, want one volume in both", attached, mounted)
	}
	spec := mounted[0].Spec
	if name, err := m.of(spec).VolumeName(spec); name != mounted[0].VolumeName || err != nil {
		m.t.Errorf("VolumeName of the spec: got %q, %v; want %q", name, err, mounted[0].VolumeName)
	}
	return spec
}

// TestDefaults: for a driver that only attaches and detaches, the plugin mounts an inline volume itself.
func TestDefaults(t *testing.T) {
	testenv.RequireRoot(t)
	m := newMachine(t)
	image := newImage(t)
	var cases []string
	for _, c := range attachCases(image) {
		if !strings.HasPrefix(c, "getvolumename") && !strings.HasPrefix(c, "isattached") && !strings.HasPrefix(c, "waitfor") {
			cases = append(cases, c)
		}
	}
	m.install(cases...)
	spec := inline("data", corev1.FlexVolumeSource{Driver: "acme/disk", FSType: "xfs", ReadOnly: true})
	p := m.of(spec)
	attachment := plugintest.Value(p.Attach(t.Context(), spec))(t)
	must(t, p.MountDevice(t.Context(), spec, attachment, plugins.MounterArgs{}))
	path := plugintest.Value(m.setUp(spec, plugins.MounterArgs{}))(t)
	if err := os.WriteFile(filepath.Join(path, "file"), nil, 0o600); !errors.Is(err, syscall.EROFS) {
		t.Errorf("write to a read-only volume: got %v, want EROFS", err)
	}
	must(t, m.tearDown(path))
	found := m.found()
	if found.Name() != "data" {
		t.Errorf("got volume %q, want data", found.Name())
	}
	must(t, p.UnmountDevice(t.Context(), found))
	must(t, p.Detach(t.Context(), found))
	other := inline("data", corev1.FlexVolumeSource{Driver: "acme/disk", FSType: "xfs", Options: map[string]string{"disk": "8"}})
	one, _ := p.VolumeName(spec)
	if two, err := p.VolumeName(other); one == two || err != nil {
		t.Errorf("inline volumes of two sources: got VolumeNames %q and %q, error %v; want different names", one, two, err)
	}
}

// TestGrow: for a driver without the call expandfs, the plugin expands the filesystem.
func TestGrow(t *testing.T) {
	testenv.RequireRoot(t)
	m := newMachine(t)
	image := newImage(t)
	m.install(append(attachCases(image), `expandvolume) truncate -s "$4" `+image+` && losetup -c $(losetup -n -O NAME -j `+image+`) && ok;;`)...)
	spec := persistent(corev1.FlexPersistentVolumeSource{Driver: "acme/disk", FSType: "xfs"})
	p := m.of(spec)
	attachment := plugintest.Value(p.Attach(t.Context(), spec))(t)
	must(t, p.MountDevice(t.Context(), spec, attachment, plugins.MounterArgs{}))
	path := plugintest.Value(m.setUp(spec, plugins.MounterArgs{}))(t)
	before := size(t, path)
	want := resource.MustParse("640Mi")
	_, node, err := p.(plugins.ExpandableVolumePlugin).Expand(t.Context(), spec.PersistentVolume, want)
	if err != nil || !node {
		t.Errorf("Expand: got node expansion %t, %v; want true", node, err)
	}
	must(t, p.(plugins.NodeExpandableVolumePlugin).NodeExpand(t.Context(), spec, plugins.NodeExpandOptions{Path: path, Size: want}))
	if after := size(t, path); after < before*3/2 {
		t.Errorf("got a filesystem of %d bytes, want about twice %d", after, before)
	}
	must(t, m.tearDown(path))
	must(t, p.UnmountDevice(t.Context(), spec))
	must(t, p.Detach(t.Context(), spec))
}

// size returns the size of a filesystem in bytes.
func size(t *testing.T, path string) int64 {
	t.Helper()
	var st syscall.Statfs_t
	must(t, syscall.Statfs(path, &st))
	return int64(st.Blocks) * st.Bsize
}

// TestAttachFailed: after a failed Attach, only a volume that may be attached keeps its record.
func TestAttachFailed(t *testing.T) {
	m := newMachine(t)
	spec := persistent(corev1.FlexPersistentVolumeSource{Driver: "acme/disk"})
	for want, attach := range map[string]string{
		"no disk": `attach) echo '{"status":"Failure","message":"no disk"}'; exit 1;;`,
		"garbage": `attach) echo garbage; exit;;`,
	} {
		m.install(`init) ok;;`, attach, `detach) ok;;`)
		p := m.of(spec)
		_, err := p.Attach(t.Context(), spec)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got error %v, want one with %q", err, want)
		}
		left := plugintest.Value(p.Attachments())(t)
		if plugins.Uncertain(err) != (want == "garbage") || len(left) > 0 != plugins.Uncertain(err) {
			t.Errorf("%s: got an uncertain error %t and records %v, want both only after garbage", want, plugins.Uncertain(err), left)
		}
		must(t, p.Detach(t.Context(), spec))
	}
}

// TestOwnExecutable: the plugin mounts and expands volumes of this project's FlexVolume driver.
func TestOwnExecutable(t *testing.T) {
	m := newMachine(t)
	fs := testenv.Filesystem(t, "xfs", "2G")
	dir := filepath.Join(m.dir, "trivet~loop")
	must(t, os.Mkdir(dir, 0o755))
	must(t, testenv.Build(filepath.Join(dir, "loop")))
	must(t, os.WriteFile(filepath.Join(dir, "config.yaml"), []byte("pools: [{name: flex, directory: {path: "+fs+"/pool}}]\n"), 0o600))
	t.Setenv("TRIVET_FLEXVOLUME_STATE_DIR", fs+"/state")
	spec := persistent(corev1.FlexPersistentVolumeSource{Driver: "trivet/loop", FSType: "xfs", Options: map[string]string{"size": "320Mi"}})
	if needs, err := m.of(spec).NeedsAttach(spec); needs || err != nil {
		t.Fatalf("NeedsAttach: got %t, %v; want false", needs, err)
	}
	group := int64(1234)
	path := plugintest.Value(m.setUp(spec, plugins.MounterArgs{FSGroup: &group}))(t)
	must(t, os.WriteFile(filepath.Join(path, "file"), []byte("kept"), 0o600))
	before, want := size(t, path), resource.MustParse("640Mi")
	got, node, err := m.of(spec).(plugins.ExpandableVolumePlugin).Expand(t.Context(), spec.PersistentVolume, want)
	if err != nil || !node || got.Cmp(want) != 0 {
		t.Errorf("Expand: got %v, %t, %v; want %v and true", got.String(), node, err, want.String())
	}
	must(t, m.of(spec).(plugins.NodeExpandableVolumePlugin).NodeExpand(t.Context(), spec, plugins.NodeExpandOptions{Path: path, Size: want}))
	if after := size(t, path); after < before*3/2 {
		t.Errorf("got a filesystem of %d bytes, want about twice %d", after, before)
	}
	must(t, m.tearDown(path))
	plugintest.WantMissing(t, path)
	path = plugintest.Value(m.setUp(spec, plugins.MounterArgs{}))(t)
	plugintest.WantText(t, filepath.Join(path, "file"), "kept")
	must(t, m.tearDown(path))
}
