// Package claim binds, provisions, expands and reclaims the volumes of claims. It does for one
// machine what kube-controller-manager, external-provisioner and external-resizer do for a
// cluster.
//
// Each decision is written to the store before it is executed or reported. The order of the
// writes allows a restarted manager to continue. A claim is recorded as Pending before its volume
// is created, and the volume is recorded before the claim is Bound. A volume is recorded as
// Released before its claim is removed, and is removed after its data is deleted. So Sync needs
// only the manifests and the store, and each operation checks the records again before it writes.
//
// A claim is identified by its UID, which is derived from its name unless the manifest sets one. So a
// claim that is added again gets its volume back, unless deletion of the volume has begun. A retained
// volume is bound to another claim if the volume's manifest names that claim in spec.claimRef. If the
// manifest of a volume is removed and added again, the volume is available to any claim.
package claim

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/keymutex"

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
	// fromManifest marks the record of a volume that a manifest declares. If that manifest is
	// removed, the claim of the volume is Lost.
	fromManifest = "trivet.dev/manifest"
	// reclaim marks a volume whose data is being deleted or scrubbed (reclaimBegun), or was deleted
	// although a manifest still declares the volume (reclaimDone). Such a volume is not bound to a
	// claim.
	reclaim      = "trivet.dev/reclaim"
	reclaimBegun = "begun"
	reclaimDone  = "done"
)

// maxWrites is the maximum number of volumes whose records are written at the same time.
const maxWrites = 64

// Store persists claims and volumes; package store implements it. Returned objects are never
// modified: each write replaces the object, so equal pointers mean that nothing was written.
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
	// InUse reports whether a volume is in use. A volume is in use from before Controller.Volume
	// returns it for a pod until no part of it is set up on the machine any more.
	InUse(pvName string) bool
}

// Controller binds, provisions, expands and reclaims volumes. It is safe for concurrent use.
type Controller struct {
	store      Store
	plugins    plugins.Registry
	operations *operation.Executor
	events     *event.Recorder
	machine    Machine

	// syncing serializes Sync. No other method may lock it, because Sync calls Machine's methods,
	// which may block on other locks.
	syncing sync.Mutex
	// records has a lock for each volume. An operation holds the lock while it checks the records of
	// the volume and its claim for the last time and then writes them.
	records keymutex.KeyMutex

	// mu guards the fields below. It is never held during a blocking call.
	mu      sync.Mutex
	objects *manifest.Objects
	// view is the result of the last pass.
	view view
	// expanded holds the sizes of volumes on the machine, keyed by the names of the volumes.
	expanded map[string]nodeSize
	// releasing holds the claims that an operation is removing; their records may still exist.
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
		store: store, plugins: plugins, operations: operations, events: events, machine: machine,
		records: keymutex.NewHashed(maxWrites), expanded: map[string]nodeSize{}, releasing: map[types.NamespacedName]bool{},
	}
}

// Update replaces the manifests and returns the result of Sync.
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
	c.mu.Lock()
	defer c.mu.Unlock()
	for key := range c.view.claims {
		c.operations.Forget(claimObject(key))
	}
	for name := range c.view.volumes {
		c.operations.Forget(volumeObject(name))
	}
}

// sameDependencies reports whether a and b have equal classes, drivers, secrets and snapshots.
// Operations depend on these besides their own claim and volume.
func sameDependencies(a, b *manifest.Objects) bool {
	return reflect.DeepEqual(a.Classes, b.Classes) && reflect.DeepEqual(a.Drivers, b.Drivers) &&
		reflect.DeepEqual(a.Secrets, b.Secrets) && reflect.DeepEqual(a.Snapshots, b.Snapshots) &&
		reflect.DeepEqual(a.SnapshotContents, b.SnapshotContents)
}

// Sync checks all claims and volumes and starts the operations that are due. It must be called when
// an operation ends, when a volume comes into use or goes out of use, and at the returned time unless
// that is zero. Sync itself writes nothing and blocks only on Machine.
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
		p.view.volumes[name] = outcome{condition: p.syncVolume(v), volume: v.PersistentVolume}
	}
	c.publish(ctx, p.view)
	return p.again
}

// Volume returns a claim and the volume that the claim is bound to, as recorded in the store. The
// error says why the claim has no volume and what to do. The error wraps plugins.ErrNotFound if the
// claim does not exist. If the claim has lost its volume, Volume returns both the last known volume
// and an error. The returned objects are shared and must not be modified.
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

// NodeExpanded stores the size of a volume's filesystem or device on the machine in memory. The next
// Sync starts an operation that records the end of the expansion.
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
	record, _ := c.store.Volume(name)
	return record
}

// isExpandedOnNode reports whether the size on the machine is at least the volume's capacity.
func (c *Controller) isExpandedOnNode(v *volume) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	e, ok := c.expanded[v.Name]
	return ok && e.record == v.record && e.size.Cmp(capacity(v.PersistentVolume)) >= 0
}

func claimObject(key types.NamespacedName) string { return "claim " + key.String() }

func volumeObject(name string) string { return "volume " + name }

// ClaimStatus is the state of a claim that is shown to users.
type ClaimStatus struct { //nolint:revive // the name tells it apart from VolumeStatus
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	// Phase is a Kubernetes claim phase, or Terminating if the claim was removed from the manifests.
	Phase            string `json:"phase"`
	PersistentVolume string `json:"persistentVolume,omitempty"`
	SizeBytes        int64  `json:"sizeBytes,omitempty"`
	// Message says what the claim waits for or what is wrong, and what to do.
	Message string `json:"message,omitempty"`
}

// VolumeStatus is the state of a PersistentVolume that is shown to users.
type VolumeStatus struct {
	Name string `json:"name"`
	// Phase is a Kubernetes volume phase. A volume that cannot be reclaimed is Failed.
	Phase         string `json:"phase"`
	Claim         string `json:"claim,omitempty"`
	StorageClass  string `json:"storageClass,omitempty"`
	ReclaimPolicy string `json:"reclaimPolicy,omitempty"`
	SizeBytes     int64  `json:"sizeBytes,omitempty"`
	Message       string `json:"message,omitempty"`
}

const terminating = "Terminating"

// condition is the part of an outcome whose changes are recorded as events.
type condition struct {
	phase   string
	message string
	// warning is set if a user must act.
	warning bool
}

// outcome is the state of a claim or of a volume after a pass.
type outcome struct {
	condition
	// claim is nil in the outcome of a volume.
	claim  *corev1.PersistentVolumeClaim
	volume *corev1.PersistentVolume
	// usable is set if pods may use the volume.
	usable bool
}

// waiting is the outcome of a pending claim that needs no action.
func waiting(format string, args ...any) outcome {
	return outcome{condition: condition{phase: string(corev1.ClaimPending), message: fmt.Sprintf(format, args...)}}
}

// blocked is the outcome of a pending claim for which a user must act.
func blocked(format string, args ...any) outcome {
	o := waiting(format, args...)
	o.warning = true
	return o
}

// view is the result of a pass.
type view struct {
	claims  map[types.NamespacedName]outcome
	volumes map[string]outcome
	// conflicts has a message for each pod that has a generic ephemeral volume whose claim name is
	// already used by another claim.
	conflicts map[string]string
}

// publish replaces the view and records an event for each change.
func (c *Controller) publish(ctx context.Context, view view) {
	c.mu.Lock()
	old := c.view
	c.view = view
	c.mu.Unlock()
	for key, o := range view.claims {
		c.recordChange(ctx, claimObject(key), "Claim", old.claims[key].condition, o.condition)
	}
	for name, o := range view.volumes {
		c.recordChange(ctx, volumeObject(name), "Volume", old.volumes[name].condition, o.condition)
	}
	for pod, message := range view.conflicts {
		if message != old.conflicts[pod] {
			c.events.Record(ctx, event.Event{Warning: true, Object: pod, Reason: "ClaimConflict", Message: message})
		}
	}
}

// recordChange records an event if a condition has changed. A new object without a message causes no
// event. kind begins the reason of the event.
func (c *Controller) recordChange(ctx context.Context, object, kind string, old, now condition) {
	if now.message != old.message || old.phase != "" && now.phase != old.phase {
		c.events.Record(ctx, event.Event{Warning: now.warning, Object: object, Reason: kind + now.phase, Message: cmp.Or(now.message, "it is "+now.phase)})
	}
}

// Status returns all claims and volumes, sorted by namespace and name.
func (c *Controller) Status() (claims []ClaimStatus, volumes []VolumeStatus) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for key, o := range c.view.claims {
		s := ClaimStatus{Namespace: key.Namespace, Name: key.Name, Phase: o.phase, Message: o.message}
		if o.claim != nil {
			s.PersistentVolume = o.claim.Spec.VolumeName
			if size, ok := o.claim.Status.Capacity[corev1.ResourceStorage]; ok {
				s.SizeBytes = size.Value()
			}
		}
		claims = append(claims, s)
	}
	for name, o := range c.view.volumes {
		size := capacity(o.volume)
		s := VolumeStatus{
			Name: name, Phase: o.phase, StorageClass: o.volume.Spec.StorageClassName, SizeBytes: size.Value(),
			ReclaimPolicy: string(o.volume.Spec.PersistentVolumeReclaimPolicy), Message: o.message,
		}
		if o.volume.Spec.ClaimRef != nil {
			s.Claim = refKey(o.volume.Spec.ClaimRef).String()
		}
		volumes = append(volumes, s)
	}
	slices.SortFunc(claims, func(a, b ClaimStatus) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	})
	slices.SortFunc(volumes, func(a, b VolumeStatus) int { return cmp.Compare(a.Name, b.Name) })
	return claims, volumes
}

// run starts an operation, unless one with the same object is running. During the back-off after a
// failure, it returns the error of the last attempt.
func (p *pass) run(object, name, pluginName string, do func(ctx context.Context) error) error {
	err := p.c.operations.Run(object, operation.Operation{Name: name, Plugin: pluginName, Object: object, Do: do})
	if errors.Is(err, operation.ErrPending) {
		return nil
	}
	if backoff, ok := errors.AsType[*operation.BackoffError](err); ok {
		if p.again.IsZero() || backoff.Until.Before(p.again) {
			p.again = backoff.Until
		}
		return backoff.Last
	}
	return err
}

func (p *pass) pluginOf(v *volume) (plugins.VolumePlugin, error) {
	return p.c.plugins.ForSpec(&plugins.Spec{PersistentVolume: v.PersistentVolume})
}

// pluginName returns the name of a volume's plugin for metrics and logs; "" if no plugin supports the
// volume.
func (p *pass) pluginName(v *volume) string {
	plugin, err := p.pluginOf(v)
	if err != nil {
		return ""
	}
	return plugin.Name()
}
