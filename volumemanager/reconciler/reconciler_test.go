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

// failing returns a script with a result for one kind of operation. Other operations succeed.
func failing(operation string, r result) func(string) result {
	return func(o string) result {
		if o == operation {
			return r
		}
		return result{}
	}
}

// wantAllRemoved fails the test if a volume, a device or a directory of a pod is left.
func wantAllRemoved(t *testing.T, host *fakeHost, m interface{ StateDiff() (int, int) }) {
	t.Helper()
	if toMount, toUnmount := m.StateDiff(); toMount != 0 || toUnmount != 0 {
		t.Errorf("got %d volumes to mount, %d to unmount; want 0", toMount, toUnmount)
	}
	if existing := host.existing(); existing != "" {
		t.Errorf("got volumes %s, want none", existing)
	}
	if dirs, err := os.ReadDir(host.paths.Pods()); err != nil || len(dirs) > 0 {
		t.Errorf("got directories of pods %v, error %v; want none", dirs, err)
	}
}

// TestPodLifecycle: the volumes of a pod are attached and mounted in order, stay mounted, and are unmounted
// and detached after the pod is removed.
func TestPodLifecycle(t *testing.T) {
	withFakeClock(t, func(t *testing.T, host *fakeHost) {
		c := newClaims("fs", "disk")
		host.setScript(func(string) result { return result{duration: time.Second} })
		m := start(t, host, c, fullPlugin{host}, plainPlugin{fakeHost: host})
		if ready, _, known := m.PodReady(key("web")); ready || known {
			t.Errorf("pod without a manifest: got ready %t, known %t; want neither", ready, known)
		}
		m.Update(objects(pod("web", "fs", "disk", "e")))
		if toMount, toUnmount := m.StateDiff(); toMount != 3 || toUnmount != 0 || !m.InUse("fs") || m.InUse("other") {
			t.Errorf("got %d volumes to mount, %d to unmount, fs in use %t, other in use %t; want 3, 0, true, false", toMount, toUnmount, m.InUse("fs"), m.InUse("other"))
		}
		time.Sleep(time.Minute / 2)
		m.wantReady(t, "web")
		wantCalls(t, host,
			"Attach h-fs", "MountDevice h-fs", "SetUp h-fs uid-web",
			"Attach h-disk", "MountDevice h-disk", "SetUp h-disk uid-web", "SetUp e uid-web")
		for volume, path := range map[string]string{
			"fs": "volumes/test~full/fs", "disk": "volumeDevices/test~full/disk", "e": "volumes/test~plain/e",
		} {
			if s := m.wantPhase(t, "web", volume, state.Mounted); s.Path != filepath.Join(host.paths.Pod("uid-web"), path) || s.Message != "" {
				t.Errorf("volume %s: got status %+v, want path %s below the pod's directory and no message", volume, s, path)
			}
		}
		time.Sleep(10 * time.Minute)
		wantCalls(t, host)
		m.Update(objects())
		time.Sleep(time.Minute / 2)
		wantCalls(t, host,
			"TearDown h-fs uid-web", "UnmountDevice h-fs", "Detach h-fs",
			"TearDown h-disk uid-web", "UnmountDevice h-disk", "Detach h-disk", "TearDown e uid-web")
		wantAllRemoved(t, host, m)
		if m.InUse("fs") || len(m.Status()) > 0 || len(m.events.List()) > 0 {
			t.Errorf("after the removal: got fs in use %t, status %+v, events %+v; want none", m.InUse("fs"), m.Status(), m.events.List())
		}
	})
}

// TestTwoPodsUseOneDevice: a device is attached and mounted once for two pods, and stays while one of them
// uses it.
func TestTwoPodsUseOneDevice(t *testing.T) {
	withFakeClock(t, func(t *testing.T, host *fakeHost) {
		host.setScript(func(string) result { return result{duration: time.Second} })
		m := start(t, host, newClaims("fs"), fullPlugin{host})
		m.Update(objects(pod("a", "fs"), pod("b", "fs")))
		time.Sleep(time.Minute / 2)
		m.wantReady(t, "a", "b")
		wantCalls(t, host, "Attach h-fs", "MountDevice h-fs", "SetUp h-fs uid-a", "SetUp h-fs uid-b")
		m.Update(objects(pod("b", "fs")))
		time.Sleep(time.Minute / 2)
		wantCalls(t, host, "TearDown h-fs uid-a")
		m.wantReady(t, "b")
	})
}

// TestDriverWithoutStaging: a volume that needs neither an attachment nor a device mount is only mounted for
// the pod.
func TestDriverWithoutStaging(t *testing.T) {
	withFakeClock(t, func(t *testing.T, host *fakeHost) {
		host.unstaged["h-fs"] = true
		f := withoutAttach{fullPlugin{host}}
		m := start(t, host, newClaims("fs"), f)
		m.apply(pod("a", "fs"))
		m.wantReady(t, "a")
		m.apply()
		wantCalls(t, host, "SetUp h-fs uid-a", "TearDown h-fs uid-a")
		wantAllRemoved(t, host, m)
	})
}

// withoutAttach is fullPlugin with volumes that need no attachment.
type withoutAttach struct{ fullPlugin }

func (withoutAttach) NeedsAttach(*plugins.Spec) (bool, error) { return false, nil }

// TestErrors: a failed operation is reported and retried with back-off. When the pod is removed, each
// part of the volume that may be set up is torn down.
func TestErrors(t *testing.T) {
	for name, c := range map[string]struct {
		operation string
		result    result
		// tearDown contains the expected TearDown operations after the pod is removed.
		tearDown []string
	}{
		"not mounted":             {"SetUp", result{err: errBroken}, nil},
		"possibly mounted":        {"SetUp", result{err: &plugins.UncertainError{Err: errBroken}, takesEffect: true}, []string{"TearDown h-fs uid-a"}},
		"panic":                   {"SetUp", result{panic: true, takesEffect: true}, []string{"TearDown h-fs uid-a"}},
		"device not mounted":      {"MountDevice", result{err: errBroken}, nil},
		"device possibly mounted": {"MountDevice", result{err: &plugins.UncertainError{Err: errBroken}}, nil},
		"not attached":            {"Attach", result{err: errBroken}, nil},
		"possibly attached":       {"Attach", result{err: &plugins.UncertainError{Err: errBroken}, takesEffect: true}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			withFakeClock(t, func(t *testing.T, host *fakeHost) {
				host.setScript(failing(c.operation, c.result))
				m := start(t, host, newClaims("fs"), fullPlugin{host})
				m.Update(objects(pod("a", "fs")))
				time.Sleep(10 * time.Second)
				s := m.wantPhase(t, "a", "fs", state.Failed)
				if s.RetryAt.Before(time.Now()) || s.Message == "" {
					t.Errorf("got status %+v, want a message and the time of the next retry", s)
				}
				if n := host.count(c.operation); n != 5 { // after 0, 0.5, 1.5, 3.5 and 7.5 s
					t.Errorf("got %d attempts, want 5", n)
				}
				if all := m.events.List(); len(all) != 1 || all[0].Count != 5 {
					t.Errorf("got events %+v, want one with count 5", all)
				}
				m.apply()
				want := c.tearDown
				if c.operation == "SetUp" || c.operation == "MountDevice" && plugins.Uncertain(c.result.err) {
					want = append(want, "UnmountDevice h-fs")
				}
				if c.operation != "Attach" || c.result.takesEffect {
					want = append(want, "Detach h-fs")
				}
				wantCalls(t, host, want...)
				if existing := host.existing(); existing != "" || len(m.Status()) > 0 {
					t.Errorf("after the removal: got volumes %s, status %+v; want none", existing, m.Status())
				}
			})
		})
	}
}

// TestUnmountFails: a volume of a removed pod that cannot be unmounted stays in the status, and its
// device stays until a retry succeeds.
func TestUnmountFails(t *testing.T) {
	withFakeClock(t, func(t *testing.T, host *fakeHost) {
		m := start(t, host, newClaims("fs"), fullPlugin{host})
		m.apply(pod("a", "fs"))
		host.setScript(failing("TearDown", result{err: errBroken}))
		m.Update(objects())
		time.Sleep(time.Second)
		s := m.Status()
		if len(s) != 1 || s[0].Phase != state.Failed || s[0].Pod != "default/a" || !m.InUse("fs") || !strings.Contains(host.existing(), "h-fs") {
			t.Errorf("got status %+v, volumes %s; want volume fs of pod default/a Failed, in use and mounted", s, host.existing())
		}
		host.setScript(nil)
		time.Sleep(time.Minute)
		wantAllRemoved(t, host, m)
	})
}

// TestAddedWhileUnmounting: if a pod is added again while its volume is being unmounted, the volume is
// mounted again, and its device stays.
func TestAddedWhileUnmounting(t *testing.T) {
	withFakeClock(t, func(t *testing.T, host *fakeHost) {
		m := start(t, host, newClaims("fs"), fullPlugin{host})
		m.apply(pod("a", "fs"))
		host.calls()
		host.setScript(func(string) result { return result{duration: time.Second} })
		m.Update(objects())
		time.Sleep(time.Second / 2)
		if s := m.Status(); len(s) != 1 || s[0].Phase != state.Unmounting {
			t.Errorf("during TearDown: got status %+v, want one volume in phase Unmounting", s)
		}
		m.Update(objects(pod("a", "fs")))
		time.Sleep(10 * time.Second)
		m.wantReady(t, "a")
		wantCalls(t, host, "TearDown h-fs uid-a", "SetUp h-fs uid-a")
	})
}

// TestRestart: after a restart, desired volumes that are on disk are set up again without being torn
// down. Other volumes on disk are torn down when the manifests are complete.
func TestRestart(t *testing.T) {
	withFakeClock(t, func(t *testing.T, host *fakeHost) {
		c := newClaims("fs", "removed", "disk", "device")
		m := start(t, host, c, fullPlugin{host}, plainPlugin{fakeHost: host})
		m.apply(pod("a", "fs", "e", "disk"), pod("b", "removed", "e", "device"))
		m.wantReady(t, "a", "b")
		m.stop()
		host.calls()

		m = start(t, host, c, fullPlugin{host}, plainPlugin{fakeHost: host})
		early := objects()
		early.Complete = false
		m.Update(early)
		c.setUnbound(true)
		settle()
		wantCalls(t, host)
		if !m.InUse("removed") || !m.InUse("disk") || m.InUse("e2") {
			t.Errorf("in use: got removed %t, disk %t, e2 %t; want only the volumes on disk, removed and disk", m.InUse("removed"), m.InUse("disk"), m.InUse("e2"))
		}
		m.apply(pod("a", "fs", "e", "disk"))
		wantCalls(t, host,
			"SetUp e uid-a", // the claims of the other volumes of pod a are not bound now
			"TearDown h-removed uid-b", "UnmountDevice h-removed", "Detach h-removed", "TearDown e uid-b",
			"TearDown h-device uid-b", "UnmountDevice h-device", "Detach h-device")
		c.setUnbound(false)
		m.Wake()
		settle()
		wantCalls(t, host,
			"Attach h-fs", "MountDevice h-fs", "SetUp h-fs uid-a",
			"Attach h-disk", "MountDevice h-disk", "SetUp h-disk uid-a")
		m.wantReady(t, "a")
		m.wantRemoved(t, host)
	})
}

// TestDuplicate: if two PersistentVolumes have the same handle, the device that is found after a
// restart has the name of one of them. The device stays while a pod uses the other PersistentVolume.
func TestDuplicate(t *testing.T) {
	withFakeClock(t, func(t *testing.T, host *fakeHost) {
		host.handles["duplicate"] = "h-fs"
		c := newClaims("fs")
		c.set(volumeOf("duplicate", "h-fs", corev1.PersistentVolumeFilesystem))
		m := start(t, host, c, fullPlugin{host})
		m.apply(pod("a", "fs"), pod("b", "duplicate"))
		m.wantReady(t, "a", "b")
		m.stop()
		host.calls()

		m = start(t, host, c, fullPlugin{host})
		c.setUnbound(true)
		m.apply(pod("b", "duplicate"))
		wantCalls(t, host, "TearDown h-fs uid-a")
		if !m.InUse("fs") {
			t.Error("volume fs is not in use, although a pod uses another PersistentVolume with the same handle")
		}
		host.setScript(failing("TearDown", result{err: errBroken}))
		m.apply()
		wantCalls(t, host, "TearDown h-fs uid-b")
		host.setScript(nil)
		time.Sleep(time.Second)
		wantCalls(t, host, "TearDown h-fs uid-b", "UnmountDevice h-fs", "Detach h-fs")
		wantAllRemoved(t, host, m)
	})
}

// TestLostClaim: a volume stays mounted if its claim is lost while the pod is still desired.
func TestLostClaim(t *testing.T) {
	withFakeClock(t, func(t *testing.T, host *fakeHost) {
		c := newClaims("fs")
		m := start(t, host, c, fullPlugin{host})
		m.apply(pod("a", "fs"))
		host.calls()
		c.setUnbound(true)
		m.Wake()
		time.Sleep(5 * time.Minute)
		wantCalls(t, host)
		m.wantPhase(t, "a", "fs", state.Pending, "create a volume")
		if all := m.events.List(); len(all) != 0 { // package claim records the event
			t.Errorf("got events %+v, want none", all)
		}
	})
}

// TestReadWriteOncePod: a pod waits while another pod uses a volume that only one pod may use.
func TestReadWriteOncePod(t *testing.T) {
	withFakeClock(t, func(t *testing.T, host *fakeHost) {
		host.exclusive["h-fs"] = true
		c := newClaims()
		pv := volumeOf("fs", "h-fs", corev1.PersistentVolumeFilesystem)
		pv.Spec.AccessModes = []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOncePod}
		c.set(pv)
		m := start(t, host, c, fullPlugin{host})
		m.apply(pod("b", "fs"))
		m.apply(pod("a", "fs"), pod("b", "fs"))
		m.wantReady(t, "b")
		m.wantPhase(t, "a", "fs", state.Pending, "default/b")
		m.apply(pod("a", "fs"))
		m.wantReady(t, "a")
	})
}

// TestVolumeLimit: if the limit of a driver is reached, a volume waits until another one is detached.
func TestVolumeLimit(t *testing.T) {
	withFakeClock(t, func(t *testing.T, host *fakeHost) {
		host.limit = 2
		m := start(t, host, newClaims("fs1", "fs2", "fs3"), fullPlugin{host})
		m.apply(pod("a", "fs1", "fs2"), pod("b", "fs2", "fs3"))
		m.wantReady(t, "a")
		m.wantPhase(t, "b", "fs2", state.Mounted)
		m.wantPhase(t, "b", "fs3", state.Pending, "2 volumes")
		m.apply(pod("b", "fs2", "fs3"))
		m.wantReady(t, "b")
	})
}

// TestVolumeLimitWhileWaiting: a device for which two pods wait counts once towards the driver's limit.
func TestVolumeLimitWhileWaiting(t *testing.T) {
	withFakeClock(t, func(t *testing.T, host *fakeHost) {
		host.limit = 2
		host.setScript(failing("Attach", result{err: errBroken}))
		m := start(t, host, newClaims("fs1", "fs2"), fullPlugin{host})
		m.Update(objects(pod("a", "fs1"), pod("b", "fs1"), pod("c", "fs2")))
		time.Sleep(10 * time.Second)
		for pod, volume := range map[string]string{"a": "fs1", "b": "fs1", "c": "fs2"} {
			if s := m.wantPhase(t, pod, volume, state.Failed); s.Message != errBroken.Error() {
				t.Errorf("pod %s: got message %q, want %q", pod, s.Message, errBroken)
			}
		}
	})
}

// TestDriverRegistered: a volume waits for its driver to register, and is then mounted.
func TestDriverRegistered(t *testing.T) {
	withFakeClock(t, func(t *testing.T, host *fakeHost) {
		host.unregistered = true
		m := start(t, host, newClaims("fs"), fullPlugin{host})
		m.apply(pod("a", "fs"))
		m.wantPhase(t, "a", "fs", state.Pending, "not registered")
		host.setUnregistered(false)
		m.Retry()
		settle()
		m.wantReady(t, "a")
	})
}

// TestDriverRegisteredDuringCall: if the driver registers while a failing call runs, the call is
// retried without back-off.
func TestDriverRegisteredDuringCall(t *testing.T) {
	withFakeClock(t, func(t *testing.T, host *fakeHost) {
		host.setScript(failing("SetUp", result{err: errBroken, duration: time.Second}))
		m := start(t, host, newClaims("fs"), fullPlugin{host})
		m.Update(objects(pod("a", "fs")))
		time.Sleep(10 * time.Minute)
		for m.volume(t, "a", "fs").Phase != state.Mounting {
			time.Sleep(time.Second / 2)
		}
		host.setScript(nil) // the next call succeeds
		m.Retry()
		time.Sleep(5 * time.Second)
		m.wantReady(t, "a")
	})
}

// TestAffinity: a volume is not mounted if its nodeAffinity does not match the machine. A driver may
// report the machine's topology later, and may disappear while its volumes are mounted.
func TestAffinity(t *testing.T) {
	withFakeClock(t, func(t *testing.T, host *fakeHost) {
		c := newClaims()
		for volume, zone := range map[string]string{"fs": "a", "fs2": "b", "disk": "a"} {
			c.set(inZone(newClaims(volume).volumes[volume], zone))
		}
		host.unregistered, host.zone = true, "a"
		toggle := func(m *manager, unregistered bool) {
			host.setUnregistered(unregistered)
			m.Retry()
			settle()
		}
		m := start(t, host, c, fullPlugin{host}, plainPlugin{fakeHost: host})
		m.apply(pod("a", "fs", "disk", "e"), pod("b", "fs2", "e"))
		for pod, volume := range map[string]string{"a": "fs", "b": "fs2"} {
			m.wantPhase(t, pod, volume, state.Pending, "not registered")
		}
		toggle(m, false)
		m.wantReady(t, "a")
		m.wantPhase(t, "b", "fs2", state.Failed, "nodeAffinity", "zone=a")
		m.wantPhase(t, "b", "e", state.Mounted)
		if done := strings.Join(host.calls(), "; "); strings.Contains(done, "h-fs2") {
			t.Errorf("got operations %s, want none with the volume of another machine, h-fs2", done)
		}
		toggle(m, true)
		m.apply(pod("a", "fs", "disk", "e"), pod("b", "fs2", "e"), pod("c", "e"))
		m.wantReady(t, "a", "c")
		m.stop()

		host.calls()
		m = start(t, host, c, fullPlugin{host}, plainPlugin{fakeHost: host})
		m.Update(objects(pod("a", "fs", "disk", "e"), pod("b", "fs2", "e")))
		time.Sleep(3 * time.Minute)
		toggle(m, false)
		m.wantReady(t, "a")
		for _, o := range host.calls() {
			if strings.HasPrefix(o, "TearDown h-") || strings.HasPrefix(o, "Un") || strings.HasPrefix(o, "Detach") {
				t.Errorf("after a restart: got operation %s, want no volume torn down", o)
			}
		}
	})
}

// inZone restricts a volume to the machines of a zone.
func inZone(v *corev1.PersistentVolume, zone string) *corev1.PersistentVolume {
	requirement := corev1.NodeSelectorRequirement{Key: "zone", Operator: corev1.NodeSelectorOpIn, Values: []string{zone}}
	term := corev1.NodeSelectorTerm{MatchExpressions: []corev1.NodeSelectorRequirement{requirement}}
	v.Spec.NodeAffinity = &corev1.VolumeNodeAffinity{Required: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{term}}}
	return v
}

// TestChangeEndsBackoff: after a change of the manifests, failed operations are retried at once.
func TestChangeEndsBackoff(t *testing.T) {
	withFakeClock(t, func(t *testing.T, host *fakeHost) {
		host.setScript(failing("SetUp", result{err: errBroken}))
		m := start(t, host, newClaims("fs"), fullPlugin{host})
		manifests := objects(pod("a", "fs"))
		m.Update(manifests)
		time.Sleep(10 * time.Minute)
		host.setScript(nil)
		m.Update(manifests)
		settle()
		m.wantPhase(t, "a", "fs", state.Failed)
		m.apply(pod("a", "fs"), pod("b"))
		m.wantReady(t, "a", "b")
	})
}

// TestExpand: if the capacity of a mounted volume grows, the volume is expanded once. It stays mounted while
// the expansion fails.
func TestExpand(t *testing.T) {
	withFakeClock(t, func(t *testing.T, host *fakeHost) {
		c := newClaims("fs")
		m := start(t, host, c, fullPlugin{host})
		m.apply(pod("a", "fs"))
		grown := volumeOf("fs", "h-fs", corev1.PersistentVolumeFilesystem)
		grown.Spec.Capacity[corev1.ResourceStorage] = resource.MustParse("2Gi")
		c.set(grown)
		host.setScript(failing("NodeExpand", result{err: errBroken}))
		m.Wake()
		settle()
		m.wantReady(t, "a")
		m.wantMounted(t, "fs", errBroken.Error())
		host.setScript(nil)
		time.Sleep(time.Second)
		wantSizes(t, host, c, "2Gi")
		m.wantMounted(t, "fs", "")
		host.calls()
		m.Wake()
		time.Sleep(5 * time.Minute)
		wantCalls(t, host)
	})
}

// wantSizes fails the test unless volume fs, and no other volume, was expanded to size.
func wantSizes(t *testing.T, host *fakeHost, c *claims, size string) {
	t.Helper()
	host.mu.Lock()
	defer host.mu.Unlock()
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(host.sizes) != 1 || host.sizes["h-fs"] != size || c.expanded["fs"] != size {
		t.Errorf("got expanded sizes %v, reported sizes %v; want %s of fs in both", host.sizes, c.expanded, size)
	}
}

// TestExpandOnMount: a volume whose capacity grew while the volume was not mounted is expanded after
// the mount, if the node must expand it.
func TestExpandOnMount(t *testing.T) {
	withFakeClock(t, func(t *testing.T, host *fakeHost) {
		c := newClaims("fs", "current")
		grown := volumeOf("fs", "h-fs", corev1.PersistentVolumeFilesystem)
		grown.Annotations = map[string]string{plugins.NodeExpandAnnotation: "true"}
		c.set(grown)
		m := start(t, host, c, fullPlugin{host})
		m.Update(objects(pod("a", "fs", "current")))
		time.Sleep(5 * time.Minute)
		m.wantReady(t, "a")
		wantSizes(t, host, c, "1Gi")
		if n := host.count("NodeExpand"); n != 1 {
			t.Errorf("got %d expansions, want 1", n)
		}
	})
}

// TestRemounts: a volume whose plugin returns true from Remounts is set up again after each change of
// the manifests and about once a minute. If that fails, the volume stays mounted.
func TestRemounts(t *testing.T) {
	withFakeClock(t, func(t *testing.T, host *fakeHost) {
		m := start(t, host, newClaims(), plainPlugin{fakeHost: host, remounts: true})
		m.apply(pod("a", "e"))
		wantCalls(t, host, "SetUp e uid-a")
		m.apply(pod("a", "e"), pod("b"))
		wantCalls(t, host, "SetUp e uid-a")
		m.apply(pod("a", "e"), pod("b"))
		wantCalls(t, host)
		for range 10 {
			time.Sleep(time.Minute * 66 / 60)
			synctest.Wait()
		}
		if n := len(host.calls()); n < 9 || n > 13 {
			t.Errorf("got %d calls of SetUp in 11 minutes, want 9 to 13", n)
		}
		for _, err := range []error{errBroken, &plugins.UncertainError{Err: errBroken}} {
			host.setScript(failing("SetUp", result{err: err}))
			time.Sleep(70 * time.Second)
			m.wantReady(t, "a")
			m.wantMounted(t, "e", errBroken.Error())
			host.setScript(nil)
			time.Sleep(3 * time.Minute)
			m.wantMounted(t, "e", "")
		}
	})
}

// TestRemovedLink: if the link to a raw device is removed, it is created again.
func TestRemovedLink(t *testing.T) {
	withFakeClock(t, func(t *testing.T, host *fakeHost) {
		m := start(t, host, newClaims("disk"), fullPlugin{host})
		m.apply(pod("a", "disk"))
		host.calls()
		path := m.wantPhase(t, "a", "disk", state.Mounted).Path
		must(t, os.Remove(path))
		time.Sleep(2 * time.Minute)
		wantCalls(t, host, "SetUp h-disk uid-a")
		m.wantReady(t, "a")
		if _, err := os.Stat(path); err != nil {
			t.Error(err)
		}
	})
}

// TestWarning: the status of a mounted volume contains the warning of its plugin.
func TestWarning(t *testing.T) {
	withFakeClock(t, func(t *testing.T, host *fakeHost) {
		m := start(t, host, newClaims(), plainPlugin{fakeHost: host, warning: "no limit: use another filesystem"})
		m.Update(objects(pod("a", "e")))
		time.Sleep(2 * time.Minute)
		m.wantMounted(t, "e", "no limit: use another filesystem")
	})
}

// TestChangedSpec: a volume whose spec is changed is set up again.
func TestChangedSpec(t *testing.T) {
	withFakeClock(t, func(t *testing.T, host *fakeHost) {
		m := start(t, host, newClaims(), plainPlugin{fakeHost: host})
		m.apply(pod("a", "e"))
		changed := pod("a", "e")
		changed.Spec.Volumes[0].EmptyDir.Medium = corev1.StorageMediumMemory
		host.setScript(failing("SetUp", result{err: plugins.Invalidf("medium: use another volume")}))
		m.apply(changed)
		if s := m.wantPhase(t, "a", "e", state.Failed); !strings.Contains(s.Message, "medium") || s.Path == "" {
			t.Errorf("got status %+v, want the error as message, and the path", s)
		}
		wantCalls(t, host, "SetUp e uid-a", "SetUp e uid-a")
		m.apply(pod("a", "e"))
		m.wantReady(t, "a")
	})
}

// TestOtherDevice: if the PersistentVolume of a mounted volume is changed to another device, the volume
// fails and its device stays mounted.
func TestOtherDevice(t *testing.T) {
	// restarted returns the plugin with which the manager is restarted; nil for no restart.
	for name, restarted := range map[string]func(host *fakeHost) plugins.VolumePlugin{
		"without a restart":         nil,
		"restarted":                 func(host *fakeHost) plugins.VolumePlugin { return fullPlugin{host} },
		"restarted without records": func(host *fakeHost) plugins.VolumePlugin { return withoutVolumeName{fullPlugin{host}} },
	} {
		t.Run(name, func(t *testing.T) {
			withFakeClock(t, func(t *testing.T, host *fakeHost) {
				c := newClaims("fs")
				m := start(t, host, c, fullPlugin{host})
				m.apply(pod("a", "fs"))
				m.wantReady(t, "a")
				before := host.existing()
				c.set(volumeOf("fs", "h-other", corev1.PersistentVolumeFilesystem))
				if restarted != nil {
					m.stop()
					m = start(t, host, c, restarted(host))
				}
				m.Update(objects(pod("a", "fs")))
				time.Sleep(5 * time.Minute)
				m.wantPhase(t, "a", "fs", state.Failed, "the volume was changed")
				c.set(volumeOf("fs", "h-fs", corev1.PersistentVolumeFilesystem))
				m.Update(objects(pod("a", "fs")))
				time.Sleep(5 * time.Minute)
				m.wantReady(t, "a")
				if after := host.existing(); after != before {
					t.Errorf("got volumes %s, want %s as before the change", after, before)
				}
				m.wantRemoved(t, host)
			})
		})
	}
}

// withoutVolumeName is fullPlugin without records that contain the device of a pod's volume.
type withoutVolumeName struct{ fullPlugin }

func (withoutVolumeName) PodVolumeName(string, types.UID, bool) string { return "" }

// TestOtherVolumeMode: if the volumeMode of a PersistentVolume changes to Block, the volume is set up as
// a raw device only after its filesystem is unmounted.
func TestOtherVolumeMode(t *testing.T) {
	withFakeClock(t, func(t *testing.T, host *fakeHost) {
		c := newClaims("fs")
		m := start(t, host, c, fullPlugin{host})
		m.apply(pod("a", "fs"))
		c.set(volumeOf("fs", "h-fs", corev1.PersistentVolumeBlock))
		host.calls()
		m.apply(pod("b", "fs"), pod("a", "fs"))
		wantCalls(t, host, "TearDown h-fs uid-a", "UnmountDevice h-fs", "MountDevice h-fs", "SetUp h-fs uid-a", "SetUp h-fs uid-b")
		m.wantReady(t, "a", "b")
	})
}

// TestUnknownFiles: unknown files are reported and not changed, and other volumes are mounted.
func TestUnknownFiles(t *testing.T) {
	withFakeClock(t, func(t *testing.T, host *fakeHost) {
		files := []string{
			"pods/file",
			"pods/uid-x/volumes/test~other/v/data",
			"pods/uid-x/volumes/test~plain/file",
			"pods/uid-x/volumeDevices/test~full/file",
			"pods/uid-y/notes",
		}
		for _, f := range files {
			path := filepath.Join(host.paths.Root, f)
			must(t, os.MkdirAll(filepath.Dir(path), 0o755))
			must(t, os.WriteFile(path, nil, 0o644))
		}
		m := start(t, host, newClaims("fs"), fullPlugin{host}, plainPlugin{fakeHost: host})
		m.apply(pod("a", "fs", "e"))
		m.wantReady(t, "a")
		for _, f := range files {
			if _, err := os.Stat(filepath.Join(host.paths.Root, f)); err != nil {
				t.Errorf("unknown file %s: got %v, want it unchanged", f, err)
			}
		}
		reasons := map[string]int{}
		for _, e := range m.events.List() {
			reasons[e.Reason]++
			if !e.Warning || !strings.Contains(e.Message, "by hand") {
				t.Errorf("got event %+v, want a warning that says what to do by hand", e)
			}
		}
		if reasons["Unknown"] != 4 || reasons["FailedRemoveDirectory"] != 2 {
			t.Errorf("got events %+v, want 4 with reason Unknown and 2 with reason FailedRemoveDirectory", m.events.List())
		}
		var failed []string
		for _, v := range m.Status() {
			if v.Phase == state.Failed {
				failed = append(failed, v.Path)
			}
		}
		if len(failed) != 2 {
			t.Errorf("got failed directories %v in the status, want those of uid-x and uid-y", failed)
		}
	})
}

// TestLeftByPlugin: if a plugin sets up a volume and yet reports that nothing is set up, the volume is
// found on disk and torn down.
func TestLeftByPlugin(t *testing.T) {
	withFakeClock(t, func(t *testing.T, host *fakeHost) {
		host.setScript(failing("SetUp", result{err: errBroken, takesEffect: true}))
		m := start(t, host, newClaims(), plainPlugin{fakeHost: host})
		m.apply(pod("a", "e"))
		host.setScript(nil)
		m.apply()
		if host.existing() == "" {
			t.Error("no volume exists before the sync, want the one that the plugin has set up")
		}
		time.Sleep(3 * time.Minute)
		wantAllRemoved(t, host, m)
	})
}

// TestSourceOfUnboundClaim: a volume is not mounted while another claim of the pod is unbound and is
// copied from it. A mounted volume stays mounted.
func TestSourceOfUnboundClaim(t *testing.T) {
	withFakeClock(t, func(t *testing.T, host *fakeHost) {
		c := newClaims("fs")
		m := start(t, host, c, fullPlugin{host}, plainPlugin{fakeHost: host})
		withCopy := func(pods ...*corev1.Pod) *manifest.Objects {
			o := objects(pods...)
			claim := &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "fs2"}, Spec: corev1.PersistentVolumeClaimSpec{DataSource: &corev1.TypedLocalObjectReference{Kind: "PersistentVolumeClaim", Name: "fs"}}}
			o.Claims = map[types.NamespacedName]*corev1.PersistentVolumeClaim{{Namespace: "default", Name: "fs2"}: claim}
			return o
		}
		m.Update(withCopy(pod("a", "fs", "fs2", "e")))
		settle()
		m.wantPhase(t, "a", "e", state.Mounted)
		m.wantPhase(t, "a", "fs", state.Pending, "claim fs2")
		if done := strings.Join(host.calls(), "; "); strings.Contains(done, "h-fs") {
			t.Errorf("before claim fs2 is bound: got operations %s, want none with h-fs", done)
		}
		m.Update(withCopy(pod("b", "fs")))
		settle()
		m.wantReady(t, "b")
		m.Update(withCopy(pod("b", "fs", "fs2")))
		settle()
		m.wantPhase(t, "b", "fs", state.Mounted)
		c.set(newClaims("fs2").volumes["fs2"])
		m.Update(withCopy(pod("b", "fs", "fs2")))
		settle()
		m.wantReady(t, "b")
	})
}
