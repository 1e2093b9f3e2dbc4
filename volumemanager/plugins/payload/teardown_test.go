package payload_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/volumemanager/plugins"
	"github.com/trivet-csi/trivet/volumemanager/plugins/payload"
	"github.com/trivet-csi/trivet/volumemanager/plugins/plugintest"
)

// TestMemory: content that may be secret is in memory only.
func TestMemory(t *testing.T) {
	h := newHost(t)
	h.setBoth(map[string]string{"a": "1"})
	for _, tc := range []struct {
		volume corev1.Volume
		memory bool
		path   string
	}{
		{configMapVolume("web"), false, "kubernetes.io~configmap"},
		{secretVolume("web"), true, "kubernetes.io~secret"},
		{downwardVolume(fieldItem("a", "metadata.name")), true, "kubernetes.io~downward-api"},
		{projectedVolume(ofConfigMap("web")), true, "kubernetes.io~projected"},
	} {
		t.Run(tc.path, func(t *testing.T) {
			at := h.mount(t, tc.volume, newPod(), plugins.MounterArgs{})
			if want := filepath.Join(h.Paths().Root, "pods/4711/volumes", tc.path, "data"); at != want {
				t.Errorf("got path %s, want %s", at, want)
			}
			e := plugintest.MountAt(t, at)
			if memory := e != nil && e.FSType == "tmpfs"; memory != tc.memory {
				t.Errorf("got in memory %t with mount %+v, want %t", memory, e, tc.memory)
			}
			if !tc.memory {
				return
			}
			must(t, mount.Unmount(at))
			plugintest.WantEntries(t, at, 0)
		})
	}
}

// TestTearDown: TearDown is idempotent, and succeeds for a volume that was never or not completely set
// up.
func TestTearDown(t *testing.T) {
	h := newHost(t)
	h.setBoth(map[string]string{"a": "1"})
	for name, v := range onDiskAndInMemory() {
		t.Run(name, func(t *testing.T) {
			must(t, h.tearDown(t, v))
			at := plugintest.Value(h.setUp(t, v, newPod(), plugins.MounterArgs{}))(t)
			for range 2 {
				must(t, h.tearDown(t, v))
				wantRemoved(t, at)
			}
			must(t, os.Mkdir(at, 0o750))
			must(t, h.tearDown(t, v))
			wantRemoved(t, at)
		})
	}
}

// TestOtherMount: another mount at the volume's path is neither written to nor removed.
func TestOtherMount(t *testing.T) {
	h := newHost(t)
	h.setBoth(map[string]string{"a": "1"})
	for name, v := range onDiskAndInMemory() {
		t.Run(name, func(t *testing.T) {
			other, at := testenv.Filesystem(t, "ext4", "16M"), h.Paths().PodVolume("4711", h.plugin(t, v).Name(), "data")
			must(t, os.WriteFile(filepath.Join(other, "precious"), nil, 0o600))
			must(t, os.MkdirAll(at, 0o750))
			must(t, mount.Bind(other, at, mount.Options{}))
			_, err := h.setUp(t, v, newPod(), plugins.MounterArgs{})
			plugintest.WantError(t, err, at, "unmount it")
			plugintest.WantError(t, h.tearDown(t, v), "unmount it")
			plugintest.WantEntries(t, other, 2) // with lost+found
			must(t, mount.Unmount(at))
			must(t, h.tearDown(t, v))
		})
	}
}

// TestOtherMemory: SetUp does not write to another filesystem in memory. In the volume's own filesystem,
// it restores missing files.
func TestOtherMemory(t *testing.T) {
	h := newHost(t)
	h.secret("web", map[string]string{"a": "1"})
	other, at := memoryDisk(t), h.Paths().PodVolume("4711", "kubernetes.io/secret", "data")
	must(t, os.MkdirAll(at, 0o750))
	must(t, mount.Bind(other, at, mount.Options{}))
	_, err := h.setUp(t, secretVolume("web"), newPod(), plugins.MounterArgs{})
	plugintest.WantError(t, err, "unmount it")
	plugintest.WantEntries(t, other, 0)
	must(t, mount.Unmount(at))
	h.mount(t, secretVolume("web"), newPod(), plugins.MounterArgs{})
	must(t, os.Remove(filepath.Join(at, "..data")))
	h.mount(t, secretVolume("web"), newPod(), plugins.MounterArgs{})
	wantContent(t, at, map[string]string{"a": "-rw-r--r-- 0:0 1"})
}

// TestHiddenFiles: files that the mount hides are not removed.
func TestHiddenFiles(t *testing.T) {
	h := newHost(t)
	h.secret("web", map[string]string{"a": "1"})
	at := plugintest.Value(h.setUp(t, secretVolume("web"), newPod(), plugins.MounterArgs{}))(t)
	must(t, mount.Unmount(at))
	file := filepath.Join(at, "precious")
	must(t, os.WriteFile(file, nil, 0o600))
	h.mount(t, secretVolume("web"), newPod(), plugins.MounterArgs{})
	wantContent(t, at, map[string]string{"a": "-rw-r--r-- 0:0 1"})
	plugintest.WantError(t, h.tearDown(t, secretVolume("web")), at, "remove them")
	must(t, os.Remove(file))
}

// TestMountBelow: mounts in a volume, and targets of links in it, are not removed.
func TestMountBelow(t *testing.T) {
	h, other := newHost(t), t.TempDir()
	precious := filepath.Join(other, "precious")
	must(t, os.WriteFile(precious, nil, 0o600))
	h.configMap("web", map[string]string{"a": "1"})
	at := h.mount(t, configMapVolume("web"), newPod(), plugins.MounterArgs{})
	must(t, os.Symlink(other, filepath.Join(at, "..link")))
	below := filepath.Join(at, "..old", "below")
	must(t, os.MkdirAll(below, 0o755))
	must(t, mount.Bind(other, below, mount.Options{}))
	plugintest.WantError(t, h.tearDown(t, configMapVolume("web")), below)
	h.configMap("web", map[string]string{"a": "2"})
	_, err := h.setUp(t, configMapVolume("web"), newPod(), plugins.MounterArgs{})
	plugintest.WantError(t, err, below)
	must(t, mount.Unmount(below))
	h.mount(t, configMapVolume("web"), newPod(), plugins.MounterArgs{})
	wantContent(t, at, map[string]string{"a": "-rw-r--r-- 0:0 2"})
	wantLinks(t, at, 1)
	plugintest.WantText(t, precious, "")
}

// TestContainersDirectory: a directory that a container runtime has created as a mount point stays until
// the volume is removed.
func TestContainersDirectory(t *testing.T) {
	h := newHost(t)
	h.configMap("web", map[string]string{"a": "1"})
	at := h.mount(t, configMapVolume("web"), newPod(), plugins.MounterArgs{})
	inner := filepath.Join(at, "inner")
	must(t, os.Mkdir(inner, 0o755))
	h.configMap("web", map[string]string{"a": "2"})
	h.mount(t, configMapVolume("web"), newPod(), plugins.MounterArgs{})
	if _, err := os.Stat(inner); err != nil {
		t.Error(err)
	}
	h.configMap("web", map[string]string{"inner": "3"})
	h.mount(t, configMapVolume("web"), newPod(), plugins.MounterArgs{})
	wantContent(t, at, map[string]string{"inner": "drwxr-xr-x 0:0"})
}

// TestNotADirectory: a link at the volume's path is neither removed nor followed.
func TestNotADirectory(t *testing.T) {
	h, other := newHost(t), t.TempDir()
	h.setBoth(map[string]string{"a": "1"})
	for name, v := range onDiskAndInMemory() {
		t.Run(name, func(t *testing.T) {
			at := h.Paths().PodVolume("4711", h.plugin(t, v).Name(), "data")
			must(t, os.MkdirAll(filepath.Dir(at), 0o750))
			must(t, os.Symlink(other, at))
			_, err := h.setUp(t, v, newPod(), plugins.MounterArgs{})
			plugintest.WantError(t, err, at)
			plugintest.WantEntries(t, other, 0)
		})
	}
}

// TestFull: if the content does not fit on the disk, a new volume is not created, and an existing one
// keeps its content.
func TestFull(t *testing.T) {
	h := newHost(t)
	disk := memoryDisk(t)
	h.Root = disk
	h.configMap("web", map[string]string{"a": strings.Repeat("x", 2<<20)})
	at := h.Paths().PodVolume("4711", "kubernetes.io/configmap", "data")
	if _, err := h.setUp(t, configMapVolume("web"), newPod(), plugins.MounterArgs{}); err == nil {
		t.Error("SetUp of content that does not fit: got no error")
	}
	wantRemoved(t, at)
	h.configMap("web", map[string]string{"a": "1"})
	h.mount(t, configMapVolume("web"), newPod(), plugins.MounterArgs{})
	h.configMap("web", map[string]string{"a": strings.Repeat("x", 2<<20)})
	if _, err := h.setUp(t, configMapVolume("web"), newPod(), plugins.MounterArgs{}); err == nil {
		t.Error("SetUp of content that does not fit: got no error")
	}
	wantContent(t, at, map[string]string{"a": "-rw-r--r-- 0:0 1"})
}

// memoryDisk mounts a filesystem of 1 MiB in memory until the test ends.
func memoryDisk(t *testing.T) string {
	t.Helper()
	at := t.TempDir()
	disk := plugintest.Value(mount.Memory("trivet:test", mount.MemoryFor(1<<20), mount.Options{}))(t)
	must(t, disk.MoveTo(at))
	must(t, disk.Close())
	t.Cleanup(func() { must(t, mount.Unmount(at)) })
	return at
}

// TestUnmounterRefuses: NewUnmounter refuses names that are not file names.
func TestUnmounterRefuses(t *testing.T) {
	h := newHost(t)
	for _, p := range payload.New(h) {
		for _, name := range []string{"", ".", "..", "a/b", "/"} {
			if _, err := p.NewUnmounter(name, "4711"); err == nil {
				t.Errorf("%s: volume %q: got no error", p.Name(), name)
			}
			if _, err := p.NewUnmounter("data", newPod().UID+"/"); err == nil {
				t.Errorf("%s: pod UID with a slash: got no error", p.Name())
			}
		}
	}
}
