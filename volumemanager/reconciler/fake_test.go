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

// ground is a machine with fake plugins. It outlives managers. As with real plugins, a file or
// directory exists for what may be set up.
type ground struct {
	paths plugins.Paths
	// script returns the result of an operation; nil: all succeed.
	script func(operation string) result
	// wrong reports a forbidden operation.
	wrong func(format string, args ...any)
	// desired, if set, reports whether a pod has requested a volume for some time.
	desired func(state.ID) bool
	// unstaged has the handles of volumes without a device mount.
	unstaged map[string]bool
	// handles has the handles of volumes x whose handle is not h-x.
	handles map[string]string

	mu       sync.Mutex
	attached map[string]bool
	devices  map[string]bool
	// mounts has the handle of each mount.
	mounts map[state.ID]string
	sizes  map[string]string
	alone  map[string]bool
	// pending has the running operations.
	pending map[string]bool
	log     []string
	limit   int64
	// unregistered is set while the driver is not registered.
	unregistered bool
	// zone is the topology that the registered driver reports.
	zone string
}

// result is how an operation ends.
type result struct {
	takes time.Duration
	err   error
	// done is set if the operation takes effect although it fails.
	done  bool
	panic bool
}

func newGround(root string) *ground {
	return &ground{
		paths: plugins.Paths{Root: root}, mounts: map[state.ID]string{},
		unstaged: map[string]bool{}, attached: map[string]bool{}, devices: map[string]bool{}, alone: map[string]bool{},
		pending: map[string]bool{}, handles: map[string]string{}, sizes: map[string]string{},
	}
}

// do runs an operation on a volume, of one pod if the ID has one. check and effect run with mu held.
func (g *ground) do(ctx context.Context, operation, volume string, id state.ID, check func(), effect func() error) error {
	script := g.begin(operation, volume, id, check)
	defer g.end(volume, id)
	var how result
	if script != nil {
		how = script(operation)
	}
	if how.takes > 0 {
		select {
		case <-ctx.Done():
			how.err = &plugins.UncertainError{Err: ctx.Err()}
		case <-time.After(how.takes):
		}
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if how.err == nil && !how.panic || how.done {
		if err := effect(); err != nil {
			return err
		}
	}
	if how.panic {
		panic("scripted")
	}
	return how.err
}

// begin records a call, and returns the script for it.
func (g *ground) begin(operation, volume string, id state.ID, check func()) func(string) result {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.log = append(g.log, strings.TrimSpace(operation+" "+volume+" "+string(id.Pod)))
	for other := range g.pending {
		name, whose, _ := strings.Cut(other, "|")
		if name == volume && (whose == "" || id.Pod == "" || whose == owner(id)) {
			g.wrong("%s of %s while %s is pending", operation, volume, other)
		}
	}
	g.pending[volume+"|"+owner(id)] = true
	check()
	return g.script
}

func (g *ground) end(volume string, id state.ID) {
	g.mu.Lock()
	defer g.mu.Unlock()
	delete(g.pending, volume+"|"+owner(id))
}

// owner returns the volume of a pod that an operation is for; empty for all pods.
func owner(id state.ID) string {
	if id.Pod == "" {
		return ""
	}
	return string(id.Pod) + "/" + id.Name
}

func (g *ground) handleOf(name string) string { return cmp.Or(g.handles[name], "h-"+name) }

func (g *ground) setScript(script func(string) result) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.script = script
}

func (g *ground) node() *corev1.Node {
	g.mu.Lock()
	defer g.mu.Unlock()
	n := plugins.Node("here")
	if !g.unregistered {
		n.Labels["zone"] = g.zone
	}
	return n
}

// left returns the attached and mounted volumes as text; empty if there are none.
func (g *ground) left() string {
	g.mu.Lock()
	defer g.mu.Unlock()
	if len(g.attached)+len(g.devices)+len(g.mounts) == 0 {
		return ""
	}
	return fmt.Sprint(g.attached, g.devices, g.mounts)
}

// calls returns the operations since the last call of calls.
func (g *ground) calls() []string {
	g.mu.Lock()
	defer g.mu.Unlock()
	log := g.log
	g.log = nil
	return log
}

// count returns the number of operations of one kind since the last call of calls, as calls does.
func (g *ground) count(operation string) (n int) {
	for _, o := range g.calls() {
		if strings.HasPrefix(o, operation+" ") {
			n++
		}
	}
	return n
}

func (g *ground) setUnregistered(unregistered bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.unregistered = unregistered
}

// mounted reports whether a pod has a volume.
func (g *ground) mounted(volume string) bool {
	return slices.Contains(slices.Collect(maps.Values(g.mounts)), volume)
}

func (g *ground) setUp(ctx context.Context, id state.ID, volume string, staged bool, path string, show func(path string) error) error {
	other := func() bool { return g.mounts[id] != "" && g.mounts[id] != volume }
	return g.do(ctx, "SetUp", volume, id, func() {
		if staged && !g.devices[volume] && !other() {
			g.wrong("SetUp of %s before its device is mounted", id)
		}
		for other, v := range g.mounts {
			if g.alone[volume] && v == volume && other.Pod != id.Pod {
				g.wrong("SetUp of %s, which %s uses exclusively", id, other)
			}
		}
	}, func() error {
		if other() {
			return plugins.Invalidf("it was changed: set it back")
		}
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		if err := show(path); err != nil && !errors.Is(err, os.ErrExist) {
			return err
		}
		g.mounts[id] = volume
		return nil
	})
}

func (g *ground) tearDown(ctx context.Context, id state.ID, volume, path string) error {
	return g.do(ctx, "TearDown", volume, id, func() {
		if g.desired != nil && g.desired(id) {
			g.wrong("TearDown of %s, which is desired", id)
		}
	}, func() error {
		if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
		delete(g.mounts, id)
		return nil
	})
}

// record records on disk that a volume may be attached or mounted.
func (g *ground) record(kind, volume, text string) error {
	dir := filepath.Join(g.paths.Plugin("test/full"), kind)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, volume), []byte(text), 0o644)
}

func (g *ground) unrecord(kind, volume string) error {
	err := os.Remove(filepath.Join(g.paths.Plugin("test/full"), kind, volume))
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return err
}

func (g *ground) recorded(kind string) (all []plugins.DeviceMount, err error) {
	dir := filepath.Join(g.paths.Plugin("test/full"), kind)
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

// plain is a plugin for emptyDirs.
type plain struct {
	*ground
	remounts bool
	warning  string
}

func (plain) Name() string { return "test/plain" }
func (plain) CanSupport(spec *plugins.Spec) bool {
	return spec.Volume != nil && spec.Volume.EmptyDir != nil
}
func (p plain) Remounts(*plugins.Spec) bool { return p.remounts }
func (p plain) id(pod types.UID, name string) state.ID {
	return state.ID{Pod: pod, Plugin: p.Name(), Name: name}
}

func (p plain) NewMounter(spec *plugins.Spec, pod *corev1.Pod) (plugins.Mounter, error) {
	id := p.id(pod.UID, spec.Name())
	m := mounter{p.ground, id, spec.Name(), false, p.paths.PodVolume(pod.UID, p.Name(), spec.Name())}
	if p.warning != "" {
		return warner{m, p.warning}, nil
	}
	return m, nil
}

func (p plain) NewUnmounter(name string, pod types.UID) (plugins.Unmounter, error) {
	return mounter{p.ground, p.id(pod, name), name, false, p.paths.PodVolume(pod, p.Name(), name)}, nil
}

// mounter implements the interfaces for a volume of a pod.
type mounter struct {
	*ground
	id     state.ID
	volume string
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

type warner struct {
	mounter
	warning string
}

func (w warner) Warnings() []string { return []string{w.warning} }

// full is a plugin for PersistentVolumes that implements all optional interfaces. The handle of
// volume x is h-x, unless ground.handles has another.
type full struct{ *ground }

func (full) Name() string { return "test/full" }
func (full) CanSupport(spec *plugins.Spec) bool {
	return spec.PersistentVolume != nil && spec.PersistentVolume.Spec.CSI != nil
}
func (full) Remounts(*plugins.Spec) bool { return false }
func (full) VolumeName(spec *plugins.Spec) (string, error) {
	return spec.PersistentVolume.Spec.CSI.VolumeHandle, nil
}

func (f full) PodVolumeName(name string, pod types.UID, block bool) string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.mounts[state.ID{Pod: pod, Plugin: f.Name(), Name: name, Block: block}]
}

func (f full) NeedsAttach(*plugins.Spec) (bool, error) { return f.NeedsDeviceMount(nil) }

func (f full) NeedsDeviceMount(spec *plugins.Spec) (bool, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.unregistered {
		return false, errors.New("driver full is not registered: start it")
	}
	return spec == nil || !f.unstaged[handle(spec)], nil
}

func (full) AccessModes() []corev1.PersistentVolumeAccessMode {
	return []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce, corev1.ReadWriteOncePod}
}

func (f full) AttachLimit(*plugins.Spec) (limit int64, driver string) { return f.limit, "full" }

func handle(spec *plugins.Spec) string { return spec.PersistentVolume.Spec.CSI.VolumeHandle }

func (f full) mounter(name string, pod types.UID, block bool) mounter {
	id := state.ID{Pod: pod, Plugin: f.Name(), Name: name, Block: block}
	path := f.paths.PodVolume(pod, f.Name(), name)
	if block {
		path = f.paths.PodDevice(pod, f.Name(), name)
	}
	volume := f.handleOf(name)
	return mounter{f.ground, id, volume, !f.unstaged[volume], path}
}

func (f full) NewMounter(spec *plugins.Spec, pod *corev1.Pod) (plugins.Mounter, error) {
	m := f.mounter(spec.Name(), pod.UID, false)
	m.volume = handle(spec)
	return m, nil
}

func (f full) NewUnmounter(name string, pod types.UID) (plugins.Unmounter, error) {
	return f.mounter(name, pod, false), nil
}

func (f full) NewBlockVolumeMapper(spec *plugins.Spec, pod *corev1.Pod) (plugins.BlockVolumeMapper, error) {
	return mapper{f.mounter(spec.Name(), pod.UID, true), spec}, nil
}

func (f full) NewBlockVolumeUnmapper(name string, pod types.UID) (plugins.BlockVolumeUnmapper, error) {
	return f.mounter(name, pod, true), nil
}

type mapper struct {
	mounter
	spec *plugins.Spec
}

func (m mapper) SetUpDevice(ctx context.Context, a plugins.Attachment) error {
	return full{m.ground}.MountDevice(ctx, m.spec, a, plugins.MounterArgs{})
}

func (f full) Attach(ctx context.Context, spec *plugins.Spec) (plugins.Attachment, error) {
	h := handle(spec)
	err := f.do(ctx, "Attach", h, state.ID{}, func() {}, func() error {
		f.attached[h] = true
		return f.record("attachments", h, spec.Name()+" "+string(*spec.PersistentVolume.Spec.VolumeMode))
	})
	return plugins.Attachment{"of": h}, err
}

func (f full) Detach(ctx context.Context, spec *plugins.Spec) error {
	h := handle(spec)
	return f.do(ctx, "Detach", h, state.ID{}, func() {
		if f.devices[h] || f.mounted(h) {
			f.wrong("Detach of %s, which is mounted", h)
		}
	}, func() error {
		delete(f.attached, h)
		return f.unrecord("attachments", h)
	})
}

func (f full) DeviceMountPath(spec *plugins.Spec) (string, error) {
	return filepath.Join(f.paths.Plugin(f.Name()), "devices", handle(spec)), nil
}

func (f full) MountDevice(ctx context.Context, spec *plugins.Spec, a plugins.Attachment, _ plugins.MounterArgs) error {
	h := handle(spec)
	return f.do(ctx, "MountDevice", h, state.ID{}, func() {
		if !f.attached[h] || a["of"] != h {
			f.wrong("MountDevice of %s, which is not attached: %v", h, a)
		}
	}, func() error {
		f.devices[h] = true
		return f.record("devices", h, spec.Name()+" "+string(*spec.PersistentVolume.Spec.VolumeMode))
	})
}

func (f full) UnmountDevice(ctx context.Context, spec *plugins.Spec) error {
	h := handle(spec)
	return f.do(ctx, "UnmountDevice", h, state.ID{}, func() {
		if f.mounted(h) {
			f.wrong("UnmountDevice of %s, which a pod uses", h)
		}
	}, func() error {
		delete(f.devices, h)
		return f.unrecord("devices", h)
	})
}

func (f full) DeviceMounts() ([]plugins.DeviceMount, error) { return f.recorded("devices") }
func (f full) Attachments() ([]plugins.DeviceMount, error)  { return f.recorded("attachments") }

func (f full) NodeExpand(ctx context.Context, spec *plugins.Spec, o plugins.NodeExpandOptions) error {
	h := handle(spec)
	return f.do(ctx, "NodeExpand", h, state.ID{}, func() {
		if !f.mounted(h) || !f.devices[h] || o.Path == "" || o.DeviceMountPath == "" {
			f.wrong("NodeExpand of %s, which is not mounted: %+v", h, o)
		}
	}, func() error {
		f.sizes[h] = o.Size.String()
		return nil
	})
}

// claims binds each claim to the volume of the same name.
type claims struct {
	mu       sync.Mutex
	volumes  map[string]*corev1.PersistentVolume
	expanded map[string]string
	// away is set while no claim is bound.
	away bool
}

func (c *claims) Volume(key types.NamespacedName) (*corev1.PersistentVolumeClaim, *corev1.PersistentVolume, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	pv := c.volumes[key.Name]
	if pv == nil || c.away {
		return nil, nil, fmt.Errorf("claim %s: it is not bound: create a volume", key)
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

func (c *claims) setAway(away bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.away = away
}
