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

// history is a random sequence of changes of pods, operations that fail or panic, drivers and claims
// that disappear and return, and restarts of the manager. The fake host reports forbidden operations.
type history struct {
	*rand.Rand
	// outcomes is the random source of operations, guarded by host.mu.
	outcomes *rand.Rand
	t        *testing.T
	host     *fakeHost
	c        *claims
	m        *manager
	pods     map[string]*corev1.Pod
	// since holds the time since which a volume has been desired.
	since map[state.ID]time.Time
}

// modelVolumes are the volumes from which each pod has a random choice; the function pod says what their
// names mean. fsduplicate has the handle of fs1, and fsexclusive is ReadWriteOncePod.
var modelVolumes = []string{"fs1", "fsduplicate", "fs2", "fs3", "fsexclusive", "disk1", "disk2", "e1", "e2"}

// TestRandomHistories: in random histories no forbidden operation occurs, and in the end exactly the
// desired volumes are mounted. TRIVET_TEST_HISTORIES is the number of histories.
func TestRandomHistories(t *testing.T) {
	const steps = 40
	histories, err := strconv.ParseUint(cmp.Or(os.Getenv("TRIVET_TEST_HISTORIES"), "100"), 10, 64)
	must(t, err)
	root := t.TempDir()
	for seed := range histories {
		ok := t.Run(fmt.Sprint(seed), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h := newHistory(t, filepath.Join(root, fmt.Sprint(seed)), seed)
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

func newHistory(t *testing.T, root string, seed uint64) *history {
	t.Helper()
	h := &history{
		Rand: rand.New(rand.NewPCG(seed, 0)), outcomes: rand.New(rand.NewPCG(seed, 1)),
		t: t, host: newFakeHost(root), pods: map[string]*corev1.Pod{}, since: map[state.ID]time.Time{},
	}
	h.c = newClaims("fs1", "fs2", "fs3", "disk1", "disk2")
	h.host.handles["fsduplicate"] = "h-fs1"
	h.c.set(volumeOf("fsduplicate", "h-fs1", corev1.PersistentVolumeFilesystem))
	exclusive := volumeOf("fsexclusive", "h-fsexclusive", corev1.PersistentVolumeFilesystem)
	exclusive.Spec.AccessModes = []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOncePod}
	h.c.set(exclusive)
	h.host.exclusive["h-fsexclusive"] = true
	h.host.reportForbidden = t.Errorf
	h.host.script = h.script
	h.host.desired = func(id state.ID) bool {
		since, desired := h.since[id]
		return desired && since.Before(time.Now())
	}
	h.restart()
	return h
}

// script returns a random result.
func (h *history) script(string) result {
	h.host.mu.Lock()
	defer h.host.mu.Unlock()
	r := result{duration: time.Duration(h.outcomes.IntN(3000)) * time.Millisecond}
	switch h.outcomes.IntN(8) {
	case 0:
		r.err = errBroken
	case 1:
		r.err, r.takesEffect = &plugins.UncertainError{Err: errBroken}, h.outcomes.IntN(2) == 0
	case 2:
		r.panic, r.takesEffect = true, h.outcomes.IntN(2) == 0
	}
	return r
}

// step makes one random change, and lets up to ten seconds pass.
func (h *history) step() {
	switch h.IntN(8) {
	case 0:
		h.restart()
	case 1:
		h.c.setUnbound(h.IntN(2) == 0)
		h.m.Wake()
	case 2:
		h.setUnregistered(h.IntN(2) == 0)
	default:
		h.change()
	}
	time.Sleep(time.Duration(h.IntN(10000)) * time.Millisecond)
}

// restart stops the manager during its operations, and starts another one. The manifests may be
// incomplete at first.
func (h *history) restart() {
	if h.m != nil {
		h.m.stop()
	}
	h.m = start(h.t, h.host, h.c, fullPlugin{h.host}, plainPlugin{fakeHost: h.host, remounts: true})
	if h.IntN(2) == 0 {
		o := objects()
		o.Complete = false
		h.m.Update(o)
		time.Sleep(time.Duration(h.IntN(3000)) * time.Millisecond)
	}
	h.update()
}

func (h *history) setUnregistered(unregistered bool) {
	h.host.setUnregistered(unregistered)
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

// update passes the pods to the manager, and updates since.
func (h *history) update() {
	h.host.mu.Lock()
	desired := h.desired()
	maps.DeleteFunc(h.since, func(id state.ID, _ time.Time) bool { return desired[id] == "" })
	for id := range desired {
		if h.since[id].IsZero() {
			h.since[id] = time.Now()
		}
	}
	h.host.mu.Unlock()
	h.m.Update(objects(slices.Collect(maps.Values(h.pods))...))
}

// desired returns the volumes of all pods with their handles.
func (h *history) desired() map[state.ID]string {
	desired := map[state.ID]string{}
	for _, p := range h.pods {
		for _, v := range p.Spec.Volumes {
			id, volume := state.ID{Pod: p.UID, Plugin: "test/full", Name: v.Name, Block: v.Name[0] == 'd'}, h.host.handleOf(v.Name)
			if v.EmptyDir != nil {
				id.Plugin, volume = "test/plain", v.Name
			}
			desired[id] = volume
		}
	}
	return desired
}

// end lets all operations succeed, waits for them, and compares the actual state with the desired one.
func (h *history) end() {
	h.host.setScript(nil)
	h.c.setUnbound(false)
	h.setUnregistered(false)
	// One pod keeps the ReadWriteOncePod volume.
	for _, name := range slices.Sorted(maps.Keys(h.pods))[min(1, len(h.pods)):] {
		p := h.pods[name].DeepCopy()
		p.Spec.Volumes = slices.DeleteFunc(p.Spec.Volumes, func(v corev1.Volume) bool { return v.Name == "fsexclusive" })
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
	h.host.mu.Lock()
	if !maps.Equal(h.host.mounts, desired) || !maps.Equal(h.host.devices, devices) || !maps.Equal(h.host.attached, devices) {
		h.t.Errorf("got mounts %v, want %v; got devices %v and attached volumes %v, want %v in both", h.host.mounts, desired, h.host.devices, h.host.attached, devices)
	}
	h.host.mu.Unlock()
	entries, err := os.ReadDir(h.host.paths.Pods())
	if err != nil && len(dirs) > 0 {
		h.t.Error(err)
	}
	for _, e := range entries {
		if !dirs[e.Name()] {
			h.t.Errorf("the directory of pod %s was not removed", e.Name())
		}
	}
	for name, p := range h.pods {
		if ready, volumes, _ := h.m.PodReady(types.NamespacedName{Namespace: p.Namespace, Name: name}); !ready {
			h.t.Errorf("pod %s is not ready: %+v", name, volumes)
		}
	}
	if toMount, toUnmount := h.m.StateDiff(); toMount+toUnmount > 0 {
		h.t.Errorf("got %d volumes to mount, %d to unmount; want 0", toMount, toUnmount)
	}
}
