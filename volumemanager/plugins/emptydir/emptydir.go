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

// Name is the plugin's, as the kubelet has it.
const Name = "kubernetes.io/empty-dir"

// mode is that of a volume's directory: containers run as anybody.
const mode = 0o777

// Plugin is the volume plugin for emptyDir. It keeps a record of each volume on the disk
// below Paths.Plugin.
type Plugin struct {
	host plugins.Host
	// recording is held while records and the IDs in them change.
	recording sync.Mutex
	// swept: no record is left of a volume that was gone before this process began.
	swept atomic.Bool
}

// New makes the plugin.
func New(host plugins.Host) *Plugin { return &Plugin{host: host} }

// Name is kubernetes.io/empty-dir.
func (p *Plugin) Name() string { return Name }

// CanSupport tells whether a spec is an emptyDir.
func (p *Plugin) CanSupport(spec *plugins.Spec) bool {
	return spec.PersistentVolume == nil && spec.Volume != nil && spec.Volume.EmptyDir != nil
}

// Remounts is false: what is in the volume is the pod's.
func (p *Plugin) Remounts(*plugins.Spec) bool { return false }

// NewMounter finds out what the volume is to be made of.
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
			return nil, plugins.Invalidf("emptyDir.sizeLimit %q: want a size", m.limit)
		}
	}
	switch {
	case m.medium == corev1.StorageMediumDefault:
		return m, nil
	case m.medium == corev1.StorageMediumMemory:
		asked := m.size
		if m.size, err = memorySize(asked, pod); m.size != asked {
			m.limit = "" // a smaller bound is in force
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

// volume is where one of a pod is.
type volume struct {
	p *Plugin
	// key names the volume's record; a UID has no dot.
	key, path string
}

func (p *Plugin) volume(name string, pod types.UID) (*volume, error) {
	if err := errors.Join(plugins.CheckPart("metadata.uid", string(pod)), plugins.CheckPart("volume", name)); err != nil {
		return nil, err
	}
	if strings.Contains(string(pod), ".") {
		return nil, plugins.Invalidf("metadata.uid %q: want one without a dot", pod)
	}
	return &volume{p, string(pod) + "." + name, p.host.Paths().PodVolume(pod, Name, name)}, nil
}

type mounter struct {
	*volume
	medium corev1.StorageMedium
	// limit is the sizeLimit as the manifest has it; empty if it has none, or memory is
	// bounded by less.
	limit string
	// size is how much the volume may have, in bytes; 0 is no limit.
	size int64
	// page is the size of a huge page in bytes; 0 for other media.
	page     int64
	warnings []string
}

// Path is the volume's directory.
func (m *mounter) Path() string { return m.path }

// Warnings tells of a sizeLimit that nothing enforces.
func (m *mounter) Warnings() []string { return m.warnings }

// SetUp makes what is missing, and leaves alone what is there; only a sizeLimit follows
// the manifest.
func (m *mounter) SetUp(ctx context.Context, args plugins.MounterArgs) error {
	m.warnings = nil
	made, err := m.p.load(m.key)
	if err != nil {
		return err
	}
	at, err := mount.OnPath(m.path)
	if err != nil {
		return err
	}
	if err := m.checkMedium(at, made); err != nil {
		return err
	}
	if m.medium == corev1.StorageMediumDefault {
		err = m.setUpDisk(ctx, made, args)
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

// checkMedium refuses a volume that is there already, of another medium.
func (m *mounter) checkMedium(at *mount.Entry, made *record) error {
	have := "the disk"
	switch {
	case at != nil:
		have = at.FSType
	case made == nil:
		return nil
	}
	if have == m.fsType() {
		return nil
	}
	return plugins.Invalidf("emptyDir.medium %q: the volume is on %s already, and keeps what is in it: change it back, or give the pod another metadata.uid", m.medium, have)
}

// fsType is that of the mount that a volume has by its medium.
func (m *mounter) fsType() string {
	switch {
	case m.page != 0:
		return hugePages
	case m.medium == corev1.StorageMediumMemory:
		return memory
	}
	return "the disk"
}

// TearDown removes the volume with all that is in it. It does nothing while anything is
// mounted there that is not the volume.
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

func (v *volume) unmount(mounts []*mount.Entry) error {
	for _, e := range mounts {
		if filepath.Base(e.Mountpoint) != filepath.Base(v.path) || e.FSType != memory && e.FSType != hugePages {
			return fmt.Errorf("%s is mounted at %s, and not by the volume manager: unmount it", e.FSType, e.Mountpoint)
		}
	}
	return mount.Unmount(v.path)
}

// makeAbove makes the directory that has a pod's volumes.
func (v *volume) makeAbove() error { return os.MkdirAll(filepath.Dir(v.path), 0o750) }
