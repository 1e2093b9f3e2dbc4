package claim_test

import (
	"cmp"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"testing"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/trivet-csi/trivet/volumemanager/plugins"
	"github.com/trivet-csi/trivet/volumemanager/store"
)

// settleAfterKill settles. If the process is killed meanwhile, it starts a new one and settles again.
func (f *fixture) settleAfterKill() {
	f.t.Helper()
	f.settle()
	if f.dead() {
		f.restartAndSettle()
	}
}

// TestKilled: if the manager is killed before any write or call, the restarted manager completes the
// lifecycle.
func TestKilled(t *testing.T) {
	for n := 1; ; n++ {
		f := newFixture(t)
		f.driver.node = true
		f.driver.volumes["static"], f.driver.volumes["recycled"] = &driverVolume{}, &driverVolume{}
		f.killAt(n)
		f.lifecycle()
		survived := f.killIn > 0
		if t.Failed() {
			t.Fatalf("the manager was killed before write or call %d; the final state: %s", n, f.status())
		}
		if survived {
			t.Logf("killed before each of %d writes and calls", n-1)
			break
		}
	}
}

// lifecycle binds, provisions, expands, deletes and scrubs volumes, and checks each result.
func (f *fixture) lifecycle() {
	f.t.Helper()
	f.add(newClass("fast"),
		withPolicy(newVolume("static", "1Gi", "a"), corev1.PersistentVolumeReclaimDelete),
		withPolicy(newVolume("recycled", "1Gi", "b"), corev1.PersistentVolumeReclaimRecycle),
		newClaim("dynamic", "1Gi", "fast"), newClaim("static", "1Gi", "a"), newClaim("recycled", "1Gi", "b"))
	f.settleAfterKill()
	f.checkBound("dynamic", "pvc-uid-dynamic")
	f.checkBound("static", "static")
	f.checkBound("recycled", "recycled")

	f.add(newClaim("dynamic", "2Gi", "fast"))
	f.settleAfterKill()
	f.manager.controller.NodeExpanded("pvc-uid-dynamic", resource.MustParse("2Gi"))
	f.settleAfterKill()
	if _, v, err := f.manager.controller.Volume(named("dynamic")); err == nil && v.Annotations[plugins.NodeExpandAnnotation] != "" {
		f.manager.controller.NodeExpanded("pvc-uid-dynamic", resource.MustParse("2Gi")) // the restarted manager expands on the node again
		f.settleAfterKill()
	}
	if c := f.claim("dynamic"); c.SizeBytes != 2<<30 || c.Message != "" {
		f.t.Errorf("claim after the expansion: got %+v, want capacity 2Gi and no message", c)
	}

	for _, name := range []string{"dynamic", "static", "recycled"} {
		f.removeClaim(name)
	}
	f.settleAfterKill()
	if v := f.driver.volumes["recycled"]; len(f.driver.volumes) != 1 || v == nil || v.scrubs == 0 {
		f.t.Errorf("volumes of the driver: got %v, want only recycled, scrubbed", f.driver.volumes)
	}
	if f.volume("recycled").Phase != "Available" || len(f.manager.store.Claims()) > 0 {
		f.t.Errorf("after the removal of all claims: got %s, want no claims, and volume recycled Available", f.status())
	}
}

// TestHistories runs random histories of edited manifests, failing and uncertain calls, and kills.
// After each history, every claim has one volume that matches, no volume has two claims, and the
// driver has only the volumes of claims and the retained volumes. TRIVET_TEST_HISTORIES is the number
// of histories, TRIVET_TEST_SEED the first seed.
func TestHistories(t *testing.T) {
	for seed := range number(t, "TRIVET_TEST_HISTORIES", 60) {
		seed += number(t, "TRIVET_TEST_SEED", 0)
		if !t.Run(strconv.Itoa(seed), func(t *testing.T) { newHistory(t, seed).run() }) {
			return
		}
	}
}

// number returns the number in an environment variable; fallback if the variable is not set.
func number(t *testing.T, variable string, fallback int) int {
	t.Helper()
	n, err := strconv.Atoi(cmp.Or(os.Getenv(variable), strconv.Itoa(fallback)))
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// history is a random sequence of changes and failures.
type history struct {
	*fixture
	random *rand.Rand
}

// retained is the name of the class with the reclaim policy Retain.
const retained = "retained"

// newHistory returns a history with three classes and six volumes of manifests, half of which are retained
// and half of which are scrubbed.
func newHistory(t *testing.T, seed int) *history {
	t.Helper()
	h := &history{fixture: newFixture(t), random: rand.New(rand.NewPCG(uint64(seed), 8))}
	late, keep := newClass("late"), newClass(retained)
	late.VolumeBindingMode = new(storagev1.VolumeBindingWaitForFirstConsumer)
	keep.ReclaimPolicy = new(corev1.PersistentVolumeReclaimRetain)
	h.add(newClass("fast"), late, keep)
	for i := range 6 {
		policy := []corev1.PersistentVolumeReclaimPolicy{corev1.PersistentVolumeReclaimRetain, corev1.PersistentVolumeReclaimRecycle}[i%2]
		name := fmt.Sprintf("static-%d", i)
		h.add(withPolicy(newVolume(name, fmt.Sprintf("%dGi", 1+i/2), "static"), policy))
		h.driver.volumes[name] = &driverVolume{retain: true}
	}
	return h
}

// run makes random changes. Then it checks the state without failures, and the state after all manifests
// of pods and claims were removed.
func (h *history) run() {
	for range 60 {
		h.step()
		if h.dead() {
			h.restart()
		}
	}
	h.driver.mu.Lock()
	h.driver.fails = nil
	h.driver.mu.Unlock()
	h.killAt(0)
	h.endUse()
	h.settleAfterKill()
	h.check()
	clear(h.objects.Pods)
	clear(h.objects.Claims)
	h.update()
	h.endUse()
	h.settleAfterKill()
	h.checkRetained()
}

// step makes one random change.
func (h *history) step() {
	name := fmt.Sprintf("c%d", h.random.IntN(8))
	switch h.random.IntN(12) {
	case 0, 1, 2:
		class := []string{"fast", "late", retained, "static"}[h.random.IntN(4)]
		c := newClaim(name, fmt.Sprintf("%dGi", 1+h.random.IntN(3)), class)
		if before := h.objects.Claims[named(name)]; before != nil { // the class is immutable
			c.Spec.StorageClassName = before.Spec.StorageClassName
		}
		h.add(c)
	case 3, 4:
		h.removeClaim(name)
	case 5:
		h.add(newPod("p-"+name, name))
	case 6:
		h.removePod("p-" + name)
	case 7:
		h.endUse()
	case 8:
		h.fail()
	case 9:
		h.killAt(1 + h.random.IntN(6))
	case 10:
		h.restart()
	case 11:
		h.syncSome()
	}
	h.useVolumes()
}

// syncSome syncs up to three times, and waits for the operations after some of the passes.
func (h *history) syncSome() {
	for range h.random.IntN(4) {
		h.manager.controller.Retry()
		h.sync()
		if h.random.IntN(2) == 0 {
			h.wait()
		}
	}
}

// fail makes some of the next calls fail. A failing call may be executed, and its error may be
// uncertain.
func (h *history) fail() {
	h.driver.mu.Lock()
	defer h.driver.mu.Unlock()
	random := rand.New(rand.NewPCG(h.random.Uint64(), 1)) // calls run concurrently with the history, which uses h.random
	left := random.IntN(12)
	h.driver.fails = func(string) result {
		if left--; left < 0 {
			return result{}
		}
		failed := errors.New("failed")
		switch random.IntN(4) {
		case 0:
			return result{skip: true, err: failed}
		case 1:
			return result{skip: true, err: &plugins.UncertainError{Err: failed}}
		case 2:
			return result{err: &plugins.UncertainError{Err: failed}}
		}
		return result{}
	}
}

// useVolumes does what the reconciler does: a volume that Volume returns for a pod is in use.
func (h *history) useVolumes() {
	for claim, volume := range h.requested() {
		h.setInUse(volume, true)
		h.checkRecorded(claim, volume)
	}
}

// requested returns the volumes that Volume returns for pods, keyed by the names of their claims.
func (h *history) requested() map[string]string {
	volumes := map[string]string{}
	for _, pod := range h.objects.Pods {
		for _, v := range pod.Spec.Volumes {
			if _, pv, err := h.manager.controller.Volume(named(v.Name)); err == nil {
				volumes[v.Name] = pv.Name
			}
		}
	}
	return volumes
}

// endUse ends the use of volumes that no pod requests any more.
func (h *history) endUse() {
	inUse := map[string]bool{}
	for _, volume := range h.requested() {
		inUse[volume] = true
	}
	h.mu.Lock()
	h.inUse = inUse
	h.mu.Unlock()
	h.sync()
}

// checkRecorded checks that the files of the store contain a binding that Volume returned.
func (h *history) checkRecorded(name, volume string) {
	s, err := store.Open(h.dir)
	if err != nil {
		h.t.Fatal(err)
	}
	defer func() { _ = s.Close() }()
	c, err := s.Claim(named(name))
	if err != nil || c == nil || c.Spec.VolumeName != volume {
		h.t.Fatalf("recorded claim %s: got %v, error %v; want it bound to volume %s", name, c, err, volume)
	}
	if v, err := s.Volume(volume); err != nil || v == nil || v.Spec.ClaimRef.UID != c.UID {
		h.t.Fatalf("recorded volume %s: got %v, error %v; want it bound to claim %s", volume, v, err, name)
	}
}

// check checks the result of a history after it has settled.
func (h *history) check() {
	volumes := map[string]string{}
	for key, c := range h.objects.Claims {
		bound, v, err := h.manager.controller.Volume(key)
		if err != nil {
			h.checkUnbound(c, err)
			continue
		}
		if other := volumes[v.Name]; other != "" {
			h.t.Errorf("volume %s has claims %s and %s", v.Name, other, key)
		}
		volumes[v.Name] = key.String()
		if v.Spec.ClaimRef.UID != c.UID {
			h.t.Errorf("claim %s is bound to volume %s, which is bound to another claim: %+v", key, v.Name, v.Spec)
		}
		actual, requested := v.Spec.Capacity.Storage(), bound.Spec.Resources.Requests.Storage()
		if actual.Cmp(*requested) < 0 && *bound.Spec.StorageClassName != "static" {
			h.t.Errorf("capacity of claim %s: got %s, want at least %s", key, actual, requested)
		}
		if h.driver.volumes[v.Name] == nil {
			h.t.Errorf("volume %s of claim %s does not exist in the driver", v.Name, key)
		}
	}
	for _, v := range h.manager.store.Volumes() {
		if v.Status.Phase == corev1.VolumeBound && volumes[v.Name] == "" && !h.protected(v.Spec.ClaimRef.Name) {
			h.t.Errorf("volume %s is Bound, but no claim is bound to it: claimRef %+v", v.Name, v.Spec.ClaimRef)
		}
	}
	h.checkLeaks()
	if h.t.Failed() {
		h.t.Log(h.status())
	}
}

// protected reports whether a pod uses a claim, so that the claim stays when its manifest is removed.
func (h *history) protected(name string) bool { return h.objects.Pods[named("p-"+name)] != nil }

// checkUnbound checks that there is a reason why a claim is not bound. err is the error of Volume.
func (h *history) checkUnbound(c *corev1.PersistentVolumeClaim, err error) {
	if before := h.volume("pvc-" + string(c.UID)); before.Phase == "Released" && before.StorageClass == retained {
		return // the earlier volume of the claim still exists, and is too small
	}
	switch class := *c.Spec.StorageClassName; class {
	case "late":
		if h.protected(c.Name) {
			h.t.Errorf("a pod uses claim %s, but the claim is not bound: %v", c.Name, err)
		}
	case "static":
		for name, v := range h.objects.Volumes {
			status := h.volume(name)
			if status.Phase == "Available" && v.Spec.Capacity.Storage().Cmp(*c.Spec.Resources.Requests.Storage()) >= 0 {
				h.t.Errorf("claim %s is not bound, although volume %s is available: %v", c.Name, name, err)
			}
		}
	default:
		h.t.Errorf("claim %s is not bound: %v", c.Name, err)
	}
}

// checkLeaks checks that each volume of the driver has a manifest, a record, or the record of a claim
// whose volume may exist.
func (h *history) checkLeaks() {
	recorded := map[string]bool{}
	for _, v := range h.manager.store.Volumes() {
		recorded[v.Name] = true
	}
	for _, c := range h.manager.store.Claims() {
		recorded["pvc-"+string(c.UID)] = true
	}
	for name := range h.driver.volumes {
		if h.objects.Volumes[name] == nil && !recorded[name] {
			h.t.Errorf("volume %s has no record", name)
		}
	}
}

// checkRetained checks, after all claims were removed, that only retained volumes exist.
func (h *history) checkRetained() {
	if claims := h.manager.store.Claims(); len(claims) > 0 {
		h.t.Errorf("recorded claims: got %v, want none", claims)
	}
	for _, v := range h.manager.store.Volumes() {
		if v.Spec.PersistentVolumeReclaimPolicy == corev1.PersistentVolumeReclaimDelete {
			h.t.Errorf("volume %s has policy Delete and is still recorded: %+v", v.Name, v.Status)
		}
	}
	for name, v := range h.driver.volumes {
		if !v.retain {
			h.t.Errorf("volume %s was not deleted from the driver", name)
		}
	}
	for name := range h.objects.Volumes {
		if h.driver.volumes[name] == nil {
			h.t.Errorf("volume %s was deleted from the driver although its manifest exists", name)
		}
	}
	h.checkLeaks()
	if h.t.Failed() {
		h.t.Log(h.status())
	}
}
