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
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/volumemanager/plugins"
)

const (
	initMounts = `init) echo '{"status":"Success","capabilities":{"attach":false}}'; exit;;`
	mounts     = `mount) printf '%s' "$3" >"$0.options"; mount -t tmpfs -o size=1M tmpfs "$2" && ok;;`
	unmounts   = `unmount) umount "$2" && ok;;`
)

// options are those of the last call to mount.
func (m *machine) options() (o map[string]string) {
	m.t.Helper()
	b, err := os.ReadFile(filepath.Join(m.dir, "acme~disk", "disk.options"))
	must(m.t, err)
	must(m.t, json.Unmarshal(b, &o))
	return o
}

// TestMount: a driver that only mounts gets what a kubelet gives it, is there without a
// restart, and the volume is where a kubelet has it.
func TestMount(t *testing.T) {
	testenv.RequireRoot(t)
	m := newMachine(t)
	m.secret = &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "key"}, Type: "acme/disk", Data: map[string][]byte{"user": []byte("me")}}
	spec := inline("data", corev1.FlexVolumeSource{
		Driver: "acme/disk", FSType: "ext4", Options: map[string]string{"disk": "7"}, SecretRef: &corev1.LocalObjectReference{Name: "key"},
	})
	if _, err := m.setUp(spec, plugins.MounterArgs{}); err == nil || !strings.Contains(err.Error(), "is not installed") {
		t.Errorf("without a driver: %v", err)
	}
	m.install(initMounts, mounts, unmounts)
	if needs, err := m.of(spec).NeedsAttach(spec); needs || err != nil {
		t.Errorf("%t, %v", needs, err)
	}
	group := int64(1234)
	path, err := m.setUp(spec, plugins.MounterArgs{FSGroup: &group})
	must(t, err)
	if path != m.paths.Root+"/pods/"+string(pod.UID)+"/volumes/acme~disk/data" || !mounted(t, path) {
		t.Errorf("%s is not mounted", path)
	}
	if info, err := os.Stat(path); err != nil || info.Sys().(*syscall.Stat_t).Gid != 1234 {
		t.Errorf("its group: %+v, %v", info, err)
	}
	for key, want := range map[string]string{
		"kubernetes.io/fsType": "ext4", "kubernetes.io/readwrite": "rw", "kubernetes.io/pvOrVolumeName": "data", "disk": "7",
		"kubernetes.io/pod.name": "web", "kubernetes.io/pod.namespace": "shop", "kubernetes.io/pod.uid": string(pod.UID),
		"kubernetes.io/serviceAccount.name": "seller", "kubernetes.io/mounterArgs.FsGroup": "1234", "kubernetes.io/secret/user": "bWU=",
	} {
		if got := m.options()[key]; got != want {
			t.Errorf("option %s=%q, want %q", key, got, want)
		}
	}
	if len(m.options()) != 10 {
		t.Errorf("%v", m.options())
	}
	_, err = m.setUp(spec, plugins.MounterArgs{}) // it is mounted
	must(t, err)
	must(t, m.tearDown(path))
	must(t, m.tearDown(path))
	m.wantGone(path)
	m.wantCalls("init", "init", "mount "+path+" OPTIONS", "init", "unmount "+path)
}

// TestGroupOnce: the files of a volume that is mounted are its pod's.
func TestGroupOnce(t *testing.T) {
	testenv.RequireRoot(t)
	m := newMachine(t)
	m.install(initMounts, mounts, unmounts)
	spec, group := inline("data", corev1.FlexVolumeSource{Driver: "acme/disk"}), int64(1234)
	path, err := m.setUp(spec, plugins.MounterArgs{FSGroup: &group})
	must(t, err)
	key := filepath.Join(path, "key")
	must(t, os.WriteFile(key, nil, 0o600))
	_, err = m.setUp(spec, plugins.MounterArgs{FSGroup: &group})
	must(t, err)
	if info, err := os.Stat(key); err != nil || info.Mode() != 0o600 {
		t.Errorf("%v, %v", info, err)
	}
	must(t, m.tearDown(path))
}

// TestChanged: a pod's own volume that was changed is not taken for the one that is
// mounted, also after a restart; one that was taken down may be another.
func TestChanged(t *testing.T) {
	testenv.RequireRoot(t)
	m := newMachine(t)
	m.install(initMounts, mounts, unmounts)
	of := func(name, disk string) *plugins.Spec {
		return inline(name, corev1.FlexVolumeSource{Driver: "acme/disk", Options: map[string]string{"disk": disk}})
	}
	beside, err := m.setUp(of("data-0123456789abcdef", "9"), plugins.MounterArgs{})
	must(t, err)
	path, err := m.setUp(of("data", "7"), plugins.MounterArgs{})
	must(t, err)
	var invalid *plugins.InvalidError
	if _, err := m.setUp(of("data", "8"), plugins.MounterArgs{}); !errors.As(err, &invalid) || !strings.Contains(err.Error(), "it was changed") {
		t.Errorf("changed: %v", err)
	}
	_, err = m.setUp(of("data", "7"), plugins.MounterArgs{})
	must(t, err)
	must(t, mount.Unmount(path)) // somebody does
	_, err = m.setUp(of("data", "8"), plugins.MounterArgs{})
	must(t, err)
	if _, err := m.setUp(of("data", "7"), plugins.MounterArgs{}); !errors.As(err, &invalid) {
		t.Errorf("changed back: %v", err)
	}
	must(t, m.tearDown(path))
	_, err = m.setUp(of("data", "7"), plugins.MounterArgs{})
	must(t, err)
	must(t, m.tearDown(path))
	must(t, m.tearDown(beside))
	if left, err := os.ReadDir(m.paths.PodPlugin(pod.UID, "acme/disk")); err != nil || len(left) > 0 {
		t.Errorf("it left %v, %v", left, err)
	}
}

// TestLies: what a driver says is held against the mount table.
func TestLies(t *testing.T) {
	testenv.RequireRoot(t)
	m := newMachine(t)
	spec := inline("data", corev1.FlexVolumeSource{Driver: "acme/disk"})
	m.install(initMounts, `mount) ok;;`, `unmount) ok;;`)
	path, err := m.setUp(spec, plugins.MounterArgs{})
	if !plugins.Uncertain(err) || !strings.Contains(err.Error(), "reported success but nothing is mounted at "+path) {
		t.Errorf("mount: %v", err)
	}
	must(t, m.tearDown(path))
	m.wantGone(path)

	m.install(initMounts, `mount) mount -t tmpfs none "$2"; echo '{"status":"Failure","message":"late"}'; exit 1;;`, `unmount) ok;;`)
	unmounted(t, path)
	if _, err = m.setUp(spec, plugins.MounterArgs{}); !plugins.Uncertain(err) || !strings.Contains(err.Error(), `"late"`) {
		t.Errorf("mounted and failed: %v", err)
	}
	if err := m.tearDown(path); err == nil || !strings.Contains(err.Error(), "is still mounted") {
		t.Errorf("unmount: %v", err)
	}
	m.install(initMounts, unmounts)
	must(t, m.tearDown(path))

	m.install(initMounts, `mount) echo '{"status":"Failure","message":"no disk"}'; exit 1;;`)
	if _, err = m.setUp(spec, plugins.MounterArgs{}); err == nil || plugins.Uncertain(err) {
		t.Errorf("failed: %v", err)
	}
	m.wantGone(path)
}

// TestNotInstalled: what is mounted by a driver that is gone stays, and says so; where
// nothing is, nothing is needed of it.
func TestNotInstalled(t *testing.T) {
	testenv.RequireRoot(t)
	m := newMachine(t)
	spec := inline("data", corev1.FlexVolumeSource{Driver: "acme/disk"})
	m.install(initMounts, mounts)
	path, err := m.setUp(spec, plugins.MounterArgs{})
	must(t, err)
	unmounted(t, path)
	must(t, os.RemoveAll(filepath.Join(m.dir, "acme~disk")))
	if err := m.tearDown(path); err == nil || !strings.Contains(err.Error(), "put its executable at "+m.dir+"/acme~disk/disk") {
		t.Error(err)
	}
	m.install(initMounts) // which leaves unmounting to others
	must(t, m.tearDown(path))
	must(t, os.RemoveAll(filepath.Join(m.dir, "acme~disk")))
	must(t, os.MkdirAll(path, 0o750))
	must(t, m.tearDown(path))
	m.wantGone(path)
}

// TestRefused: what no driver should get.
func TestRefused(t *testing.T) {
	m := newMachine(t)
	m.secret = &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "key"}, Type: "Opaque"}
	block := persistent(corev1.FlexPersistentVolumeSource{Driver: "acme/disk"})
	mode := corev1.PersistentVolumeBlock
	block.PersistentVolume.Spec.VolumeMode = &mode
	m.install(initMounts, mounts)
	for _, tc := range []struct {
		spec *plugins.Spec
		says string
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
		var invalid *plugins.InvalidError
		if _, err := m.setUp(tc.spec, plugins.MounterArgs{}); !errors.As(err, &invalid) || !strings.Contains(err.Error(), tc.says) {
			t.Errorf("%v does not say %q", err, tc.says)
		}
	}
	missing := inline("data", corev1.FlexVolumeSource{Driver: "acme/disk", SecretRef: &corev1.LocalObjectReference{Name: "gone"}})
	if _, err := m.setUp(missing, plugins.MounterArgs{}); !errors.Is(err, plugins.ErrNotFound) {
		t.Error(err)
	}
}

// attaches is a driver that has all calls: its disk is a file in a loop device.
func attaches(image string) []string {
	return []string{
		`init) ok;;`,
		`getvolumename) echo '{"status":"Success","volumeName":"disk-7"}'; exit;;`,
		`attach) d=$(losetup --show -f ` + image + `) && echo '{"status":"Success","device":"'$d'"}'; exit;;`,
		`waitforattach) echo '{"status":"Success","device":"'$2'"}'; exit;;`,
		`isattached) losetup -n -O NAME -j ` + image + ` | grep -q . && a=true || a=false; echo '{"status":"Success","attached":'$a'}'; exit;;`,
		`detach) losetup -d $(losetup -n -O NAME -j ` + image + `) && ok;;`,
	}
}

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

// TestAttach: a driver with all calls, each as a kubelet makes it; and all of it known
// again after a restart.
func TestAttach(t *testing.T) {
	testenv.RequireRoot(t)
	m := newMachine(t)
	image := newImage(t)
	m.install(append(attaches(image),
		`mountdevice) mount "$3" "$2" && ok;;`, `unmountdevice) umount "$2" && ok;;`,
		`mount) mount --bind `+m.paths.Root+`/plugins/kubernetes.io/flexvolume/acme/disk/mounts/pv "$2" && ok;;`, unmounts,
		`expandvolume) echo '{"status":"Success","volumeNewSize":'$(($4+1))'}'; exit;;`, `expandfs) ok;;`)...)
	spec := persistent(corev1.FlexPersistentVolumeSource{Driver: "acme/disk"})
	p := m.of(spec)
	if needs, err := p.NeedsAttach(spec); !needs || err != nil {
		t.Fatalf("%t, %v", needs, err)
	}
	attachment, err := p.Attach(t.Context(), spec)
	must(t, err)
	device := attachment["device"]
	must(t, p.MountDevice(t.Context(), spec, attachment, plugins.MounterArgs{}))
	path, err := m.setUp(spec, plugins.MounterArgs{})
	must(t, err)
	at := m.paths.Root + "/plugins/kubernetes.io/flexvolume/acme/disk/mounts/pv"
	m.wantCalls("init", "getvolumename OPTIONS", "attach OPTIONS node-1", "waitforattach "+device+" OPTIONS",
		"mountdevice "+at+" "+device+" OPTIONS", "init", "mount "+path+" OPTIONS")

	again, err := m.of(spec).Attach(t.Context(), spec)
	must(t, err)
	if again["device"] != device {
		t.Errorf("attached again as %v", again)
	}
	m.wantCalls("getvolumename OPTIONS", "isattached OPTIONS node-1", "waitforattach "+device+" OPTIONS")
	m.expand(spec, path, at, device)

	must(t, m.tearDown(path))
	back := m.found()
	must(t, p.UnmountDevice(t.Context(), back))
	must(t, p.UnmountDevice(t.Context(), back))
	must(t, p.Detach(t.Context(), back))
	must(t, p.Detach(t.Context(), back))
	m.wantCalls("unmount "+path, "unmountdevice "+at, "detach pv node-1")
	m.wantGone(at)
	if all, err := m.registry().All(); len(all) != 1 || err != nil {
		t.Errorf("%v, %v", all, err)
	}
	if left, err := p.Attachments(); len(left) > 0 || err != nil {
		t.Errorf("%v, %v", left, err)
	}
}

func (m *machine) expand(spec *plugins.Spec, path, at, device string) {
	m.t.Helper()
	p := m.of(spec)
	size, node, err := p.(plugins.ExpandableVolumePlugin).Expand(m.t.Context(), spec.PersistentVolume, resource.MustParse("400Mi"))
	if err != nil || !node || size.Value() != 400<<20+1 {
		m.t.Errorf("%v, %t, %v", size, node, err)
	}
	must(m.t, p.(plugins.NodeExpandableVolumePlugin).NodeExpand(m.t.Context(), spec, plugins.NodeExpandOptions{Path: path, DeviceMountPath: at, Size: size}))
	m.wantCalls("init", "expandvolume OPTIONS "+at+" 419430400 335544320", "expandfs OPTIONS "+device+" "+at+" 419430401 335544320")
}

// found is the only volume that a manager finds when it starts.
func (m *machine) found() *plugins.Spec {
	m.t.Helper()
	all, err := m.registry().All()
	must(m.t, err)
	p := all[0].(plugins.AttachableVolumePlugin)
	attached, err := p.Attachments()
	must(m.t, err)
	mounted, err := p.DeviceMounts()
	must(m.t, err)
	if len(attached) != 1 || len(mounted) != 1 || attached[0].VolumeName != mounted[0].VolumeName {
		m.t.Fatalf("attached %v, mounted %v", attached, mounted)
	}
	spec := mounted[0].Spec
	if name, err := m.of(spec).VolumeName(spec); name != mounted[0].VolumeName || err != nil {
		m.t.Errorf("volume %q is %q by its spec, %v", mounted[0].VolumeName, name, err)
	}
	return spec
}

// TestDefaults: a driver that attaches and leaves all else to others, as it does in a
// kubelet; of a pod's own volume.
func TestDefaults(t *testing.T) {
	testenv.RequireRoot(t)
	m := newMachine(t)
	image := newImage(t)
	var own []string
	for _, c := range attaches(image) {
		if !strings.HasPrefix(c, "getvolumename") && !strings.HasPrefix(c, "isattached") && !strings.HasPrefix(c, "waitfor") {
			own = append(own, c)
		}
	}
	m.install(own...)
	spec := inline("data", corev1.FlexVolumeSource{Driver: "acme/disk", FSType: "xfs", ReadOnly: true})
	p := m.of(spec)
	attachment, err := p.Attach(t.Context(), spec)
	must(t, err)
	must(t, p.MountDevice(t.Context(), spec, attachment, plugins.MounterArgs{}))
	path, err := m.setUp(spec, plugins.MounterArgs{})
	must(t, err)
	if err := os.WriteFile(filepath.Join(path, "file"), nil, 0o600); !errors.Is(err, syscall.EROFS) {
		t.Errorf("writing read-only: %v", err)
	}
	must(t, m.tearDown(path))
	back := m.found()
	if back.Name() != "data" {
		t.Errorf("it is called %q", back.Name())
	}
	must(t, p.UnmountDevice(t.Context(), back))
	must(t, p.Detach(t.Context(), back))
	other := inline("data", corev1.FlexVolumeSource{Driver: "acme/disk", FSType: "xfs", Options: map[string]string{"disk": "8"}})
	one, _ := p.VolumeName(spec)
	if two, err := p.VolumeName(other); one == two || err != nil {
		t.Errorf("two volumes of one name: %q, %v", two, err)
	}
}

// TestGrow: the filesystem of a driver that does not support expandfs is grown.
func TestGrow(t *testing.T) {
	testenv.RequireRoot(t)
	m := newMachine(t)
	image := newImage(t)
	m.install(append(attaches(image), `expandvolume) truncate -s "$4" `+image+` && losetup -c $(losetup -n -O NAME -j `+image+`) && ok;;`)...)
	spec := persistent(corev1.FlexPersistentVolumeSource{Driver: "acme/disk", FSType: "xfs"})
	p := m.of(spec)
	attachment, err := p.Attach(t.Context(), spec)
	must(t, err)
	must(t, p.MountDevice(t.Context(), spec, attachment, plugins.MounterArgs{}))
	path, err := m.setUp(spec, plugins.MounterArgs{})
	must(t, err)
	before := size(t, path)
	want := resource.MustParse("640Mi")
	_, node, err := p.(plugins.ExpandableVolumePlugin).Expand(t.Context(), spec.PersistentVolume, want)
	if err != nil || !node {
		t.Errorf("%t, %v", node, err)
	}
	must(t, p.(plugins.NodeExpandableVolumePlugin).NodeExpand(t.Context(), spec, plugins.NodeExpandOptions{Path: path, Size: want}))
	if after := size(t, path); after < before*3/2 {
		t.Errorf("it had %d bytes, and has %d", before, after)
	}
	must(t, m.tearDown(path))
	must(t, p.UnmountDevice(t.Context(), spec))
	must(t, p.Detach(t.Context(), spec))
}

func size(t *testing.T, path string) int64 {
	t.Helper()
	var st syscall.Statfs_t
	must(t, syscall.Statfs(path, &st))
	return int64(st.Blocks) * st.Bsize
}

// TestAttachFailed: what is certainly not attached is not written down; all else is.
func TestAttachFailed(t *testing.T) {
	m := newMachine(t)
	spec := persistent(corev1.FlexPersistentVolumeSource{Driver: "acme/disk"})
	for says, attach := range map[string]string{
		"no disk": `attach) echo '{"status":"Failure","message":"no disk"}'; exit 1;;`,
		"garbage": `attach) echo garbage; exit;;`,
	} {
		m.install(`init) ok;;`, attach, `detach) ok;;`)
		p := m.of(spec)
		_, err := p.Attach(t.Context(), spec)
		if err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v", says, err)
		}
		left, listed := p.Attachments()
		must(t, listed)
		if plugins.Uncertain(err) != (says == "garbage") || len(left) > 0 != plugins.Uncertain(err) {
			t.Errorf("%s: uncertain %t, written down %v", says, plugins.Uncertain(err), left)
		}
		must(t, p.Detach(t.Context(), spec))
	}
}

// TestOwnExecutable: the program's own executable, driven by the manager.
func TestOwnExecutable(t *testing.T) {
	m := newMachine(t)
	fs := testenv.Filesystem(t, "xfs", "2G")
	dir := filepath.Join(m.dir, "trivet~loop")
	must(t, os.Mkdir(dir, 0o755))
	testenv.Run(t, "go", "build", "-o", filepath.Join(dir, "loop"), "../../../cmd/trivet")
	must(t, os.WriteFile(filepath.Join(dir, "config.yaml"), []byte("pools: [{name: flex, directory: {path: "+fs+"/pool}}]\n"), 0o600))
	t.Setenv("TRIVET_FLEXVOLUME_STATE_DIR", fs+"/state")
	spec := persistent(corev1.FlexPersistentVolumeSource{Driver: "trivet/loop", FSType: "xfs", Options: map[string]string{"size": "320Mi"}})
	if needs, err := m.of(spec).NeedsAttach(spec); needs || err != nil {
		t.Fatalf("%t, %v", needs, err)
	}
	group := int64(1234)
	path, err := m.setUp(spec, plugins.MounterArgs{FSGroup: &group})
	must(t, err)
	must(t, os.WriteFile(filepath.Join(path, "file"), []byte("kept"), 0o600))
	before, want := size(t, path), resource.MustParse("640Mi")
	got, node, err := m.of(spec).(plugins.ExpandableVolumePlugin).Expand(t.Context(), spec.PersistentVolume, want)
	if err != nil || !node || got.Cmp(want) != 0 {
		t.Errorf("%v, %t, %v", got, node, err)
	}
	must(t, m.of(spec).(plugins.NodeExpandableVolumePlugin).NodeExpand(t.Context(), spec, plugins.NodeExpandOptions{Path: path, Size: want}))
	if after := size(t, path); after < before*3/2 {
		t.Errorf("it had %d bytes, and has %d", before, after)
	}
	must(t, m.tearDown(path))
	m.wantGone(path)
	path, err = m.setUp(spec, plugins.MounterArgs{})
	must(t, err)
	if b, err := os.ReadFile(filepath.Join(path, "file")); string(b) != "kept" || err != nil {
		t.Errorf("%q, %v", b, err)
	}
	must(t, m.tearDown(path))
}
