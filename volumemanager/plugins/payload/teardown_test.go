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
)

// TestMemory: what may be secret is on no disk, and gone with the volume.
func TestMemory(t *testing.T) {
	h := newHost(t)
	h.configMap("web", map[string]string{"a": "1"})
	h.secret("web", map[string]string{"a": "1"})
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
			at := h.shown(t, tc.volume, newPod(), plugins.MounterArgs{})
			if want := filepath.Join(h.paths.Root, "pods/4711/volumes", tc.path, "data"); at != want {
				t.Errorf("it is at %s, want %s", at, want)
			}
			e, err := mount.OnPath(at)
			must(t, err)
			if (e != nil && e.FSType == "tmpfs") != tc.memory {
				t.Errorf("%+v", e)
			}
			if !tc.memory {
				return
			}
			must(t, mount.Unmount(at))
			if entries, err := os.ReadDir(at); err != nil || len(entries) > 0 {
				t.Errorf("below it the disk has %v, %v", entries, err)
			}
		})
	}
}

// TestTearDown is repeated, and done for what was never there or is there by half.
func TestTearDown(t *testing.T) {
	h := newHost(t)
	h.configMap("web", map[string]string{"a": "1"})
	h.secret("web", map[string]string{"a": "1"})
	for name, v := range map[string]corev1.Volume{"on disk": configMapVolume("web"), "in memory": secretVolume("web")} {
		t.Run(name, func(t *testing.T) {
			must(t, h.tearDown(t, v))
			at, err := h.setUp(t, v, newPod(), plugins.MounterArgs{})
			must(t, err)
			for range 2 {
				must(t, h.tearDown(t, v))
				gone(t, at)
			}
			must(t, os.Mkdir(at, 0o750))
			must(t, h.tearDown(t, v))
			gone(t, at)
		})
	}
}

// TestOtherMount: what is mounted there by others is neither written to nor removed.
func TestOtherMount(t *testing.T) {
	h := newHost(t)
	h.configMap("web", map[string]string{"a": "1"})
	h.secret("web", map[string]string{"a": "1"})
	for name, v := range map[string]corev1.Volume{"on disk": configMapVolume("web"), "in memory": secretVolume("web")} {
		t.Run(name, func(t *testing.T) {
			other, at := testenv.Filesystem(t, "ext4", "16M"), h.paths.PodVolume("4711", h.plugin(t, v).Name(), "data")
			must(t, os.WriteFile(filepath.Join(other, "precious"), nil, 0o600))
			must(t, os.MkdirAll(at, 0o750))
			must(t, mount.Bind(other, at, mount.Options{}))
			_, err := h.setUp(t, v, newPod(), plugins.MounterArgs{})
			if err == nil || !strings.Contains(err.Error(), at) || !strings.Contains(err.Error(), "unmount it") {
				t.Errorf("set up: %v", err)
			}
			if err := h.tearDown(t, v); err == nil || !strings.Contains(err.Error(), "unmount it") {
				t.Errorf("torn down: %v", err)
			}
			if entries, err := os.ReadDir(other); err != nil || len(entries) != 2 { // lost+found too
				t.Errorf("it has %v, %v", entries, err)
			}
			must(t, mount.Unmount(at))
			must(t, h.tearDown(t, v))
		})
	}
}

// TestOtherMemory: a filesystem in memory that others have mounted there is not written to;
// of the volume's own what is missing comes back.
func TestOtherMemory(t *testing.T) {
	h := newHost(t)
	h.secret("web", map[string]string{"a": "1"})
	other, at := memoryDisk(t), h.paths.PodVolume("4711", "kubernetes.io/secret", "data")
	must(t, os.MkdirAll(at, 0o750))
	must(t, mount.Bind(other, at, mount.Options{}))
	if _, err := h.setUp(t, secretVolume("web"), newPod(), plugins.MounterArgs{}); err == nil || !strings.Contains(err.Error(), "unmount it") {
		t.Errorf("set up: %v", err)
	}
	if entries, err := os.ReadDir(other); err != nil || len(entries) > 0 {
		t.Errorf("it wrote %v, %v", entries, err)
	}
	must(t, mount.Unmount(at))
	h.shown(t, secretVolume("web"), newPod(), plugins.MounterArgs{})
	must(t, os.Remove(filepath.Join(at, "..data")))
	h.shown(t, secretVolume("web"), newPod(), plugins.MounterArgs{})
	wantContent(t, at, map[string]string{"a": "-rw-r--r-- 0:0 1"})
}

// TestBeneath: what others wrote to the directory while nothing was mounted stays.
func TestBeneath(t *testing.T) {
	h := newHost(t)
	h.secret("web", map[string]string{"a": "1"})
	at, err := h.setUp(t, secretVolume("web"), newPod(), plugins.MounterArgs{})
	must(t, err)
	must(t, mount.Unmount(at))
	file := filepath.Join(at, "precious")
	must(t, os.WriteFile(file, nil, 0o600))
	h.shown(t, secretVolume("web"), newPod(), plugins.MounterArgs{})
	wantContent(t, at, map[string]string{"a": "-rw-r--r-- 0:0 1"})
	if err := h.tearDown(t, secretVolume("web")); err == nil || !strings.Contains(err.Error(), at) || !strings.Contains(err.Error(), "remove them") {
		t.Errorf("torn down: %v", err)
	}
	must(t, os.Remove(file))
}

// TestMountBelow: what is mounted in a volume, or linked from it, is not the volume's.
func TestMountBelow(t *testing.T) {
	h, other := newHost(t), t.TempDir()
	precious := filepath.Join(other, "precious")
	must(t, os.WriteFile(precious, nil, 0o600))
	h.configMap("web", map[string]string{"a": "1"})
	at := h.shown(t, configMapVolume("web"), newPod(), plugins.MounterArgs{})
	must(t, os.Symlink(other, filepath.Join(at, "..link")))
	below := filepath.Join(at, "..old", "below")
	must(t, os.MkdirAll(below, 0o755))
	must(t, mount.Bind(other, below, mount.Options{}))
	if err := h.tearDown(t, configMapVolume("web")); err == nil || !strings.Contains(err.Error(), below) {
		t.Errorf("torn down: %v", err)
	}
	h.configMap("web", map[string]string{"a": "2"})
	if _, err := h.setUp(t, configMapVolume("web"), newPod(), plugins.MounterArgs{}); err == nil || !strings.Contains(err.Error(), below) {
		t.Errorf("set up: %v", err)
	}
	must(t, mount.Unmount(below))
	h.shown(t, configMapVolume("web"), newPod(), plugins.MounterArgs{})
	wantContent(t, at, map[string]string{"a": "-rw-r--r-- 0:0 2"})
	only(t, at, 1)
	if _, err := os.Stat(precious); err != nil {
		t.Error(err)
	}
}

// TestContainersDirectory: the mount point that a container runtime made for another
// volume is left alone, and goes with the volume.
func TestContainersDirectory(t *testing.T) {
	h := newHost(t)
	h.configMap("web", map[string]string{"a": "1"})
	at := h.shown(t, configMapVolume("web"), newPod(), plugins.MounterArgs{})
	inner := filepath.Join(at, "inner")
	must(t, os.Mkdir(inner, 0o755))
	h.configMap("web", map[string]string{"a": "2"})
	h.shown(t, configMapVolume("web"), newPod(), plugins.MounterArgs{})
	if _, err := os.Stat(inner); err != nil {
		t.Error(err)
	}
	h.configMap("web", map[string]string{"inner": "3"})
	h.shown(t, configMapVolume("web"), newPod(), plugins.MounterArgs{})
	wantContent(t, at, map[string]string{"inner": "drwxr-xr-x 0:0"})
}

// TestNotADirectory: what is in the way is not removed, nor written through.
func TestNotADirectory(t *testing.T) {
	h, other := newHost(t), t.TempDir()
	h.configMap("web", map[string]string{"a": "1"})
	h.secret("web", map[string]string{"a": "1"})
	for name, v := range map[string]corev1.Volume{"on disk": configMapVolume("web"), "in memory": secretVolume("web")} {
		t.Run(name, func(t *testing.T) {
			at := h.paths.PodVolume("4711", h.plugin(t, v).Name(), "data")
			must(t, os.MkdirAll(filepath.Dir(at), 0o750))
			must(t, os.Symlink(other, at))
			if _, err := h.setUp(t, v, newPod(), plugins.MounterArgs{}); err == nil || !strings.Contains(err.Error(), at) {
				t.Errorf("set up: %v", err)
			}
			if entries, err := os.ReadDir(other); err != nil || len(entries) > 0 {
				t.Errorf("it wrote %v, %v", entries, err)
			}
		})
	}
}

// TestFull: a volume that there is no room for is not there.
func TestFull(t *testing.T) {
	h := newHost(t)
	disk := memoryDisk(t)
	h.paths = plugins.Paths{Root: disk}
	h.configMap("web", map[string]string{"a": strings.Repeat("x", 2<<20)})
	at := h.paths.PodVolume("4711", "kubernetes.io/configmap", "data")
	if _, err := h.setUp(t, configMapVolume("web"), newPod(), plugins.MounterArgs{}); err == nil {
		t.Error("it fits")
	}
	gone(t, at)
	h.configMap("web", map[string]string{"a": "1"})
	h.shown(t, configMapVolume("web"), newPod(), plugins.MounterArgs{})
	h.configMap("web", map[string]string{"a": strings.Repeat("x", 2<<20)})
	if _, err := h.setUp(t, configMapVolume("web"), newPod(), plugins.MounterArgs{}); err == nil {
		t.Error("it fits")
	}
	wantContent(t, at, map[string]string{"a": "-rw-r--r-- 0:0 1"})
}

// memoryDisk is a small filesystem.
func memoryDisk(t *testing.T) string {
	t.Helper()
	at := t.TempDir()
	disk, err := mount.Memory("trivet:test", mount.MemoryFor(1<<20), mount.Options{})
	must(t, err)
	must(t, disk.MoveTo(at))
	must(t, disk.Close())
	t.Cleanup(func() { must(t, mount.Unmount(at)) })
	return at
}

// TestUnmounterRefuses names that lead elsewhere.
func TestUnmounterRefuses(t *testing.T) {
	h := newHost(t)
	for _, p := range payload.New(h) {
		for _, name := range []string{"", ".", "..", "a/b", "/"} {
			if _, err := p.NewUnmounter(name, "4711"); err == nil {
				t.Errorf("%s takes volume %q", p.Name(), name)
			}
			if _, err := p.NewUnmounter("data", newPod().UID+"/"); err == nil {
				t.Errorf("%s takes a pod with a slash", p.Name())
			}
		}
	}
}
