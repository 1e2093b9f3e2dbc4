package nfsvolume_test

import (
	"context"
	"errors"
	"os"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/volumemanager/plugins"
	"github.com/trivet-csi/trivet/volumemanager/plugins/nfsvolume"
)

func TestMain(m *testing.M) { testenv.Main(m) }

type host struct {
	plugins.Host
	root string
}

func (h host) Paths() plugins.Paths { return plugins.Paths{Root: h.root} }

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

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

func TestSpecs(t *testing.T) {
	p := nfsvolume.New(host{root: t.TempDir()}, mount.NewNFSUnmounter())
	for _, spec := range []*plugins.Spec{inline("nas", "/tank"), inline("[fd00::1]", "/tank"), persistent("10.0.0.1", "/", "nfsvers=4.1", "hard")} {
		if _, err := p.NewMounter(spec, pod()); err != nil || !p.CanSupport(spec) {
			t.Errorf("%s: %v", spec.Name(), err)
		}
	}
	for says, spec := range map[string]*plugins.Spec{
		`nfs.server ""`:      inline("", "/tank"),
		`nfs.server "a/b"`:   inline("a/b", "/tank"),
		`nfs.path "tank"`:    inline("nas", "tank"),
		`nfs.path "/a/../b"`: inline("nas", "/a/../b"),
		"addr=10.0.0.2":      persistent("nas", "/tank", "addr=10.0.0.2"),
		"sharecache":         persistent("nas", "/tank", "sharecache"),
		"bind":               persistent("nas", "/tank", "bind"),
	} {
		var invalid *plugins.InvalidError
		if _, err := p.NewMounter(spec, pod()); !errors.As(err, &invalid) || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v", says, err)
		}
	}
}

// TestForeignMount: what else is mounted where the volume was to be is left alone.
func TestForeignMount(t *testing.T) {
	testenv.RequireRoot(t)
	p := nfsvolume.New(host{root: t.TempDir()}, mount.NewNFSUnmounter())
	m, err := p.NewMounter(inline("nas", "/tank"), pod())
	must(t, err)
	u, err := p.NewUnmounter("data", "one")
	must(t, err)
	must(t, u.TearDown(t.Context()))
	testenv.Run(t, "mkdir", "-p", m.Path())
	testenv.Run(t, "mount", "-t", "tmpfs", "none", m.Path())
	t.Cleanup(func() { must(t, mount.Unmount(m.Path())) })
	if err := m.SetUp(t.Context(), plugins.MounterArgs{}); err == nil || !strings.Contains(err.Error(), "unmount it") {
		t.Errorf("setting up: %v", err)
	}
	if err := u.TearDown(t.Context()); err == nil || !strings.Contains(err.Error(), "unmount it") {
		t.Errorf("taking down: %v", err)
	}
}

// TestSweep: what calls of Recycle left that were cut off goes, but for what else is
// mounted there.
func TestSweep(t *testing.T) {
	testenv.RequireRoot(t)
	root := t.TempDir()
	p := nfsvolume.New(host{root: root}, mount.NewNFSUnmounter())
	must(t, p.Run(t.Context()))
	recycling := plugins.Paths{Root: root}.Plugin(nfsvolume.Name) + "/recycling"
	testenv.Run(t, "mkdir", "-p", recycling+"/before", recycling+"/foreign")
	testenv.Run(t, "mount", "-t", "tmpfs", "none", recycling+"/foreign")
	t.Cleanup(func() { _ = mount.Unmount(recycling + "/foreign") })
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	must(t, p.Run(ctx)) // once
	if left, err := os.ReadDir(recycling); err != nil || len(left) != 1 || left[0].Name() != "foreign" {
		t.Errorf("there is %v, %v", left, err)
	}
	if at, err := mount.OnPath(recycling + "/foreign"); err != nil || at == nil {
		t.Errorf("what is another's is gone: %v", err)
	}
	must(t, mount.Unmount(recycling+"/foreign"))
	must(t, p.Run(t.Context()))
	if left, err := os.ReadDir(recycling); err != nil || len(left) > 0 {
		t.Errorf("there is %v, %v", left, err)
	}
}
