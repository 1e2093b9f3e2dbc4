package reconciler_test

import (
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

// history is a random one of pods, errors, panics, drivers and claims that go and come,
// and managers that die. The ground says when something is done that must not be.
type history struct {
	*rand.Rand
	// luck is that of operations; the ground's lock guards it.
	luck *rand.Rand
	t    *testing.T
	g    *ground
	c    *claims
	m    *manager
	// pods are those that are wanted now, since when by volume.
	pods  map[string]*corev1.Pod
	since map[state.ID]time.Time
}

var modelVolumes = []string{"fs1", "fstwin", "fs2", "fs3", "fsalone", "disk1", "disk2", "e1", "e2"}

// TestRandomHistories holds what must never happen, and that in the end there is what is
// wanted, and nothing else. TRIVET_TEST_HISTORIES is how many there are.
func TestRandomHistories(t *testing.T) {
	histories, steps := uint64(100), 40
	if many := os.Getenv("TRIVET_TEST_HISTORIES"); many != "" {
		var err error
		if histories, err = strconv.ParseUint(many, 10, 64); err != nil {
			t.Fatal(err)
		}
	}
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
		Rand: rand.New(rand.NewPCG(seed, 0)), luck: rand.New(rand.NewPCG(seed, 1)),
		t: t, g: newGround(root), pods: map[string]*corev1.Pod{}, since: map[state.ID]time.Time{},
	}
	h.c = newClaims("fs1", "fs2", "fs3", "disk1", "disk2")
	h.g.handles["fstwin"] = "h-fs1"
	h.c.set(volumeOf("fstwin", "h-fs1", corev1.PersistentVolumeFilesystem))
	alone := volumeOf("fsalone", "h-fsalone", corev1.PersistentVolumeFilesystem)
	alone.Spec.AccessModes = []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOncePod}
	h.c.set(alone)
	h.g.alone["h-fsalone"] = true
	h.g.wrong = t.Errorf
	h.g.script = h.script
	h.g.wanted = func(id state.ID) bool {
		since, wanted := h.since[id]
		return wanted && since.Before(time.Now())
	}
	h.restart()
	return h
}

// script ends operations at random.
func (h *history) script(string) ending {
	h.g.mu.Lock()
	defer h.g.mu.Unlock()
	e := ending{takes: time.Duration(h.luck.IntN(3000)) * time.Millisecond}
	switch h.luck.IntN(8) {
	case 0:
		e.err = errBroken
	case 1:
		e.err, e.done = &plugins.UncertainError{Err: errBroken}, h.luck.IntN(2) == 0
	case 2:
		e.panic, e.done = true, h.luck.IntN(2) == 0
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
		h.setGone(h.IntN(2) == 0)
	default:
		h.change()
	}
	time.Sleep(time.Duration(h.IntN(10000)) * time.Millisecond)
}

// restart is a manager that dies in the middle of what it does, and another that begins,
// perhaps without having read all manifests.
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

func (h *history) setGone(gone bool) {
	h.g.mu.Lock()
	h.g.gone = gone
	h.g.mu.Unlock()
	h.m.Retry()
}

// change makes a pod, takes one away, or changes what one has.
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
	wanted := h.wanted()
	maps.DeleteFunc(h.since, func(id state.ID, _ time.Time) bool { return wanted[id] == "" })
	for id := range wanted {
		if h.since[id].IsZero() {
			h.since[id] = time.Now()
		}
	}
	h.g.mu.Unlock()
	h.m.Update(objects(slices.Collect(maps.Values(h.pods))...))
}

// wanted are the volumes of all pods, by what they come by.
func (h *history) wanted() map[state.ID]string {
	wanted := map[state.ID]string{}
	for _, p := range h.pods {
		for _, v := range p.Spec.Volumes {
			id, volume := state.ID{Pod: p.UID, Plugin: "test/full", Name: v.Name, Block: v.Name[0] == 'd'}, h.g.handleOf(v.Name)
			if v.EmptyDir != nil {
				id.Plugin, volume = "test/plain", v.Name
			}
			wanted[id] = volume
		}
	}
	return wanted
}

// end lets everything come to rest, and compares.
func (h *history) end() {
	h.g.setScript(nil)
	h.c.setAway(false)
	h.setGone(false)
	// Of those who want what one alone may have, one stays.
	for _, name := range slices.Sorted(maps.Keys(h.pods))[min(1, len(h.pods)):] {
		p := h.pods[name].DeepCopy()
		p.Spec.Volumes = slices.DeleteFunc(p.Spec.Volumes, func(v corev1.Volume) bool { return v.Name == "fsalone" })
		h.pods[name] = p
	}
	h.update()
	time.Sleep(10 * time.Minute)
	synctest.Wait()
	wanted, devices := h.wanted(), map[string]bool{}
	dirs := map[string]bool{}
	for _, p := range h.pods {
		dirs[string(p.UID)] = true
	}
	for id, volume := range wanted {
		if id.Plugin == "test/full" {
			devices[volume] = true
		}
	}
	h.g.mu.Lock()
	if !maps.Equal(h.g.mounts, wanted) || !maps.Equal(h.g.devices, devices) || !maps.Equal(h.g.attached, devices) {
		h.t.Errorf("mounted %v\nwant    %v\ndevices %v, attached %v", h.g.mounts, wanted, h.g.devices, h.g.attached)
	}
	h.g.mu.Unlock()
	entries, err := os.ReadDir(h.g.paths.Pods())
	if err != nil && len(dirs) > 0 {
		h.t.Error(err)
	}
	for _, e := range entries {
		if !dirs[e.Name()] {
			h.t.Errorf("directory of %s is left", e.Name())
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
