package reconciler_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/trivet-csi/trivet/volumemanager/manifest"
	"github.com/trivet-csi/trivet/volumemanager/plugins"
	"github.com/trivet-csi/trivet/volumemanager/state"
)

var errBroken = errors.New("broken: mend it")

// failing is a script in which one kind of operation fails.
func failing(operation string, how ending) func(string) ending {
	return func(o string) ending {
		if o == operation {
			return how
		}
		return ending{}
	}
}

func wantNothing(t *testing.T, g *ground, m interface{ StateDiff() (int, int) }) {
	t.Helper()
	if up, down := m.StateDiff(); up != 0 || down != 0 {
		t.Errorf("%d volumes to mount, %d to unmount", up, down)
	}
	if there := g.there(); there != "" {
		t.Errorf("left: %s", there)
	}
	if left, err := os.ReadDir(g.paths.Pods()); err != nil || len(left) > 0 {
		t.Errorf("left of pods: %v, %v", left, err)
	}
}

func TestLifeOfAPod(t *testing.T) {
	bubble(t, func(t *testing.T, g *ground) {
		c := newClaims("fs", "disk")
		m := start(t, g, c, full{g}, plain{ground: g})
		if ready, _, known := m.PodReady(key("web")); ready || known {
			t.Error("a pod is known that nobody has heard of")
		}
		m.Update(objects(pod("web", "fs", "disk", "e")))
		if up, down := m.StateDiff(); up != 3 || down != 0 || !m.InUse("fs") || m.InUse("other") {
			t.Errorf("%d to mount, %d to unmount", up, down)
		}
		settle()
		m.wantReady(t, "web")
		wantTook(t, g,
			"Attach h-fs", "MountDevice h-fs", "SetUp h-fs uid-web",
			"Attach h-disk", "MountDevice h-disk", "SetUp h-disk uid-web", "SetUp e uid-web")
		for volume, path := range map[string]string{
			"fs": "volumes/test~full/fs", "disk": "volumeDevices/test~full/disk", "e": "volumes/test~plain/e",
		} {
			if s := m.wantPhase(t, "web", volume, state.Mounted); s.Path != filepath.Join(g.paths.Pod("uid-web"), path) || s.Message != "" {
				t.Errorf("status: %+v", s)
			}
		}
		time.Sleep(10 * time.Minute)
		wantTook(t, g)
		m.Update(objects())
		settle()
		wantTook(t, g,
			"TearDown h-fs uid-web", "UnmountDevice h-fs", "Detach h-fs",
			"TearDown h-disk uid-web", "UnmountDevice h-disk", "Detach h-disk", "TearDown e uid-web")
		wantNothing(t, g, m)
		if m.InUse("fs") || len(m.Status()) > 0 || len(m.events.List()) > 0 {
			t.Errorf("status: %+v, events: %+v", m.Status(), m.events.List())
		}
	})
}

func TestTwoPodsHaveOneDevice(t *testing.T) {
	bubble(t, func(t *testing.T, g *ground) {
		g.setScript(func(string) ending { return ending{takes: time.Second} })
		m := start(t, g, newClaims("fs"), full{g})
		m.Update(objects(pod("a", "fs"), pod("b", "fs")))
		time.Sleep(time.Minute / 2)
		m.wantReady(t, "a", "b")
		wantTook(t, g, "Attach h-fs", "MountDevice h-fs", "SetUp h-fs uid-a", "SetUp h-fs uid-b")
		m.Update(objects(pod("b", "fs")))
		time.Sleep(time.Minute / 2)
		wantTook(t, g, "TearDown h-fs uid-a")
		m.wantReady(t, "b")
	})
}

func TestADriverThatDoesNotStage(t *testing.T) {
	bubble(t, func(t *testing.T, g *ground) {
		g.unstaged["h-fs"] = true
		f := unattached{full{g}}
		m := start(t, g, newClaims("fs"), f)
		m.Update(objects(pod("a", "fs")))
		settle()
		m.wantReady(t, "a")
		m.Update(objects())
		settle()
		wantTook(t, g, "SetUp h-fs uid-a", "TearDown h-fs uid-a")
		wantNothing(t, g, m)
	})
}

type unattached struct{ full }

func (unattached) NeedsAttach(*plugins.Spec) (bool, error) { return false, nil }

// TestErrors: what failed is tried again, later each time, and says so; if it is not
// wanted any more it is taken down if it may be there, and else not.
func TestErrors(t *testing.T) {
	for name, c := range map[string]struct {
		operation string
		how       ending
		// undone is what is done when the pod goes.
		undone []string
	}{
		"nothing was mounted":  {"SetUp", ending{err: errBroken}, nil},
		"it may be mounted":    {"SetUp", ending{err: &plugins.UncertainError{Err: errBroken}, done: true}, []string{"TearDown h-fs uid-a"}},
		"a panic":              {"SetUp", ending{panic: true, done: true}, []string{"TearDown h-fs uid-a"}},
		"no device":            {"MountDevice", ending{err: errBroken}, nil},
		"a device, maybe":      {"MountDevice", ending{err: &plugins.UncertainError{Err: errBroken}}, nil},
		"it was not attached":  {"Attach", ending{err: errBroken}, nil},
		"it is attached maybe": {"Attach", ending{err: &plugins.UncertainError{Err: errBroken}, done: true}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T, g *ground) {
				g.setScript(failing(c.operation, c.how))
				m := start(t, g, newClaims("fs"), full{g})
				m.Update(objects(pod("a", "fs")))
				time.Sleep(10 * time.Second)
				s := m.wantPhase(t, "a", "fs", state.Failed)
				if s.RetryAt.Before(time.Now()) || s.Message == "" {
					t.Errorf("status: %+v", s)
				}
				tries := 0
				for _, o := range g.took() {
					if strings.HasPrefix(o, c.operation+" ") {
						tries++
					}
				}
				if tries != 5 { // after 0, 0.5, 1.5, 3.5 and 7.5 s
					t.Errorf("tried %d times", tries)
				}
				if all := m.events.List(); len(all) != 1 || all[0].Count != 5 {
					t.Errorf("events: %+v", all)
				}
				m.Update(objects())
				settle()
				undone := c.undone
				if c.operation == "SetUp" || c.operation == "MountDevice" && plugins.Uncertain(c.how.err) {
					undone = append(undone, "UnmountDevice h-fs")
				}
				if c.operation != "Attach" || c.how.done {
					undone = append(undone, "Detach h-fs")
				}
				wantTook(t, g, undone...)
				if there := g.there(); there != "" || len(m.Status()) > 0 {
					t.Errorf("left: %s, %+v", there, m.Status())
				}
			})
		})
	}
}

// TestTakingDownGoesOn: what could not be taken down is shown without its pod, tried
// again, and its device stays as long.
func TestTakingDownGoesOn(t *testing.T) {
	bubble(t, func(t *testing.T, g *ground) {
		m := start(t, g, newClaims("fs"), full{g})
		m.Update(objects(pod("a", "fs")))
		settle()
		g.setScript(failing("TearDown", ending{err: errBroken}))
		m.Update(objects())
		time.Sleep(time.Second)
		s := m.Status()
		if len(s) != 1 || s[0].Phase != state.Failed || s[0].Pod != "default/a" || !m.InUse("fs") || !strings.Contains(g.there(), "h-fs") {
			t.Errorf("status: %+v", s)
		}
		g.setScript(nil)
		time.Sleep(time.Minute)
		wantNothing(t, g, m)
	})
}

func TestWantedAgain(t *testing.T) {
	bubble(t, func(t *testing.T, g *ground) {
		m := start(t, g, newClaims("fs"), full{g})
		m.Update(objects(pod("a", "fs")))
		settle()
		g.took()
		g.setScript(func(string) ending { return ending{takes: time.Second} })
		m.Update(objects())
		time.Sleep(time.Second / 2)
		m.wantUnmounting(t)
		m.Update(objects(pod("a", "fs")))
		time.Sleep(10 * time.Second)
		m.wantReady(t, "a")
		wantTook(t, g, "TearDown h-fs uid-a", "SetUp h-fs uid-a")
	})
}

func (m *manager) wantUnmounting(t *testing.T) {
	t.Helper()
	if s := m.Status(); len(s) != 1 || s[0].Phase != state.Unmounting {
		t.Errorf("status: %+v", s)
	}
}

// TestRestart: what is on disk and wanted is set up again and never taken down, what is
// not wanted is taken down once that is certain.
func TestRestart(t *testing.T) {
	bubble(t, func(t *testing.T, g *ground) {
		c := newClaims("fs", "gone", "disk", "device")
		m := start(t, g, c, full{g}, plain{ground: g})
		m.Update(objects(pod("a", "fs", "e", "disk"), pod("b", "gone", "e", "device")))
		settle()
		m.wantReady(t, "a", "b")
		m.stop()
		g.took()

		m = start(t, g, c, full{g}, plain{ground: g})
		early := objects()
		early.Complete = false
		m.Update(early)
		c.setAway(true)
		settle()
		wantTook(t, g)
		if !m.InUse("gone") || !m.InUse("disk") || m.InUse("e2") {
			t.Error("what is on the disk is in use")
		}
		m.Update(objects(pod("a", "fs", "e", "disk")))
		settle()
		wantTook(t, g,
			"SetUp e uid-a", // the others of pod a may be any
			"TearDown h-gone uid-b", "UnmountDevice h-gone", "Detach h-gone", "TearDown e uid-b",
			"TearDown h-device uid-b", "UnmountDevice h-device", "Detach h-device")
		c.setAway(false)
		m.Wake()
		settle()
		wantTook(t, g,
			"Attach h-fs", "MountDevice h-fs", "SetUp h-fs uid-a",
			"Attach h-disk", "MountDevice h-disk", "SetUp h-disk uid-a")
		m.wantReady(t, "a")
		m.Update(objects())
		settle()
		wantNothing(t, g, m)
	})
}

// TestTwoVolumesOfOneHandle: after a restart the device, which has the name of one of them,
// stays as long as a pod has it by the other's.
func TestTwoVolumesOfOneHandle(t *testing.T) {
	bubble(t, func(t *testing.T, g *ground) {
		g.handles["twin"] = "h-fs"
		c := newClaims("fs")
		c.set(volumeOf("twin", "h-fs", corev1.PersistentVolumeFilesystem))
		m := start(t, g, c, full{g})
		m.Update(objects(pod("a", "fs"), pod("b", "twin")))
		settle()
		m.wantReady(t, "a", "b")
		m.stop()
		g.took()

		m = start(t, g, c, full{g})
		c.setAway(true)
		m.Update(objects(pod("b", "twin")))
		settle()
		wantTook(t, g, "TearDown h-fs uid-a")
		if !m.InUse("fs") {
			t.Error("what a pod has by another name is not in use")
		}
		g.setScript(failing("TearDown", ending{err: errBroken}))
		m.Update(objects())
		settle()
		wantTook(t, g, "TearDown h-fs uid-b")
		g.setScript(nil)
		time.Sleep(time.Second)
		wantTook(t, g, "TearDown h-fs uid-b", "UnmountDevice h-fs", "Detach h-fs")
		wantNothing(t, g, m)
	})
}

// TestClaimThatIsLost: what is mounted stays while its pod is wanted.
func TestClaimThatIsLost(t *testing.T) {
	bubble(t, func(t *testing.T, g *ground) {
		c := newClaims("fs")
		m := start(t, g, c, full{g})
		m.Update(objects(pod("a", "fs")))
		settle()
		g.took()
		c.setAway(true)
		m.Wake()
		time.Sleep(5 * time.Minute)
		wantTook(t, g)
		if s := m.wantPhase(t, "a", "fs", state.Pending); !strings.Contains(s.Message, "make a volume") {
			t.Errorf("status: %+v", s)
		}
		if all := m.events.List(); len(all) != 0 { // who knows claims tells of them
			t.Errorf("events: %+v", all)
		}
	})
}

func TestReadWriteOncePod(t *testing.T) {
	bubble(t, func(t *testing.T, g *ground) {
		g.alone["h-fs"] = true
		c := newClaims()
		pv := volumeOf("fs", "h-fs", corev1.PersistentVolumeFilesystem)
		pv.Spec.AccessModes = []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOncePod}
		c.set(pv)
		m := start(t, g, c, full{g})
		m.Update(objects(pod("b", "fs")))
		settle()
		m.Update(objects(pod("a", "fs"), pod("b", "fs")))
		settle()
		m.wantReady(t, "b")
		if s := m.wantPhase(t, "a", "fs", state.Pending); !strings.Contains(s.Message, "default/b") {
			t.Errorf("status: %+v", s)
		}
		m.Update(objects(pod("a", "fs")))
		settle()
		m.wantReady(t, "a")
	})
}

func TestLimitOfADriver(t *testing.T) {
	bubble(t, func(t *testing.T, g *ground) {
		g.limit = 2
		m := start(t, g, newClaims("fs1", "fs2", "fs3"), full{g})
		m.Update(objects(pod("a", "fs1", "fs2"), pod("b", "fs2", "fs3")))
		settle()
		m.wantReady(t, "a")
		m.wantPhase(t, "b", "fs2", state.Mounted)
		if s := m.wantPhase(t, "b", "fs3", state.Pending); !strings.Contains(s.Message, "2 volumes") {
			t.Errorf("status: %+v", s)
		}
		m.Update(objects(pod("b", "fs2", "fs3")))
		settle()
		m.wantReady(t, "b")
	})
}

// TestLimitWhileWaiting: two pods that wait for one device are one volume of its driver.
func TestLimitWhileWaiting(t *testing.T) {
	bubble(t, func(t *testing.T, g *ground) {
		g.limit = 2
		g.setScript(failing("Attach", ending{err: errBroken}))
		m := start(t, g, newClaims("fs1", "fs2"), full{g})
		m.Update(objects(pod("a", "fs1"), pod("b", "fs1"), pod("c", "fs2")))
		time.Sleep(10 * time.Second)
		for pod, volume := range map[string]string{"a": "fs1", "b": "fs1", "c": "fs2"} {
			if s := m.wantPhase(t, pod, volume, state.Failed); s.Message != errBroken.Error() {
				t.Errorf("status of pod %s: %+v", pod, s)
			}
		}
	})
}

func TestDriverThatComes(t *testing.T) {
	bubble(t, func(t *testing.T, g *ground) {
		g.gone = true
		m := start(t, g, newClaims("fs"), full{g})
		m.Update(objects(pod("a", "fs")))
		settle()
		if s := m.wantPhase(t, "a", "fs", state.Pending); !strings.Contains(s.Message, "not registered") {
			t.Errorf("status: %+v", s)
		}
		g.mu.Lock()
		g.gone = false
		g.mu.Unlock()
		m.Retry()
		settle()
		m.wantReady(t, "a")
	})
}

// TestDriverThatComesMeanwhile: it comes while a call is pending that fails for want of it.
func TestDriverThatComesMeanwhile(t *testing.T) {
	bubble(t, func(t *testing.T, g *ground) {
		g.setScript(failing("SetUp", ending{err: errBroken, takes: time.Second}))
		m := start(t, g, newClaims("fs"), full{g})
		m.Update(objects(pod("a", "fs")))
		time.Sleep(10 * time.Minute)
		for m.wantAny(t, "a", "fs").Phase != state.Mounting {
			time.Sleep(time.Second / 2)
		}
		g.setScript(nil) // of the call after this one
		m.Retry()
		time.Sleep(5 * time.Second)
		m.wantReady(t, "a")
	})
}

// TestElsewhere: a volume for other machines is not brought to this one. What a driver
// tells of the machine may come later than the volume, and go: what is mounted stays.
func TestElsewhere(t *testing.T) {
	bubble(t, func(t *testing.T, g *ground) {
		c := newClaims()
		for volume, zone := range map[string]string{"fs": "a", "fs2": "b", "disk": "a"} {
			c.set(only(newClaims(volume).volumes[volume], zone))
		}
		g.gone, g.zone = true, "a"
		toggle := func(m *manager, gone bool) {
			g.mu.Lock()
			g.gone = gone
			g.mu.Unlock()
			m.Retry()
			settle()
		}
		m := start(t, g, c, full{g}, plain{ground: g})
		m.Update(objects(pod("a", "fs", "disk", "e"), pod("b", "fs2", "e")))
		settle()
		for pod, volume := range map[string]string{"a": "fs", "b": "fs2"} {
			if s := m.wantPhase(t, pod, volume, state.Pending); !strings.Contains(s.Message, "not registered") {
				t.Errorf("without a driver: %+v", s)
			}
		}
		toggle(m, false)
		m.wantReady(t, "a")
		if s := m.wantPhase(t, "b", "fs2", state.Failed); !strings.Contains(s.Message, "nodeAffinity") || !strings.Contains(s.Message, "zone=a") {
			t.Errorf("elsewhere: %+v", s)
		}
		m.wantPhase(t, "b", "e", state.Mounted)
		if done := strings.Join(g.took(), "; "); strings.Contains(done, "h-fs2") {
			t.Errorf("elsewhere: %s", done)
		}
		toggle(m, true)
		m.Update(objects(pod("a", "fs", "disk", "e"), pod("b", "fs2", "e"), pod("c", "e")))
		settle()
		m.wantReady(t, "a", "c")
		m.stop()

		g.took()
		m = start(t, g, c, full{g}, plain{ground: g})
		m.Update(objects(pod("a", "fs", "disk", "e"), pod("b", "fs2", "e")))
		time.Sleep(3 * time.Minute)
		toggle(m, false)
		m.wantReady(t, "a")
		for _, o := range g.took() {
			if strings.HasPrefix(o, "TearDown h-") || strings.HasPrefix(o, "Un") || strings.HasPrefix(o, "Detach") {
				t.Errorf("done after a restart: %s", o)
			}
		}
	})
}

// only has a volume be for machines of a zone.
func only(v *corev1.PersistentVolume, zone string) *corev1.PersistentVolume {
	is := corev1.NodeSelectorRequirement{Key: "zone", Operator: corev1.NodeSelectorOpIn, Values: []string{zone}}
	v.Spec.NodeAffinity = &corev1.VolumeNodeAffinity{Required: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{
		{MatchExpressions: []corev1.NodeSelectorRequirement{is}},
	}}}
	return v
}

// TestChangeEndsBackoff: who mends a manifest is not to wait for minutes.
func TestChangeEndsBackoff(t *testing.T) {
	bubble(t, func(t *testing.T, g *ground) {
		g.setScript(failing("SetUp", ending{err: errBroken}))
		m := start(t, g, newClaims("fs"), full{g})
		wanted := objects(pod("a", "fs"))
		m.Update(wanted)
		time.Sleep(10 * time.Minute)
		g.setScript(nil)
		m.Update(wanted)
		settle()
		m.wantPhase(t, "a", "fs", state.Failed)
		m.Update(objects(pod("a", "fs"), pod("b")))
		settle()
		m.wantReady(t, "a", "b")
	})
}

func TestGrowth(t *testing.T) {
	bubble(t, func(t *testing.T, g *ground) {
		c := newClaims("fs")
		m := start(t, g, c, full{g})
		m.Update(objects(pod("a", "fs")))
		settle()
		grown := volumeOf("fs", "h-fs", corev1.PersistentVolumeFilesystem)
		grown.Spec.Capacity[corev1.ResourceStorage] = resource.MustParse("2Gi")
		c.set(grown)
		g.setScript(failing("NodeExpand", ending{err: errBroken}))
		m.Wake()
		settle()
		m.wantReady(t, "a")
		if s := m.wantPhase(t, "a", "fs", state.Mounted); s.Message != errBroken.Error() {
			t.Errorf("status: %+v", s)
		}
		g.setScript(nil)
		time.Sleep(time.Second)
		wantSizes(t, g, c, "2Gi")
		if s := m.wantPhase(t, "a", "fs", state.Mounted); s.Message != "" {
			t.Errorf("status: %+v", s)
		}
		g.took()
		m.Wake()
		time.Sleep(5 * time.Minute)
		wantTook(t, g)
	})
}

// wantSizes wants the volume fs, and no other, to have been expanded.
func wantSizes(t *testing.T, g *ground, c *claims, size string) {
	t.Helper()
	g.mu.Lock()
	defer g.mu.Unlock()
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(g.sizes) != 1 || g.sizes["h-fs"] != size || c.expanded["fs"] != size {
		t.Errorf("grown to %v, told %v, want %s", g.sizes, c.expanded, size)
	}
}

// TestGrowthBefore: a volume that grew while it was not mounted is expanded when it is,
// if the machine has to follow.
func TestGrowthBefore(t *testing.T) {
	bubble(t, func(t *testing.T, g *ground) {
		c := newClaims("fs", "fine")
		grown := volumeOf("fs", "h-fs", corev1.PersistentVolumeFilesystem)
		grown.Annotations = map[string]string{plugins.NodeExpandAnnotation: "true"}
		c.set(grown)
		m := start(t, g, c, full{g})
		m.Update(objects(pod("a", "fs", "fine")))
		time.Sleep(5 * time.Minute)
		m.wantReady(t, "a")
		wantSizes(t, g, c, "1Gi")
		n := 0
		for _, o := range g.took() {
			if strings.HasPrefix(o, "NodeExpand") {
				n++
			}
		}
		if n != 1 {
			t.Errorf("expanded %d times", n)
		}
	})
}

func TestRemounts(t *testing.T) {
	bubble(t, func(t *testing.T, g *ground) {
		m := start(t, g, newClaims(), plain{ground: g, remounts: true})
		m.Update(objects(pod("a", "e")))
		settle()
		wantTook(t, g, "SetUp e uid-a")
		m.Update(objects(pod("a", "e"), pod("b")))
		settle()
		wantTook(t, g, "SetUp e uid-a")
		m.Update(objects(pod("a", "e"), pod("b")))
		settle()
		wantTook(t, g)
		for range 10 {
			time.Sleep(time.Minute * 66 / 60)
			synctest.Wait()
		}
		if n := len(g.took()); n < 9 || n > 13 {
			t.Errorf("set up %d times in 11 minutes", n)
		}
		for _, err := range []error{errBroken, &plugins.UncertainError{Err: errBroken}} {
			g.setScript(failing("SetUp", ending{err: err}))
			time.Sleep(70 * time.Second)
			m.wantReady(t, "a")
			if s := m.wantPhase(t, "a", "e", state.Mounted); s.Message != errBroken.Error() {
				t.Errorf("status: %+v", s)
			}
			g.setScript(nil)
			time.Sleep(3 * time.Minute)
			if s := m.wantPhase(t, "a", "e", state.Mounted); s.Message != "" {
				t.Errorf("status: %+v", s)
			}
		}
	})
}

// TestDeviceThatIsUnlinked: a raw device that a pod lost is given to it again.
func TestDeviceThatIsUnlinked(t *testing.T) {
	bubble(t, func(t *testing.T, g *ground) {
		m := start(t, g, newClaims("disk"), full{g})
		m.Update(objects(pod("a", "disk")))
		settle()
		g.took()
		path := m.wantPhase(t, "a", "disk", state.Mounted).Path
		must(t, os.Remove(path))
		time.Sleep(2 * time.Minute)
		wantTook(t, g, "SetUp h-disk uid-a")
		m.wantReady(t, "a")
		if _, err := os.Stat(path); err != nil {
			t.Error(err)
		}
	})
}

// TestWarning: what is less than was asked for is shown as long as it is mounted.
func TestWarning(t *testing.T) {
	bubble(t, func(t *testing.T, g *ground) {
		m := start(t, g, newClaims(), plain{ground: g, warning: "no limit: use another filesystem"})
		m.Update(objects(pod("a", "e")))
		time.Sleep(2 * time.Minute)
		if s := m.wantPhase(t, "a", "e", state.Mounted); s.Message != "no limit: use another filesystem" {
			t.Errorf("status: %+v", s)
		}
	})
}

// TestChangedSpec: a volume that is wanted otherwise under the same name is set up again.
func TestChangedSpec(t *testing.T) {
	bubble(t, func(t *testing.T, g *ground) {
		m := start(t, g, newClaims(), plain{ground: g})
		m.Update(objects(pod("a", "e")))
		settle()
		changed := pod("a", "e")
		changed.Spec.Volumes[0].EmptyDir.Medium = corev1.StorageMediumMemory
		g.setScript(failing("SetUp", ending{err: plugins.Invalidf("medium: make another volume")}))
		m.Update(objects(changed))
		settle()
		if s := m.wantPhase(t, "a", "e", state.Failed); !strings.Contains(s.Message, "medium") || s.Path == "" {
			t.Errorf("status: %+v", s)
		}
		wantTook(t, g, "SetUp e uid-a", "SetUp e uid-a")
		m.Update(objects(pod("a", "e")))
		settle()
		m.wantReady(t, "a")
	})
}

// TestOtherDevice: a mounted volume that is wanted by another device is refused, and keeps
// the one that it has.
func TestOtherDevice(t *testing.T) {
	for name, again := range map[string]func(g *ground) plugins.VolumePlugin{
		"running":                   nil,
		"restarted":                 func(g *ground) plugins.VolumePlugin { return full{g} },
		"restarted without records": func(g *ground) plugins.VolumePlugin { return nameless{full{g}} },
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T, g *ground) {
				c := newClaims("fs")
				m := start(t, g, c, full{g})
				m.Update(objects(pod("a", "fs")))
				settle()
				m.wantReady(t, "a")
				before := g.there()
				c.set(volumeOf("fs", "h-other", corev1.PersistentVolumeFilesystem))
				if again != nil {
					m.stop()
					m = start(t, g, c, again(g))
				}
				m.Update(objects(pod("a", "fs")))
				time.Sleep(5 * time.Minute)
				if s := m.wantPhase(t, "a", "fs", state.Failed); !strings.Contains(s.Message, "it was changed") {
					t.Errorf("status: %+v", s)
				}
				c.set(volumeOf("fs", "h-fs", corev1.PersistentVolumeFilesystem))
				m.Update(objects(pod("a", "fs")))
				time.Sleep(5 * time.Minute)
				m.wantReady(t, "a")
				if there := g.there(); there != before {
					t.Errorf("there is %s, was %s", there, before)
				}
				m.Update(objects())
				settle()
				wantNothing(t, g, m)
			})
		})
	}
}

// nameless does not know what device a pod's volume comes by.
type nameless struct{ full }

func (nameless) PodVolumeName(string, types.UID, bool) string { return "" }

// TestOtherModeOfAVolume: a PersistentVolume that comes back as a raw device waits until
// the filesystem is unmounted.
func TestOtherModeOfAVolume(t *testing.T) {
	bubble(t, func(t *testing.T, g *ground) {
		c := newClaims("fs")
		m := start(t, g, c, full{g})
		m.Update(objects(pod("a", "fs")))
		settle()
		c.set(volumeOf("fs", "h-fs", corev1.PersistentVolumeBlock))
		g.took()
		m.Update(objects(pod("b", "fs"), pod("a", "fs")))
		settle()
		wantTook(t, g, "TearDown h-fs uid-a", "UnmountDevice h-fs", "MountDevice h-fs", "SetUp h-fs uid-a", "SetUp h-fs uid-b")
		m.wantReady(t, "a", "b")
	})
}

// TestStrangeThings: what nobody knows is reported and left alone, and everything else
// goes on.
func TestStrangeThings(t *testing.T) {
	bubble(t, func(t *testing.T, g *ground) {
		made := []string{
			"pods/file",
			"pods/uid-x/volumes/test~other/v/data",
			"pods/uid-x/volumes/test~plain/file",
			"pods/uid-x/volumeDevices/test~full/file",
			"pods/uid-y/notes",
		}
		for _, f := range made {
			path := filepath.Join(g.paths.Root, f)
			if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(path, nil, 0o644); err != nil {
				t.Fatal(err)
			}
		}
		m := start(t, g, newClaims("fs"), full{g}, plain{ground: g})
		m.Update(objects(pod("a", "fs", "e")))
		settle()
		m.wantReady(t, "a")
		for _, f := range made {
			if _, err := os.Stat(filepath.Join(g.paths.Root, f)); err != nil {
				t.Errorf("what nobody knows was touched: %v", err)
			}
		}
		reasons := map[string]int{}
		for _, e := range m.events.List() {
			reasons[e.Reason]++
			if !e.Warning || !strings.Contains(e.Message, "by hand") {
				t.Errorf("event: %+v", e)
			}
		}
		if reasons["Unknown"] != 4 || reasons["FailedRemoveDirectory"] != 2 {
			t.Errorf("events: %+v", m.events.List())
		}
		var s []string
		for _, v := range m.Status() {
			if v.Phase == state.Failed {
				s = append(s, v.Path)
			}
		}
		if len(s) != 2 {
			t.Errorf("directories that could not be removed: %v", s)
		}
	})
}

// TestLeftByMistake: what a plugin left although it said that nothing is there is found,
// and taken down.
func TestLeftByMistake(t *testing.T) {
	bubble(t, func(t *testing.T, g *ground) {
		g.setScript(failing("SetUp", ending{err: errBroken, done: true}))
		m := start(t, g, newClaims(), plain{ground: g})
		m.Update(objects(pod("a", "e")))
		settle()
		g.setScript(nil)
		m.Update(objects())
		settle()
		if g.there() == "" {
			t.Error("the plugin left nothing")
		}
		time.Sleep(3 * time.Minute)
		wantNothing(t, g, m)
	})
}

// TestCopied: a pod's volume is not brought while another claim of the pod is to be a copy
// of it, but stays where it is.
func TestCopied(t *testing.T) {
	bubble(t, func(t *testing.T, g *ground) {
		c := newClaims("fs")
		m := start(t, g, c, full{g}, plain{ground: g})
		copied := func(pods ...*corev1.Pod) *manifest.Objects {
			o := objects(pods...)
			claim := &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "fs2"}, Spec: corev1.PersistentVolumeClaimSpec{DataSource: &corev1.TypedLocalObjectReference{Kind: "PersistentVolumeClaim", Name: "fs"}}}
			o.Claims = map[types.NamespacedName]*corev1.PersistentVolumeClaim{{Namespace: "default", Name: "fs2"}: claim}
			return o
		}
		m.Update(copied(pod("a", "fs", "fs2", "e")))
		settle()
		m.wantPhase(t, "a", "e", state.Mounted)
		if s := m.wantPhase(t, "a", "fs", state.Pending); !strings.Contains(s.Message, "claim fs2") {
			t.Errorf("%+v", s)
		}
		if done := strings.Join(g.took(), "; "); strings.Contains(done, "h-fs") {
			t.Errorf("while a copy is to be made: %s", done)
		}
		m.Update(copied(pod("b", "fs")))
		settle()
		m.wantReady(t, "b")
		m.Update(copied(pod("b", "fs", "fs2")))
		settle()
		m.wantPhase(t, "b", "fs", state.Mounted)
		c.set(newClaims("fs2").volumes["fs2"])
		m.Update(copied(pod("b", "fs", "fs2")))
		settle()
		m.wantReady(t, "b")
	})
}
