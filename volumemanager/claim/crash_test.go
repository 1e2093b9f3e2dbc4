package claim_test

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"testing"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/trivet-csi/trivet/volumemanager/plugins"
	"github.com/trivet-csi/trivet/volumemanager/store"
)

// goOn settles, in a second life if the first one ends.
func (w *world) goOn() {
	w.t.Helper()
	w.settle()
	if w.dead() {
		w.restart()
		w.settle()
	}
}

// TestKilled: wherever the manager is killed, between any two writes or calls, the next
// one goes on to the same end.
func TestKilled(t *testing.T) {
	for n := 1; ; n++ {
		w := newWorld(t)
		w.driver.node = true
		w.driver.volumes["static"], w.driver.volumes["recycled"] = &made{}, &made{}
		w.killAt(n)
		w.lifecycle()
		survived := w.killIn > 0
		if t.Failed() {
			t.Fatalf("killed before act %d: %s", n, w.tell())
		}
		if survived {
			t.Logf("killed before each of %d acts", n-1)
			break
		}
	}
}

// lifecycle binds, provisions, expands, deletes, scrubs, and looks at each result.
func (w *world) lifecycle() {
	w.t.Helper()
	w.add(newClass("fast"),
		withPolicy(newVolume("static", "1Gi", "a"), corev1.PersistentVolumeReclaimDelete),
		withPolicy(newVolume("recycled", "1Gi", "b"), corev1.PersistentVolumeReclaimRecycle),
		newClaim("dynamic", "1Gi", "fast"), newClaim("static", "1Gi", "a"), newClaim("recycled", "1Gi", "b"))
	w.goOn()
	w.bound("dynamic", "pvc-uid-dynamic")
	w.bound("static", "static")
	w.bound("recycled", "recycled")

	w.add(newClaim("dynamic", "2Gi", "fast"))
	w.goOn()
	w.life.controller.NodeExpanded("pvc-uid-dynamic", resource.MustParse("2Gi"))
	w.goOn()
	if _, v, err := w.life.controller.Volume(named("dynamic")); err == nil && v.Annotations[plugins.NodeExpandAnnotation] != "" {
		w.life.controller.NodeExpanded("pvc-uid-dynamic", resource.MustParse("2Gi")) // the node is asked again
		w.goOn()
	}
	if c := w.claim("dynamic"); c.Capacity != "2Gi" || c.Message != "" {
		w.t.Errorf("expanded: %+v", c)
	}

	for _, name := range []string{"dynamic", "static", "recycled"} {
		w.removeClaim(name)
	}
	w.goOn()
	if got := slices.Collect(maps.Keys(w.driver.volumes)); len(got) != 1 || got[0] != "recycled" || w.driver.volumes["recycled"].scrubs == 0 {
		w.t.Errorf("the driver has %v", got)
	}
	if w.volume("recycled").Phase != "Available" || len(w.life.store.Claims()) > 0 {
		w.t.Errorf("not reclaimed: %s", w.tell())
	}
}

// TestHistories: random histories of edited manifests, failing and uncertain calls, and
// kills. At the end of each every claim has one volume that fits, none has two claims,
// and the driver has the volumes of claims and those that are retained.
// TRIVET_TEST_HISTORIES is how many, TRIVET_TEST_SEED the first.
func TestHistories(t *testing.T) {
	for seed := range number(t, "TRIVET_TEST_HISTORIES", 60) {
		seed += number(t, "TRIVET_TEST_SEED", 0)
		if !t.Run(strconv.Itoa(seed), func(t *testing.T) { newHistory(t, seed).run() }) {
			return
		}
	}
}

func number(t *testing.T, variable string, usual int) int {
	t.Helper()
	text := os.Getenv(variable)
	if text == "" {
		return usual
	}
	n, err := strconv.Atoi(text)
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
		h.driver.volumes[name] = &made{retain: true}
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
	h.goOn()
	h.check()
	clear(h.objects.Pods)
	clear(h.objects.Claims)
	h.update()
	h.unuse()
	h.goOn()
	h.checkEmpty()
}

func (h *history) step() {
	name := fmt.Sprintf("c%d", h.random.IntN(8))
	switch h.random.IntN(12) {
	case 0, 1, 2:
		class := []string{"fast", "late", retained, "static"}[h.random.IntN(4)]
		c := newClaim(name, fmt.Sprintf("%dGi", 1+h.random.IntN(3)), class)
		if before := h.objects.Claims[named(name)]; before != nil { // what can be edited
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

// settleSome lets things go on for a while.
func (h *history) settleSome() {
	for range h.random.IntN(4) {
		h.life.controller.Retry()
		h.sync()
		if h.random.IntN(2) == 0 {
			h.wait()
		}
	}
}

// fail has some calls fail from now on, carried out or not, certainly or not.
func (h *history) fail() {
	h.driver.mu.Lock()
	defer h.driver.mu.Unlock()
	seed := h.random.Uint64()
	random := rand.New(rand.NewPCG(seed, 1))
	left := random.IntN(12)
	h.driver.fails = func(string) fate {
		if left--; left < 0 {
			return fate{}
		}
		failed := errors.New("failed")
		switch random.IntN(4) {
		case 0:
			return fate{undone: true, err: failed}
		case 1:
			return fate{undone: true, err: &plugins.UncertainError{Err: failed}}
		case 2:
			return fate{err: &plugins.UncertainError{Err: failed}}
		}
		return fate{}
	}
}

// useSome is a reconciler, which has a volume from when it was told of it for a pod.
func (h *history) useSome() {
	for _, pod := range h.objects.Pods {
		for _, v := range pod.Spec.Volumes {
			if _, pv, err := h.life.controller.Volume(named(v.Name)); err == nil {
				h.use(pv.Name, true)
				h.checkTold(v.Name, pv.Name)
			}
		}
	}
}

// unuse lets go of what no pod uses.
func (h *history) unuse() {
	wanted := map[string]bool{}
	for _, pod := range h.objects.Pods {
		for _, v := range pod.Spec.Volumes {
			if _, pv, err := h.life.controller.Volume(named(v.Name)); err == nil {
				wanted[pv.Name] = true
			}
		}
	}
	h.mu.Lock()
	h.inUse = wanted
	h.mu.Unlock()
	h.sync()
}

// checkTold: what a pod is told is on the disk.
func (h *history) checkTold(name, volume string) {
	s, err := store.Open(h.dir)
	if err != nil {
		h.t.Fatal(err)
	}
	defer func() { _ = s.Close() }()
	c, err := s.Claim(named(name))
	if err != nil || c == nil || c.Spec.VolumeName != volume {
		h.t.Fatalf("told of %s, recorded is %v, %v", volume, c, err)
	}
	if v, err := s.Volume(volume); err != nil || v == nil || v.Spec.ClaimRef.UID != c.UID {
		h.t.Fatalf("claim %s has %s, recorded is %v, %v", name, volume, v, err)
	}
}

// check is for the end: nothing fails, and nothing is left to be done.
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
		has, asked := v.Spec.Capacity.Storage(), bound.Spec.Resources.Requests.Storage()
		if has.Cmp(*asked) < 0 && *bound.Spec.StorageClassName != "static" {
			h.t.Errorf("claim %s asks for %s, and has %s", key, asked, has)
		}
		if h.driver.volumes[v.Name] == nil {
			h.t.Errorf("claim %s: its volume %s is not there", key, v.Name)
		}
	}
	for _, v := range h.life.store.Volumes() {
		if v.Status.Phase == corev1.VolumeBound && volumes[v.Name] == "" && !h.protected(v.Spec.ClaimRef.Name) {
			h.t.Errorf("volume %s is bound to nothing: %+v", v.Name, v.Spec.ClaimRef)
		}
	}
	h.checkLeaks()
	if h.t.Failed() {
		h.t.Log(h.tell())
	}
}

// protected: a claim whose manifest is gone stays as long as a pod uses it.
func (h *history) protected(name string) bool { return h.objects.Pods[named("p-"+name)] != nil }

func (h *history) checkUnbound(c *corev1.PersistentVolumeClaim, err error) {
	if before := h.volume("pvc-" + string(c.UID)); before.Phase == "Released" && before.Class == retained {
		return // its earlier volume is there, and does not fit
	}
	switch class := *c.Spec.StorageClassName; class {
	case "late":
		if h.protected(c.Name) {
			h.t.Errorf("claim %s has a pod: %v", c.Name, err)
		}
	case "static":
		for name, v := range h.objects.Volumes {
			status := h.volume(name)
			if status.Phase == "Available" && v.Spec.Capacity.Storage().Cmp(*c.Spec.Resources.Requests.Storage()) >= 0 {
				h.t.Errorf("claim %s could have %s: %v", c.Name, name, err)
			}
		}
	default:
		h.t.Errorf("claim %s: %v", c.Name, err)
	}
}

// checkLeaks: what the driver has is recorded, if only as what may have been made.
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
			h.t.Errorf("volume %s is leaked", name)
		}
	}
}

// checkEmpty is for the very end: only what is retained is left.
func (h *history) checkEmpty() {
	if claims := h.life.store.Claims(); len(claims) > 0 {
		h.t.Errorf("claims are left: %v", claims)
	}
	for _, v := range h.life.store.Volumes() {
		if v.Spec.PersistentVolumeReclaimPolicy == corev1.PersistentVolumeReclaimDelete {
			h.t.Errorf("volume %s is left: %+v", v.Name, v.Status)
		}
	}
	for name, v := range h.driver.volumes {
		if !v.retain {
			h.t.Errorf("volume %s is leaked", name)
		}
	}
	for name := range h.objects.Volumes {
		if h.driver.volumes[name] == nil {
			h.t.Errorf("volume %s was deleted", name)
		}
	}
	h.checkLeaks()
	if h.t.Failed() {
		h.t.Log(h.tell())
	}
}
