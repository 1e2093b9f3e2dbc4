package claim

import (
	"context"
	"fmt"
	"maps"
	"reflect"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"

	"github.com/trivet-csi/trivet/volumemanager/event"
	"github.com/trivet-csi/trivet/volumemanager/manifest"
	"github.com/trivet-csi/trivet/volumemanager/operation"
	"github.com/trivet-csi/trivet/volumemanager/plugin"
)

const (
	// provisionedBy is of external-provisioner: the StorageClass's provisioner.
	provisionedBy = "pv.kubernetes.io/provisioned-by"
	// storageProvisioner is Kubernetes': who was asked for a claim's volume.
	storageProvisioner = "volume.kubernetes.io/storage-provisioner"
	// fromManifest marks a record whose volume is a manifest's: without it, it is lost.
	fromManifest = "trivet.dev/manifest"
	// reclaim is on a volume whose data is being deleted or scrubbed (reclaimBegun), or is
	// deleted while a manifest still has it (reclaimDone). No claim gets it.
	reclaim      = "trivet.dev/reclaim"
	reclaimBegun = "begun"
	reclaimDone  = "done"
)

// Store is what lasts: package store's. What it returns is never changed, and is another
// object once it was written.
type Store interface {
	Claim(key types.NamespacedName) (*corev1.PersistentVolumeClaim, error)
	Claims() []*corev1.PersistentVolumeClaim
	PutClaim(claim *corev1.PersistentVolumeClaim) error
	RemoveClaim(key types.NamespacedName) error
	Volume(name string) (*corev1.PersistentVolume, error)
	Volumes() []*corev1.PersistentVolume
	PutVolume(volume *corev1.PersistentVolume) error
	RemoveVolume(name string) error
}

// Machine is what volumes are brought to.
type Machine interface {
	// Node is what a cluster would have of the machine: its name and labels.
	Node() *corev1.Node
	// InUse counts a volume from before Volume has told a pod of it until nothing of it is
	// on the machine.
	InUse(pvName string) bool
}

// Controller gives claims their volumes. It is safe for concurrent use.
type Controller struct {
	store      Store
	plugins    plugin.Registry
	operations *operation.Executor
	events     *event.Recorder
	machine    Machine

	// syncing is held by a Sync, which asks Machine; nothing else that Machine may wait for.
	syncing sync.Mutex
	// records is held, for one volume, from an operation's last look at its record, and its
	// claim's, to the writes.
	records *locks

	// mu guards what is below, and is held for moments.
	mu       sync.Mutex
	objects  *manifest.Objects
	view     view
	expanded map[string]nodeSize
	// releasing are the claims that an operation is about to forget, whatever their records
	// say yet.
	releasing map[types.NamespacedName]bool
}

// nodeSize is what the machine has of a volume whose record was that.
type nodeSize struct {
	record *corev1.PersistentVolume
	size   resource.Quantity
}

// New makes a Controller, which does nothing before Update.
func New(store Store, plugins plugin.Registry, operations *operation.Executor, events *event.Recorder, machine Machine) *Controller {
	return &Controller{
		store: store, plugins: plugins, operations: operations, events: events, machine: machine, records: newLocks(),
		expanded: map[string]nodeSize{}, releasing: map[types.NamespacedName]bool{},
	}
}

// Update takes new manifests, and syncs.
func (c *Controller) Update(ctx context.Context, objects *manifest.Objects) (again time.Time) {
	c.mu.Lock()
	old := c.objects
	c.objects = objects
	c.mu.Unlock()
	if old != nil {
		c.forget(old, objects)
	}
	return c.Sync(ctx)
}

// forget has tried again at once what the new manifests may have mended.
func (c *Controller) forget(old, objects *manifest.Objects) {
	if !sameSurroundings(old, objects) {
		c.Retry()
		return
	}
	for key, claim := range objects.Claims {
		if !reflect.DeepEqual(old.Claims[key], claim) {
			c.operations.Forget(claimObject(key))
		}
	}
	for name, volume := range objects.Volumes {
		if !reflect.DeepEqual(old.Volumes[name], volume) {
			c.operations.Forget(volumeObject(name))
		}
	}
}

// Retry has what failed tried again at the next Sync: a driver has come, say.
func (c *Controller) Retry() {
	claims, volumes := c.Status()
	for _, s := range claims {
		c.operations.Forget(claimObject(types.NamespacedName{Namespace: s.Namespace, Name: s.Name}))
	}
	for _, s := range volumes {
		c.operations.Forget(volumeObject(s.Name))
	}
}

// sameSurroundings compares what operations depend on beside their own claim and volume.
func sameSurroundings(a, b *manifest.Objects) bool {
	return reflect.DeepEqual(a.Classes, b.Classes) && reflect.DeepEqual(a.Drivers, b.Drivers) &&
		reflect.DeepEqual(a.Secrets, b.Secrets) && reflect.DeepEqual(a.Snapshots, b.Snapshots) &&
		reflect.DeepEqual(a.SnapshotContents, b.SnapshotContents)
}

// Sync looks at everything and starts the operations that are due. It is to be called
// when an operation is done or the use of a volume has changed, and at the time that it
// returns, if it is not zero. It writes nothing itself, and waits for Machine alone.
func (c *Controller) Sync(ctx context.Context) (again time.Time) {
	c.syncing.Lock()
	defer c.syncing.Unlock()
	c.mu.Lock()
	objects := c.objects
	c.mu.Unlock()
	if objects == nil {
		return time.Time{}
	}
	p := c.look(objects)
	p.decide()
	c.publish(ctx, p.view)
	return p.again
}

// decide starts what is due, and says what there is to say.
func (p *pass) decide() {
	for _, claim := range p.ordered() {
		p.tellClaim(keyOf(claim), p.want(claim))
	}
	for key, record := range p.records {
		if p.wanted[key] == nil {
			p.tellClaim(key, p.unwant(record))
		}
	}
	for _, v := range p.volumes {
		p.tellVolume(v, p.keep(v))
	}
}

// Volume is what a claim of a pod is bound to; both are on disk. The error says why there
// is nothing yet, and what to do; it errors.Is plugin.ErrNotFound if there is no such
// claim. With the error of a claim that has lost its volume, that volume is returned as it
// was. What is returned is shared, and never changed.
func (c *Controller) Volume(key types.NamespacedName) (*corev1.PersistentVolumeClaim, *corev1.PersistentVolume, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	o, known := c.view.claims[key]
	if !known {
		return nil, nil, fmt.Errorf("claim %s: %w: add it", key, plugin.ErrNotFound)
	}
	return o.claim, o.volume, o.err(key)
}

// NodeExpanded says that a volume's filesystem or device has size on the machine. The next
// Sync writes it down.
func (c *Controller) NodeExpanded(pvName string, size resource.Quantity) {
	c.mu.Lock()
	defer c.mu.Unlock()
	maps.DeleteFunc(c.expanded, func(name string, e nodeSize) bool { return c.recordNow(name) != e.record })
	if record := c.recordNow(pvName); record != nil {
		c.expanded[pvName] = nodeSize{record, size}
	}
}

// recordNow is nil for a volume that has no record, or none that can be read.
func (c *Controller) recordNow(name string) *corev1.PersistentVolume {
	record, err := c.store.Volume(name)
	if err != nil {
		return nil
	}
	return record
}

// nodeExpanded tells whether the machine has all of a volume.
func (c *Controller) nodeExpanded(v *volume) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	e, ok := c.expanded[v.Name]
	return ok && e.record == v.record && e.size.Cmp(capacity(v.PersistentVolume)) >= 0
}

func claimObject(key types.NamespacedName) string { return "claim " + key.String() }

func volumeObject(name string) string { return "volume " + name }
