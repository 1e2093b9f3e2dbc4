package kube

import (
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/volume"
)

// Kubelet is the kubelet's directory as mounted into the driver's pod.
type Kubelet struct {
	Dir string
	// PodUID is the UID of this process's pod.
	PodUID string
}

// ownPodDir is the directory that the kubelet creates for this pod. If it exists, Dir belongs to the
// kubelet that runs this pod.
func (k Kubelet) ownPodDir() string { return filepath.Join(k.Dir, "pods", k.PodUID) }

// StagingPath returns the staging path of a filesystem volume, as the kubelet computes it since
// Kubernetes 1.24 (makeDeviceMountPath in k8s.io/kubernetes/pkg/volume/csi).
func (k Kubelet) StagingPath(driver, volumeID string) string {
	return filepath.Join(k.Dir, "plugins/kubernetes.io/csi", driver, fmt.Sprintf("%x", sha256.Sum256([]byte(volumeID))), "globalmount")
}

// CheckDir returns ErrPrecondition if Dir is not the directory of the kubelet that runs this pod, or if
// PodUID is empty.
func (k Kubelet) CheckDir() error {
	if k.PodUID == "" {
		return volume.Errorf(volume.ErrPrecondition, "kubernetes: the environment variable POD_UID is not set: set it with the downward API (metadata.uid), or remove the section kubernetes if no kubelet runs the driver")
	}
	at, err := mount.Inspect(k.ownPodDir())
	if err != nil {
		return err
	}
	if !at.IsDir() {
		return volume.Errorf(volume.ErrPrecondition, "kubernetes.kubeletDir %q is not the directory of the kubelet that runs this pod: it does not contain pods/%s: set it to the kubelet's --root-dir, and mount that directory at the same path in the container", k.Dir, k.PodUID)
	}
	return nil
}

// CheckPropagation returns ErrPrecondition if mounts made by this process below Dir do not
// propagate to the node (mount_namespaces(7)).
func (k Kubelet) CheckPropagation() error {
	if err := k.checkShared(k.ownPodDir()); err != nil {
		return err
	}
	// The kubelet stages volumes and publishes block volumes below plugins, which may be a separate mount.
	plugins := filepath.Join(k.Dir, "plugins")
	if at, err := mount.Inspect(plugins); err != nil || !at.Exists {
		return err
	}
	return k.checkShared(plugins)
}

// checkShared returns ErrPrecondition if the mount that contains a path does not propagate to the node.
func (k Kubelet) checkShared(path string) error {
	at, err := mount.At(path)
	if err != nil {
		return fmt.Errorf("kubernetes.kubeletDir %q: %w", k.Dir, err)
	}
	if !shared(at) {
		return volume.Errorf(volume.ErrPrecondition, "kubernetes.kubeletDir %q: the mount at %s is not shared, so volumes mounted here do not propagate to the node: set mountPropagation: Bidirectional on that volumeMount of the driver's container", k.Dir, at.Mountpoint)
	}
	return nil
}

// shared reports whether a mount belongs to a peer group (mount_namespaces(7)).
func shared(e *mount.Entry) bool {
	for field := range strings.FieldsSeq(e.Optional) {
		if strings.HasPrefix(field, "shared:") {
			return true
		}
	}
	return false
}

// StagedVolume is a volume that the kubelet has staged.
type StagedVolume struct {
	// Handle is the ID of the volume.
	Handle string
	// Path is the staging path of a filesystem volume. It is empty for a raw device.
	Path string
}

// stagedRecord contains the fields in use of the kubelet's record of a staged volume (saveVolumeData in
// k8s.io/kubernetes/pkg/volume/csi).
type stagedRecord struct {
	Driver string `json:"driverName"`
	Handle string `json:"volumeHandle"`
}

// Staged returns the volumes of a driver that the kubelet has staged. The kubelet writes the record of a volume before it
// stages the volume, and removes it afterwards. An unreadable record is ignored, because the kubelet may be writing it.
func (k Kubelet) Staged(driver string) []StagedVolume {
	plugins := filepath.Join(k.Dir, "plugins/kubernetes.io/csi")
	var staged []StagedVolume
	for _, name := range names(filepath.Join(plugins, driver)) {
		dir := filepath.Join(plugins, driver, name)
		if r := readStaged(dir); r.Driver == driver {
			staged = append(staged, StagedVolume{r.Handle, filepath.Join(dir, "globalmount")})
		}
	}
	for _, name := range names(filepath.Join(plugins, "volumeDevices")) {
		if r := readStaged(filepath.Join(plugins, "volumeDevices", name, "data")); r.Driver == driver {
			staged = append(staged, StagedVolume{Handle: r.Handle})
		}
	}
	return staged
}

// names returns the names in a directory; none if it does not exist.
func names(dir string) (all []string) {
	entries, _ := os.ReadDir(dir)
	for _, e := range entries {
		all = append(all, e.Name())
	}
	return all
}

func readStaged(dir string) (r stagedRecord) {
	if b, err := os.ReadFile(filepath.Join(dir, "vol_data.json")); err == nil {
		_ = json.Unmarshal(b, &r) // r has no driver then
	}
	return r
}
