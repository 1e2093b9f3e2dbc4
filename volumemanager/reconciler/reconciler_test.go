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

var errBroken = errors.New("broken: fix it")

// failing returns a script with a result for one kind of operation.
func failing(operation string, how result) func(string) result {
	return func(o string) result {
		if o == operation {
			return how
		}
		return result{}
	}
}

func wantNothing(t *testing.T, g *ground, m interface{ StateDiff() (int, int) }) {
	t.Helper()
	if up, down := m.StateDiff(); up != 0 || down != 0 {
		t.Errorf("%d volumes to mount, %d to unmount", up, down)
	}
	if left := g.left(); left != "" {
		t.Errorf("not removed: %s", left)
	}
	if left, err := os.ReadDir(g.paths.Pods()); err != nil || len(left) > 0 {
		t.Errorf("directories of pods: %v, %v", left, err)
	}
}

func TestLifeOfAPod(t *testing.T) {
	bubble(t, func(t *testing.T, g *ground) {
		c := newClaims("fs", "disk")
		g.setScript(func(string) result { return result{takes: time.Second} })
		m := start(t, g, c, full{g}, plain{ground: g})
		if ready, _, known := m.PodReady(key("web")); ready || known {
			t.Error("a pod without a manifest is known")
		}
		m.Update(objects(pod("web", "fs", "disk", "e")))
		if up, down := m.StateDiff(); up != 3 || down != 0 || !m.InUse("fs") || m.InUse("other") {
			t.Errorf("%d to mount, %d to unmount", up, down)
		}
		time.Sleep(time.Minute / 2)
		m.wantReady(t, "web")
		wantCalls(t, g,
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
		wantCalls(t, g)
		m.Update(objects())
		time.Sleep(time.Minute / 2)
		wantCalls(t, g,
			"TearDown h-fs uid-web", "UnmountDevice h-fs", "Detach h-fs",
			"TearDown h-disk uid-web", "UnmountDevice h-disk", "Detach h-disk", "TearDown e uid-web")
		wantNothing(t, g, m)
		if m.InUse("fs") || len(m.Status()) > 0 || len(m.events.List()) > 0 {
			t.Errorf("status: %+v, events: %+v", m.Status(), m.events.List())
		}
	})
}

func TestTwoPodsUseOneDevice(t *testing.T) {
	bubble(t, func(t *testing.T, g *ground) {
		g.setScript(func(string) result { return result{takes: time.Second} })
		m := start(t, g, newClaims("fs"), full{g})
		m.Update(objects(pod("a", "fs"), pod("b", "fs")))
		time.Sleep(time.Minute / 2)
		m.wantReady(t, "a", "b")
		wantCalls(t, g, "Attach h-fs", "MountDevice h-fs", "SetUp h-fs uid-a", "SetUp h-fs uid-b")
		m.Update(objects(pod("b", "fs")))
		time.Sleep(time.Minute / 2)
		wantCalls(t, g, "TearDown h-fs uid-a")
		m.wantReady(t, "b")
	})
}

func TestDriverWithoutStaging(t *testing.T) {
	bubble(t, func(t *testing.T, g *ground) {
		g.unstaged["h-fs"] = true
		f := unattached{full{g}}
		m := start(t, g, newClaims("fs"), f)
		m.apply(pod("a", "fs"))
		m.wantReady(t, "a")
		m.apply()
		wantCalls(t, g, "SetUp h-fs uid-a", "TearDown h-fs uid-a")
		wantNothing(t, g, m)
	})
}

type unattached struct{ full }

func (unattached) NeedsAttach(*plugins.Spec) (bool, error) { return false, nil }

// TestErrors: a failed operation is reported and retried with back-off. When the pod is removed, the
// volume is torn down if it may be set up.
func TestErrors(t *testing.T) {
	for name, c := range map[string]struct {
		operation string
		how       result
		// undone are the operations after the pod is removed.
		undone []string
	}{
		"not mounted":             {"SetUp", result{err: errBroken}, nil},
		"possibly mounted":        {"SetUp", result{err: &plugins.UncertainError{Err: errBroken}, done: true}, []string{"TearDown h-fs uid-a"}},
		"panic":                   {"SetUp", result{panic: true, done: true}, []string{"TearDown h-fs uid-a"}},
		"device not mounted":      {"MountDevice", result{err: errBroken}, nil},
		"device possibly mounted": {"MountDevice", result{err: &plugins.UncertainError{Err: errBroken}}, nil},
		"not attached":            {"Attach", result{err: errBroken}, nil},
		"possibly attached":       {"Attach", result{err: &plugins.UncertainError{Err: errBroken}, done: true}, nil},
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
				if n := g.count(c.operation); n != 5 { // after 0, 0.5, 1.5, 3.5 and 7.5 s
					t.Errorf("tried %d times", n)
				}
				if all := m.events.List(); len(all) != 1 || all[0].Count != 5 {
					t.Errorf("events: %+v", all)
				}
				m.apply()
				undone := c.undone
				if c.operation == "SetUp" || c.operation == "MountDevice" && plugins.Uncertain(c.how.err) {
					undone = append(undone, "UnmountDevice h-fs")
				}
				if c.operation != "Attach" || c.how.done {
					undone = append(undone, "Detach h-fs")
				}
				wantCalls(t, g, undone...)
				if left := g.left(); left != "" || len(m.Status()) > 0 {
					t.Errorf("not removed: %s, %+v", left, m.Status())
				}
			})
		})
	}
}

// TestUnmountFails: a volume of a removed pod that cannot be unmounted stays in the status, and its
// device stays until a retry succeeds.
func TestUnmountFails(t *testing.T) {
	bubble(t, func(t *testing.T, g *ground) {
		m := start(t, g, newClaims("fs"), full{g})
		m.apply(pod("a", "fs"))
		g.setScript(failing("TearDown", result{err: errBroken}))
		m.Update(objects())
		time.Sleep(time.Second)
		s := m.Status()
		if len(s) != 1 || s[0].Phase != state.Failed || s[0].Pod != "default/a" || !m.InUse("fs") || !strings.Contains(g.left(), "h-fs") {
			t.Errorf("status: %+v", s)
		}
		g.setScript(nil)
		time.Sleep(time.Minute)
		wantNothing(t, g, m)
	})
}

func TestAddedWhileUnmounting(t *testing.T) {
	bubble(t, func(t *testing.T, g *ground) {
		m := start(t, g, newClaims("fs"), full{g})
		m.apply(pod("a", "fs"))
		g.calls()
		g.setScript(func(string) result { return result{takes: time.Second} })
		m.Update(objects())
		time.Sleep(time.Second / 2)
		if s := m.Status(); len(s) != 1 || s[0].Phase != state.Unmounting {
			t.Errorf("status: %+v", s)
		}
		m.Update(objects(pod("a", "fs")))
		time.Sleep(10 * time.Second)
		m.wantReady(t, "a")
		wantCalls(t, g, "TearDown h-fs uid-a", "SetUp h-fs uid-a")
	})
}

// TestRestart: volumes on disk that are desired are set up again without being torn down; the others
// are torn down when the manifests are complete.
func TestRestart(t *testing.T) {
	bubble(t, func(t *testing.T, g *ground) {
		c := newClaims("fs", "removed", "disk", "device")
		m := start(t, g, c, full{g}, plain{ground: g})
		m.apply(pod("a", "fs", "e", "disk"), pod("b", "removed", "e", "device"))
		m.wantReady(t, "a", "b")
		m.stop()
		g.calls()

		m = start(t, g, c, full{g}, plain{ground: g})
		early := objects()
		early.Complete = false
		m.Update(early)
		c.setAway(true)
		settle()
		wantCalls(t, g)
		if !m.InUse("removed") || !m.InUse("disk") || m.InUse("e2") {
			t.Error("InUse is wrong for volumes on disk")
		}
		m.apply(pod("a", "fs", "e", "disk"))
		wantCalls(t, g,
			"SetUp e uid-a", // the other volumes of pod a are unknown
			"TearDown h-removed uid-b", "UnmountDevice h-removed", "Detach h-removed", "TearDown e uid-b",
			"TearDown h-device uid-b", "UnmountDevice h-device", "Detach h-device")
		c.setAway(false)
		m.Wake()
		settle()
		wantCalls(t, g,
			"Attach h-fs", "MountDevice h-fs", "SetUp h-fs uid-a",
			"Attach h-disk", "MountDevice h-disk", "SetUp h-disk uid-a")
		m.wantReady(t, "a")
		m.wantRemoved(t, g)
	})
}

// TestDuplicate: of two PersistentVolumes with one handle, the device found after a restart has the
// name of one. It stays while a pod uses the other.
func TestDuplicate(t *testing.T) {
	bubble(t, func(t *testing.T, g *ground) {
		g.handles["duplicate"] = "h-fs"
		c := newClaims("fs")
		c.set(volumeOf("duplicate", "h-fs", corev1.PersistentVolumeFilesystem))
		m := start(t, g, c, full{g})
		m.apply(pod("a", "fs"), pod("b", "duplicate"))
		m.wantReady(t, "a", "b")
		m.stop()
		g.calls()

		m = start(t, g, c, full{g})
		c.setAway(true)
		m.apply(pod("b", "duplicate"))
		wantCalls(t, g, "TearDown h-fs uid-a")
		if !m.InUse("fs") {
			t.Error("a volume that a pod uses as a duplicate is not in use")
		}
		g.setScript(failing("TearDown", result{err: errBroken}))
		m.apply()
		wantCalls(t, g, "TearDown h-fs uid-b")
		g.setScript(nil)
		time.Sleep(time.Second)
		wantCalls(t, g, "TearDown h-fs uid-b", "UnmountDevice h-fs", "Detach h-fs")
		wantNothing(t, g, m)
	})
}

// TestLostClaim: a mounted volume whose claim is lost stays while its pod is desired.
func TestLostClaim(t *testing.T) {
	bubble(t, func(t *testing.T, g *ground) {
		c := newClaims("fs")
		m := start(t, g, c, full{g})
		m.apply(pod("a", "fs"))
		g.calls()
		c.setAway(true)
		m.Wake()
		time.Sleep(5 * time.Minute)
		wantCalls(t, g)
		m.wantPhase(t, "a", "fs", state.Pending, "create a volume")
		if all := m.events.List(); len(all) != 0 { // package claim reports it
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
		m.apply(pod("b", "fs"))
		m.apply(pod("a", "fs"), pod("b", "fs"))
		m.wantReady(t, "b")
		m.wantPhase(t, "a", "fs", state.Pending, "default/b")
		m.apply(pod("a", "fs"))
		m.wantReady(t, "a")
	})
}

func TestVolumeLimit(t *testing.T) {
	bubble(t, func(t *testing.T, g *ground) {
		g.limit = 2
		m := start(t, g, newClaims("fs1", "fs2", "fs3"), full{g})
		m.apply(pod("a", "fs1", "fs2"), pod("b", "fs2", "fs3"))
		m.wantReady(t, "a")
		m.wantPhase(t, "b", "fs2", state.Mounted)
		m.wantPhase(t, "b", "fs3", state.Pending, "2 volumes")
		m.apply(pod("b", "fs2", "fs3"))
		m.wantReady(t, "b")
	})
}

// TestVolumeLimitWhileWaiting: a device for which two pods wait counts once.
func TestVolumeLimitWhileWaiting(t *testing.T) {
	bubble(t, func(t *testing.T, g *ground) {
		g.limit = 2
		g.setScript(failing("Attach", result{err: errBroken}))
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

func TestDriverRegistered(t *testing.T) {
	bubble(t, func(t *testing.T, g *ground) {
		g.unregistered = true
		m := start(t, g, newClaims("fs"), full{g})
		m.apply(pod("a", "fs"))
		m.wantPhase(t, "a", "fs", state.Pending, "not registered")
		g.setUnregistered(false)
		m.Retry()
		settle()
		m.wantReady(t, "a")
	})
}

// TestDriverRegisteredMeanwhile: the driver registers while a call runs that fails without it.
func TestDriverRegisteredMeanwhile(t *testing.T) {
	bubble(t, func(t *testing.T, g *ground) {
		g.setScript(failing("SetUp", result{err: errBroken, takes: time.Second}))
		m := start(t, g, newClaims("fs"), full{g})
		m.Update(objects(pod("a", "fs")))
		time.Sleep(10 * time.Minute)
		for m.volume(t, "a", "fs").Phase != state.Mounting {
			time.Sleep(time.Second / 2)
		}
		g.setScript(nil) // for the next call
		m.Retry()
		time.Sleep(5 * time.Second)
		m.wantReady(t, "a")
	})
}

// TestAffinity: a volume of another machine is not mounted. A driver may report the topology of the
// machine later, and may disappear; mounted volumes stay.
func TestAffinity(t *testing.T) {
	bubble(t, func(t *testing.T, g *ground) {
		c := newClaims()
		for volume, zone := range map[string]string{"fs": "a", "fs2": "b", "disk": "a"} {
			c.set(only(newClaims(volume).volumes[volume], zone))
		}
		g.unregistered, g.zone = true, "a"
		toggle := func(m *manager, unregistered bool) {
			g.setUnregistered(unregistered)
			m.Retry()
			settle()
		}
		m := start(t, g, c, full{g}, plain{ground: g})
		m.apply(pod("a", "fs", "disk", "e"), pod("b", "fs2", "e"))
		for pod, volume := range map[string]string{"a": "fs", "b": "fs2"} {
			m.wantPhase(t, pod, volume, state.Pending, "not registered")
		}
		toggle(m, false)
		m.wantReady(t, "a")
		m.wantPhase(t, "b", "fs2", state.Failed, "nodeAffinity", "zone=a")
		m.wantPhase(t, "b", "e", state.Mounted)
		if done := strings.Join(g.calls(), "; "); strings.Contains(done, "h-fs2") {
			t.Errorf("operations with a volume of another machine: %s", done)
		}
		toggle(m, true)
		m.apply(pod("a", "fs", "disk", "e"), pod("b", "fs2", "e"), pod("c", "e"))
		m.wantReady(t, "a", "c")
		m.stop()

		g.calls()
		m = start(t, g, c, full{g}, plain{ground: g})
		m.Update(objects(pod("a", "fs", "disk", "e"), pod("b", "fs2", "e")))
		time.Sleep(3 * time.Minute)
		toggle(m, false)
		m.wantReady(t, "a")
		for _, o := range g.calls() {
			if strings.HasPrefix(o, "TearDown h-") || strings.HasPrefix(o, "Un") || strings.HasPrefix(o, "Detach") {
				t.Errorf("operation after a restart: %s", o)
			}
		}
	})
}

// only restricts a volume to machines of a zone.
func only(v *corev1.PersistentVolume, zone string) *corev1.PersistentVolume {
	requirement := corev1.NodeSelectorRequirement{Key: "zone", Operator: corev1.NodeSelectorOpIn, Values: []string{zone}}
	term := corev1.NodeSelectorTerm{MatchExpressions: []corev1.NodeSelectorRequirement{requirement}}
	v.Spec.NodeAffinity = &corev1.VolumeNodeAffinity{Required: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{term}}}
	return v
}

// TestChangeEndsBackoff: a changed manifest is applied without back-off.
func TestChangeEndsBackoff(t *testing.T) {
	bubble(t, func(t *testing.T, g *ground) {
		g.setScript(failing("SetUp", result{err: errBroken}))
		m := start(t, g, newClaims("fs"), full{g})
		manifests := objects(pod("a", "fs"))
		m.Update(manifests)
		time.Sleep(10 * time.Minute)
		g.setScript(nil)
		m.Update(manifests)
		settle()
		m.wantPhase(t, "a", "fs", state.Failed)
		m.apply(pod("a", "fs"), pod("b"))
		m.wantReady(t, "a", "b")
	})
}

func TestExpand(t *testing.T) {
	bubble(t, func(t *testing.T, g *ground) {
		c := newClaims("fs")
		m := start(t, g, c, full{g})
		m.apply(pod("a", "fs"))
		grown := volumeOf("fs", "h-fs", corev1.PersistentVolumeFilesystem)
		grown.Spec.Capacity[corev1.ResourceStorage] = resource.MustParse("2Gi")
		c.set(grown)
		g.setScript(failing("NodeExpand", result{err: errBroken}))
		m.Wake()
		settle()
		m.wantReady(t, "a")
		m.wantMounted(t, "fs", errBroken.Error())
		g.setScript(nil)
		time.Sleep(time.Second)
		wantSizes(t, g, c, "2Gi")
		m.wantMounted(t, "fs", "")
		g.calls()
		m.Wake()
		time.Sleep(5 * time.Minute)
		wantCalls(t, g)
	})
}

// wantSizes fails the test unless volume fs, and no other, was expanded.
func wantSizes(t *testing.T, g *ground, c *claims, size string) {
	t.Helper()
	g.mu.Lock()
	defer g.mu.Unlock()
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(g.sizes) != 1 || g.sizes["h-fs"] != size || c.expanded["fs"] != size {
		t.Errorf("expanded to %v, reported %v, want %s", g.sizes, c.expanded, size)
	}
}

// TestExpandOnMount: a volume that grew while it was not mounted is expanded after it is mounted, if
// the node must expand it.
func TestExpandOnMount(t *testing.T) {
	bubble(t, func(t *testing.T, g *ground) {
		c := newClaims("fs", "current")
		grown := volumeOf("fs", "h-fs", corev1.PersistentVolumeFilesystem)
		grown.Annotations = map[string]string{plugins.NodeExpandAnnotation: "true"}
		c.set(grown)
		m := start(t, g, c, full{g})
		m.Update(objects(pod("a", "fs", "current")))
		time.Sleep(5 * time.Minute)
		m.wantReady(t, "a")
		wantSizes(t, g, c, "1Gi")
		if n := g.count("NodeExpand"); n != 1 {
			t.Errorf("expanded %d times", n)
		}
	})
}

func TestRemounts(t *testing.T) {
	bubble(t, func(t *testing.T, g *ground) {
		m := start(t, g, newClaims(), plain{ground: g, remounts: true})
		m.apply(pod("a", "e"))
		wantCalls(t, g, "SetUp e uid-a")
		m.apply(pod("a", "e"), pod("b"))
		wantCalls(t, g, "SetUp e uid-a")
		m.apply(pod("a", "e"), pod("b"))
		wantCalls(t, g)
		for range 10 {
			time.Sleep(time.Minute * 66 / 60)
			synctest.Wait()
		}
		if n := len(g.calls()); n < 9 || n > 13 {
			t.Errorf("set up %d times in 11 minutes", n)
		}
		for _, err := range []error{errBroken, &plugins.UncertainError{Err: errBroken}} {
			g.setScript(failing("SetUp", result{err: err}))
			time.Sleep(70 * time.Second)
			m.wantReady(t, "a")
			m.wantMounted(t, "e", errBroken.Error())
			g.setScript(nil)
			time.Sleep(3 * time.Minute)
			m.wantMounted(t, "e", "")
		}
	})
}

// TestRemovedLink: the link to a raw device is created again.
func TestRemovedLink(t *testing.T) {
	bubble(t, func(t *testing.T, g *ground) {
		m := start(t, g, newClaims("disk"), full{g})
		m.apply(pod("a", "disk"))
		g.calls()
		path := m.wantPhase(t, "a", "disk", state.Mounted).Path
		must(t, os.Remove(path))
		time.Sleep(2 * time.Minute)
		wantCalls(t, g, "SetUp h-disk uid-a")
		m.wantReady(t, "a")
		if _, err := os.Stat(path); err != nil {
			t.Error(err)
		}
	})
}

// TestWarning: a warning of the plugin is the message while the volume is mounted.
func TestWarning(t *testing.T) {
	bubble(t, func(t *testing.T, g *ground) {
		m := start(t, g, newClaims(), plain{ground: g, warning: "no limit: use another filesystem"})
		m.Update(objects(pod("a", "e")))
		time.Sleep(2 * time.Minute)
		m.wantMounted(t, "e", "no limit: use another filesystem")
	})
}

// TestChangedSpec: a volume whose spec is changed is set up again.
func TestChangedSpec(t *testing.T) {
	bubble(t, func(t *testing.T, g *ground) {
		m := start(t, g, newClaims(), plain{ground: g})
		m.apply(pod("a", "e"))
		changed := pod("a", "e")
		changed.Spec.Volumes[0].EmptyDir.Medium = corev1.StorageMediumMemory
		g.setScript(failing("SetUp", result{err: plugins.Invalidf("medium: use another volume")}))
		m.apply(changed)
		if s := m.wantPhase(t, "a", "e", state.Failed); !strings.Contains(s.Message, "medium") || s.Path == "" {
			t.Errorf("status: %+v", s)
		}
		wantCalls(t, g, "SetUp e uid-a", "SetUp e uid-a")
		m.apply(pod("a", "e"))
		m.wantReady(t, "a")
	})
}

// TestOtherDevice: if the device of a mounted volume is changed, the volume fails and keeps its
// device.
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
				m.apply(pod("a", "fs"))
				m.wantReady(t, "a")
				before := g.left()
				c.set(volumeOf("fs", "h-other", corev1.PersistentVolumeFilesystem))
				if again != nil {
					m.stop()
					m = start(t, g, c, again(g))
				}
				m.Update(objects(pod("a", "fs")))
				time.Sleep(5 * time.Minute)
				m.wantPhase(t, "a", "fs", state.Failed, "it was changed")
				c.set(volumeOf("fs", "h-fs", corev1.PersistentVolumeFilesystem))
				m.Update(objects(pod("a", "fs")))
				time.Sleep(5 * time.Minute)
				m.wantReady(t, "a")
				if after := g.left(); after != before {
					t.Errorf("mounted %s, before %s", after, before)
				}
				m.wantRemoved(t, g)
			})
		})
	}
}

// nameless has no record of the device of a pod's volume.
type nameless struct{ full }

func (nameless) PodVolumeName(string, types.UID, bool) string { return "" }

// TestOtherVolumeMode: a PersistentVolume that becomes a raw device waits until the filesystem is
// unmounted.
func TestOtherVolumeMode(t *testing.T) {
	bubble(t, func(t *testing.T, g *ground) {
		c := newClaims("fs")
		m := start(t, g, c, full{g})
		m.apply(pod("a", "fs"))
		c.set(volumeOf("fs", "h-fs", corev1.PersistentVolumeBlock))
		g.calls()
		m.apply(pod("b", "fs"), pod("a", "fs"))
		wantCalls(t, g, "TearDown h-fs uid-a", "UnmountDevice h-fs", "MountDevice h-fs", "SetUp h-fs uid-a", "SetUp h-fs uid-b")
		m.wantReady(t, "a", "b")
	})
}

// TestUnknownFiles: unknown files are reported and not changed, and other volumes are mounted.
func TestUnknownFiles(t *testing.T) {
	bubble(t, func(t *testing.T, g *ground) {
		files := []string{
			"pods/file",
			"pods/uid-x/volumes/test~other/v/data",
			"pods/uid-x/volumes/test~plain/file",
			"pods/uid-x/volumeDevices/test~full/file",
			"pods/uid-y/notes",
		}
		for _, f := range files {
			path := filepath.Join(g.paths.Root, f)
			must(t, os.MkdirAll(filepath.Dir(path), 0o755))
			must(t, os.WriteFile(path, nil, 0o644))
		}
		m := start(t, g, newClaims("fs"), full{g}, plain{ground: g})
		m.apply(pod("a", "fs", "e"))
		m.wantReady(t, "a")
		for _, f := range files {
			if _, err := os.Stat(filepath.Join(g.paths.Root, f)); err != nil {
				t.Errorf("an unknown file was changed: %v", err)
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

// TestLeftByPlugin: a volume that a plugin has set up although it reported a certain failure is found
// and torn down.
func TestLeftByPlugin(t *testing.T) {
	bubble(t, func(t *testing.T, g *ground) {
		g.setScript(failing("SetUp", result{err: errBroken, done: true}))
		m := start(t, g, newClaims(), plain{ground: g})
		m.apply(pod("a", "e"))
		g.setScript(nil)
		m.apply()
		if g.left() == "" {
			t.Error("the plugin left no volume")
		}
		time.Sleep(3 * time.Minute)
		wantNothing(t, g, m)
	})
}

// TestCopied: a pod's volume is not mounted while another claim of the pod is a copy of it and not
// bound. A mounted one stays mounted.
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
		m.wantPhase(t, "a", "fs", state.Pending, "claim fs2")
		if done := strings.Join(g.calls(), "; "); strings.Contains(done, "h-fs") {
			t.Errorf("operations before the copy is bound: %s", done)
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
