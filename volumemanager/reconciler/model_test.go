package reconciler_test

import (
	"cmp"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/trivet-csi/trivet/volumemanager/plugins"
	"github.com/trivet-csi/trivet/volumemanager/state"
)

// history is a random sequence of changed pods, failing and panicking operations, drivers and claims
// that disappear and return, and restarted managers. The ground reports forbidden operations.
type history struct {
	*rand.Rand
	// outcomes is the random source of operations, guarded by ground.mu.
	outcomes *rand.Rand
	t        *testing.T
	g        *ground
	c        *claims
	m        *manager
	pods     map[string]*corev1.Pod
	// since is the time from which a volume has been desired.
	since map[state.ID]time.Time
}

var modelVolumes = []string{"fs1", "fsduplicate", "fs2", "fs3", "fsalone", "disk1", "disk2", "e1", "e2"}

// TestRandomHistories: no forbidden operation occurs, and in the end exactly the desired volumes are
// mounted. TRIVET_TEST_HISTORIES is the number of histories.
func TestRandomHistories(t *testing.T) {
	const steps = 40
	histories, err := strconv.ParseUint(cmp.Or(os.Getenv("TRIVET_TEST_HISTORIES"), "100"), 10, 64)
	must(t, err)
	root := t.TempDir()
	for seed := range histories {
		ok := t.Run(fmt.Sprint(seed), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h := begin(t, filepath.Join(root, fmt.Sprint(seed)), seed)
				for range steps {
					h.step()
				}
				h.end()
			})
		})
		if !ok {
			return
		}
	}
}

func begin(t *testing.T, root string, seed uint64) *history {
	t.Helper()
	h := &history{
		Rand: rand.New(rand.NewPCG(seed, 0)), outcomes: rand.New(rand.NewPCG(seed, 1)),
		t: t, g: newGround(root), pods: map[string]*corev1.Pod{}, since: map[state.ID]time.Time{},
	}
	h.c = newClaims("fs1", "fs2", "fs3", "disk1", "disk2")
	h.g.handles["fsduplicate"] = "h-fs1"
	h.c.set(volumeOf("fsduplicate", "h-fs1", corev1.PersistentVolumeFilesystem))
	alone := volumeOf("fsalone", "h-fsalone", corev1.PersistentVolumeFilesystem)
	alone.Spec.AccessModes = []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOncePod}
	h.c.set(alone)
	h.g.alone["h-fsalone"] = true
	h.g.wrong = t.Errorf
	h.g.script = h.script
	h.g.desired = func(id state.ID) bool {
		since, desired := h.since[id]
		return desired && since.Before(time.Now())
	}
	h.restart()
	return h
}

// script returns a random result.
func (h *history) script(string) result {
	h.g.mu.Lock()
	defer h.g.mu.Unlock()
	e := result{takes: time.Duration(h.outcomes.IntN(3000)) * time.Millisecond}
	switch h.outcomes.IntN(8) {
	case 0:
		e.err = errBroken
	case 1:
		e.err, e.done = &plugins.UncertainError{Err: errBroken}, h.outcomes.IntN(2) == 0
	case 2:
		e.panic, e.done = true, h.outcomes.IntN(2) == 0
	}
	return e
}

func (h *history) step() {
	switch h.IntN(8) {
	case 0:
		h.restart()
	case 1:
		h.c.setAway(h.IntN(2) == 0)
		h.m.Wake()
	case 2:
		h.setUnregistered(h.IntN(2) == 0)
	default:
		h.change()
	}
	time.Sleep(time.Duration(h.IntN(10000)) * time.Millisecond)
}

// restart stops the manager during its operations, and starts another, which may have incomplete
// manifests at first.
func (h *history) restart() {
	if h.m != nil {
		h.m.stop()
	}
	h.m = start(h.t, h.g, h.c, full{h.g}, plain{ground: h.g, remounts: true})
	if h.IntN(2) == 0 {
		o := objects()
		o.Complete = false
		h.m.Update(o)
		time.Sleep(time.Duration(h.IntN(3000)) * time.Millisecond)
	}
	h.update()
}

func (h *history) setUnregistered(unregistered bool) {
	h.g.setUnregistered(unregistered)
	h.m.Retry()
}

// change adds, changes or removes a pod.
func (h *history) change() {
	name := fmt.Sprint("pod", h.IntN(4))
	if h.IntN(2) == 0 {
		delete(h.pods, name)
	} else {
		var volumes []string
		for _, v := range modelVolumes {
			if h.IntN(3) == 0 {
				volumes = append(volumes, v)
			}
		}
		h.pods[name] = pod(name, volumes...)
	}
	h.update()
}

func (h *history) update() {
	h.g.mu.Lock()
	desired := h.desired()
	maps.DeleteFunc(h.since, func(id state.ID, _ time.Time) bool { return desired[id] == "" })
	for id := range desired {
		if h.since[id].IsZero() {
			h.since[id] = time.Now()
		}
	}
	h.g.mu.Unlock()
	h.m.Update(objects(slices.Collect(maps.Values(h.pods))...))
}

// desired returns the handles of the volumes of all pods.
func (h *history) desired() map[state.ID]string {
	desired := map[state.ID]string{}
	for _, p := range h.pods {
		for _, v := range p.Spec.Volumes {
			id, volume := state.ID{Pod: p.UID, Plugin: "test/full", Name: v.Name, Block: v.Name[0] == 'd'}, h.g.handleOf(v.Name)
			if v.EmptyDir != nil {
				id.Plugin, volume = "test/plain", v.Name
			}
			desired[id] = volume
		}
	}
	return desired
}

// end waits until all operations succeeded, and compares desired and actual state.
func (h *history) end() {
	h.g.setScript(nil)
	h.c.setAway(false)
	h.setUnregistered(false)
	// One pod keeps the ReadWriteOncePod volume.
	for _, name := range slices.Sorted(maps.Keys(h.pods))[min(1, len(h.pods)):] {
		p := h.pods[name].DeepCopy()
		p.Spec.Volumes = slices.DeleteFunc(p.Spec.Volumes, func(v corev1.Volume) bool { return v.Name == "fsalone" })
		h.pods[name] = p
	}
	h.update()
	time.Sleep(10 * time.Minute)
	synctest.Wait()
	desired, devices := h.desired(), map[string]bool{}
	dirs := map[string]bool{}
	for _, p := range h.pods {
		dirs[string(p.UID)] = true
	}
	for id, volume := range desired {
		if id.Plugin == "test/full" {
			devices[volume] = true
		}
	}
	h.g.mu.Lock()
	if !maps.Equal(h.g.mounts, desired) || !maps.Equal(h.g.devices, devices) || !maps.Equal(h.g.attached, devices) {
		h.t.Errorf("mounted %v\nwant    %v\ndevices %v, attached %v", h.g.mounts, desired, h.g.devices, h.g.attached)
	}
	h.g.mu.Unlock()
	entries, err := os.ReadDir(h.g.paths.Pods())
	if err != nil && len(dirs) > 0 {
		h.t.Error(err)
	}
	for _, e := range entries {
		if !dirs[e.Name()] {
			h.t.Errorf("the directory of %s was not removed", e.Name())
		}
	}
	for name, p := range h.pods {
		if ready, volumes, _ := h.m.PodReady(types.NamespacedName{Namespace: p.Namespace, Name: name}); !ready {
			h.t.Errorf("pod %s is not ready: %+v", name, volumes)
		}
	}
	if up, down := h.m.StateDiff(); up+down > 0 {
		h.t.Errorf("%d to mount, %d to unmount", up, down)
	}
}
