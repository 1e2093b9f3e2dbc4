package kube

import (
	"cmp"
	"context"
	"crypto/sha256"
	"fmt"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
)

// The resources that kubectl trivet move reads and writes in addition.
var (
	claims            = schema.GroupVersionResource{Version: "v1", Resource: "persistentvolumeclaims"}
	events            = schema.GroupVersionResource{Version: "v1", Resource: "events"}
	volumeAttachments = schema.GroupVersionResource{Group: "storage.k8s.io", Version: "v1", Resource: "volumeattachments"}
	accessReviews     = schema.GroupVersionResource{Group: "authorization.k8s.io", Version: "v1", Resource: "selfsubjectaccessreviews"}
	snapshots         = schema.GroupVersionResource{Group: snapshotGroup, Version: "v1", Resource: "volumesnapshots"}
	snapshotClasses   = schema.GroupVersionResource{Group: snapshotGroup, Version: "v1", Resource: "volumesnapshotclasses"}
)

// snapshotGroup is the API group of snapshots.
const snapshotGroup = "snapshot.storage.k8s.io"

// Object is an object with all its fields.
type Object = map[string]any

// Claim is core/v1 PersistentVolumeClaim.
type Claim struct {
	Metadata Meta `json:"metadata"`
	Spec     struct {
		AccessModes               []string `json:"accessModes"`
		VolumeMode                string   `json:"volumeMode"`
		VolumeName                string   `json:"volumeName"`
		StorageClassName          string   `json:"storageClassName"`
		VolumeAttributesClassName string   `json:"volumeAttributesClassName"`
		Resources                 struct {
			Requests struct {
				Storage string `json:"storage"`
			} `json:"requests"`
		} `json:"resources"`
		DataSource struct {
			Kind string `json:"kind"`
			Name string `json:"name"`
		} `json:"dataSource"`
	} `json:"spec"`
	Status struct {
		Phase string `json:"phase"`
	} `json:"status"`
}

// Snapshot is snapshot.storage.k8s.io/v1 VolumeSnapshot.
type Snapshot struct {
	Metadata Meta `json:"metadata"`
	Status   struct {
		ReadyToUse  bool   `json:"readyToUse"`
		RestoreSize string `json:"restoreSize"`
		Error       struct {
			Message string `json:"message"`
		} `json:"error"`
	} `json:"status"`
}

// SnapshotClass is snapshot.storage.k8s.io/v1 VolumeSnapshotClass.
type SnapshotClass struct {
	Metadata       Meta   `json:"metadata"`
	Driver         string `json:"driver"`
	DeletionPolicy string `json:"deletionPolicy"`
}

// VolumeAttachment is storage/v1 VolumeAttachment.
type VolumeAttachment struct {
	Metadata Meta `json:"metadata"`
	Spec     struct {
		NodeName string `json:"nodeName"`
		Source   struct {
			PersistentVolumeName string `json:"persistentVolumeName"`
		} `json:"source"`
	} `json:"spec"`
}

// Claim reads a PersistentVolumeClaim.
func (c *Client) Claim(ctx context.Context, namespace, name string) (Claim, error) {
	return get[Claim](ctx, c.api.Resource(claims).Namespace(namespace), name)
}

// Claims lists the PersistentVolumeClaims of a namespace that match a label selector.
func (c *Client) Claims(ctx context.Context, namespace, selector string) ([]Claim, error) {
	return list[Claim](ctx, c.api.Resource(claims).Namespace(namespace), selector)
}

// CreateClaim creates a PersistentVolumeClaim.
func (c *Client) CreateClaim(ctx context.Context, namespace string, object Object) error {
	return create(ctx, c.api.Resource(claims).Namespace(namespace), "v1", "PersistentVolumeClaim", object)
}

// AnnotateClaim sets annotations of a PersistentVolumeClaim; nil removes one. If the claim has changed since it was read,
// apierrors.IsConflict is true for the error.
func (c *Client) AnnotateClaim(ctx context.Context, current Meta, annotations map[string]any) (Claim, error) {
	return patch[Claim](ctx, c.api.Resource(claims).Namespace(current.Namespace), current, map[string]any{"metadata": map[string]any{"annotations": annotations}})
}

// DeleteClaim deletes a PersistentVolumeClaim. It succeeds if there is none.
func (c *Client) DeleteClaim(ctx context.Context, namespace, name string) error {
	return absent(c.api.Resource(claims).Namespace(namespace).Delete(ctx, name, metav1.DeleteOptions{}))
}

// PersistentVolume reads a PersistentVolume with all its fields.
func (c *Client) PersistentVolume(ctx context.Context, name string) (Object, error) {
	object, err := c.api.Resource(persistentVolumes).Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return nil, err
	}
	return object.Object, nil
}

// AsPersistentVolume returns the fields in use of a PersistentVolume.
func AsPersistentVolume(object Object) (PersistentVolume, error) {
	return view[PersistentVolume](object)
}

// CreatePersistentVolume creates a PersistentVolume.
func (c *Client) CreatePersistentVolume(ctx context.Context, object Object) error {
	return create(ctx, c.api.Resource(persistentVolumes), "v1", "PersistentVolume", object)
}

// SetReclaimPolicy sets the reclaim policy of a PersistentVolume that has not changed since it was read.
func (c *Client) SetReclaimPolicy(ctx context.Context, v PersistentVolume, policy string) (PersistentVolume, error) {
	if v.Spec.ReclaimPolicy == policy {
		return v, nil
	}
	return patch[PersistentVolume](ctx, c.api.Resource(persistentVolumes), v.Metadata, map[string]any{"spec": map[string]any{"persistentVolumeReclaimPolicy": policy}})
}

// RemovePersistentVolume removes the object of a PersistentVolume, but not the volume: the reclaim policy must be Retain. It
// removes the finalizers, because that of a bound PersistentVolume stays until the claim is deleted. The object must be the
// one that was read. It succeeds if that one does not exist.
func (c *Client) RemovePersistentVolume(ctx context.Context, v PersistentVolume) error {
	resource, name, uid := c.api.Resource(persistentVolumes), v.Metadata.Name, types.UID(v.Metadata.UID)
	for {
		var err error
		switch {
		case v.Spec.ReclaimPolicy != "Retain":
			return fmt.Errorf("PersistentVolume %s has the reclaim policy %q: its object is removed only with Retain", name, v.Spec.ReclaimPolicy)
		case v.Metadata.DeletionTimestamp == "":
			version := v.Metadata.ResourceVersion
			err = resource.Delete(ctx, name, metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &uid, ResourceVersion: &version}})
		case len(v.Metadata.Finalizers) > 0:
			_, err = patch[struct{}](ctx, resource, v.Metadata, map[string]any{"metadata": map[string]any{"finalizers": nil}})
		}
		if err := absent(err); err != nil && !apierrors.IsConflict(err) {
			return err
		}
		v, err = get[PersistentVolume](ctx, resource, name)
		if apierrors.IsNotFound(err) || err == nil && v.Metadata.UID != string(uid) {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// absent returns nil for the error that an object does not exist.
func absent(err error) error {
	if apierrors.IsNotFound(err) {
		return nil
	}
	return err
}

// VolumeAttachments lists the VolumeAttachments.
func (c *Client) VolumeAttachments(ctx context.Context) ([]VolumeAttachment, error) {
	return list[VolumeAttachment](ctx, c.api.Resource(volumeAttachments), "")
}

// ConfigMap reads a ConfigMap.
func (c *Client) ConfigMap(ctx context.Context, namespace, name string) (ConfigMap, error) {
	return get[ConfigMap](ctx, c.api.Resource(configMaps).Namespace(namespace), name)
}

// ConfigMaps lists the ConfigMaps of a namespace that match a label selector.
func (c *Client) ConfigMaps(ctx context.Context, namespace, selector string) ([]ConfigMap, error) {
	return list[ConfigMap](ctx, c.api.Resource(configMaps).Namespace(namespace), selector)
}

// CreateConfigMap creates a ConfigMap.
func (c *Client) CreateConfigMap(ctx context.Context, namespace string, object Object) (ConfigMap, error) {
	object["apiVersion"], object["kind"] = "v1", "ConfigMap"
	created, err := c.api.Resource(configMaps).Namespace(namespace).Create(ctx, &unstructured.Unstructured{Object: object}, metav1.CreateOptions{})
	if err != nil {
		return ConfigMap{}, err
	}
	return view[ConfigMap](created.Object)
}

// ChangeConfigMap changes data of a ConfigMap that has not changed since it was read.
func (c *Client) ChangeConfigMap(ctx context.Context, current Meta, data map[string]any) (ConfigMap, error) {
	return patch[ConfigMap](ctx, c.api.Resource(configMaps).Namespace(current.Namespace), current, map[string]any{"data": data})
}

// DeleteConfigMap deletes a ConfigMap that has not changed since it was read.
func (c *Client) DeleteConfigMap(ctx context.Context, current Meta) error {
	options := metav1.DeleteOptions{Preconditions: &metav1.Preconditions{ResourceVersion: &current.ResourceVersion}}
	return c.api.Resource(configMaps).Namespace(current.Namespace).Delete(ctx, current.Name, options)
}

// StorageClass reads a StorageClass.
func (c *Client) StorageClass(ctx context.Context, name string) (StorageClass, error) {
	return get[StorageClass](ctx, c.api.Resource(storageClasses), name)
}

// SnapshotClasses lists the VolumeSnapshotClasses of a CSI driver. It returns none if the cluster has no snapshot CRDs.
func (c *Client) SnapshotClasses(ctx context.Context, driver string) (own []SnapshotClass, err error) {
	all, err := list[SnapshotClass](ctx, c.api.Resource(snapshotClasses), "")
	for _, s := range all {
		if s.Driver == driver {
			own = append(own, s)
		}
	}
	return own, absent(err)
}

// Snapshot reads a VolumeSnapshot.
func (c *Client) Snapshot(ctx context.Context, namespace, name string) (Snapshot, error) {
	return get[Snapshot](ctx, c.api.Resource(snapshots).Namespace(namespace), name)
}

// Snapshots lists the VolumeSnapshots of a namespace that match a label selector.
func (c *Client) Snapshots(ctx context.Context, namespace, selector string) ([]Snapshot, error) {
	return list[Snapshot](ctx, c.api.Resource(snapshots).Namespace(namespace), selector)
}

// CreateSnapshot creates a VolumeSnapshot.
func (c *Client) CreateSnapshot(ctx context.Context, namespace string, object Object) error {
	return create(ctx, c.api.Resource(snapshots).Namespace(namespace), snapshotGroup+"/v1", "VolumeSnapshot", object)
}

// DeleteSnapshot deletes a VolumeSnapshot. It succeeds if there is none.
func (c *Client) DeleteSnapshot(ctx context.Context, namespace, name string) error {
	return absent(c.api.Resource(snapshots).Namespace(namespace).Delete(ctx, name, metav1.DeleteOptions{}))
}

// Cordon makes a node unschedulable, or schedulable again.
func (c *Client) Cordon(ctx context.Context, node string, unschedulable bool) error {
	n, err := c.Node(ctx, node)
	if err != nil || n.Spec.Unschedulable == unschedulable {
		return err
	}
	_, err = patch[struct{}](ctx, c.api.Resource(nodes), n.Metadata, map[string]any{"spec": map[string]any{"unschedulable": unschedulable}})
	if apierrors.IsConflict(err) { // the kubelet writes the node's status
		return c.Cordon(ctx, node, unschedulable)
	}
	return err
}

// Evict evicts a pod by the Eviction API. apierrors.IsTooManyRequests is true for the error if a PodDisruptionBudget does not
// allow it now.
func (c *Client) Evict(ctx context.Context, pod Meta) error {
	object := &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "policy/v1", "kind": "Eviction",
		"metadata":      map[string]any{"name": pod.Name, "namespace": pod.Namespace},
		"deleteOptions": map[string]any{"preconditions": map[string]any{"uid": pod.UID}},
	}}
	_, err := c.api.Resource(pods).Namespace(pod.Namespace).Create(ctx, object, metav1.CreateOptions{}, "eviction")
	return absent(err)
}

// LastWarning returns the message of the newest event of an object that is a warning, or "".
func (c *Client) LastWarning(ctx context.Context, of Meta) (string, error) {
	selector := fields.Set{"involvedObject.uid": of.UID, "type": "Warning"}.AsSelector().String()
	found, err := c.api.Resource(events).Namespace(of.Namespace).List(ctx, metav1.ListOptions{FieldSelector: selector})
	if err != nil {
		return "", err
	}
	var message string
	var newest time.Time
	for _, item := range found.Items {
		e, err := view[event](item.Object)
		if err != nil {
			return "", err
		}
		if at, err := time.Parse(time.RFC3339, e.LastTimestamp); err == nil && !at.Before(newest) {
			newest, message = at, e.Message
		}
	}
	return message, nil
}

// warn creates an event of the type Warning of a driver. Replicas create it once in a reportInterval, because its name consists of
// prefix and a hash of its content and that time. An error is only logged, because a namespace that is being deleted accepts no
// events.
func (c *Client) warn(ctx context.Context, driver, prefix, kind string, of Meta, reason, message string) {
	sum := sha256.Sum256([]byte(of.UID + reason + message + time.Now().Truncate(reportInterval).UTC().String()))
	namespace, now := cmp.Or(of.Namespace, metav1.NamespaceDefault), metav1.Now().UTC().Format(time.RFC3339)
	err := create(ctx, c.api.Resource(events).Namespace(namespace), "v1", "Event", map[string]any{
		"metadata":       map[string]any{"name": fmt.Sprintf("%s-%x", prefix, sum[:10]), "namespace": namespace},
		"involvedObject": map[string]any{"apiVersion": "v1", "kind": kind, "namespace": of.Namespace, "name": of.Name, "uid": of.UID},
		"type":           "Warning", "reason": reason, "message": message,
		"source": map[string]any{"component": driver}, "firstTimestamp": now, "lastTimestamp": now, "count": int64(1),
	})
	if err != nil && !apierrors.IsAlreadyExists(err) {
		klog.FromContext(ctx).Error(err, "Creating an event failed", "kind", kind, "namespace", of.Namespace, "name", of.Name, "reason", reason)
	}
}

// event is core/v1 Event.
type event struct {
	Message       string `json:"message"`
	LastTimestamp string `json:"lastTimestamp"`
}

// Right is a verb for a resource, in a namespace or, if Namespace is empty, in the cluster.
type Right struct{ Verb, Group, Resource, Subresource, Namespace string }

// String returns the right as in `kubectl auth can-i`.
func (r Right) String() string {
	text := r.Verb + " " + r.Resource
	if r.Subresource != "" {
		text += "/" + r.Subresource
	}
	if r.Namespace != "" {
		text += " in the namespace " + r.Namespace
	}
	return text
}

// May reports whether the user has a right. Every user may ask.
func (c *Client) May(ctx context.Context, r Right) (bool, error) {
	object := &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview",
		"spec": map[string]any{"resourceAttributes": map[string]any{
			"verb": r.Verb, "group": r.Group, "resource": r.Resource, "subresource": r.Subresource, "namespace": r.Namespace,
		}},
	}}
	answer, err := c.api.Resource(accessReviews).Create(ctx, object, metav1.CreateOptions{})
	if err != nil {
		return false, err
	}
	allowed, _, err := unstructured.NestedBool(answer.Object, "status", "allowed")
	return allowed, err
}
