package chart

import (
	"maps"
	"slices"
	"testing"

	rbacv1 "k8s.io/api/rbac/v1"
	storagev1 "k8s.io/api/storage/v1"
)

// onOpenShift enables the objects and fields for OpenShift.
const onOpenShift = "openshift: {enabled: true}\n"

// TestOpenShift checks that each pod requires SecurityContextConstraints that allow it, that its ServiceAccount and that of the
// jobs of protected claims may use the constraints for their pods and no others, and that unprivileged containers have the SELinux
// type of the privileged driver if they use its socket or mount.
func TestOpenShift(t *testing.T) {
	const protection = "protection: {enabled: true}\nsnapshots: {enabled: true}\n"
	for name, tc := range map[string]struct {
		values string
		want   map[string]string // the constraints, by pod
		jobs   string            // the constraints for the jobs of protected claims
		spcT   []string          // the pods whose containers have the SELinux type
	}{
		"cluster":           {onOpenShift, map[string]string{"trivet-node": "privileged", "trivet-controller": "nonroot-v2"}, "", []string{"trivet-node"}},
		"protection":        {onOpenShift + protection, map[string]string{"trivet-node": "privileged", "trivet-controller": "nonroot-v2"}, "nonroot-v2", []string{"trivet-node"}},
		"NFS":               {onOpenShift + nasOnly + protection, map[string]string{"trivet-node": "privileged", "trivet-controller": "privileged"}, "nonroot-v2", []string{"trivet-node", "trivet-controller"}},
		"one node":          {onOpenShift + oneNode, map[string]string{"trivet": "privileged"}, "", []string{"trivet"}},
		"without OpenShift": {protection, map[string]string{"trivet-node": "", "trivet-controller": ""}, "", nil},
	} {
		t.Run(name, func(t *testing.T) {
			all := template(t, tc.values, externalAPIs)
			for _, role := range ofType[*rbacv1.ClusterRole](all) {
				if slices.ContainsFunc(role.Rules, concernsConstraints) {
					t.Errorf("the ClusterRole %s has a rule for SecurityContextConstraints, want it only in a Role", role.Name)
				}
			}
			checkConstraints(t, all, "trivet-protection", tc.jobs)
			got := map[string]string{}
			for name, pod := range pods(all) {
				got[name] = pod.Annotations["openshift.io/required-scc"]
				checkConstraints(t, all, pod.Spec.ServiceAccountName, got[name])
				for _, c := range pod.Spec.Containers {
					s := c.SecurityContext
					has := s.SELinuxOptions != nil && s.SELinuxOptions.Type == "spc_t"
					if want := slices.Contains(tc.spcT, name) && !*s.Privileged; has != want {
						t.Errorf("%s, %s: got SELinux options %v, want the type spc_t: %t", name, c.Name, s.SELinuxOptions, want)
					}
				}
			}
			if !maps.Equal(got, tc.want) {
				t.Errorf("got constraints %v, want %v", got, tc.want)
			}
		})
	}
}

// concernsConstraints reports whether a rule is about SecurityContextConstraints.
func concernsConstraints(rule rbacv1.PolicyRule) bool {
	return slices.Contains(rule.APIGroups, "security.openshift.io")
}

// checkConstraints checks that a ServiceAccount may use only the SecurityContextConstraints with a name, or none if it is empty.
func checkConstraints(t *testing.T, all objects, account, want string) {
	t.Helper()
	verbs := writes(t, all, account)["securitycontextconstraints "+want]
	if used := slices.Equal(verbs, []string{"use"}); used != (want != "") {
		t.Errorf("%s: got the verbs %q for SecurityContextConstraints %q, want use", account, verbs, want)
	}
	for _, rule := range rules(t, all, account) {
		if concernsConstraints(rule) && !slices.Equal(rule.ResourceNames, []string{want}) {
			t.Errorf("%s: got rule %v, want only %q", account, rule, want)
		}
	}
}

// TestInlineVolumesOnOpenShift checks that the CSIDriver has the label without which OpenShift allows inline volumes only in
// privileged namespaces.
func TestInlineVolumesOnOpenShift(t *testing.T) {
	const label = "security.openshift.io/csi-ephemeral-volume-profile"
	for values, want := range map[string]string{
		onOpenShift + "ephemeral: {enabled: true, memory: 1Gi}\n": "restricted",
		onOpenShift: "",
		"ephemeral: {enabled: true, memory: 1Gi}\n": "",
	} {
		if got := one[*storagev1.CSIDriver](t, template(t, values)).Labels[label]; got != want {
			t.Errorf("%q: got label %s: %q, want %q", values, label, got, want)
		}
	}
}
