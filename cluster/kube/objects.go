package kube

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// The types below contain only the fields in use of each API object.

// Meta is meta/v1 ObjectMeta.
type Meta struct {
	Namespace       string            `json:"namespace"`
	Name            string            `json:"name"`
	UID             string            `json:"uid"`
	ResourceVersion string            `json:"resourceVersion"`
	Labels          map[string]string `json:"labels"`
	// DeletionTimestamp is not empty if the object is being deleted.
	DeletionTimestamp string `json:"deletionTimestamp,omitempty"`
}

// Node is core/v1 Node.
type Node struct {
	Metadata Meta `json:"metadata"`
	Spec     struct {
		// Each taint is a map, so that unknown fields are written back.
		Taints []map[string]any `json:"taints"`
	} `json:"spec"`
}

// HasTaint reports whether the node has a taint with a key.
func (n Node) HasTaint(key string) bool {
	return slices.ContainsFunc(n.Spec.Taints, func(t map[string]any) bool { return t["key"] == key })
}

// Pod is core/v1 Pod.
type Pod struct {
	Metadata Meta `json:"metadata"`
	Spec     struct {
		NodeName   string      `json:"nodeName"`
		Containers []Container `json:"containers"`
		// A sidecar may be an init container with restartPolicy Always.
		InitContainers []Container `json:"initContainers"`
		Volumes        []PodVolume `json:"volumes"`
	} `json:"spec"`
	Status struct {
		Phase      string `json:"phase"`
		Conditions []struct {
			Type   string `json:"type"`
			Status string `json:"status"`
		} `json:"conditions"`
		ContainerStatuses []struct {
			Name  string `json:"name"`
			State struct {
				Running    *struct{}       `json:"running"`
				Waiting    *containerState `json:"waiting"`
				Terminated *containerState `json:"terminated"`
			} `json:"state"`
		} `json:"containerStatuses"`
	} `json:"status"`
}

// containerState says why a container is not running.
type containerState struct {
	Reason   string `json:"reason"`
	Message  string `json:"message"`
	ExitCode int    `json:"exitCode"`
}

// NotRunning returns why a container of the pod is not running, or "" if it is.
func (p Pod) NotRunning(container string) string {
	for _, c := range p.Status.ContainerStatuses {
		switch {
		case c.Name != container:
		case c.State.Running != nil:
			return ""
		case c.State.Terminated != nil:
			return fmt.Sprintf("%s, exit code %d", cmp.Or(c.State.Terminated.Reason, "terminated"), c.State.Terminated.ExitCode)
		case c.State.Waiting != nil:
			return strings.TrimSuffix(cmp.Or(c.State.Waiting.Reason, "waiting")+": "+c.State.Waiting.Message, ": ")
		}
	}
	return "the pod is " + cmp.Or(p.Status.Phase, "Unknown")
}

// Ready reports whether the pod has the condition Ready.
func (p Pod) Ready() bool {
	for _, c := range p.Status.Conditions {
		if c.Type == "Ready" {
			return c.Status == "True"
		}
	}
	return false
}

// PodVolume is core/v1 Volume.
type PodVolume struct {
	Name                  string `json:"name"`
	PersistentVolumeClaim struct {
		ClaimName string `json:"claimName"`
	} `json:"persistentVolumeClaim"`
	// Ephemeral is not nil for a generic ephemeral volume.
	Ephemeral *struct{} `json:"ephemeral"`
}

// ClaimName returns the name of the claim that a volume of a pod uses, or "". The claim of a generic ephemeral
// volume has the names of the pod and of the volume.
func (v PodVolume) ClaimName(pod string) string {
	if v.Ephemeral != nil {
		return pod + "-" + v.Name
	}
	return v.PersistentVolumeClaim.ClaimName
}

// Container is core/v1 Container.
type Container struct {
	Name  string `json:"name"`
	Image string `json:"image"`
	Ports []struct {
		Name          string `json:"name"`
		ContainerPort int    `json:"containerPort"`
	} `json:"ports"`
}

// PersistentVolume is core/v1 PersistentVolume.
type PersistentVolume struct {
	Metadata Meta `json:"metadata"`
	Spec     struct {
		CSI struct {
			Driver       string `json:"driver"`
			VolumeHandle string `json:"volumeHandle"`
		} `json:"csi"`
		ClaimRef struct {
			Namespace string `json:"namespace"`
			Name      string `json:"name"`
		} `json:"claimRef"`
		StorageClassName string `json:"storageClassName"`
	} `json:"spec"`
	Status struct {
		Phase string `json:"phase"`
	} `json:"status"`
}

// SnapshotContent is snapshot.storage.k8s.io/v1 VolumeSnapshotContent.
type SnapshotContent struct {
	Metadata Meta `json:"metadata"`
	Spec     struct {
		Driver string `json:"driver"`
		Source struct {
			SnapshotHandle string `json:"snapshotHandle"`
		} `json:"source"`
		VolumeSnapshotRef struct {
			Namespace string `json:"namespace"`
			Name      string `json:"name"`
		} `json:"volumeSnapshotRef"`
	} `json:"spec"`
	Status struct {
		SnapshotHandle string `json:"snapshotHandle"`
	} `json:"status"`
}

// Handle returns the ID of the snapshot, or "" if it is not created yet.
func (s SnapshotContent) Handle() string {
	return cmp.Or(s.Status.SnapshotHandle, s.Spec.Source.SnapshotHandle)
}

// CSINode is storage/v1 CSINode.
type CSINode struct {
	Spec struct {
		Drivers []CSINodeDriver `json:"drivers"`
	} `json:"spec"`
}

// CSINodeDriver is one registered driver.
type CSINodeDriver struct {
	Name         string   `json:"name"`
	NodeID       string   `json:"nodeID"`
	TopologyKeys []string `json:"topologyKeys"`
}

// Driver returns the registered driver with a name, and whether the kubelet has registered it.
func (n CSINode) Driver(name string) (CSINodeDriver, bool) {
	for _, d := range n.Spec.Drivers {
		if d.Name == name {
			return d, true
		}
	}
	return CSINodeDriver{}, false
}

// CSIDriver is storage/v1 CSIDriver.
type CSIDriver struct {
	Metadata Meta `json:"metadata"`
	Spec     struct {
		AttachRequired       bool     `json:"attachRequired"`
		FSGroupPolicy        string   `json:"fsGroupPolicy"`
		StorageCapacity      bool     `json:"storageCapacity"`
		SELinuxMount         bool     `json:"seLinuxMount"`
		PodInfoOnMount       bool     `json:"podInfoOnMount"`
		VolumeLifecycleModes []string `json:"volumeLifecycleModes"`
	} `json:"spec"`
}

// StorageClass is storage/v1 StorageClass.
type StorageClass struct {
	Metadata          Meta              `json:"metadata"`
	Provisioner       string            `json:"provisioner"`
	Parameters        map[string]string `json:"parameters"`
	MountOptions      []string          `json:"mountOptions"`
	VolumeBindingMode string            `json:"volumeBindingMode"`
}

// endpointSlice is discovery/v1 EndpointSlice.
type endpointSlice struct {
	Endpoints []endpoint `json:"endpoints"`
	Ports     []struct {
		Name string `json:"name"`
		Port int    `json:"port"`
	} `json:"ports"`
}

// endpoint is one pod of a Service.
type endpoint struct {
	Addresses  []string `json:"addresses"`
	NodeName   string   `json:"nodeName"`
	Conditions struct {
		Ready       bool `json:"ready"`
		Terminating bool `json:"terminating"`
	} `json:"conditions"`
}

// secret is core/v1 Secret.
type secret struct {
	Metadata Meta              `json:"metadata"`
	Data     map[string][]byte `json:"data"`
}

// configMap is core/v1 ConfigMap.
type configMap struct {
	Metadata Meta              `json:"metadata"`
	Data     map[string]string `json:"data"`
}

// signingRequest is certificates/v1 CertificateSigningRequest.
type signingRequest struct {
	Metadata Meta `json:"metadata"`
	Spec     struct {
		Request  []byte              `json:"request"`
		Usages   []string            `json:"usages"`
		Username string              `json:"username"`
		Extra    map[string][]string `json:"extra"`
	} `json:"spec"`
	Status struct {
		// Each condition is a map, so that unknown fields are written back.
		Conditions  []map[string]any `json:"conditions"`
		Certificate []byte           `json:"certificate"`
	} `json:"status"`
}

// condition returns the message of the condition of a type, and whether the request has that condition.
func (r signingRequest) condition(conditionType string) (message string, found bool) {
	for _, c := range r.Status.Conditions {
		if c["type"] == conditionType {
			message, _ = c["message"].(string)
			return message, true
		}
	}
	return "", false
}
