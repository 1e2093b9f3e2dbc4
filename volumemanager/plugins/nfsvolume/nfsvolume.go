package nfsvolume

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/volumemanager/plugins"
)

// Name is the kubelet's name of the plugin.
const Name = "kubernetes.io/nfs"

// ownSuperblock gives each mount its own superblock, so that an abort of one mount does not affect
// other mounts of the server.
const ownSuperblock = "nosharecache"

// Plugin is the volume plugin for nfs.
type Plugin struct {
	host         plugins.Host
	nfsUnmounter *mount.NFSUnmounter

	mu sync.Mutex
	// busy holds the paths of mounts that a call of Recycle or sweep uses.
	busy map[string]bool
}

var (
	_ plugins.PersistentVolumePlugin = (*Plugin)(nil)
	_ plugins.RecyclableVolumePlugin = (*Plugin)(nil)
)

// New creates the plugin.
func New(host plugins.Host, nfsUnmounter *mount.NFSUnmounter) *Plugin {
	return &Plugin{host: host, nfsUnmounter: nfsUnmounter, busy: map[string]bool{}}
}

// Name returns kubernetes.io/nfs.
func (p *Plugin) Name() string { return Name }

// CanSupport reports whether a spec has an nfs source.
func (p *Plugin) CanSupport(spec *plugins.Spec) bool { return sourceOf(spec) != nil }

// AccessModes returns all modes except ReadWriteOncePod, as in a kubelet.
func (p *Plugin) AccessModes() []corev1.PersistentVolumeAccessMode {
	return []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce, corev1.ReadOnlyMany, corev1.ReadWriteMany}
}

// Remounts returns false, because the kernel waits for an unreachable server.
func (p *Plugin) Remounts(*plugins.Spec) bool { return false }

func sourceOf(spec *plugins.Spec) *corev1.NFSVolumeSource {
	switch {
	case spec.PersistentVolume != nil:
		return spec.PersistentVolume.Spec.NFS
	case spec.Volume != nil:
		return spec.Volume.NFS
	}
	return nil
}

// NewMounter validates the server, the path and the mount options.
func (p *Plugin) NewMounter(spec *plugins.Spec, pod *corev1.Pod) (plugins.Mounter, error) {
	at, err := p.host.Paths().CheckedPodVolume(pod.UID, Name, spec.Name())
	if err != nil {
		return nil, err
	}
	export, err := exportOf(spec)
	return &mounter{path: at, export: export, readOnly: spec.ReadOnly || sourceOf(spec).ReadOnly}, err
}

// exportOf returns the server's directory of a spec, with the mount options.
func exportOf(spec *plugins.Spec) (mount.NFS, error) {
	source := sourceOf(spec)
	n := mount.NFS{Server: strings.TrimSuffix(strings.TrimPrefix(source.Server, "["), "]"), Path: source.Path, Options: []string{ownSuperblock}}
	if n.Server == "" || strings.ContainsAny(n.Server, "/[]\x00 ") {
		return n, plugins.Invalidf("nfs.server %q: want a name or an address", source.Server)
	}
	if err := plugins.CheckAbsolute("nfs.path", n.Path); err != nil || spec.PersistentVolume == nil {
		return n, err
	}
	options := spec.PersistentVolume.Spec.MountOptions
	if err := mount.CheckNFSOptions(options); err != nil {
		return n, plugins.Invalidf("mountOptions %q: %v: remove this option", options, err)
	}
	return n.With(options), nil
}

// NewUnmounter needs no manifest.
func (p *Plugin) NewUnmounter(name string, pod types.UID) (plugins.Unmounter, error) {
	at, err := p.host.Paths().CheckedPodVolume(pod, Name, name)
	return &unmounter{p, at}, err
}

type mounter struct {
	path     string
	export   mount.NFS
	readOnly bool
}

// Path returns the path of the mount.
func (m *mounter) Path() string { return m.path }

// SetUp mounts the server's directory. It does not access an existing mount, because its server
// may be unreachable. It does not change owners or modes, because the server controls them.
func (m *mounter) SetUp(ctx context.Context, _ plugins.MounterArgs) error {
	at, err := mount.OnPath(m.path)
	if err != nil {
		return err
	}
	if at != nil {
		return m.checkSource(at)
	}
	if err := os.MkdirAll(m.path, 0o750); err != nil {
		return err
	}
	var o mount.Options
	if m.readOnly {
		o = o.ReadOnly()
	}
	if err := mountExport(ctx, m.export, m.path, o); err != nil {
		return errors.Join(err, mount.RemoveTarget(m.path))
	}
	return nil
}

// checkSource returns an error if a mount is not that of the volume. The mount table shows a source
// without a trailing slash.
func (m *mounter) checkSource(at *mount.Entry) error {
	trim := func(source string) string { return strings.TrimRight(source, "/") }
	if !mount.IsNFS(at) || trim(at.Source) != trim(m.export.String()) {
		return fmt.Errorf("%s is mounted at %s, not nfs %s: unmount it, or give the pod another metadata.uid", at.Source, m.path, m.export.String())
	}
	return nil
}

// mountExport mounts a server's directory at a path.
func mountExport(ctx context.Context, export mount.NFS, path string, o mount.Options) error {
	detached, _, err := mount.MountNFS(ctx, export, o.Attr)
	if errors.Is(err, mount.ErrBadOption) {
		return plugins.Invalidf("mountOptions: %v: remove the option that the NFS client does not support", err)
	}
	if err != nil {
		return err
	}
	return errors.Join(detached.MoveTo(path), detached.Close())
}

type unmounter struct {
	p    *Plugin
	path string
}

// TearDown unmounts the volume and removes the empty directory.
func (u *unmounter) TearDown(ctx context.Context) error { return u.p.unmount(ctx, u.path) }

// unmount unmounts a path and removes the empty directory.
func (p *Plugin) unmount(ctx context.Context, path string) error {
	at, err := p.nfsUnmounter.Unmount(ctx, path)
	if err != nil {
		return err
	}
	if at != nil {
		return fmt.Errorf("%s at %s was not mounted by the volume manager: unmount it", at.Source, path)
	}
	return mount.RemoveTarget(path)
}
