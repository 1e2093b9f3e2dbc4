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
	"github.com/trivet-csi/trivet/volumemanager/plugins"
)

const (
	// provisionedBy is external-provisioner's annotation for the StorageClass's provisioner.
	provisionedBy = "pv.kubernetes.io/provisioned-by"
	// storageProvisioner is Kubernetes' annotation for the provisioner of a claim's volume.
	storageProvisioner = "volume.kubernetes.io/storage-provisioner"
	// fromManifest marks the record of a volume that a manifest declares. Without the manifest
	// the volume is lost.
	fromManifest = "trivet.dev/manifest"
	// reclaim marks a volume whose data is being deleted or scrubbed (reclaimBegun), or was
	// deleted while a manifest still declares it (reclaimDone). It is not bound to a claim.
	reclaim      = "trivet.dev/reclaim"
	reclaimBegun = "begun"
	reclaimDone  = "done"
)

// Store persists claims and volumes; package store implements it. Returned objects are never
// modified: each write replaces the object, so pointers can be compared.
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

// Machine is the machine on which volumes are mounted.
type Machine interface {
	// Node returns the machine's name and labels as a Node.
	Node() *corev1.Node
	// InUse reports whether a volume is in use: from before Controller.Volume returns it for a
	// pod until no part of it is left on the machine.
	InUse(pvName string) bool
}

// Controller binds, provisions, expands and reclaims volumes. It is safe for concurrent use.
type Controller struct {
	store      Store
	plugins    plugins.Registry
	operations *operation.Executor
	events     *event.Recorder
	machine    Machine

	// syncing serializes Sync. Machine's methods may block on other locks, so only Sync, which
	// calls them, holds it.
	syncing sync.Mutex
	// records serializes, for each volume, an operation's last check of the records of the volume
	// and its claim with its writes.
	records *locks

	// mu guards the fields below. It is never held during a blocking call.
	mu       sync.Mutex
	objects  *manifest.Objects
	view     view
	expanded map[string]nodeSize
	// releasing holds the claims that an operation is about to remove; their records may still
	// exist.
	releasing map[types.NamespacedName]bool
}

// nodeSize is a volume's size on the machine. It is valid as long as record is the volume's
// record.
type nodeSize struct {
	record *corev1.PersistentVolume
	size   resource.Quantity
}

// New returns a Controller that is idle until the first Update.
func New(store Store, plugins plugins.Registry, operations *operation.Executor, events *event.Recorder, machine Machine) *Controller {
	return &Controller{
		store: store, plugins: plugins, operations: operations, events: events, machine: machine, records: newLocks(),
		expanded: map[string]nodeSize{}, releasing: map[types.NamespacedName]bool{},
	}
}

// Update replaces the manifests and calls Sync.
func (c *Controller) Update(ctx context.Context, objects *manifest.Objects) (again time.Time) {
	c.mu.Lock()
	old := c.objects
	c.objects = objects
	c.mu.Unlock()
	if old != nil {
		c.resetBackoff(old, objects)
	}
	return c.Sync(ctx)
}

// resetBackoff ends the back-off of failed operations that the new manifests may have fixed.
func (c *Controller) resetBackoff(old, objects *manifest.Objects) {
	if !sameDependencies(old, objects) {
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

// Retry ends all back-offs, so that the next Sync retries failed operations, for example after a
// driver was registered.
func (c *Controller) Retry() {
	claims, volumes := c.Status()
	for _, s := range claims {
		c.operations.Forget(claimObject(types.NamespacedName{Namespace: s.Namespace, Name: s.Name}))
	}
	for _, s := range volumes {
		c.operations.Forget(volumeObject(s.Name))
	}
}

// sameDependencies reports whether the objects are equal that operations depend on besides their
// own claim and volume.
func sameDependencies(a, b *manifest.Objects) bool {
	return reflect.DeepEqual(a.Classes, b.Classes) && reflect.DeepEqual(a.Drivers, b.Drivers) &&
		reflect.DeepEqual(a.Secrets, b.Secrets) && reflect.DeepEqual(a.Snapshots, b.Snapshots) &&
		reflect.DeepEqual(a.SnapshotContents, b.SnapshotContents)
}

// Sync checks all claims and volumes and starts the operations that are due. Call it when an
// operation ends, when the use of a volume changes, and at the returned time unless that is zero.
// It writes nothing itself and blocks only on Machine.
func (c *Controller) Sync(ctx context.Context) (again time.Time) {
	c.syncing.Lock()
	defer c.syncing.Unlock()
	c.mu.Lock()
	objects := c.objects
	c.mu.Unlock()
	if objects == nil {
		return time.Time{}
	}
	p := c.newPass(objects)
	for _, claim := range p.sortedClaims() {
		p.view.claims[keyOf(claim)] = p.syncClaim(claim)
	}
	for key, record := range p.records {
		if p.desired[key] == nil {
			p.view.claims[key] = p.syncRemovedClaim(record)
		}
	}
	for name, v := range p.volumes {
		p.view.volumes[name] = volumeOutcome{p.syncVolume(v), v.PersistentVolume}
	}
	c.publish(ctx, p.view)
	return p.again
}

// Volume returns a claim and the volume that it is bound to, as recorded in the store. The error
// says why the claim has no volume and what to do. It wraps plugins.ErrNotFound if the claim does
// not exist. If the claim has lost its volume, both the last known volume and an error are
// returned. The returned objects are shared and must not be modified.
func (c *Controller) Volume(key types.NamespacedName) (*corev1.PersistentVolumeClaim, *corev1.PersistentVolume, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	o, exists := c.view.claims[key]
	if !exists {
		return nil, nil, fmt.Errorf("claim %s: %w: add it", key, plugins.ErrNotFound)
	}
	var err error
	if !o.usable {
		err = fmt.Errorf("claim %s: %s", key, o.message)
	}
	return o.claim, o.volume, err
}

// NodeExpanded reports the size of a volume's filesystem or device on the machine. An operation of
// the next Sync records it.
func (c *Controller) NodeExpanded(pvName string, size resource.Quantity) {
	c.mu.Lock()
	defer c.mu.Unlock()
	maps.DeleteFunc(c.expanded, func(name string, e nodeSize) bool { return c.currentRecord(name) != e.record })
	if record := c.currentRecord(pvName); record != nil {
		c.expanded[pvName] = nodeSize{record, size}
	}
}

// currentRecord returns a volume's record; nil if it does not exist or cannot be read.
func (c *Controller) currentRecord(name string) *corev1.PersistentVolume {
	record, err := c.store.Volume(name)
	if err != nil {
		return nil
	}
	return record
}

// nodeExpanded reports whether the size on the machine is at least the volume's capacity.
func (c *Controller) nodeExpanded(v *volume) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	e, ok := c.expanded[v.Name]
	return ok && e.record == v.record && e.size.Cmp(capacity(v.PersistentVolume)) >= 0
}

func claimObject(key types.NamespacedName) string { return "claim " + key.String() }

func volumeObject(name string) string { return "volume " + name }
