package hostpath_test

import (
	"errors"
	"io/fs"
	"net"
	"os"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/linux/tree"
	"github.com/trivet-csi/trivet/volumemanager/plugins"
	"github.com/trivet-csi/trivet/volumemanager/plugins/hostpath"
)

func TestMain(m *testing.M) { testenv.Main(m) }

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func setUp(t *testing.T, path string, kind corev1.HostPathType) error {
	t.Helper()
	source := &corev1.HostPathVolumeSource{Path: path, Type: &kind}
	spec := &plugins.Spec{Volume: &corev1.Volume{Name: "data", VolumeSource: corev1.VolumeSource{HostPath: source}}}
	p := hostpath.New()
	if !p.CanSupport(spec) {
		t.Fatal("it is not of the plugin")
	}
	m, err := p.NewMounter(spec, &corev1.Pod{})
	if err != nil {
		return err
	}
	if m.Path() != path {
		t.Errorf("the path is %s", m.Path())
	}
	return m.SetUp(t.Context(), plugins.MounterArgs{})
}

func TestTypes(t *testing.T) {
	testenv.RequireRoot(t)
	dir := t.TempDir()
	socket, err := net.Listen("unix", dir+"/socket")
	must(t, err)
	t.Cleanup(func() { must(t, socket.Close()) })
	must(t, os.WriteFile(dir+"/file", nil, 0o600))
	must(t, os.Symlink("file", dir+"/link"))
	must(t, os.Symlink(t.TempDir(), dir+"/elsewhere"))
	block, _, _ := testenv.Disk(t, 1<<20)
	there := map[string]corev1.HostPathType{
		dir: corev1.HostPathDirectory, dir + "/elsewhere": corev1.HostPathDirectory, dir + "/file": corev1.HostPathFile, dir + "/link": corev1.HostPathFile,
		dir + "/socket": corev1.HostPathSocket, "/dev/null": corev1.HostPathCharDev, block: corev1.HostPathBlockDev,
	}
	for path, is := range there {
		must(t, setUp(t, path, corev1.HostPathUnset))
		for _, kind := range there {
			if err := setUp(t, path, kind); (err == nil) != (kind == is) {
				t.Errorf("%s as %s: %v", path, kind, err)
			}
		}
	}
	for _, kind := range there {
		if err := setUp(t, dir+"/missing", kind); err == nil || !strings.Contains(err.Error(), "does not exist") {
			t.Errorf("missing as %s: %v", kind, err)
		}
	}
	must(t, setUp(t, dir+"/missing", corev1.HostPathUnset))
}

func TestCreate(t *testing.T) {
	dir := t.TempDir()
	for range 2 {
		must(t, setUp(t, dir+"/a/b", corev1.HostPathDirectoryOrCreate))
		must(t, setUp(t, dir+"/a/file", corev1.HostPathFileOrCreate))
	}
	for path, want := range map[string]fs.FileMode{"/a/b": fs.ModeDir | 0o755, "/a/file": 0o644} {
		if info, err := os.Stat(dir + path); err != nil || info.Mode() != want {
			t.Errorf("%s: %v, %v", path, info, err)
		}
	}
	if err := setUp(t, dir+"/a/b", corev1.HostPathFileOrCreate); err == nil {
		t.Error("a directory was taken for a file")
	}
	if err := setUp(t, dir+"/none/file", corev1.HostPathFileOrCreate); err == nil {
		t.Error("a file was made without its directory")
	}
	u, err := hostpath.New().NewUnmounter("data", "uid")
	must(t, err)
	must(t, u.TearDown(t.Context()))
	if _, err := os.Stat(dir + "/a/file"); err != nil {
		t.Error(err)
	}
}

func TestInvalid(t *testing.T) {
	for path, kind := range map[string]corev1.HostPathType{"relative": "", "/a/../b": "", "": "", "/": "Folder"} {
		var invalid *plugins.InvalidError
		if err := setUp(t, path, kind); !errors.As(err, &invalid) {
			t.Errorf("%q as %q: %v", path, kind, err)
		}
	}
}

func recycle(t *testing.T, path string) error {
	t.Helper()
	pv := &corev1.PersistentVolume{}
	pv.Spec.HostPath = &corev1.HostPathVolumeSource{Path: path}
	return hostpath.New().Recycle(t.Context(), pv)
}

func TestRecycle(t *testing.T) {
	testenv.RequireRoot(t)
	base := t.TempDir()
	dir, outside := base+"/volume", base+"/outside"
	must(t, os.MkdirAll(dir+"/a/b", 0o700))
	must(t, os.WriteFile(dir+"/a/file", nil, 0o600))
	must(t, os.MkdirAll(outside, 0o700))
	must(t, os.WriteFile(outside+"/kept", nil, 0o600))
	must(t, os.Symlink(outside, dir+"/link"))
	must(t, recycle(t, dir))
	if entries, err := os.ReadDir(dir); err != nil || len(entries) > 0 {
		t.Errorf("there still is %v, %v", entries, err)
	}
	must(t, os.Mkdir(dir+"/mounted", 0o700))
	testenv.Run(t, "mount", "--bind", outside, dir+"/mounted")
	t.Cleanup(func() { testenv.Run(t, "umount", dir+"/mounted") })
	if err := recycle(t, dir); !errors.Is(err, tree.ErrMounted) {
		t.Errorf("with a mount in it: %v", err)
	}
	if _, err := os.Stat(outside + "/kept"); err != nil {
		t.Error(err)
	}
	var invalid *plugins.InvalidError
	if err := recycle(t, "//."); !errors.As(err, &invalid) {
		t.Errorf("all of the machine: %v", err)
	}
	if err := recycle(t, outside+"/kept"); err == nil {
		t.Error("a file was recycled")
	}
	must(t, os.Symlink(outside, base+"/link"))
	if err := recycle(t, base+"/link/"); err == nil {
		t.Error("what a link leads to was recycled")
	}
}

// TestRecycleThroughLink: whoever has a directory in the middle of the path can replace it
// by a link; what that leads to stays.
func TestRecycleThroughLink(t *testing.T) {
	testenv.RequireRoot(t)
	base := t.TempDir()
	must(t, os.MkdirAll(base+"/outside/volume", 0o700))
	must(t, os.WriteFile(base+"/outside/volume/kept", nil, 0o600))
	must(t, os.Symlink(base+"/outside", base+"/tenant"))
	if err := recycle(t, base+"/tenant/volume"); err == nil || !strings.Contains(err.Error(), "symbolic link") {
		t.Errorf("a link in the middle of the path: %v", err)
	}
	if _, err := os.Stat(base + "/outside/volume/kept"); err != nil {
		t.Error(err)
	}
	must(t, recycle(t, base+"/outside/volume"))
	if _, err := os.Stat(base + "/outside/volume/kept"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("without a link it is recycled: %v", err)
	}
}
