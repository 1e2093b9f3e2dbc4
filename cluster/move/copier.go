package move

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/trivet-csi/trivet/cluster/kube"
	"github.com/trivet-csi/trivet/cluster/kubectl"
	"github.com/trivet-csi/trivet/internal/crashpoint"
)

// progressInterval is the time between two messages about the progress of a transfer.
const progressInterval = 10 * time.Second

// selectedNode is the annotation of a claim with the node on which the provisioner creates its volume. The scheduler sets it for
// the first pod of the claim.
const selectedNode = "volume.kubernetes.io/selected-node"

// copier creates copies of the volume of a claim on another node. A copy is a snapshot, and a claim of the same name that has it
// as source. Without snapshots it is only a claim, which has the claim of the volume as source.
type copier struct {
	api   *kubectl.Cluster
	claim kube.Claim
	// capacity is the size of the claim's PersistentVolume.
	capacity string
	// to is the node of the copies, snapshotClass the class of their snapshots, or "" if there are none.
	to, snapshotClass string
	// used is true if pods may use the volume, so that waiting does not help if the pool takes snapshots only of unused volumes.
	used bool
	// retried is true if a copy that the provisioner could not create on the node, for example for lack of room, is tried again.
	retried bool
	// labels and annotations mark the objects of a copy.
	labels, annotations map[string]any
	// owners are the objects without which Kubernetes deletes those of a copy.
	owners []any
	// status describes how far the copy of a claim is, or why it does not begin.
	status func(ctx context.Context, claim kube.Meta) (string, error)
	// progress prints a line.
	progress func(format string, args ...any)
}

// takeSnapshot takes a snapshot of the claim, and waits until it can be used.
func (c *copier) takeSnapshot(ctx context.Context, name string, check func() error) (taken kube.Snapshot, err error) {
	namespace := c.claim.Metadata.Namespace
	err = c.api.CreateSnapshot(ctx, namespace, kube.Object{
		"metadata": map[string]any{"name": name, "labels": c.labels, "annotations": c.annotations, "ownerReferences": c.owners},
		"spec": map[string]any{
			"volumeSnapshotClassName": c.snapshotClass,
			"source":                  map[string]any{"persistentVolumeClaimName": c.claim.Metadata.Name},
		},
	})
	if err != nil && !apierrors.IsAlreadyExists(err) {
		return taken, fmt.Errorf("creating snapshot %s: %w", name, err)
	}
	shown := ""
	err = until(ctx, c.progress, 0, "", func() (_ bool, err error) {
		if taken, err = c.api.Snapshot(ctx, namespace, name); err != nil {
			return false, err
		}
		if taken.Status.ReadyToUse {
			err = check()
			return err == nil, err
		}
		message := taken.Status.Error.Message
		if c.used && strings.Contains(message, "FailedPrecondition") {
			return false, fmt.Errorf("snapshot %s: %s: stop the pods, for example scale their controller to 0, and run this command again", name, message)
		}
		c.show(name, &shown, message)
		return false, check()
	})
	return taken, err
}

// restore creates the volume of a copy, and waits until it is complete. restoreSize is that of its snapshot, if there is one.
func (c *copier) restore(ctx context.Context, name, restoreSize string, check func() error) (v kube.PersistentVolume, err error) {
	begin := time.Now()
	err = c.api.CreateClaim(ctx, c.claim.Metadata.Namespace, c.copyClaim(name, restoreSize))
	if apierrors.IsAlreadyExists(err) {
		err = c.checkExisting(ctx, name)
	}
	if err != nil {
		return v, fmt.Errorf("creating claim %s: %w", name, err)
	}
	crashpoint.Here(crashpoint.MoveCopying)
	claim, err := c.waitCopied(ctx, name, check)
	if err != nil {
		return v, err
	}
	c.progress("Copy %s is complete after %.1f s.", name, time.Since(begin).Seconds())
	object, err := c.api.PersistentVolume(ctx, claim.Spec.VolumeName)
	if err != nil {
		return v, err
	}
	return kube.AsPersistentVolume(object)
}

// checkExisting checks that an existing claim was created by this move or protection.
func (c *copier) checkExisting(ctx context.Context, name string) error {
	claim, err := c.api.Claim(ctx, c.claim.Metadata.Namespace, name)
	if err != nil {
		return err
	}
	source, expected := claim.Spec.DataSource, c.source(name)
	own := source.Kind == expected["kind"] && source.Name == expected["name"]
	for key, value := range c.labels {
		own = own && claim.Metadata.Labels[key] == value
	}
	if !own {
		return fmt.Errorf("it exists with the source %s %q, and was not created by this command: delete it", source.Kind, source.Name)
	}
	return nil
}

// show prints a message unless it is empty or the one that was shown last.
func (c *copier) show(name string, shown *string, message string) {
	if message != "" && message != *shown {
		*shown = message
		c.progress("Copy %s: %s", name, message)
	}
}

// source returns the source of a copy with a name.
func (c *copier) source(name string) map[string]any {
	if c.snapshotClass == "" {
		return map[string]any{"kind": "PersistentVolumeClaim", "name": c.claim.Metadata.Name}
	}
	return map[string]any{"apiGroup": "snapshot.storage.k8s.io", "kind": "VolumeSnapshot", "name": name}
}

// copyClaim returns the claim of a copy. Its volume is created on the node to.
func (c *copier) copyClaim(name, restoreSize string) kube.Object {
	spec := map[string]any{
		"storageClassName": c.claim.Spec.StorageClassName,
		"volumeMode":       cmp.Or(c.claim.Spec.VolumeMode, "Filesystem"),
		"accessModes":      toAny(c.claim.Spec.AccessModes),
		"resources":        map[string]any{"requests": map[string]any{"storage": largest(c.claim.Spec.Resources.Requests.Storage, c.capacity, restoreSize)}},
		"dataSource":       c.source(name),
	}
	if class := c.claim.Spec.VolumeAttributesClassName; class != "" {
		spec["volumeAttributesClassName"] = class
	}
	annotations := map[string]any{selectedNode: c.to}
	for key, value := range c.annotations {
		annotations[key] = value
	}
	return kube.Object{
		"metadata": map[string]any{"name": name, "labels": c.labels, "annotations": annotations, "ownerReferences": c.owners},
		"spec":     spec,
	}
}

func toAny(texts []string) (all []any) {
	for _, t := range texts {
		all = append(all, t)
	}
	return all
}

// largest returns the largest of sizes.
func largest(size string, others ...string) string {
	for _, other := range others {
		known, err1 := resource.ParseQuantity(size)
		next, err2 := resource.ParseQuantity(other)
		if errors.Join(err1, err2) == nil && next.Cmp(known) > 0 {
			size = other
		}
	}
	return size
}

// waitCopied waits until the claim of a copy is bound.
func (c *copier) waitCopied(ctx context.Context, name string, check func() error) (claim kube.Claim, err error) {
	shown, next, again := "", time.Now().Add(progressInterval), time.Time{}
	err = until(ctx, c.progress, 0, "", func() (_ bool, err error) {
		if claim, err = c.api.Claim(ctx, c.claim.Metadata.Namespace, name); err != nil {
			return false, err
		}
		if claim.Status.Phase == "Bound" {
			err = check()
			return err == nil, err
		}
		switch at := time.Now(); {
		case c.retried && stray(claim):
			if at.After(again) {
				again = at.Add(progressInterval)
				err = c.selectAgain(ctx, claim.Metadata, &shown)
			}
		case at.After(next):
			next = at.Add(progressInterval)
			var message string
			message, err = c.status(ctx, claim.Metadata)
			c.show(name, &shown, message)
		}
		if err != nil {
			return false, err
		}
		return false, check()
	})
	return claim, err
}

// selectAgain selects the node of a copy again, which the provisioner has removed from the claim because it could not create the
// volume there.
func (c *copier) selectAgain(ctx context.Context, claim kube.Meta, shown *string) error {
	warning, err := c.api.LastWarning(ctx, claim)
	if err != nil {
		return err
	}
	c.show(claim.Name, shown, fmt.Sprintf("%s: node %s is tried again every %v: see 'kubectl trivet status' for the room there, or end this command and undo the move with --abort", cmp.Or(warning, "the volume could not be created"), c.to, progressInterval))
	_, err = c.api.AnnotateClaim(ctx, claim, map[string]any{selectedNode: c.to})
	if apierrors.IsConflict(err) {
		return nil // the claim has changed, and is read again
	}
	return err
}

// elsewhere returns the error of a copy that was created on another node.
func elsewhere(claim string, v kube.PersistentVolume, to string) error {
	return fmt.Errorf("claim %s: volume %s was not created on node %s", claim, v.Spec.CSI.VolumeHandle, to)
}
