package localvolume

import (
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/selection"

	"github.com/trivet-csi/trivet/volumemanager/plugin"
)

// checkAffinity refuses a volume that is not for this machine. Of a machine its name alone
// is known, which Kubernetes has as the label kubernetes.io/hostname.
func checkAffinity(pv *corev1.PersistentVolume, node string) error {
	affinity := pv.Spec.NodeAffinity
	if affinity == nil || affinity.Required == nil {
		return nil
	}
	for _, term := range affinity.Required.NodeSelectorTerms {
		if matches(term, node) {
			return nil
		}
	}
	return plugin.Invalidf("nodeAffinity: the volume is not for this machine, whose %s is %q; no other label of it is known: correct it, or start the manager with the name that is meant", corev1.LabelHostname, node)
}

// matches tells whether a machine meets all of a term; an empty one is met by none.
func matches(term corev1.NodeSelectorTerm, node string) bool {
	if len(term.MatchExpressions)+len(term.MatchFields) == 0 {
		return false
	}
	return all(term.MatchExpressions, labels.Set{corev1.LabelHostname: node}) && all(term.MatchFields, labels.Set{"metadata.name": node})
}

func all(expressions []corev1.NodeSelectorRequirement, have labels.Set) bool {
	for _, e := range expressions {
		r, err := labels.NewRequirement(e.Key, operators[e.Operator], e.Values)
		if err != nil || !r.Matches(have) {
			return false
		}
	}
	return true
}

var operators = map[corev1.NodeSelectorOperator]selection.Operator{
	corev1.NodeSelectorOpIn:           selection.In,
	corev1.NodeSelectorOpNotIn:        selection.NotIn,
	corev1.NodeSelectorOpExists:       selection.Exists,
	corev1.NodeSelectorOpDoesNotExist: selection.DoesNotExist,
	corev1.NodeSelectorOpGt:           selection.GreaterThan,
	corev1.NodeSelectorOpLt:           selection.LessThan,
}
