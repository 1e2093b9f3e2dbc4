package reconciler_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"

	"github.com/trivet-csi/trivet/volumemanager/plugins"
	"github.com/trivet-csi/trivet/volumemanager/state"
)

// fakeHost is a machine with fake plugins. It outlives managers. Like real plugins, the fake plugins
// keep a file or directory for each volume that may be set up.
type fakeHost struct {
	paths plugins.Paths
	// script returns the result of an operation. If it is nil, all operations succeed.
	script func(operation string) result
	// reportForbidden reports a forbidden operation.
	reportForbidden func(format string, args ...any)
	// desired, if set, reports whether a pod has requested a volume for some time.
	desired func(state.ID) bool
	// unstaged contains the handles of volumes that need no device mount.
	unstaged map[string]bool
	// handles contains the handles of volumes by name. The default handle of volume x is h-x.
	handles map[string]string

	mu sync.Mutex
	// attached and devices contain the handles of attached volumes and of mounted devices.
	attached map[string]bool
	devices  map[string]bool
	// mounts contains the handle of each mounted volume.
	mounts map[state.ID]string
	// sizes contains the sizes to which volumes were expanded, by handle.
	sizes map[string]string
	// exclusive contains the handles of volumes with access mode ReadWriteOncePod.
	exclusive map[string]bool
	// pending contains the running operations as VOLUME|OWNER, with the owner as in func owner.
	pending map[string]bool
	// log contains the operations since the last call of calls or count.
	log []string
	// limit is the volume limit of the driver; 0 for none.
	limit int64
	// unregistered is set while the driver is not registered.
	unregistered bool
	// zone is the topology that the registered driver reports.
	zone string
}

// result is the scripted result of an operation.
type result struct {
	duration time.Duration
	err      error
	// takesEffect is set if the operation takes effect although it fails.
	takesEffect bool
	panic       bool
}

func newFakeHost(root string) *fakeHost {
	return &fakeHost{
		paths: plugins.Paths{Root: root}, mounts: map[state.ID]string{},
		unstaged: map[string]bool{}, attached: map[string]bool{}, devices: map[string]bool{}, exclusive: map[string]bool{},
		pending: map[string]bool{}, handles: map[string]string{}, sizes: map[string]string{},
	}
}

// do runs an operation on a volume. If the ID is not zero, the operation concerns only the volume of
// that pod. check runs before the operation, effect if it takes effect, both with mu held.
func (h *fakeHost) do(ctx context.Context, operation, volume string, id state.ID, check func(), effect func() error) error {
	script := h.begin(operation, volume, id, check)
	defer h.end(volume, id)
	var r result
	if script != nil {
		r = script(operation)
	}
	if r.duration > 0 {
		select {
		case <-ctx.Done():
			r.err = &plugins.UncertainError{Err: ctx.Err()}
		case <-time.After(r.duration):
		}
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if r.err == nil && !r.panic || r.takesEffect {
		if err := effect(); err != nil {
			return err
		}
	}
	if r.panic {
		panic("scripted")
	}
	return r.err
}

// begin records the begin of an operation and returns the current script.
func (h *fakeHost) begin(operation, volume string, id state.ID, check func()) func(string) result {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.log = append(h.log, strings.TrimSpace(operation+" "+volume+" "+string(id.Pod)))
	for other := range h.pending {
		name, pod, _ := strings.Cut(other, "|")
		if name == volume && (pod == "" || id.Pod == "" || pod == owner(id)) {
			h.reportForbidden("%s of %s while %s is pending", operation, volume, other)
		}
	}
	h.pending[volume+"|"+owner(id)] = true
	check()
	return h.script
}

func (h *fakeHost) end(volume string, id state.ID) {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.pending, volume+"|"+owner(id))
}

// owner returns the pod and the name of a volume; empty for an operation that concerns all pods.
func owner(id state.ID) string {
	if id.Pod == "" {
		return ""
	}
	return string(id.Pod) + "/" + id.Name
}

// handleOf returns the handle of the volume with this name.
func (h *fakeHost) handleOf(name string) string { return cmp.Or(h.handles[name], "h-"+name) }

func (h *fakeHost) setScript(script func(string) result) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.script = script
}

func (h *fakeHost) node() *corev1.Node {
	h.mu.Lock()
	defer h.mu.Unlock()
	n := plugins.Node("here")
	if !h.unregistered {
		n.Labels["zone"] = h.zone
	}
	return n
}

// existing returns the attached and mounted volumes as text; empty if there are none.
func (h *fakeHost) existing() string {
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.attached)+len(h.devices)+len(h.mounts) == 0 {
		return ""
	}
	return fmt.Sprint(h.attached, h.devices, h.mounts)
}

// calls returns the operations since the last call of calls or count.
func (h *fakeHost) calls() []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	log := h.log
	h.log = nil
	return log
}

// count returns the number of operations of one kind since the last call of calls or count.
func (h *fakeHost) count(operation string) (n int) {
	for _, o := range h.calls() {
		if strings.HasPrefix(o, operation+" ") {
			n++
		}
	}
	return n
}

func (h *fakeHost) setUnregistered(unregistered bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.unregistered = unregistered
}

// mounted reports whether a volume is mounted for a pod. The caller holds mu.
func (h *fakeHost) mounted(volume string) bool {
	return slices.Contains(slices.Collect(maps.Values(h.mounts)), volume)
}

// setUp mounts a volume for a pod. If staged is set, the device of the volume must be mounted already.
// create creates the directory or link at path.
func (h *fakeHost) setUp(ctx context.Context, id state.ID, volume string, staged bool, path string, create func(path string) error) error {
	usesOther := func() bool { return h.mounts[id] != "" && h.mounts[id] != volume }
	return h.do(ctx, "SetUp", volume, id, func() {
		if staged && !h.devices[volume] && !usesOther() {
			h.reportForbidden("SetUp of %s before its device is mounted", id)
		}
		for other, v := range h.mounts {
			if h.exclusive[volume] && v == volume && other.Pod != id.Pod {
				h.reportForbidden("SetUp of %s, which %s uses exclusively", id, other)
			}
		}
	}, func() error {
		if usesOther() {
			return plugins.Invalidf("the volume was changed: undo the change")
		}
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		if err := create(path); err != nil && !errors.Is(err, os.ErrExist) {
			return err
		}
		h.mounts[id] = volume
		return nil
	})
}

// tearDown unmounts a volume of a pod and removes path.
func (h *fakeHost) tearDown(ctx context.Context, id state.ID, volume, path string) error {
	return h.do(ctx, "TearDown", volume, id, func() {
		if h.desired != nil && h.desired(id) {
			h.reportForbidden("TearDown of %s, which is desired", id)
		}
	}, func() error {
		if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
		delete(h.mounts, id)
		return nil
	})
}

// record records on disk that a volume may be attached (kind attachments) or mounted (kind devices). text
// has the name and the volumeMode of the PersistentVolume.
func (h *fakeHost) record(kind, volume, text string) error {
	dir := filepath.Join(h.paths.Plugin("test/full"), kind)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, volume), []byte(text), 0o644)
}

func (h *fakeHost) unrecord(kind, volume string) error {
	err := os.Remove(filepath.Join(h.paths.Plugin("test/full"), kind, volume))
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return err
}

// recorded returns the volumes that record has recorded and unrecord has not removed.
func (h *fakeHost) recorded(kind string) (all []plugins.DeviceMount, err error) {
	dir := filepath.Join(h.paths.Plugin("test/full"), kind)
	entries, err := os.ReadDir(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	for _, e := range entries {
		text, err := os.ReadFile(filepath.Join(dir, e.Name()))
		if err != nil {
			return nil, err
		}
		name, mode, _ := strings.Cut(string(text), " ")
		v := volumeOf(name, e.Name(), corev1.PersistentVolumeMode(mode))
		all = append(all, plugins.DeviceMount{VolumeName: e.Name(), Spec: &plugins.Spec{PersistentVolume: v}, Block: mode == "Block"})
	}
	return all, err
}

// plainPlugin is a plugin for emptyDirs.
type plainPlugin struct {
	*fakeHost
	// remounts is the result of Remounts.
	remounts bool
	// warning is a warning about each volume, or empty.
	warning string
}

func (plainPlugin) Name() string { return "test/plain" }
func (plainPlugin) CanSupport(spec *plugins.Spec) bool {
	return spec.Volume != nil && spec.Volume.EmptyDir != nil
}
func (p plainPlugin) Remounts(*plugins.Spec) bool { return p.remounts }
func (p plainPlugin) id(pod types.UID, name string) state.ID {
	return state.ID{Pod: pod, Plugin: p.Name(), Name: name}
}

func (p plainPlugin) NewMounter(spec *plugins.Spec, pod *corev1.Pod) (plugins.Mounter, error) {
	id := p.id(pod.UID, spec.Name())
	m := mounter{p.fakeHost, id, spec.Name(), false, p.paths.PodVolume(pod.UID, p.Name(), spec.Name())}
	if p.warning != "" {
		return warner{m, p.warning}, nil
	}
	return m, nil
}

func (p plainPlugin) NewUnmounter(name string, pod types.UID) (plugins.Unmounter, error) {
	return mounter{p.fakeHost, p.id(pod, name), name, false, p.paths.PodVolume(pod, p.Name(), name)}, nil
}

// mounter implements Mounter, Unmounter and the interfaces for raw devices, for a volume of a pod.
type mounter struct {
	*fakeHost
	id state.ID
	// volume is the handle of a PersistentVolume or the name of an emptyDir.
	volume string
	// staged is set if the volume needs a device mount.
	staged bool
	path   string
}

func (m mounter) Path() string { return m.path }

func (m mounter) SetUp(ctx context.Context, _ plugins.MounterArgs) error {
	return m.setUp(ctx, m.id, m.volume, m.staged, m.path, func(path string) error { return os.Mkdir(path, 0o755) })
}

func (m mounter) TearDown(ctx context.Context) error {
	return m.tearDown(ctx, m.id, m.volume, m.path)
}

func (m mounter) MapPodDevice(ctx context.Context) error {
	return m.setUp(ctx, m.id, m.volume, true, m.path, func(path string) error { return os.Symlink("/dev/null", path) })
}

func (m mounter) UnmapPodDevice(ctx context.Context) error { return m.TearDown(ctx) }

// warner is a mounter with a warning.
type warner struct {
	mounter
	warning string
}

func (w warner) Warnings() []string { return []string{w.warning} }

// fullPlugin is a plugin for PersistentVolumes that implements all optional interfaces.
type fullPlugin struct{ *fakeHost }

func (fullPlugin) Name() string { return "test/full" }
func (fullPlugin) CanSupport(spec *plugins.Spec) bool {
	return spec.PersistentVolume != nil && spec.PersistentVolume.Spec.CSI != nil
}
func (fullPlugin) Remounts(*plugins.Spec) bool { return false }
func (fullPlugin) VolumeName(spec *plugins.Spec) (string, error) {
	return spec.PersistentVolume.Spec.CSI.VolumeHandle, nil
}

func (f fullPlugin) PodVolumeName(name string, pod types.UID, block bool) string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.mounts[state.ID{Pod: pod, Plugin: f.Name(), Name: name, Block: block}]
}

func (f fullPlugin) NeedsAttach(*plugins.Spec) (bool, error) { return f.NeedsDeviceMount(nil) }

func (f fullPlugin) NeedsDeviceMount(spec *plugins.Spec) (bool, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.unregistered {
		return false, errors.New("driver full is not registered: start it")
	}
	return spec == nil || !f.unstaged[handle(spec)], nil
}

func (fullPlugin) AccessModes() []corev1.PersistentVolumeAccessMode {
	return []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce, corev1.ReadWriteOncePod}
}

func (f fullPlugin) AttachLimit(*plugins.Spec) (limit int64, driver string) { return f.limit, "full" }

func handle(spec *plugins.Spec) string { return spec.PersistentVolume.Spec.CSI.VolumeHandle }

func (f fullPlugin) mounter(name string, pod types.UID, block bool) mounter {
	id := state.ID{Pod: pod, Plugin: f.Name(), Name: name, Block: block}
	path := f.paths.PodVolume(pod, f.Name(), name)
	if block {
		path = f.paths.PodDevice(pod, f.Name(), name)
	}
	volume := f.handleOf(name)
	return mounter{f.fakeHost, id, volume, !f.unstaged[volume], path}
}

func (f fullPlugin) NewMounter(spec *plugins.Spec, pod *corev1.Pod) (plugins.Mounter, error) {
	m := f.mounter(spec.Name(), pod.UID, false)
	m.volume = handle(spec)
	return m, nil
}

func (f fullPlugin) NewUnmounter(name string, pod types.UID) (plugins.Unmounter, error) {
	return f.mounter(name, pod, false), nil
}

func (f fullPlugin) NewBlockVolumeMapper(spec *plugins.Spec, pod *corev1.Pod) (plugins.BlockVolumeMapper, error) {
	return mapper{f.mounter(spec.Name(), pod.UID, true), spec}, nil
}

func (f fullPlugin) NewBlockVolumeUnmapper(name string, pod types.UID) (plugins.BlockVolumeUnmapper, error) {
	return f.mounter(name, pod, true), nil
}

// mapper is a mounter that can also stage the raw device.
type mapper struct {
	mounter
	spec *plugins.Spec
}

func (m mapper) SetUpDevice(ctx context.Context, a plugins.Attachment) error {
	return fullPlugin{m.fakeHost}.MountDevice(ctx, m.spec, a, plugins.MounterArgs{})
}

func (f fullPlugin) Attach(ctx context.Context, spec *plugins.Spec) (plugins.Attachment, error) {
	h := handle(spec)
	err := f.do(ctx, "Attach", h, state.ID{}, func() {}, func() error {
		f.attached[h] = true
		return f.record("attachments", h, spec.Name()+" "+string(*spec.PersistentVolume.Spec.VolumeMode))
	})
	return plugins.Attachment{"of": h}, err
}

func (f fullPlugin) Detach(ctx context.Context, spec *plugins.Spec) error {
	h := handle(spec)
	return f.do(ctx, "Detach", h, state.ID{}, func() {
		if f.devices[h] || f.mounted(h) {
			f.reportForbidden("Detach of %s, which is mounted", h)
		}
	}, func() error {
		delete(f.attached, h)
		return f.unrecord("attachments", h)
	})
}

func (f fullPlugin) DeviceMountPath(spec *plugins.Spec) (string, error) {
	return filepath.Join(f.paths.Plugin(f.Name()), "devices", handle(spec)), nil
}

func (f fullPlugin) MountDevice(ctx context.Context, spec *plugins.Spec, a plugins.Attachment, _ plugins.MounterArgs) error {
	h := handle(spec)
	return f.do(ctx, "MountDevice", h, state.ID{}, func() {
		if !f.attached[h] || a["of"] != h {
			f.reportForbidden("MountDevice of %s, which is not attached: %v", h, a)
		}
	}, func() error {
		f.devices[h] = true
		return f.record("devices", h, spec.Name()+" "+string(*spec.PersistentVolume.Spec.VolumeMode))
	})
}

func (f fullPlugin) UnmountDevice(ctx context.Context, spec *plugins.Spec) error {
	h := handle(spec)
	return f.do(ctx, "UnmountDevice", h, state.ID{}, func() {
		if f.mounted(h) {
			f.reportForbidden("UnmountDevice of %s, which a pod uses", h)
		}
	}, func() error {
		delete(f.devices, h)
		return f.unrecord("devices", h)
	})
}

func (f fullPlugin) DeviceMounts() ([]plugins.DeviceMount, error) { return f.recorded("devices") }
func (f fullPlugin) Attachments() ([]plugins.DeviceMount, error)  { return f.recorded("attachments") }

func (f fullPlugin) NodeExpand(ctx context.Context, spec *plugins.Spec, o plugins.NodeExpandOptions) error {
	h := handle(spec)
	return f.do(ctx, "NodeExpand", h, state.ID{}, func() {
		if !f.mounted(h) || !f.devices[h] || o.Path == "" || o.DeviceMountPath == "" {
			f.reportForbidden("NodeExpand of %s, which is not mounted: %+v", h, o)
		}
	}, func() error {
		f.sizes[h] = o.Size.String()
		return nil
	})
}

// claims binds each claim to the volume of the same name.
type claims struct {
	mu      sync.Mutex
	volumes map[string]*corev1.PersistentVolume
	// expanded contains the sizes with which NodeExpanded was called, by the names of the volumes.
	expanded map[string]string
	// unbound is set if no claim is bound now.
	unbound bool
}

func (c *claims) Volume(key types.NamespacedName) (*corev1.PersistentVolumeClaim, *corev1.PersistentVolume, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	pv := c.volumes[key.Name]
	if pv == nil || c.unbound {
		return nil, nil, fmt.Errorf("claim %s is not bound: create a volume", key)
	}
	return &corev1.PersistentVolumeClaim{Spec: corev1.PersistentVolumeClaimSpec{AccessModes: pv.Spec.AccessModes}}, pv, nil
}

func (c *claims) NodeExpanded(volume string, size resource.Quantity) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.expanded[volume] = size.String()
}

func (c *claims) set(pv *corev1.PersistentVolume) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.volumes[pv.Name] = pv
}

func (c *claims) setUnbound(unbound bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.unbound = unbound
}
