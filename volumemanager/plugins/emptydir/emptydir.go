package emptydir

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/volumemanager/plugins"
)

// Name is the kubelet's name of the plugin.
const Name = "kubernetes.io/empty-dir"

// mode is the mode of a volume's directory. It gives everybody access, because containers may run as any
// user.
const mode = 0o777

// Plugin is the volume plugin for emptyDir. Below Paths.Plugin it keeps a record of each
// volume with the default medium.
type Plugin struct {
	host plugins.Host
	// recording is held while a quota ID is allocated, and while a record is removed.
	recording sync.Mutex
	// swept is true once no records remain of volumes that were removed before this process
	// started.
	swept atomic.Bool
}

// New creates the plugin.
func New(host plugins.Host) *Plugin { return &Plugin{host: host} }

// Name returns kubernetes.io/empty-dir.
func (p *Plugin) Name() string { return Name }

// CanSupport reports whether a spec is an emptyDir.
func (p *Plugin) CanSupport(spec *plugins.Spec) bool {
	return spec.PersistentVolume == nil && spec.Volume != nil && spec.Volume.EmptyDir != nil
}

// Remounts returns false, because the content belongs to the pod.
func (p *Plugin) Remounts(*plugins.Spec) bool { return false }

// NewMounter validates the medium and the size limit.
func (p *Plugin) NewMounter(spec *plugins.Spec, pod *corev1.Pod) (plugins.Mounter, error) {
	v, err := p.volume(spec.Name(), pod.UID)
	if err != nil {
		return nil, err
	}
	source := spec.Volume.EmptyDir
	m := &mounter{volume: v, medium: source.Medium}
	if source.SizeLimit != nil {
		m.limit, m.size = source.SizeLimit.String(), source.SizeLimit.Value()
		if m.size < 0 {
			return nil, plugins.Invalidf("emptyDir.sizeLimit %q: want a size that is not negative", m.limit)
		}
	}
	switch {
	case m.medium == corev1.StorageMediumDefault:
		return m, nil
	case m.medium == corev1.StorageMediumMemory:
		requested := m.size
		if m.size, err = memorySize(requested, pod); m.size != requested {
			m.limit = "" // a smaller limit applies
		}
		return m, err
	case m.medium == corev1.StorageMediumHugePages, strings.HasPrefix(string(m.medium), string(corev1.StorageMediumHugePagesPrefix)):
		m.page, err = pageSize(m.medium, pod)
		return m, err
	}
	return nil, plugins.Invalidf("emptyDir.medium %q: want Memory, HugePages, HugePages-<size>, or none for the disk", m.medium)
}

// NewUnmounter needs no manifest.
func (p *Plugin) NewUnmounter(name string, pod types.UID) (plugins.Unmounter, error) {
	return p.volume(name, pod)
}

// volume is the path of a pod's volume, and the key of its record.
type volume struct {
	p *Plugin
	// key is the name of the volume's record: <pod UID>.<volume name>. A UID has no dot.
	key, path string
}

func (p *Plugin) volume(name string, pod types.UID) (*volume, error) {
	path, err := p.host.Paths().CheckedPodVolume(pod, Name, name)
	if err != nil {
		return nil, err
	}
	if strings.Contains(string(pod), ".") {
		return nil, plugins.Invalidf("metadata.uid %q: want a UID without a dot", pod)
	}
	return &volume{p, string(pod) + "." + name, path}, nil
}

// mounter is a volume with the settings in the manifests of its pod.
type mounter struct {
	*volume
	medium corev1.StorageMedium
	// limit is the sizeLimit in the manifest; empty if there is none, or if a smaller limit
	// applies to memory.
	limit string
	// size is the limit in bytes; 0 if there is no limit.
	size int64
	// page is the size of a huge page in bytes; 0 for other media.
	page     int64
	warnings []string
}

// Path returns the volume's directory.
func (m *mounter) Path() string { return m.path }

// Warnings reports a sizeLimit that is not enforced.
func (m *mounter) Warnings() []string { return m.warnings }

// SetUp creates the volume if it does not exist. In an existing volume it only changes the size
// limit.
func (m *mounter) SetUp(ctx context.Context, args plugins.MounterArgs) error {
	m.warnings = nil
	rec, err := m.p.load(m.key)
	if err != nil {
		return err
	}
	at, err := mount.OnPath(m.path)
	if err != nil {
		return err
	}
	if err := m.checkMedium(at, rec); err != nil {
		return err
	}
	if m.medium == corev1.StorageMediumDefault {
		err = m.setUpDisk(ctx, rec, args)
	} else {
		err = m.setUpMemory(ctx, at, args)
	}
	if errors.Is(err, syscall.ENOSPC) {
		err = fmt.Errorf("%w: make room on the filesystem of %s", err, m.p.host.Paths().Root)
	}
	if err != nil {
		return &plugins.UncertainError{Err: fmt.Errorf("emptyDir: %w", err)}
	}
	return nil
}

// checkMedium returns a *plugins.InvalidError if the volume exists on another medium.
func (m *mounter) checkMedium(at *mount.Entry, rec *record) error {
	current := "the disk"
	switch {
	case at != nil:
		current = at.FSType
	case rec == nil:
		return nil
	}
	if current == m.fsType() {
		return nil
	}
	return plugins.Invalidf("emptyDir.medium %q: the volume is already on %s, and its content stays there: change the medium back, or give the pod another metadata.uid", m.medium, current)
}

// fsType returns the medium's filesystem type in the mount table; "the disk" for the default medium.
func (m *mounter) fsType() string {
	switch {
	case m.page != 0:
		return hugePages
	case m.medium == corev1.StorageMediumMemory:
		return memory
	}
	return "the disk"
}

// TearDown removes the volume with its content. It fails without any change if a mount at or below the
// path was not created by the plugin.
func (v *volume) TearDown(ctx context.Context) error {
	for {
		mounts, err := mount.Below(v.path)
		if err != nil {
			return err
		}
		if len(mounts) == 0 {
			break
		}
		if err := v.unmount(mounts); err != nil {
			return fmt.Errorf("emptyDir: %w", err)
		}
	}
	if err := v.removeDisk(ctx); err != nil {
		return fmt.Errorf("emptyDir: %w", err)
	}
	return nil
}

// unmount removes the topmost mount at the volume's path. It returns an error if one of the mounts at or
// below the path was not created by the plugin.
func (v *volume) unmount(mounts []*mount.Entry) error {
	for _, e := range mounts {
		if filepath.Base(e.Mountpoint) != filepath.Base(v.path) || e.FSType != memory && e.FSType != hugePages {
			return fmt.Errorf("%s at %s was not mounted by the volume manager: unmount it", e.FSType, e.Mountpoint)
		}
	}
	return mount.Unmount(v.path)
}

// makeParent creates the parent directory of the volume.
func (v *volume) makeParent() error { return os.MkdirAll(filepath.Dir(v.path), 0o750) }
