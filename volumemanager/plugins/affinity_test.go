package plugins_test

import (
	"errors"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/trivet-csi/trivet/volumemanager/plugins"
)

func TestAffinity(t *testing.T) {
	term := func(key string, operator corev1.NodeSelectorOperator, values ...string) corev1.NodeSelectorTerm {
		return corev1.NodeSelectorTerm{MatchExpressions: []corev1.NodeSelectorRequirement{{Key: key, Operator: operator, Values: values}}}
	}
	const hostname, node = corev1.LabelHostname, "node-1"
	for name, tc := range map[string]struct {
		terms []corev1.NodeSelectorTerm
		here  bool
	}{
		"here":            {[]corev1.NodeSelectorTerm{term(hostname, "In", "other", node)}, true},
		"elsewhere":       {[]corev1.NodeSelectorTerm{term(hostname, "In", "other")}, false},
		"not here":        {[]corev1.NodeSelectorTerm{term(hostname, "NotIn", node)}, false},
		"anywhere":        {[]corev1.NodeSelectorTerm{term(hostname, "Exists")}, true},
		"one of two":      {[]corev1.NodeSelectorTerm{term(hostname, "In", "other"), term(hostname, "In", node)}, true},
		"an unknown zone": {[]corev1.NodeSelectorTerm{term("topology.kubernetes.io/zone", "In", "a")}, false},
		"no zone":         {[]corev1.NodeSelectorTerm{term("topology.kubernetes.io/zone", "DoesNotExist")}, true},
		"nothing":         {[]corev1.NodeSelectorTerm{{}}, false},
		"name": {[]corev1.NodeSelectorTerm{{MatchFields: []corev1.NodeSelectorRequirement{
			{Key: "metadata.name", Operator: "In", Values: []string{node}},
		}}}, true},
	} {
		pv := &corev1.PersistentVolume{}
		pv.Spec.NodeAffinity = &corev1.VolumeNodeAffinity{Required: &corev1.NodeSelector{NodeSelectorTerms: tc.terms}}
		var invalid *plugins.InvalidError
		if err := plugins.CheckAffinity(pv, plugins.Node(node)); (err == nil) != tc.here || err != nil && !errors.As(err, &invalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
