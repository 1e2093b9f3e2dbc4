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
	Annotations     map[string]string `json:"annotations"`
	OwnerReferences []Owner           `json:"ownerReferences"`
	Finalizers      []string          `json:"finalizers"`
	// CreationTimestamp is in the format of RFC 3339, in UTC.
	CreationTimestamp string `json:"creationTimestamp"`
	// DeletionTimestamp is not empty if the object is being deleted.
	DeletionTimestamp string `json:"deletionTimestamp,omitempty"`
}

// Owner is meta/v1 OwnerReference.
type Owner struct {
	Kind       string `json:"kind"`
	Name       string `json:"name"`
	Controller bool   `json:"controller"`
}

// Controller returns the owner that manages the object, and whether there is one.
func (m Meta) Controller() (Owner, bool) {
	for _, o := range m.OwnerReferences {
		if o.Controller {
			return o, true
		}
	}
	return Owner{}, false
}

// Node is core/v1 Node.
type Node struct {
	Metadata Meta `json:"metadata"`
	Spec     struct {
		// Each taint is a map, so that unknown fields are written back.
		Taints []map[string]any `json:"taints"`
		// Unschedulable is true if the node is cordoned.
		Unschedulable bool `json:"unschedulable"`
	} `json:"spec"`
	Status struct {
		Conditions []Condition `json:"conditions"`
	} `json:"status"`
}

// Condition is a condition of a Node or a Pod.
type Condition struct {
	Type   string `json:"type"`
	Status string `json:"status"`
}

// Ready reports whether the node has the condition Ready.
func (n Node) Ready() bool { return ready(n.Status.Conditions) }

// ready reports whether the condition Ready is one of conditions, with the status True.
func ready(conditions []Condition) bool {
	return slices.Contains(conditions, Condition{Type: "Ready", Status: "True"})
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
		Phase             string      `json:"phase"`
		StartTime         string      `json:"startTime"`
		Conditions        []Condition `json:"conditions"`
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
func (p Pod) Ready() bool { return ready(p.Status.Conditions) }

// Completed reports whether the containers of the pod have ended and will not run again.
func (p Pod) Completed() bool { return p.Status.Phase == "Succeeded" || p.Status.Phase == "Failed" }

// Claims returns the names of the claims that the pod uses.
func (p Pod) Claims() (names []string) {
	for _, v := range p.Spec.Volumes {
		if claim := v.ClaimName(p.Metadata.Name); claim != "" {
			names = append(names, claim)
		}
	}
	return names
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
			Driver           string            `json:"driver"`
			VolumeHandle     string            `json:"volumeHandle"`
			VolumeAttributes map[string]string `json:"volumeAttributes"`
		} `json:"csi"`
		ClaimRef struct {
			Namespace string `json:"namespace"`
			Name      string `json:"name"`
			UID       string `json:"uid"`
		} `json:"claimRef"`
		StorageClassName string `json:"storageClassName"`
		ReclaimPolicy    string `json:"persistentVolumeReclaimPolicy"`
		Capacity         struct {
			Storage string `json:"storage"`
		} `json:"capacity"`
		NodeAffinity struct {
			Required struct {
				NodeSelectorTerms []NodeSelectorTerm `json:"nodeSelectorTerms"`
			} `json:"required"`
		} `json:"nodeAffinity"`
	} `json:"spec"`
	Status struct {
		Phase string `json:"phase"`
	} `json:"status"`
}

// NodeSelectorTerm is core/v1 NodeSelectorTerm.
type NodeSelectorTerm struct {
	MatchExpressions []struct {
		Key      string   `json:"key"`
		Operator string   `json:"operator"`
		Values   []string `json:"values"`
	} `json:"matchExpressions"`
}

// OnlyNode returns the node that is the only one from which the volume can be reached, by the values of a topology key.
// It returns "" if there are several.
func (v PersistentVolume) OnlyNode(topologyKey string) string {
	terms := v.Spec.NodeAffinity.Required.NodeSelectorTerms
	if len(terms) != 1 {
		return ""
	}
	for _, e := range terms[0].MatchExpressions {
		if e.Key == topologyKey && e.Operator == "In" && len(e.Values) == 1 {
			return e.Values[0]
		}
	}
	return ""
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
	ReclaimPolicy     string            `json:"reclaimPolicy"`
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

// ConfigMap is core/v1 ConfigMap.
type ConfigMap struct {
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
