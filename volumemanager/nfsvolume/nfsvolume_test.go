package nfsvolume_test

import (
	"errors"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/mount"
	"github.com/trivet-csi/trivet/volumemanager/nfsvolume"
	"github.com/trivet-csi/trivet/volumemanager/plugin"
)

func TestMain(m *testing.M) { testenv.Main(m) }

type host struct {
	plugin.Host
	root string
}

func (h host) Paths() plugin.Paths { return plugin.Paths{Root: h.root} }

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func inline(server, path string) *plugin.Spec {
	source := &corev1.NFSVolumeSource{Server: server, Path: path}
	return &plugin.Spec{Volume: &corev1.Volume{Name: "data", VolumeSource: corev1.VolumeSource{NFS: source}}}
}

func persistent(server, path string, options ...string) *plugin.Spec {
	pv := &corev1.PersistentVolume{}
	pv.Name = "data"
	pv.Spec.NFS = &corev1.NFSVolumeSource{Server: server, Path: path}
	pv.Spec.MountOptions = options
	return &plugin.Spec{PersistentVolume: pv}
}

func pod() *corev1.Pod {
	p := &corev1.Pod{}
	p.UID = "one"
	return p
}

func TestSpecs(t *testing.T) {
	p := nfsvolume.New(host{root: t.TempDir()})
	for _, spec := range []*plugin.Spec{inline("nas", "/tank"), inline("[fd00::1]", "/tank"), persistent("10.0.0.1", "/", "nfsvers=4.1", "hard")} {
		if _, err := p.NewMounter(spec, pod()); err != nil || !p.CanSupport(spec) {
			t.Errorf("%s: %v", spec.Name(), err)
		}
	}
	for says, spec := range map[string]*plugin.Spec{
		`nfs.server ""`:      inline("", "/tank"),
		`nfs.server "a/b"`:   inline("a/b", "/tank"),
		`nfs.path "tank"`:    inline("nas", "tank"),
		`nfs.path "/a/../b"`: inline("nas", "/a/../b"),
		"addr=10.0.0.2":      persistent("nas", "/tank", "addr=10.0.0.2"),
		"sharecache":         persistent("nas", "/tank", "sharecache"),
		"bind":               persistent("nas", "/tank", "bind"),
	} {
		var invalid *plugin.InvalidError
		if _, err := p.NewMounter(spec, pod()); !errors.As(err, &invalid) || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v", says, err)
		}
	}
}

// TestForeignMount: what else is mounted where the volume was to be is left alone.
func TestForeignMount(t *testing.T) {
	testenv.RequireRoot(t)
	p := nfsvolume.New(host{root: t.TempDir()})
	m, err := p.NewMounter(inline("nas", "/tank"), pod())
	must(t, err)
	u, err := p.NewUnmounter("data", "one")
	must(t, err)
	must(t, u.TearDown(t.Context()))
	testenv.Run(t, "mkdir", "-p", m.Path())
	testenv.Run(t, "mount", "-t", "tmpfs", "none", m.Path())
	t.Cleanup(func() { must(t, mount.Unmount(m.Path())) })
	if err := m.SetUp(t.Context(), plugin.MounterArgs{}); err == nil || !strings.Contains(err.Error(), "unmount it") {
		t.Errorf("setting up: %v", err)
	}
	if err := u.TearDown(t.Context()); err == nil || !strings.Contains(err.Error(), "unmount it") {
		t.Errorf("taking down: %v", err)
	}
}
