package kube

import (
	"slices"
)

// These are views: of each object the fields in use, named as the API has them.

// Meta is what all objects have.
type Meta struct {
	Name   string            `json:"name"`
	Labels map[string]string `json:"labels"`
}

// Node is core/v1 Node.
type Node struct {
	Metadata Meta `json:"metadata"`
	Spec     struct {
		// Taints are kept whole, so that they can be written back with fields
		// that this program does not know.
		Taints []map[string]any `json:"taints"`
	} `json:"spec"`
}

// HasTaint tells whether the node has a taint of that key.
func (n Node) HasTaint(key string) bool {
	return slices.ContainsFunc(n.Spec.Taints, func(t map[string]any) bool { return t["key"] == key })
}

// Pod is core/v1 Pod.
type Pod struct {
	Metadata Meta `json:"metadata"`
	Spec     struct {
		Containers []Container `json:"containers"`
		// Sidecars may be init containers that go on running.
		InitContainers []Container `json:"initContainers"`
	} `json:"spec"`
}

// Container is core/v1 Container.
type Container struct {
	Name  string `json:"name"`
	Image string `json:"image"`
}

// CSINode is storage/v1 CSINode.
type CSINode struct {
	Spec struct {
		Drivers []CSINodeDriver `json:"drivers"`
	} `json:"spec"`
}

// CSINodeDriver is one driver that the kubelet has registered.
type CSINodeDriver struct {
	Name         string   `json:"name"`
	NodeID       string   `json:"nodeID"`
	TopologyKeys []string `json:"topologyKeys"`
}

// Driver finds a registered driver by its name.
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
		AttachRequired  bool   `json:"attachRequired"`
		FSGroupPolicy   string `json:"fsGroupPolicy"`
		StorageCapacity bool   `json:"storageCapacity"`
		SELinuxMount    bool   `json:"seLinuxMount"`
	} `json:"spec"`
}

// StorageClass is storage/v1 StorageClass.
type StorageClass struct {
	Metadata          Meta              `json:"metadata"`
	Provisioner       string            `json:"provisioner"`
	Parameters        map[string]string `json:"parameters"`
	VolumeBindingMode string            `json:"volumeBindingMode"`
}
