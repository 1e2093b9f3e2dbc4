package claim

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/trivet-csi/trivet/volumemanager/event"
	"github.com/trivet-csi/trivet/volumemanager/operation"
	"github.com/trivet-csi/trivet/volumemanager/plugins"
)

// ClaimStatus is what a person sees of a claim.
type ClaimStatus struct { //nolint:revive // Status is of both
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	// Phase is that of Kubernetes, or Terminating: its manifest is gone.
	Phase    string `json:"phase"`
	Volume   string `json:"volume,omitempty"`
	Capacity string `json:"capacity,omitempty"`
	// Message says what is waited for or wrong, and what to do.
	Message string `json:"message,omitempty"`
}

// VolumeStatus is what a person sees of a PersistentVolume.
type VolumeStatus struct {
	Name string `json:"name"`
	// Phase is that of Kubernetes; Failed is one that cannot be reclaimed.
	Phase         string `json:"phase"`
	Claim         string `json:"claim,omitempty"`
	Class         string `json:"class,omitempty"`
	ReclaimPolicy string `json:"reclaimPolicy,omitempty"`
	Capacity      string `json:"capacity,omitempty"`
	Message       string `json:"message,omitempty"`
}

const terminating = "Terminating"

// outcome is what a pass says of a claim. Pods get its volume if it serves.
type outcome struct {
	claim   *corev1.PersistentVolumeClaim
	volume  *corev1.PersistentVolume
	phase   string
	message string
	serves  bool
	// warning says that somebody has to do something.
	warning bool
}

func (o outcome) err(key types.NamespacedName) error {
	if o.serves {
		return nil
	}
	return fmt.Errorf("claim %s: %s", key, o.message)
}

// waits is the outcome of a claim that will go on by itself.
func waits(format string, args ...any) outcome {
	return outcome{phase: string(corev1.ClaimPending), message: fmt.Sprintf(format, args...)}
}

// stuck is the outcome of a claim for which somebody has to do something.
func stuck(format string, args ...any) outcome {
	o := waits(format, args...)
	o.warning = true
	return o
}

// kept is what a pass says of a volume.
type kept struct {
	phase   corev1.PersistentVolumePhase
	message string
	warning bool
}

// view is what the last pass has said.
type view struct {
	claims   map[types.NamespacedName]outcome
	statuses map[types.NamespacedName]ClaimStatus
	volumes  map[string]VolumeStatus
	warnings map[string]bool
	// conflicts are pods whose generic ephemeral volumes have another's claim.
	conflicts map[string]string
}

func newView() view {
	return view{
		claims: map[types.NamespacedName]outcome{}, statuses: map[types.NamespacedName]ClaimStatus{},
		volumes: map[string]VolumeStatus{}, warnings: map[string]bool{}, conflicts: map[string]string{},
	}
}

func (p *pass) tellClaim(key types.NamespacedName, o outcome) {
	s := ClaimStatus{Namespace: key.Namespace, Name: key.Name, Phase: o.phase, Message: o.message}
	if o.claim != nil {
		s.Volume = o.claim.Spec.VolumeName
		if has, ok := o.claim.Status.Capacity[corev1.ResourceStorage]; ok {
			s.Capacity = has.String()
		}
	}
	p.view.claims[key], p.view.statuses[key] = o, s
	p.view.warnings[claimObject(key)] = o.warning
}

func (p *pass) tellVolume(v *volume, k kept) {
	has := capacity(v.PersistentVolume)
	s := VolumeStatus{
		Name: v.Name, Phase: string(k.phase), Class: v.Spec.StorageClassName, Capacity: has.String(),
		ReclaimPolicy: string(v.Spec.PersistentVolumeReclaimPolicy), Message: k.message,
	}
	if v.Spec.ClaimRef != nil {
		s.Claim = refKey(v.Spec.ClaimRef).String()
	}
	p.view.volumes[v.Name] = s
	p.view.warnings[volumeObject(v.Name)] = k.warning
}

// publish makes a pass's view the one that is told, with an event for each change. That
// all is well at the start is none.
func (c *Controller) publish(ctx context.Context, now view) {
	c.mu.Lock()
	before := c.view
	c.view = now
	c.mu.Unlock()
	for key, s := range now.statuses {
		was := before.statuses[key]
		if s.Message != was.Message || was.Phase != "" && s.Phase != was.Phase {
			c.record(ctx, claimObject(key), "Claim"+s.Phase, cmp.Or(s.Message, "it is "+s.Phase), now)
		}
	}
	for name, s := range now.volumes {
		was := before.volumes[name]
		if s.Message != was.Message || was.Phase != "" && s.Phase != was.Phase {
			c.record(ctx, volumeObject(name), "Volume"+s.Phase, cmp.Or(s.Message, "it is "+s.Phase), now)
		}
	}
	for pod, message := range now.conflicts {
		if message != before.conflicts[pod] {
			c.events.Record(ctx, event.Event{Warning: true, Object: pod, Reason: "ClaimConflict", Message: message})
		}
	}
}

func (c *Controller) record(ctx context.Context, object, reason, message string, now view) {
	c.events.Record(ctx, event.Event{Warning: now.warnings[object], Object: object, Reason: reason, Message: message})
}

// Status has all claims and volumes, sorted by namespace and name.
func (c *Controller) Status() ([]ClaimStatus, []VolumeStatus) {
	c.mu.Lock()
	defer c.mu.Unlock()
	claims := slices.SortedFunc(maps.Values(c.view.statuses), func(a, b ClaimStatus) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	})
	volumes := slices.SortedFunc(maps.Values(c.view.volumes), func(a, b VolumeStatus) int {
		return cmp.Compare(a.Name, b.Name)
	})
	return claims, volumes
}

// run starts an operation, unless it is under way. Its error is what the operation failed
// with the last time, until it is tried again.
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

// pluginOf is nil if there is none for a volume.
func (p *pass) pluginOf(v *volume) (plugins.VolumePlugin, error) {
	return p.c.plugins.ForSpec(&plugins.Spec{PersistentVolume: v.PersistentVolume})
}

// pluginName is for metrics and log.
func (p *pass) pluginName(v *volume) string {
	found, err := p.pluginOf(v)
	if err != nil {
		return ""
	}
	return found.Name()
}
