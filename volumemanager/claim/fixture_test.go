package claim_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/trivet-csi/trivet/volumemanager/claim"
	"github.com/trivet-csi/trivet/volumemanager/event"
	"github.com/trivet-csi/trivet/volumemanager/manifest"
	"github.com/trivet-csi/trivet/volumemanager/operation"
	"github.com/trivet-csi/trivet/volumemanager/plugins"
	"github.com/trivet-csi/trivet/volumemanager/store"
)

// The test driver is the provisioner of both names.
const (
	driverName  = "driver.test"
	otherDriver = "other.test"
)

var errKilled = errors.New("killed")

// world is a machine with a driver and a controller that tests can kill.
type world struct {
	t       testing.TB
	dir     string
	driver  *driver
	objects *manifest.Objects
	life    *life
	events  *event.Recorder

	mu     sync.Mutex
	inUse  map[string]bool
	acts   int // writes to the store and calls to the driver that began or ended
	killIn int // acts until the process is killed; 0 for never

	zone   string // the driver's topology
	broken bool   // the store has unreadable files
}

// life is one process of the controller.
type life struct {
	store      *mortalStore
	operations *operation.Executor
	controller *claim.Controller
	end        context.CancelFunc
	done       chan struct{}
	dead       bool            // guarded by world.mu
	keys       map[string]bool // all keys that operations may have
}

// mortalStore is a store whose process can be killed before a write.
type mortalStore struct {
	*store.Store
	w *world
	l *life
}

func (s *mortalStore) write(do func() error) error {
	if err := s.w.act(s.l); err != nil {
		return err
	}
	defer s.w.acted()
	return do()
}

func (s *mortalStore) PutClaim(c *corev1.PersistentVolumeClaim) error {
	return s.write(func() error { return s.Store.PutClaim(c) })
}

func (s *mortalStore) RemoveClaim(key types.NamespacedName) error {
	return s.write(func() error { return s.Store.RemoveClaim(key) })
}

func (s *mortalStore) PutVolume(v *corev1.PersistentVolume) error {
	return s.write(func() error { return s.Store.PutVolume(v) })
}

func (s *mortalStore) RemoveVolume(name string) error {
	return s.write(func() error { return s.Store.RemoveVolume(name) })
}

// act counts a write or call, and fails if the process is dead or is killed by it.
func (w *world) act(l *life) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.acts++
	if w.killIn > 0 {
		if w.killIn--; w.killIn == 0 {
			l.dead = true
		}
	}
	if l.dead {
		return errKilled
	}
	return nil
}

func (w *world) acted() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.acts++
}

func (w *world) Node() *corev1.Node {
	node := plugins.Node("here")
	w.mu.Lock()
	defer w.mu.Unlock()
	node.Labels["zone"] = w.zone
	return node
}

func (w *world) InUse(name string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.inUse[name]
}

func (w *world) use(name string, used bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.inUse[name] = used
}

func newWorld(t testing.TB) *world {
	t.Helper()
	w := &world{t: t, dir: t.TempDir(), inUse: map[string]bool{}, objects: &manifest.Objects{
		Complete: true,
		Pods:     map[types.NamespacedName]*corev1.Pod{},
		Claims:   map[types.NamespacedName]*corev1.PersistentVolumeClaim{},
		Volumes:  map[string]*corev1.PersistentVolume{},
		Classes:  map[string]*storagev1.StorageClass{},
	}}
	w.driver = &driver{w: w, volumes: map[string]*backing{}}
	w.start()
	t.Cleanup(func() { w.stop() })
	return w
}

func (w *world) start() {
	w.t.Helper()
	s, err := store.Open(w.dir)
	if err != nil {
		w.t.Fatal(err)
	}
	if len(s.Problems()) > 0 != w.broken {
		w.t.Fatalf("problems: %v", s.Problems())
	}
	ctx, end := context.WithCancel(context.Background())
	l := &life{end: end, done: make(chan struct{}, 1<<16), keys: map[string]bool{}}
	l.store = &mortalStore{Store: s, w: w, l: l}
	l.operations = operation.New(ctx, func(operation.Operation, error, time.Duration) { l.done <- struct{}{} })
	w.events = &event.Recorder{}
	l.controller = claim.New(l.store, plugins.Registry{&process{driver: w.driver, l: l}}, l.operations, w.events, w)
	w.life = l
	w.update()
}

func (w *world) stop() {
	w.life.end()
	w.life.operations.Wait()
	_ = w.life.store.Close()
}

// restart kills the process and starts another one.
func (w *world) restart() {
	w.t.Helper()
	w.kill()
	w.stop()
	w.start()
}

func (w *world) kill() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.life.dead, w.killIn = true, 0
}

// killAt kills the process before its n-th write or call from now; never if n is 0.
func (w *world) killAt(n int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.killIn = n
}

func (w *world) dead() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.life.dead
}

// update calls Update with a copy of the manifests.
func (w *world) update() {
	o := *w.objects
	o.Pods, o.Claims = maps.Clone(o.Pods), maps.Clone(o.Claims)
	o.Volumes, o.Classes = maps.Clone(o.Volumes), maps.Clone(o.Classes)
	w.life.controller.Update(context.Background(), &o)
	w.life.addKeys()
}

// sync calls Sync. Tests call it instead of Sync, so that wait knows all operations.
func (w *world) sync() (again time.Time) {
	defer w.life.addKeys()
	return w.life.controller.Sync(context.Background())
}

// addKeys adds the keys of the last pass. An operation can run longer than its claim or volume
// is in the status.
func (l *life) addKeys() {
	claims, volumes := l.controller.Status()
	for _, c := range claims {
		l.keys["claim "+c.Namespace+"/"+c.Name] = true
	}
	for _, v := range volumes {
		l.keys["volume "+v.Name] = true
	}
}

// wait returns when no operation runs.
func (w *world) wait() {
	for key := range w.life.keys {
		for w.life.operations.Pending(key) {
			<-w.life.done
		}
	}
}

// settle syncs, without back-offs, until nothing is written or called any more. It waits for
// earlier operations first: after its last write an operation still blocks others.
func (w *world) settle() {
	w.t.Helper()
	w.wait()
	for range 200 {
		before := w.actCount()
		w.life.controller.Retry()
		w.sync()
		w.wait()
		if w.actCount() == before || w.dead() {
			return
		}
	}
	w.t.Fatalf("operations do not end: %s", w.status())
}

func (w *world) actCount() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.acts
}

// status returns the state of all claims and volumes for failure messages.
func (w *world) status() string {
	claims, volumes := w.life.controller.Status()
	return fmt.Sprintf("claims %+v, volumes %+v", claims, volumes)
}

// add adds or replaces manifests.
func (w *world) add(objects ...any) {
	w.t.Helper()
	for _, o := range objects {
		switch o := o.(type) {
		case *corev1.Pod:
			w.objects.Pods[key(o)] = o
		case *corev1.PersistentVolumeClaim:
			w.objects.Claims[key(o)] = o
		case *corev1.PersistentVolume:
			w.objects.Volumes[o.Name] = o
		case *storagev1.StorageClass:
			w.objects.Classes[o.Name] = o
		default:
			w.t.Fatalf("not a manifest's object: %T", o)
		}
	}
	w.update()
}

func (w *world) removeClaim(name string) {
	delete(w.objects.Claims, named(name))
	w.update()
}

// apply adds manifests and settles.
func (w *world) apply(objects ...any) {
	w.t.Helper()
	w.add(objects...)
	w.settle()
}

// deleteClaim removes the manifest of a claim and settles.
func (w *world) deleteClaim(name string) {
	w.t.Helper()
	w.removeClaim(name)
	w.settle()
}

func (w *world) restartAndSettle() {
	w.t.Helper()
	w.restart()
	w.settle()
}

func (w *world) removePod(name string) {
	delete(w.objects.Pods, named(name))
	w.update()
}

// removeVolume removes the manifest of volume v.
func (w *world) removeVolume() {
	delete(w.objects.Volumes, "v")
	w.update()
}

func (w *world) claim(name string) claim.ClaimStatus {
	claims, _ := w.life.controller.Status()
	return find(claims, func(c claim.ClaimStatus) bool { return c.Namespace == "default" && c.Name == name })
}

func (w *world) volume(name string) claim.VolumeStatus {
	_, volumes := w.life.controller.Status()
	return find(volumes, func(v claim.VolumeStatus) bool { return v.Name == name })
}

// find returns the element that satisfies a condition; zero if there is none.
func find[T any](all []T, condition func(T) bool) (found T) {
	if i := slices.IndexFunc(all, condition); i >= 0 {
		found = all[i]
	}
	return found
}

func key(o metav1.Object) types.NamespacedName {
	return types.NamespacedName{Namespace: o.GetNamespace(), Name: o.GetName()}
}

func named(name string) types.NamespacedName {
	return types.NamespacedName{Namespace: "default", Name: name}
}

func newClaim(name, size, class string) *corev1.PersistentVolumeClaim {
	c := &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, UID: types.UID("uid-" + name)}}
	c.Spec.AccessModes = []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}
	c.Spec.Resources.Requests = corev1.ResourceList{corev1.ResourceStorage: resource.MustParse(size)}
	c.Spec.StorageClassName = &class
	return c
}

func newVolume(name, size, class string) *corev1.PersistentVolume {
	v := &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: name, UID: types.UID("uid-" + name)}}
	v.Spec.AccessModes = []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce, corev1.ReadOnlyMany}
	v.Spec.Capacity = corev1.ResourceList{corev1.ResourceStorage: resource.MustParse(size)}
	v.Spec.StorageClassName = class
	v.Spec.PersistentVolumeReclaimPolicy = corev1.PersistentVolumeReclaimRetain
	v.Spec.CSI = &corev1.CSIPersistentVolumeSource{Driver: driverName, VolumeHandle: name}
	return v
}

func withPolicy(v *corev1.PersistentVolume, policy corev1.PersistentVolumeReclaimPolicy) *corev1.PersistentVolume {
	v.Spec.PersistentVolumeReclaimPolicy = policy
	return v
}

func newClass(name string) *storagev1.StorageClass {
	return &storagev1.StorageClass{
		ObjectMeta: metav1.ObjectMeta{Name: name}, Provisioner: driverName,
		AllowVolumeExpansion: new(true),
		ReclaimPolicy:        new(corev1.PersistentVolumeReclaimDelete),
		VolumeBindingMode:    new(storagev1.VolumeBindingImmediate),
	}
}

func newPod(name string, claims ...string) *corev1.Pod {
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, UID: types.UID("uid-" + name)}}
	for _, c := range claims {
		source := &corev1.PersistentVolumeClaimVolumeSource{ClaimName: c}
		pod.Spec.Volumes = append(pod.Spec.Volumes, corev1.Volume{Name: c, VolumeSource: corev1.VolumeSource{PersistentVolumeClaim: source}})
	}
	return pod
}

// driver holds volumes. It outlives the processes of the controller.
type driver struct {
	w  *world
	mu sync.Mutex
	// volumes are keyed by handle.
	volumes map[string]*backing
	// fails, if set, returns the result of a call.
	fails func(call string) result
	// node is set if the node must expand volumes too.
	node bool
	// requests are the calls of Provision.
	requests []plugins.ProvisionOptions
}

// backing is a volume in the driver.
type backing struct {
	size    resource.Quantity
	retain  bool
	scrubs  int
	deletes int
}

// result says whether a call is executed, and what it returns.
type result struct {
	skip bool
	err  error
}

// process is the driver's plugin in one process of the controller.
type process struct {
	plugins.VolumePlugin // nil: the package does not call its methods
	*driver
	l *life
}

func (p *process) Name() string { return "kubernetes.io/csi" }

func (p *process) CanSupport(spec *plugins.Spec) bool {
	return spec.PersistentVolume != nil && spec.PersistentVolume.Spec.CSI != nil
}

func (p *process) Provisions(class *storagev1.StorageClass) bool {
	return class.Provisioner == driverName || class.Provisioner == otherDriver
}

// call executes do unless fails skips it. A dead process makes no calls.
func (p *process) call(name string, do func() error) error {
	if err := p.w.act(p.l); err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	var r result
	if p.fails != nil {
		r = p.fails(name)
	}
	if !r.skip {
		if err := do(); err != nil {
			return err
		}
	}
	return r.err
}

func (p *process) Provision(_ context.Context, o plugins.ProvisionOptions) (*corev1.PersistentVolume, error) {
	size := o.Claim.Spec.Resources.Requests[corev1.ResourceStorage]
	err := p.call("Provision", func() error {
		p.requests = append(p.requests, o)
		if p.volumes[o.PVName] == nil {
			p.volumes[o.PVName] = &backing{size: size, retain: o.Class.ReclaimPolicy != nil && *o.Class.ReclaimPolicy == corev1.PersistentVolumeReclaimRetain}
		}
		actual := p.volumes[o.PVName].size
		if actual.Cmp(size) < 0 {
			return fmt.Errorf("volume %s exists with %s, less than %s", o.PVName, actual.String(), size.String())
		}
		size = actual
		return nil
	})
	if err != nil {
		return nil, err
	}
	v := newVolume(o.PVName, size.String(), o.Class.Name)
	v.Spec.AccessModes = o.Claim.Spec.AccessModes
	return v, nil
}

func (p *process) Delete(_ context.Context, pv *corev1.PersistentVolume) error {
	handle := pv.Spec.CSI.VolumeHandle
	return p.call("Delete", func() error {
		v := p.volumes[handle]
		if p.w.InUse(pv.Name) {
			p.w.t.Errorf("volume %s is deleted while it is in use", pv.Name)
		}
		if v != nil && v.retain || pv.Spec.PersistentVolumeReclaimPolicy != corev1.PersistentVolumeReclaimDelete {
			p.w.t.Errorf("volume %s is deleted although it must be retained", pv.Name)
		}
		if v != nil {
			v.deletes++
		}
		delete(p.volumes, handle)
		return nil
	})
}

func (p *process) Recycle(_ context.Context, pv *corev1.PersistentVolume) error {
	return p.call("Recycle", func() error {
		if p.w.InUse(pv.Name) {
			p.w.t.Errorf("volume %s is scrubbed while it is in use", pv.Name)
		}
		if v := p.volumes[pv.Spec.CSI.VolumeHandle]; v != nil {
			v.scrubs++
		}
		return nil
	})
}

func (p *process) Expand(_ context.Context, pv *corev1.PersistentVolume, size resource.Quantity) (resource.Quantity, bool, error) {
	err := p.call("Expand", func() error {
		v := p.volumes[pv.Spec.CSI.VolumeHandle]
		if v == nil {
			return fmt.Errorf("volume %s does not exist", pv.Name)
		}
		if v.size.Cmp(size) < 0 {
			v.size = size
		}
		size = v.size
		return nil
	})
	return size, p.node, err
}
