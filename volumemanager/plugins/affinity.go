package plugins

import (
	"runtime"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"
)

// Node returns the Node object of a node, with the labels that every kubelet sets.
func Node(name string) *corev1.Node {
	return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{
		corev1.LabelHostname: name, corev1.LabelOSStable: runtime.GOOS, corev1.LabelArchStable: runtime.GOARCH,
	}}}
}

// CheckAffinity returns an *InvalidError if a volume's nodeAffinity does not match a node.
func CheckAffinity(pv *corev1.PersistentVolume, node *corev1.Node) error {
	affinity := pv.Spec.NodeAffinity
	if affinity == nil || affinity.Required == nil {
		return nil
	}
	matches, err := nodeaffinity.NewLazyErrorNodeSelector(affinity.Required).Match(node)
	if err != nil {
		return Invalidf("nodeAffinity.required: %v: correct the selector", err)
	}
	if !matches {
		return Invalidf("nodeAffinity does not match this node, which has the labels %s (a CSI driver that registers adds its topology): correct nodeAffinity, or start the manager with another --node-name", labels.Set(node.Labels))
	}
	return nil
}
