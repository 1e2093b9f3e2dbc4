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

// Both names are provisioners of the test driver.
const (
	driverName  = "driver.test"
	otherDriver = "other.test"
)

var errKilled = errors.New("killed")

// fixture is a machine with a driver, and a manager process that tests can kill.
type fixture struct {
	t       testing.TB
	dir     string
	driver  *driver
	objects *manifest.Objects
	manager *manager
	events  *event.Recorder

	mu     sync.Mutex
	inUse  map[string]bool
	steps  int // counts the begins of writes to the store and of calls to the driver, and the ends of writes
	killIn int // the process is killed before the killIn-th write or call from now; 0 for never

	zone   string // the machine's label zone, which the driver reports as its topology
	broken bool   // the store has unreadable files
}

// manager is a process with a controller.
type manager struct {
	store      *killableStore
	operations *operation.Executor
	controller *claim.Controller
	end        context.CancelFunc
	done       chan struct{}   // receives a value when an operation ends
	dead       bool            // the process was killed; guarded by fixture.mu
	keys       map[string]bool // all keys that operations may have
}

// killableStore is a store whose process can be killed before a write.
type killableStore struct {
	*store.Store
	f *fixture
	m *manager
}

func (s *killableStore) write(do func() error) error {
	if err := s.f.startStep(s.m); err != nil {
		return err
	}
	defer s.f.endStep()
	return do()
}

func (s *killableStore) PutClaim(c *corev1.PersistentVolumeClaim) error {
	return s.write(func() error { return s.Store.PutClaim(c) })
}

func (s *killableStore) RemoveClaim(key types.NamespacedName) error {
	return s.write(func() error { return s.Store.RemoveClaim(key) })
}

func (s *killableStore) PutVolume(v *corev1.PersistentVolume) error {
	return s.write(func() error { return s.Store.PutVolume(v) })
}

func (s *killableStore) RemoveVolume(name string) error {
	return s.write(func() error { return s.Store.RemoveVolume(name) })
}

// startStep is called before each write and call, and endStep after each write. startStep returns
// errKilled if the process is killed at this moment, or was killed earlier.
func (f *fixture) startStep(m *manager) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.steps++
	if f.killIn > 0 {
		if f.killIn--; f.killIn == 0 {
			m.dead = true
		}
	}
	if m.dead {
		return errKilled
	}
	return nil
}

func (f *fixture) endStep() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.steps++
}

func (f *fixture) Node() *corev1.Node {
	node := plugins.Node("here")
	f.mu.Lock()
	defer f.mu.Unlock()
	node.Labels["zone"] = f.zone
	return node
}

func (f *fixture) InUse(name string) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.inUse[name]
}

func (f *fixture) setInUse(name string, used bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.inUse[name] = used
}

// newFixture returns a machine with a running manager and without manifests.
func newFixture(t testing.TB) *fixture {
	t.Helper()
	f := &fixture{t: t, dir: t.TempDir(), inUse: map[string]bool{}, objects: &manifest.Objects{
		Complete: true,
		Pods:     map[types.NamespacedName]*corev1.Pod{},
		Claims:   map[types.NamespacedName]*corev1.PersistentVolumeClaim{},
		Volumes:  map[string]*corev1.PersistentVolume{},
		Classes:  map[string]*storagev1.StorageClass{},
	}}
	f.driver = &driver{f: f, volumes: map[string]*driverVolume{}}
	f.start()
	t.Cleanup(func() { f.stop() })
	return f
}

// start starts a process with the manifests.
func (f *fixture) start() {
	f.t.Helper()
	s, err := store.Open(f.dir)
	if err != nil {
		f.t.Fatal(err)
	}
	if len(s.Problems()) > 0 != f.broken {
		f.t.Fatalf("got problems %v of the store, want any: %t", s.Problems(), f.broken)
	}
	ctx, end := context.WithCancel(context.Background())
	m := &manager{end: end, done: make(chan struct{}, 1<<16), keys: map[string]bool{}}
	m.store = &killableStore{Store: s, f: f, m: m}
	m.operations = operation.New(ctx, func(operation.Operation, error, time.Duration) { m.done <- struct{}{} })
	f.events = &event.Recorder{}
	m.controller = claim.New(m.store, plugins.Registry{&pluginClient{driver: f.driver, m: m}}, m.operations, f.events, f)
	f.manager = m
	f.update()
}

// stop ends the process after its running operations.
func (f *fixture) stop() {
	f.manager.end()
	f.manager.operations.Wait()
	_ = f.manager.store.Close()
}

// restart kills the process and starts another one.
func (f *fixture) restart() {
	f.t.Helper()
	f.kill()
	f.stop()
	f.start()
}

// kill makes all further writes and calls of the process fail.
func (f *fixture) kill() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.manager.dead, f.killIn = true, 0
}

// killAt kills the process before its n-th write or call from now; never if n is 0.
func (f *fixture) killAt(n int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.killIn = n
}

func (f *fixture) dead() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.manager.dead
}

// update passes a copy of the manifests to the controller.
func (f *fixture) update() {
	o := *f.objects
	o.Pods, o.Claims = maps.Clone(o.Pods), maps.Clone(o.Claims)
	o.Volumes, o.Classes = maps.Clone(o.Volumes), maps.Clone(o.Classes)
	f.manager.controller.Update(context.Background(), &o)
	f.manager.addKeys()
}

// sync calls Sync and then addKeys. Tests must not call Sync directly, because wait needs the keys.
func (f *fixture) sync() (again time.Time) {
	defer f.manager.addKeys()
	return f.manager.controller.Sync(context.Background())
}

// addKeys adds the keys of the last pass. They are kept, because an operation can still run after its
// claim or volume has disappeared from the status.
func (m *manager) addKeys() {
	claims, volumes := m.controller.Status()
	for _, c := range claims {
		m.keys["claim "+c.Namespace+"/"+c.Name] = true
	}
	for _, v := range volumes {
		m.keys["volume "+v.Name] = true
	}
}

// wait returns when no operation runs.
func (f *fixture) wait() {
	for key := range f.manager.keys {
		for f.manager.operations.Pending(key) {
			<-f.manager.done
		}
	}
}

// settle syncs, without back-offs, until a pass causes no writes and no calls, or the process is dead.
// First it waits for earlier operations: until they end, they block operations with the same key.
func (f *fixture) settle() {
	f.t.Helper()
	f.wait()
	for range 200 {
		before := f.stepCount()
		f.manager.controller.Retry()
		f.sync()
		f.wait()
		if f.stepCount() == before || f.dead() {
			return
		}
	}
	f.t.Fatalf("after 200 passes there are still new writes or calls: %s", f.status())
}

// stepCount returns the number of writes and calls so far, counted as in steps.
func (f *fixture) stepCount() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.steps
}

// status returns the state of all claims and volumes for failure messages.
func (f *fixture) status() string {
	claims, volumes := f.manager.controller.Status()
	return fmt.Sprintf("claims %+v, volumes %+v", claims, volumes)
}

// add adds or replaces manifests.
func (f *fixture) add(objects ...any) {
	f.t.Helper()
	for _, o := range objects {
		switch o := o.(type) {
		case *corev1.Pod:
			f.objects.Pods[key(o)] = o
		case *corev1.PersistentVolumeClaim:
			f.objects.Claims[key(o)] = o
		case *corev1.PersistentVolume:
			f.objects.Volumes[o.Name] = o
		case *storagev1.StorageClass:
			f.objects.Classes[o.Name] = o
		default:
			f.t.Fatalf("add does not support objects of type %T", o)
		}
	}
	f.update()
}

// removeClaim removes the manifest of a claim.
func (f *fixture) removeClaim(name string) {
	delete(f.objects.Claims, named(name))
	f.update()
}

// apply adds or replaces manifests and settles.
func (f *fixture) apply(objects ...any) {
	f.t.Helper()
	f.add(objects...)
	f.settle()
}

// deleteClaim removes the manifest of a claim and settles.
func (f *fixture) deleteClaim(name string) {
	f.t.Helper()
	f.removeClaim(name)
	f.settle()
}

func (f *fixture) restartAndSettle() {
	f.t.Helper()
	f.restart()
	f.settle()
}

// removePod removes the manifest of a pod.
func (f *fixture) removePod(name string) {
	delete(f.objects.Pods, named(name))
	f.update()
}

// removeVolume removes the manifest of the volume named v.
func (f *fixture) removeVolume() {
	delete(f.objects.Volumes, "v")
	f.update()
}

// claim returns the status of a claim; zero if the claim is not in the status.
func (f *fixture) claim(name string) claim.ClaimStatus {
	claims, _ := f.manager.controller.Status()
	return find(claims, func(c claim.ClaimStatus) bool { return c.Namespace == "default" && c.Name == name })
}

// volume returns the status of a volume; zero if the volume is not in the status.
func (f *fixture) volume(name string) claim.VolumeStatus {
	_, volumes := f.manager.controller.Status()
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

// newVolume returns a PersistentVolume of the test driver with the policy Retain. Its handle is its name.
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

// newPod returns a pod with a volume for each claim.
func newPod(name string, claims ...string) *corev1.Pod {
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, UID: types.UID("uid-" + name)}}
	for _, c := range claims {
		source := &corev1.PersistentVolumeClaimVolumeSource{ClaimName: c}
		pod.Spec.Volumes = append(pod.Spec.Volumes, corev1.Volume{Name: c, VolumeSource: corev1.VolumeSource{PersistentVolumeClaim: source}})
	}
	return pod
}

// driver holds volumes. It outlives the manager's processes.
type driver struct {
	f  *fixture
	mu sync.Mutex
	// volumes are keyed by handle.
	volumes map[string]*driverVolume
	// fails, if set, decides whether a call fails.
	fails func(call string) result
	// node is set if the node must expand volumes too.
	node bool
	// requests are the options of all calls of Provision that were executed.
	requests []plugins.ProvisionOptions
}

// driverVolume is a volume in the driver.
type driverVolume struct {
	size resource.Quantity
	// retain is set if the volume must not be deleted.
	retain bool
	// scrubs and deletes are the numbers of calls that scrubbed and deleted the volume.
	scrubs, deletes int
}

// result says what happens in a call.
type result struct {
	// skip is set if the call is not executed.
	skip bool
	// err is the error that the call returns, even if the call is executed.
	err error
}

// pluginClient is the plugin through which one process of the manager calls the driver.
type pluginClient struct {
	plugins.VolumePlugin // nil, because package claim does not call the other methods
	*driver
	m *manager
}

func (p *pluginClient) Name() string { return "kubernetes.io/csi" }

func (p *pluginClient) CanSupport(spec *plugins.Spec) bool {
	return spec.PersistentVolume != nil && spec.PersistentVolume.Spec.CSI != nil
}

func (p *pluginClient) Provisions(class *storagev1.StorageClass) bool {
	return class.Provisioner == driverName || class.Provisioner == otherDriver
}

// call executes do unless fails skips it. A killed process makes no calls.
func (p *pluginClient) call(name string, do func() error) error {
	if err := p.f.startStep(p.m); err != nil {
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

func (p *pluginClient) Provision(_ context.Context, o plugins.ProvisionOptions) (*corev1.PersistentVolume, error) {
	size := o.Claim.Spec.Resources.Requests[corev1.ResourceStorage]
	err := p.call("Provision", func() error {
		p.requests = append(p.requests, o)
		if p.volumes[o.PVName] == nil {
			p.volumes[o.PVName] = &driverVolume{size: size, retain: o.Class.ReclaimPolicy != nil && *o.Class.ReclaimPolicy == corev1.PersistentVolumeReclaimRetain}
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

func (p *pluginClient) Delete(_ context.Context, pv *corev1.PersistentVolume) error {
	handle := pv.Spec.CSI.VolumeHandle
	return p.call("Delete", func() error {
		v := p.volumes[handle]
		if p.f.InUse(pv.Name) {
			p.f.t.Errorf("volume %s is deleted while it is in use", pv.Name)
		}
		if v != nil && v.retain || pv.Spec.PersistentVolumeReclaimPolicy != corev1.PersistentVolumeReclaimDelete {
			p.f.t.Errorf("volume %s is deleted although it must be retained", pv.Name)
		}
		if v != nil {
			v.deletes++
		}
		delete(p.volumes, handle)
		return nil
	})
}

func (p *pluginClient) Recycle(_ context.Context, pv *corev1.PersistentVolume) error {
	return p.call("Recycle", func() error {
		if p.f.InUse(pv.Name) {
			p.f.t.Errorf("volume %s is scrubbed while it is in use", pv.Name)
		}
		if v := p.volumes[pv.Spec.CSI.VolumeHandle]; v != nil {
			v.scrubs++
		}
		return nil
	})
}

func (p *pluginClient) Expand(_ context.Context, pv *corev1.PersistentVolume, size resource.Quantity) (resource.Quantity, bool, error) {
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
