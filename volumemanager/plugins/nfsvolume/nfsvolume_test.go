package nfsvolume_test

import (
	"context"
	"os"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/volumemanager/plugins"
	"github.com/trivet-csi/trivet/volumemanager/plugins/nfsvolume"
	"github.com/trivet-csi/trivet/volumemanager/plugins/plugintest"
)

func TestMain(m *testing.M) { testenv.Main(m) }

var must = plugintest.Must

func inline(server, path string) *plugins.Spec {
	source := &corev1.NFSVolumeSource{Server: server, Path: path}
	return &plugins.Spec{Volume: &corev1.Volume{Name: "data", VolumeSource: corev1.VolumeSource{NFS: source}}}
}

func persistent(server, path string, options ...string) *plugins.Spec {
	pv := &corev1.PersistentVolume{}
	pv.Name = "data"
	pv.Spec.NFS = &corev1.NFSVolumeSource{Server: server, Path: path}
	pv.Spec.MountOptions = options
	return &plugins.Spec{PersistentVolume: pv}
}

func pod() *corev1.Pod {
	p := &corev1.Pod{}
	p.UID = "one"
	return p
}

// TestSpecs: NewMounter accepts valid servers, paths and mount options, and refuses invalid ones with an
// error that names them.
func TestSpecs(t *testing.T) {
	p := nfsvolume.New(plugintest.NewHost(t.TempDir()), mount.NewNFSUnmounter())
	for name, spec := range map[string]*plugins.Spec{
		"host name": inline("nas", "/tank"), "IPv6 address": inline("[fd00::1]", "/tank"), "mount options": persistent("10.0.0.1", "/", "nfsvers=4.1", "hard"),
	} {
		if _, err := p.NewMounter(spec, pod()); err != nil || !p.CanSupport(spec) {
			t.Errorf("%s: got error %v and CanSupport %t, want no error and true", name, err, p.CanSupport(spec))
		}
	}
	for want, spec := range map[string]*plugins.Spec{
		`nfs.server ""`:      inline("", "/tank"),
		`nfs.server "a/b"`:   inline("a/b", "/tank"),
		`nfs.path "tank"`:    inline("nas", "tank"),
		`nfs.path "/a/../b"`: inline("nas", "/a/../b"),
		"addr=10.0.0.2":      persistent("nas", "/tank", "addr=10.0.0.2"),
		"sharecache":         persistent("nas", "/tank", "sharecache"),
		"bind":               persistent("nas", "/tank", "bind"),
	} {
		_, err := p.NewMounter(spec, pod())
		plugintest.WantInvalid(t, err, want)
	}
}

// TestForeignMount: SetUp and TearDown refuse a path at which another filesystem is mounted.
func TestForeignMount(t *testing.T) {
	testenv.RequireRoot(t)
	p := nfsvolume.New(plugintest.NewHost(t.TempDir()), mount.NewNFSUnmounter())
	m := plugintest.Value(p.NewMounter(inline("nas", "/tank"), pod()))(t)
	u := plugintest.Value(p.NewUnmounter("data", "one"))(t)
	must(t, u.TearDown(t.Context()))
	testenv.Run(t, "mkdir", "-p", m.Path())
	testenv.Run(t, "mount", "-t", "tmpfs", "none", m.Path())
	t.Cleanup(func() { must(t, mount.Unmount(m.Path())) })
	plugintest.WantError(t, m.SetUp(t.Context(), plugins.MounterArgs{}), "unmount it")
	plugintest.WantError(t, u.TearDown(t.Context()), "unmount it")
}

// TestSweep: Run removes the mounts of interrupted calls of Recycle, and keeps other mounts.
func TestSweep(t *testing.T) {
	testenv.RequireRoot(t)
	root := t.TempDir()
	p := nfsvolume.New(plugintest.NewHost(root), mount.NewNFSUnmounter())
	must(t, p.Run(t.Context()))
	recycling := plugins.Paths{Root: root}.Plugin(nfsvolume.Name) + "/recycling"
	testenv.Run(t, "mkdir", "-p", recycling+"/interrupted", recycling+"/foreign")
	testenv.Run(t, "mount", "-t", "tmpfs", "none", recycling+"/foreign")
	t.Cleanup(func() { _ = mount.Unmount(recycling + "/foreign") })
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	must(t, p.Run(ctx)) // a single sweep
	if left, err := os.ReadDir(recycling); err != nil || len(left) != 1 || left[0].Name() != "foreign" {
		t.Errorf("got entries %v, %v; want only foreign", left, err)
	}
	if plugintest.MountAt(t, recycling+"/foreign") == nil {
		t.Error("the foreign mount was removed")
	}
	must(t, mount.Unmount(recycling+"/foreign"))
	must(t, p.Run(t.Context()))
	plugintest.WantEntries(t, recycling, 0)
}
