package kube

import (
	"crypto/sha256"
	"fmt"
	"path/filepath"
	"strings"

	"github.com/trivet-csi/trivet/mount"
	"github.com/trivet-csi/trivet/volume"
)

// Kubelet is the kubelet's directory, as it is mounted into the driver's pod.
type Kubelet struct {
	Dir string
	// PodUID is that of the pod this process runs in.
	PodUID string
}

// ownPod is the directory that the kubelet made for this very pod: the proof that
// Dir is the directory of the kubelet that runs it.
func (k Kubelet) ownPod() string { return filepath.Join(k.Dir, "pods", k.PodUID) }

// StagingPath is where the kubelet has a driver's volume staged, if it has a
// filesystem (makeDeviceMountPath in k8s.io/kubernetes/pkg/volume/csi, since 1.24).
func (k Kubelet) StagingPath(driver, volumeID string) string {
	return filepath.Join(k.Dir, "plugins/kubernetes.io/csi", driver, fmt.Sprintf("%x", sha256.Sum256([]byte(volumeID))), "globalmount")
}

// CheckDir refuses a directory that is not that of the kubelet which runs this
// pod (ErrPrecondition).
func (k Kubelet) CheckDir() error {
	if k.PodUID == "" {
		return volume.Errorf(volume.ErrPrecondition, "kubernetes: the environment has no POD_UID: give it to the container by the downward API (metadata.uid), or remove the section where no kubelet runs the driver")
	}
	at, err := mount.Inspect(k.ownPod())
	if err != nil {
		return err
	}
	if !at.IsDir() {
		return volume.Errorf(volume.ErrPrecondition, "kubernetes.kubeletDir %q is not the directory of the kubelet that runs this pod, which has pods/%s: give the kubelet's --root-dir, and mount it at the same path into the container", k.Dir, k.PodUID)
	}
	return nil
}

// CheckPropagation refuses a directory where what is mounted by this process does
// not reach the node (ErrPrecondition).
func (k Kubelet) CheckPropagation() error {
	if err := k.checkShared(k.ownPod()); err != nil {
		return err
	}
	// Volumes are staged there, and raw ones published.
	plugins := filepath.Join(k.Dir, "plugins")
	if at, err := mount.Inspect(plugins); err != nil || !at.Exists {
		return err
	}
	return k.checkShared(plugins)
}

func (k Kubelet) checkShared(path string) error {
	at, err := mount.At(path)
	if err != nil {
		return fmt.Errorf("kubernetes.kubeletDir %q: %w", k.Dir, err)
	}
	if !shared(at) {
		return volume.Errorf(volume.ErrPrecondition, "kubernetes.kubeletDir %q: the mount at %s is not shared, so volumes mounted here would never reach the node and its pods: set mountPropagation: Bidirectional where the driver's container mounts it", k.Dir, at.Mountpoint)
	}
	return nil
}

// shared tells whether a mount belongs to a peer group (mount_namespaces(7)).
func shared(e *mount.Entry) bool {
	for field := range strings.FieldsSeq(e.Optional) {
		if strings.HasPrefix(field, "shared:") {
			return true
		}
	}
	return false
}
