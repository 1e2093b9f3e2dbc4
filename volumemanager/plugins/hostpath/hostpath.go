package hostpath

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/trivet-csi/trivet/linux/sys"
	"github.com/trivet-csi/trivet/linux/tree"
	"github.com/trivet-csi/trivet/volumemanager/plugins"
)

// Name is the plugin's, as the kubelet has it.
const Name = "kubernetes.io/host-path"

// Plugin is the volume plugin for hostPath. A volume is its path: nothing is mounted, and
// nothing is undone.
type Plugin struct{}

var (
	_ plugins.PersistentVolumePlugin = (*Plugin)(nil)
	_ plugins.RecyclableVolumePlugin = (*Plugin)(nil)
)

// New makes the plugin.
func New() *Plugin { return &Plugin{} }

// Name is kubernetes.io/host-path.
func (p *Plugin) Name() string { return Name }

// CanSupport tells whether a spec has a hostPath.
func (p *Plugin) CanSupport(spec *plugins.Spec) bool { return sourceOf(spec) != nil }

// AccessModes are of one machine.
func (p *Plugin) AccessModes() []corev1.PersistentVolumeAccessMode {
	return []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}
}

// Remounts is false: the path is the volume.
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

// NewMounter checks path and type.
func (p *Plugin) NewMounter(spec *plugins.Spec, _ *corev1.Pod) (plugins.Mounter, error) {
	source := sourceOf(spec)
	m := &mounter{path: source.Path}
	if source.Type != nil {
		m.kind = *source.Type
	}
	if _, ok := kinds[m.kind]; !ok && m.kind != corev1.HostPathUnset {
		return nil, plugins.Invalidf("hostPath.type %q: want DirectoryOrCreate, Directory, FileOrCreate, File, Socket, CharDevice, BlockDevice, or none", m.kind)
	}
	return m, checkPath(m.path)
}

func checkPath(path string) error {
	if !filepath.IsAbs(path) || slices.Contains(strings.Split(path, "/"), "..") || strings.ContainsRune(path, 0) {
		return plugins.Invalidf("hostPath.path %q: want an absolute path without ..", path)
	}
	return nil
}

// NewUnmounter gives one that does nothing.
func (p *Plugin) NewUnmounter(string, types.UID) (plugins.Unmounter, error) { return unmounter{}, nil }

type unmounter struct{}

// TearDown leaves the path as it is, also where SetUp has made it.
func (unmounter) TearDown(context.Context) error { return nil }

// Recycle removes all that is in the directory. Links in it are removed, not followed. No
// part of the path may be a link: a pod that has a directory above may have made it. What
// is mounted in the directory is left alone, and an error.
func (p *Plugin) Recycle(ctx context.Context, pv *corev1.PersistentVolume) error {
	path := pv.Spec.HostPath.Path
	if err := checkPath(path); err != nil {
		return err
	}
	if path = filepath.Clean(path); path == "/" {
		return plugins.Invalidf("persistentVolumeReclaimPolicy Recycle: hostPath.path %q is all of the machine: use Retain", path)
	}
	dir, err := sys.OpenDirectory(path)
	if errors.Is(err, syscall.ELOOP) {
		return fmt.Errorf("hostPath.path %q: a part of it is a symbolic link, and Recycle follows none: give the path that it leads to", path)
	}
	if err != nil {
		return fmt.Errorf("hostPath.path %q: %w: only directories are recycled", path, err)
	}
	defer dir.Close()
	return tree.Empty(ctx, dir)
}

// kind is what a type asks for.
type kind struct {
	mode   fs.FileMode
	called string
	create func(path string) error
}

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

// Path is the hostPath itself.
func (m *mounter) Path() string { return m.path }

// SetUp makes sure that the path is what the type says. Symbolic links are followed, as a
// kubelet does: the path is the administrator's, and what it leads to counts. No owner and
// no mode of what is there is changed.
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
		return fmt.Errorf("hostPath.path %q: there is no such path, and type %s does not make it: make it, or use another type", m.path, m.kind)
	}
	if err != nil {
		return fmt.Errorf("hostPath.path %q: %w", m.path, err)
	}
	if info.Mode().Type() != want.mode {
		return fmt.Errorf("hostPath.path %q: it is not %s, which type %s asks for: correct the path or the type", m.path, want.called, m.kind)
	}
	return nil
}
