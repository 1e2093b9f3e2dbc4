package hostpath

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/trivet-csi/trivet/linux/sys"
	"github.com/trivet-csi/trivet/linux/tree"
	"github.com/trivet-csi/trivet/volumemanager/plugins"
)

// Name is the kubelet's name of the plugin.
const Name = "kubernetes.io/host-path"

// Plugin is the volume plugin for hostPath. A pod uses the path itself, so nothing is mounted.
type Plugin struct{}

var (
	_ plugins.PersistentVolumePlugin = (*Plugin)(nil)
	_ plugins.RecyclableVolumePlugin = (*Plugin)(nil)
)

// New creates the plugin.
func New() *Plugin { return &Plugin{} }

// Name returns kubernetes.io/host-path.
func (p *Plugin) Name() string { return Name }

// CanSupport reports whether a spec has a hostPath.
func (p *Plugin) CanSupport(spec *plugins.Spec) bool { return sourceOf(spec) != nil }

// AccessModes returns ReadWriteOnce, because the path is on one node.
func (p *Plugin) AccessModes() []corev1.PersistentVolumeAccessMode {
	return []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}
}

// Remounts returns false, because the path is the volume.
func (p *Plugin) Remounts(*plugins.Spec) bool { return false }

func sourceOf(spec *plugins.Spec) *corev1.HostPathVolumeSource {
	switch {
	case spec.PersistentVolume != nil:
		return spec.PersistentVolume.Spec.HostPath
	case spec.Volume != nil:
		return spec.Volume.HostPath
	}
	return nil
}

// NewMounter validates path and type.
func (p *Plugin) NewMounter(spec *plugins.Spec, _ *corev1.Pod) (plugins.Mounter, error) {
	source := sourceOf(spec)
	m := &mounter{path: source.Path}
	if source.Type != nil {
		m.kind = *source.Type
	}
	if _, ok := kinds[m.kind]; !ok && m.kind != corev1.HostPathUnset {
		return nil, plugins.Invalidf("hostPath.type %q: want DirectoryOrCreate, Directory, FileOrCreate, File, Socket, CharDevice, BlockDevice, or none", m.kind)
	}
	return m, plugins.CheckAbsolute("hostPath.path", m.path)
}

// NewUnmounter returns an Unmounter that does nothing.
func (p *Plugin) NewUnmounter(string, types.UID) (plugins.Unmounter, error) { return unmounter{}, nil }

type unmounter struct{}

// TearDown keeps the path, even if SetUp created it.
func (unmounter) TearDown(context.Context) error { return nil }

// Recycle removes the content of the directory. It removes symbolic links in the directory and does
// not follow them. No part of the path may be a symbolic link, because a pod with access to a
// parent directory could have created it. Recycle keeps a mount in the directory, and returns
// an error.
func (p *Plugin) Recycle(ctx context.Context, pv *corev1.PersistentVolume) error {
	path := pv.Spec.HostPath.Path
	if err := plugins.CheckAbsolute("hostPath.path", path); err != nil {
		return err
	}
	if path = filepath.Clean(path); path == "/" {
		return plugins.Invalidf("persistentVolumeReclaimPolicy Recycle: hostPath.path %q is the root of the node: use Retain", path)
	}
	dir, err := sys.OpenDirectory(path)
	if errors.Is(err, syscall.ELOOP) {
		return fmt.Errorf("hostPath.path %q: a part of it is a symbolic link, which Recycle does not follow: give the path without links", path)
	}
	if err != nil {
		return fmt.Errorf("hostPath.path %q: %w: only directories are recycled", path, err)
	}
	defer dir.Close()
	return tree.Empty(ctx, dir)
}

// kind contains the requirements of a hostPath.type.
type kind struct {
	mode        fs.FileMode
	description string                  // in errors
	create      func(path string) error // nil if the path must exist
}

// kinds has all types except the empty one, which requires nothing.
var kinds = map[corev1.HostPathType]kind{
	corev1.HostPathDirectoryOrCreate: {fs.ModeDir, "a directory", func(path string) error { return os.MkdirAll(path, 0o755) }},
	corev1.HostPathDirectory:         {fs.ModeDir, "a directory", nil},
	corev1.HostPathFileOrCreate:      {0, "a file", createFile},
	corev1.HostPathFile:              {0, "a file", nil},
	corev1.HostPathSocket:            {fs.ModeSocket, "a socket", nil},
	corev1.HostPathCharDev:           {fs.ModeDevice | fs.ModeCharDevice, "a character device", nil},
	corev1.HostPathBlockDev:          {fs.ModeDevice, "a block device", nil},
}

func createFile(path string) error {
	f, err := os.OpenFile(path, os.O_RDONLY|os.O_CREATE|os.O_EXCL, 0o644)
	if err != nil {
		return err
	}
	return f.Close()
}

type mounter struct {
	path string
	kind corev1.HostPathType
}

// Path returns the hostPath itself.
func (m *mounter) Path() string { return m.path }

// SetUp checks that the path has the requested type. It creates a missing path only for the types
// DirectoryOrCreate and FileOrCreate. It follows symbolic links, as a kubelet does. It does not
// change owners or modes.
func (m *mounter) SetUp(context.Context, plugins.MounterArgs) error {
	if m.kind == corev1.HostPathUnset {
		return nil
	}
	want := kinds[m.kind]
	info, err := os.Stat(m.path)
	if errors.Is(err, fs.ErrNotExist) && want.create != nil {
		if err := want.create(m.path); err != nil {
			return fmt.Errorf("hostPath.type %s: %w", m.kind, err)
		}
		info, err = os.Stat(m.path)
	}
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("hostPath.path %q: the path does not exist, and type %s does not create it: create it, or use another type", m.path, m.kind)
	}
	if err != nil {
		return fmt.Errorf("hostPath.path %q: %w", m.path, err)
	}
	if info.Mode().Type() != want.mode {
		return fmt.Errorf("hostPath.path %q: it is not %s, as type %s requires: correct the path or the type", m.path, want.description, m.kind)
	}
	return nil
}
