package plugins_test

import (
	"errors"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/trivet-csi/trivet/volumemanager/plugins"
)

// TestAffinity: CheckAffinity matches the nodeAffinity with the node's labels and name.
func TestAffinity(t *testing.T) {
	term := func(key string, operator corev1.NodeSelectorOperator, values ...string) corev1.NodeSelectorTerm {
		return corev1.NodeSelectorTerm{MatchExpressions: []corev1.NodeSelectorRequirement{{Key: key, Operator: operator, Values: values}}}
	}
	const hostname, node = corev1.LabelHostname, "node-1"
	for name, tc := range map[string]struct {
		terms   []corev1.NodeSelectorTerm
		matches bool
	}{
		"In with this node":           {[]corev1.NodeSelectorTerm{term(hostname, "In", "other", node)}, true},
		"In without this node":        {[]corev1.NodeSelectorTerm{term(hostname, "In", "other")}, false},
		"NotIn with this node":        {[]corev1.NodeSelectorTerm{term(hostname, "NotIn", node)}, false},
		"Exists":                      {[]corev1.NodeSelectorTerm{term(hostname, "Exists")}, true},
		"one of two terms":            {[]corev1.NodeSelectorTerm{term(hostname, "In", "other"), term(hostname, "In", node)}, true},
		"In with a label not present": {[]corev1.NodeSelectorTerm{term("topology.kubernetes.io/zone", "In", "a")}, false},
		"DoesNotExist":                {[]corev1.NodeSelectorTerm{term("topology.kubernetes.io/zone", "DoesNotExist")}, true},
		"empty term":                  {[]corev1.NodeSelectorTerm{{}}, false},
		"field metadata.name": {[]corev1.NodeSelectorTerm{{MatchFields: []corev1.NodeSelectorRequirement{
			{Key: "metadata.name", Operator: "In", Values: []string{node}},
		}}}, true},
	} {
		pv := &corev1.PersistentVolume{}
		pv.Spec.NodeAffinity = &corev1.VolumeNodeAffinity{Required: &corev1.NodeSelector{NodeSelectorTerms: tc.terms}}
		var invalid *plugins.InvalidError
		if err := plugins.CheckAffinity(pv, plugins.Node(node)); (err == nil) != tc.matches || err != nil && !errors.As(err, &invalid) {
			t.Errorf("%s: got match %t with error %v, want match %t", name, err == nil, err, tc.matches)
		}
	}
}
