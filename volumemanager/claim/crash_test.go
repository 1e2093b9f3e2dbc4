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

// settleAfterKill settles, and again after a restart if the process is killed.
func (w *world) settleAfterKill() {
	w.t.Helper()
	w.settle()
	if w.dead() {
		w.restartAndSettle()
	}
}

// TestKilled: if the manager is killed before any write or call, the next one completes the
// lifecycle.
func TestKilled(t *testing.T) {
	for n := 1; ; n++ {
		w := newWorld(t)
		w.driver.node = true
		w.driver.volumes["static"], w.driver.volumes["recycled"] = &backing{}, &backing{}
		w.killAt(n)
		w.lifecycle()
		survived := w.killIn > 0
		if t.Failed() {
			t.Fatalf("killed before act %d: %s", n, w.status())
		}
		if survived {
			t.Logf("killed before each of %d acts", n-1)
			break
		}
	}
}

// lifecycle binds, provisions, expands, deletes and scrubs, and checks each result.
func (w *world) lifecycle() {
	w.t.Helper()
	w.add(newClass("fast"),
		withPolicy(newVolume("static", "1Gi", "a"), corev1.PersistentVolumeReclaimDelete),
		withPolicy(newVolume("recycled", "1Gi", "b"), corev1.PersistentVolumeReclaimRecycle),
		newClaim("dynamic", "1Gi", "fast"), newClaim("static", "1Gi", "a"), newClaim("recycled", "1Gi", "b"))
	w.settleAfterKill()
	w.bound("dynamic", "pvc-uid-dynamic")
	w.bound("static", "static")
	w.bound("recycled", "recycled")

	w.add(newClaim("dynamic", "2Gi", "fast"))
	w.settleAfterKill()
	w.life.controller.NodeExpanded("pvc-uid-dynamic", resource.MustParse("2Gi"))
	w.settleAfterKill()
	if _, v, err := w.life.controller.Volume(named("dynamic")); err == nil && v.Annotations[plugins.NodeExpandAnnotation] != "" {
		w.life.controller.NodeExpanded("pvc-uid-dynamic", resource.MustParse("2Gi")) // the restarted manager expands on the node again
		w.settleAfterKill()
	}
	if c := w.claim("dynamic"); c.Capacity != "2Gi" || c.Message != "" {
		w.t.Errorf("expanded: %+v", c)
	}

	for _, name := range []string{"dynamic", "static", "recycled"} {
		w.removeClaim(name)
	}
	w.settleAfterKill()
	if v := w.driver.volumes["recycled"]; len(w.driver.volumes) != 1 || v == nil || v.scrubs == 0 {
		w.t.Errorf("the driver has %v", w.driver.volumes)
	}
	if w.volume("recycled").Phase != "Available" || len(w.life.store.Claims()) > 0 {
		w.t.Errorf("not reclaimed: %s", w.status())
	}
}

// TestHistories runs random histories of edited manifests, failing and uncertain calls, and kills.
// After each, every claim has one volume that matches, no volume has two claims, and the driver has
// exactly the claims' and the retained volumes. TRIVET_TEST_HISTORIES is the number of histories,
// TRIVET_TEST_SEED the first seed.
func TestHistories(t *testing.T) {
	for seed := range number(t, "TRIVET_TEST_HISTORIES", 60) {
		seed += number(t, "TRIVET_TEST_SEED", 0)
		if !t.Run(strconv.Itoa(seed), func(t *testing.T) { newHistory(t, seed).run() }) {
			return
		}
	}
}

func number(t *testing.T, variable string, fallback int) int {
	t.Helper()
	n, err := strconv.Atoi(cmp.Or(os.Getenv(variable), strconv.Itoa(fallback)))
	if err != nil {
		t.Fatal(err)
	}
	return n
}

type history struct {
	*world
	random *rand.Rand
}

const retained = "retained"

func newHistory(t *testing.T, seed int) *history {
	t.Helper()
	h := &history{world: newWorld(t), random: rand.New(rand.NewPCG(uint64(seed), 8))}
	late, keep := newClass("late"), newClass(retained)
	late.VolumeBindingMode = new(storagev1.VolumeBindingWaitForFirstConsumer)
	keep.ReclaimPolicy = new(corev1.PersistentVolumeReclaimRetain)
	h.add(newClass("fast"), late, keep)
	for i := range 6 {
		policy := []corev1.PersistentVolumeReclaimPolicy{corev1.PersistentVolumeReclaimRetain, corev1.PersistentVolumeReclaimRecycle}[i%2]
		name := fmt.Sprintf("static-%d", i)
		h.add(withPolicy(newVolume(name, fmt.Sprintf("%dGi", 1+i/2), "static"), policy))
		h.driver.volumes[name] = &backing{retain: true}
	}
	return h
}

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
	h.unuse()
	h.settleAfterKill()
	h.check()
	clear(h.objects.Pods)
	clear(h.objects.Claims)
	h.update()
	h.unuse()
	h.settleAfterKill()
	h.checkRetained()
}

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
		h.unuse()
	case 8:
		h.fail()
	case 9:
		h.killAt(1 + h.random.IntN(6))
	case 10:
		h.restart()
	case 11:
		h.settleSome()
	}
	h.useSome()
}

// settleSome syncs a few times, and may not wait for the operations.
func (h *history) settleSome() {
	for range h.random.IntN(4) {
		h.life.controller.Retry()
		h.sync()
		if h.random.IntN(2) == 0 {
			h.wait()
		}
	}
}

// fail makes some of the next calls fail, executed or not, with a certain or uncertain error.
func (h *history) fail() {
	h.driver.mu.Lock()
	defer h.driver.mu.Unlock()
	seed := h.random.Uint64()
	random := rand.New(rand.NewPCG(seed, 1))
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

// useSome acts as the reconciler: a volume that Volume returns for a pod is in use.
func (h *history) useSome() {
	for claim, volume := range h.requested() {
		h.use(volume, true)
		h.checkRecorded(claim, volume)
	}
}

// requested returns the volumes that Volume returns for pods, by the names of their claims.
func (h *history) requested() map[string]string {
	volumes := map[string]string{}
	for _, pod := range h.objects.Pods {
		for _, v := range pod.Spec.Volumes {
			if _, pv, err := h.life.controller.Volume(named(v.Name)); err == nil {
				volumes[v.Name] = pv.Name
			}
		}
	}
	return volumes
}

// unuse ends the use of volumes that no pod uses.
func (h *history) unuse() {
	inUse := map[string]bool{}
	for _, volume := range h.requested() {
		inUse[volume] = true
	}
	h.mu.Lock()
	h.inUse = inUse
	h.mu.Unlock()
	h.sync()
}

// checkRecorded checks that a volume that Volume returned is recorded.
func (h *history) checkRecorded(name, volume string) {
	s, err := store.Open(h.dir)
	if err != nil {
		h.t.Fatal(err)
	}
	defer func() { _ = s.Close() }()
	c, err := s.Claim(named(name))
	if err != nil || c == nil || c.Spec.VolumeName != volume {
		h.t.Fatalf("Volume returned %s, recorded is %v, %v", volume, c, err)
	}
	if v, err := s.Volume(volume); err != nil || v == nil || v.Spec.ClaimRef.UID != c.UID {
		h.t.Fatalf("claim %s has %s, recorded is %v, %v", name, volume, v, err)
	}
}

// check checks a settled history.
func (h *history) check() {
	volumes := map[string]string{}
	for key, c := range h.objects.Claims {
		bound, v, err := h.life.controller.Volume(key)
		if err != nil {
			h.checkUnbound(c, err)
			continue
		}
		if other := volumes[v.Name]; other != "" {
			h.t.Errorf("volume %s has claims %s and %s", v.Name, other, key)
		}
		volumes[v.Name] = key.String()
		if v.Spec.ClaimRef.UID != c.UID {
			h.t.Errorf("claim %s has volume %s: %+v", key, v.Name, v.Spec)
		}
		actual, requested := v.Spec.Capacity.Storage(), bound.Spec.Resources.Requests.Storage()
		if actual.Cmp(*requested) < 0 && *bound.Spec.StorageClassName != "static" {
			h.t.Errorf("claim %s requests %s and has %s", key, requested, actual)
		}
		if h.driver.volumes[v.Name] == nil {
			h.t.Errorf("claim %s: its volume %s does not exist", key, v.Name)
		}
	}
	for _, v := range h.life.store.Volumes() {
		if v.Status.Phase == corev1.VolumeBound && volumes[v.Name] == "" && !h.protected(v.Spec.ClaimRef.Name) {
			h.t.Errorf("volume %s is bound, but no claim has it: %+v", v.Name, v.Spec.ClaimRef)
		}
	}
	h.checkLeaks()
	if h.t.Failed() {
		h.t.Log(h.status())
	}
}

// protected reports whether a pod uses a claim. Such a claim stays when its manifest is removed.
func (h *history) protected(name string) bool { return h.objects.Pods[named("p-"+name)] != nil }

func (h *history) checkUnbound(c *corev1.PersistentVolumeClaim, err error) {
	if before := h.volume("pvc-" + string(c.UID)); before.Phase == "Released" && before.Class == retained {
		return // its earlier volume exists and does not match
	}
	switch class := *c.Spec.StorageClassName; class {
	case "late":
		if h.protected(c.Name) {
			h.t.Errorf("claim %s has a pod and is not bound: %v", c.Name, err)
		}
	case "static":
		for name, v := range h.objects.Volumes {
			status := h.volume(name)
			if status.Phase == "Available" && v.Spec.Capacity.Storage().Cmp(*c.Spec.Resources.Requests.Storage()) >= 0 {
				h.t.Errorf("claim %s is not bound to %s: %v", c.Name, name, err)
			}
		}
	default:
		h.t.Errorf("claim %s: %v", c.Name, err)
	}
}

// checkLeaks checks that all volumes of the driver are recorded, at least as ones that may exist.
func (h *history) checkLeaks() {
	recorded := map[string]bool{}
	for _, v := range h.life.store.Volumes() {
		recorded[v.Name] = true
	}
	for _, c := range h.life.store.Claims() {
		recorded["pvc-"+string(c.UID)] = true
	}
	for name := range h.driver.volumes {
		if h.objects.Volumes[name] == nil && !recorded[name] {
			h.t.Errorf("volume %s has leaked", name)
		}
	}
}

// checkRetained checks a settled history without claims: only retained volumes exist.
func (h *history) checkRetained() {
	if claims := h.life.store.Claims(); len(claims) > 0 {
		h.t.Errorf("claims were not removed: %v", claims)
	}
	for _, v := range h.life.store.Volumes() {
		if v.Spec.PersistentVolumeReclaimPolicy == corev1.PersistentVolumeReclaimDelete {
			h.t.Errorf("volume %s was not removed: %+v", v.Name, v.Status)
		}
	}
	for name, v := range h.driver.volumes {
		if !v.retain {
			h.t.Errorf("volume %s has leaked", name)
		}
	}
	for name := range h.objects.Volumes {
		if h.driver.volumes[name] == nil {
			h.t.Errorf("volume %s was deleted", name)
		}
	}
	h.checkLeaks()
	if h.t.Failed() {
		h.t.Log(h.status())
	}
}
