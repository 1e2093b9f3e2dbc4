package claim

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/trivet-csi/trivet/volumemanager/event"
	"github.com/trivet-csi/trivet/volumemanager/operation"
	"github.com/trivet-csi/trivet/volumemanager/plugins"
)

// ClaimStatus is the state of a claim for users.
type ClaimStatus struct { //nolint:revive // VolumeStatus exists too
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	// Phase is a phase of Kubernetes, or Terminating if the claim is in no manifest any more.
	Phase    string `json:"phase"`
	Volume   string `json:"volume,omitempty"`
	Capacity string `json:"capacity,omitempty"`
	// Message says what the claim waits for or what is wrong, and what to do.
	Message string `json:"message,omitempty"`
}

// VolumeStatus is the state of a PersistentVolume for users.
type VolumeStatus struct {
	Name string `json:"name"`
	// Phase is a phase of Kubernetes. A volume that cannot be reclaimed is Failed.
	Phase         string `json:"phase"`
	Claim         string `json:"claim,omitempty"`
	Class         string `json:"class,omitempty"`
	ReclaimPolicy string `json:"reclaimPolicy,omitempty"`
	Capacity      string `json:"capacity,omitempty"`
	Message       string `json:"message,omitempty"`
}

const terminating = "Terminating"

// condition is the part of a state that is reported as an event when it changes.
type condition struct {
	phase   string
	message string
	// warning is set if a user must act.
	warning bool
}

// outcome is the state of a claim after a pass.
type outcome struct {
	condition
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

// volumeOutcome is the state of a volume after a pass.
type volumeOutcome struct {
	condition
	volume *corev1.PersistentVolume
}

// view is the result of a pass.
type view struct {
	claims  map[types.NamespacedName]outcome
	volumes map[string]volumeOutcome
	// conflicts has a message for each pod whose generic ephemeral volume has the name of a claim
	// that is not its own.
	conflicts map[string]string
}

func newView() view {
	return view{claims: map[types.NamespacedName]outcome{}, volumes: map[string]volumeOutcome{}, conflicts: map[string]string{}}
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

// recordChange records an event if a condition has changed. A new object without a message is no
// event.
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
			s.Volume = o.claim.Spec.VolumeName
			if size, ok := o.claim.Status.Capacity[corev1.ResourceStorage]; ok {
				s.Capacity = size.String()
			}
		}
		claims = append(claims, s)
	}
	for name, o := range c.view.volumes {
		size := capacity(o.volume)
		s := VolumeStatus{
			Name: name, Phase: o.phase, Class: o.volume.Spec.StorageClassName, Capacity: size.String(),
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

// run starts an operation, unless one with the same object is running. During the back-off it
// returns the error of the last attempt.
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

// pluginName returns the name of a volume's plugin for metrics and log, "" if there is none.
func (p *pass) pluginName(v *volume) string {
	plugin, err := p.pluginOf(v)
	if err != nil {
		return ""
	}
	return plugin.Name()
}
