package nfsvolume

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path"
	"slices"
	"strings"
	"sync"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/volumemanager/plugins"
)

// Name is the plugin's, as the kubelet has it.
const Name = "kubernetes.io/nfs"

// ownSuperblock keeps a volume's mount apart from all others of the server, so that one
// can be given up without the others.
const ownSuperblock = "nosharecache"

// Plugin is the volume plugin for nfs.
type Plugin struct {
	host    plugins.Host
	servers *mount.NFSUnmounter

	mu sync.Mutex
	// owned are the mounts that are being scrubbed, or unmounted after that.
	owned map[string]bool
}

var (
	_ plugins.PersistentVolumePlugin = (*Plugin)(nil)
	_ plugins.RecyclableVolumePlugin = (*Plugin)(nil)
)

// New makes the plugin; servers takes its mounts away.
func New(host plugins.Host, servers *mount.NFSUnmounter) *Plugin {
	return &Plugin{host: host, servers: servers, owned: map[string]bool{}}
}

// Name is kubernetes.io/nfs.
func (p *Plugin) Name() string { return Name }

// CanSupport tells whether a spec has an nfs source.
func (p *Plugin) CanSupport(spec *plugins.Spec) bool { return sourceOf(spec) != nil }

// AccessModes are all but ReadWriteOncePod, as a kubelet has it.
func (p *Plugin) AccessModes() []corev1.PersistentVolumeAccessMode {
	return []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce, corev1.ReadOnlyMany, corev1.ReadWriteMany}
}

// Remounts is false: a server that was away is waited for by the kernel.
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

// NewMounter checks the server's directory and the mount options.
func (p *Plugin) NewMounter(spec *plugins.Spec, pod *corev1.Pod) (plugins.Mounter, error) {
	at, err := p.podPath(spec.Name(), pod.UID)
	if err != nil {
		return nil, err
	}
	export, err := exportOf(spec)
	return &mounter{path: at, export: export, readOnly: spec.ReadOnly || sourceOf(spec).ReadOnly}, err
}

func exportOf(spec *plugins.Spec) (mount.NFS, error) {
	source := sourceOf(spec)
	n := mount.NFS{Server: strings.TrimSuffix(strings.TrimPrefix(source.Server, "["), "]"), Path: source.Path, Options: []string{ownSuperblock}}
	if n.Server == "" || strings.ContainsAny(n.Server, "/[]\x00 ") {
		return n, plugins.Invalidf("nfs.server %q: want a name or an address", source.Server)
	}
	if !path.IsAbs(n.Path) || slices.Contains(strings.Split(n.Path, "/"), "..") || strings.ContainsRune(n.Path, 0) {
		return n, plugins.Invalidf("nfs.path %q: want an absolute path without ..", n.Path)
	}
	if spec.PersistentVolume == nil {
		return n, nil
	}
	words := spec.PersistentVolume.Spec.MountOptions
	if err := mount.CheckNFSOptions(words); err != nil {
		return n, plugins.Invalidf("mountOptions %q: %v: remove it", words, err)
	}
	return n.With(words), nil
}

// NewUnmounter needs no manifest.
func (p *Plugin) NewUnmounter(name string, pod types.UID) (plugins.Unmounter, error) {
	at, err := p.podPath(name, pod)
	return &unmounter{p, at}, err
}

func (p *Plugin) podPath(name string, pod types.UID) (string, error) {
	err := errors.Join(plugins.CheckPart("metadata.uid", string(pod)), plugins.CheckPart("volume", name))
	return p.host.Paths().PodVolume(pod, Name, name), err
}

type mounter struct {
	path     string
	export   mount.NFS
	readOnly bool
}

// Path is where the server's directory is mounted.
func (m *mounter) Path() string { return m.path }

// SetUp mounts the server's directory. Of one that is mounted the server is not asked:
// it may be silent. No owner and no mode is changed there: they are the server's matter.
func (m *mounter) SetUp(ctx context.Context, _ plugins.MounterArgs) error {
	at, err := mount.OnPath(m.path)
	if err != nil {
		return err
	}
	if at != nil {
		return m.check(at)
	}
	if err := os.MkdirAll(m.path, 0o750); err != nil {
		return err
	}
	var o mount.Options
	if m.readOnly {
		o = o.ReadOnly()
	}
	if err := show(ctx, m.export, m.path, o); err != nil {
		return errors.Join(err, mount.RemoveTarget(m.path))
	}
	return nil
}

// check refuses what is mounted and is not the volume. The kernel leaves out a slash at
// the end of what it shows.
func (m *mounter) check(at *mount.Entry) error {
	trim := func(source string) string { return strings.TrimRight(source, "/") }
	if !mount.IsNFS(at) || trim(at.Source) != trim(m.export.String()) {
		return fmt.Errorf("%s is mounted at %s, not nfs %s: unmount it, or give the pod another metadata.uid", at.Source, m.path, m.export.String())
	}
	return nil
}

func show(ctx context.Context, export mount.NFS, path string, o mount.Options) (err error) {
	made, _, err := mount.MountNFS(ctx, export, o.Attr)
	if errors.Is(err, mount.ErrBadOption) {
		return plugins.Invalidf("mountOptions: %v: remove what the NFS client does not know", err)
	}
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, made.Close()) }()
	return made.MoveTo(path)
}

type unmounter struct {
	p    *Plugin
	path string
}

// TearDown unmounts as mount.NFSUnmounter does.
func (u *unmounter) TearDown(ctx context.Context) error { return u.p.unmount(ctx, u.path) }

// unmount takes away what is mounted at a path, and the empty directory.
func (p *Plugin) unmount(ctx context.Context, path string) error {
	at, err := p.servers.Unmount(ctx, path)
	if err != nil {
		return err
	}
	if at != nil {
		return fmt.Errorf("%s is mounted at %s, and not by the volume manager: unmount it", at.Source, path)
	}
	return mount.RemoveTarget(path)
}
