package hostpath_test

import (
	"errors"
	"io/fs"
	"net"
	"os"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/linux/tree"
	"github.com/trivet-csi/trivet/volumemanager/plugins"
	"github.com/trivet-csi/trivet/volumemanager/plugins/hostpath"
	"github.com/trivet-csi/trivet/volumemanager/plugins/plugintest"
)

func TestMain(m *testing.M) { testenv.Main(m) }

var must = plugintest.Must

// setUp calls NewMounter and SetUp for a path and a type.
func setUp(t *testing.T, path string, kind corev1.HostPathType) error {
	t.Helper()
	source := &corev1.HostPathVolumeSource{Path: path, Type: &kind}
	spec := &plugins.Spec{Volume: &corev1.Volume{Name: "data", VolumeSource: corev1.VolumeSource{HostPath: source}}}
	p := hostpath.New()
	if !p.CanSupport(spec) {
		t.Fatal("the plugin does not support the spec")
	}
	m, err := p.NewMounter(spec, &corev1.Pod{})
	if err != nil {
		return err
	}
	if m.Path() != path {
		t.Errorf("got path %s, want %s", m.Path(), path)
	}
	return m.SetUp(t.Context(), plugins.MounterArgs{})
}

// TestTypes: SetUp accepts a path only with its own type or without a type, and creates nothing.
func TestTypes(t *testing.T) {
	testenv.RequireRoot(t)
	dir := t.TempDir()
	socket := plugintest.Value(net.Listen("unix", dir+"/socket"))(t)
	t.Cleanup(func() { must(t, socket.Close()) })
	must(t, os.WriteFile(dir+"/file", nil, 0o600))
	must(t, os.Symlink("file", dir+"/link"))
	must(t, os.Symlink(t.TempDir(), dir+"/elsewhere"))
	block, _, _ := testenv.Disk(t, 1<<20)
	types := map[string]corev1.HostPathType{
		dir: corev1.HostPathDirectory, dir + "/elsewhere": corev1.HostPathDirectory, dir + "/file": corev1.HostPathFile, dir + "/link": corev1.HostPathFile,
		dir + "/socket": corev1.HostPathSocket, "/dev/null": corev1.HostPathCharDev, block: corev1.HostPathBlockDev,
	}
	for path, actual := range types {
		must(t, setUp(t, path, corev1.HostPathUnset))
		for _, kind := range types {
			if err := setUp(t, path, kind); (err == nil) != (kind == actual) {
				t.Errorf("%s, a %s, with type %s: got error %v, want an error: %t", path, actual, kind, err, kind != actual)
			}
		}
	}
	for _, kind := range types {
		plugintest.WantError(t, setUp(t, dir+"/missing", kind), "does not exist", string(kind))
	}
	must(t, setUp(t, dir+"/missing", corev1.HostPathUnset))
}

// TestCreate: SetUp creates a missing path of a type OrCreate, and TearDown keeps it.
func TestCreate(t *testing.T) {
	dir := t.TempDir()
	for range 2 {
		must(t, setUp(t, dir+"/a/b", corev1.HostPathDirectoryOrCreate))
		must(t, setUp(t, dir+"/a/file", corev1.HostPathFileOrCreate))
	}
	for path, want := range map[string]fs.FileMode{"/a/b": fs.ModeDir | 0o755, "/a/file": 0o644} {
		if info, err := os.Stat(dir + path); err != nil || info.Mode() != want {
			t.Errorf("%s: got %v, %v; want mode %v", path, info, err, want)
		}
	}
	plugintest.WantError(t, setUp(t, dir+"/a/b", corev1.HostPathFileOrCreate), "it is not a file")
	plugintest.WantError(t, setUp(t, dir+"/none/file", corev1.HostPathFileOrCreate), "no such file")
	must(t, plugintest.Value(hostpath.New().NewUnmounter("data", "uid"))(t).TearDown(t.Context()))
	plugintest.WantText(t, dir+"/a/file", "")
}

// TestInvalid: an invalid path or type is refused.
func TestInvalid(t *testing.T) {
	for path, kind := range map[string]corev1.HostPathType{"relative": "", "/a/../b": "", "": "", "/": "Folder"} {
		plugintest.WantInvalid(t, setUp(t, path, kind), "hostPath.")
	}
}

// recycle calls Recycle for a path.
func recycle(t *testing.T, path string) error {
	t.Helper()
	pv := &corev1.PersistentVolume{}
	pv.Spec.HostPath = &corev1.HostPathVolumeSource{Path: path}
	return hostpath.New().Recycle(t.Context(), pv)
}

// TestRecycle: Recycle empties a directory. It follows no links, and refuses mounts, files and the root
// directory.
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
	plugintest.WantEntries(t, dir, 0)
	must(t, os.Mkdir(dir+"/mounted", 0o700))
	testenv.Run(t, "mount", "--bind", outside, dir+"/mounted")
	t.Cleanup(func() { testenv.Run(t, "umount", dir+"/mounted") })
	if err := recycle(t, dir); !errors.Is(err, tree.ErrMounted) {
		t.Errorf("recycling a directory that contains a mount: got %v, want ErrMounted", err)
	}
	plugintest.WantInvalid(t, recycle(t, "//."), "the root of the node")
	plugintest.WantError(t, recycle(t, outside+"/kept"), "only directories")
	must(t, os.Symlink(outside, base+"/link"))
	plugintest.WantError(t, recycle(t, base+"/link/"), "symbolic link")
	plugintest.WantText(t, outside+"/kept", "")
}

// TestRecycleThroughLink: if a parent directory is a symbolic link, Recycle fails and does not change
// the link's target.
func TestRecycleThroughLink(t *testing.T) {
	testenv.RequireRoot(t)
	base := t.TempDir()
	must(t, os.MkdirAll(base+"/outside/volume", 0o700))
	must(t, os.WriteFile(base+"/outside/volume/kept", nil, 0o600))
	must(t, os.Symlink(base+"/outside", base+"/tenant"))
	plugintest.WantError(t, recycle(t, base+"/tenant/volume"), "symbolic link")
	plugintest.WantText(t, base+"/outside/volume/kept", "")
	must(t, recycle(t, base+"/outside/volume"))
	plugintest.WantMissing(t, base+"/outside/volume/kept")
}
