package chart

import (
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
)

// clusterWrites are all resources of the cluster that anything in the pod may
// change, with all features on. A new line here is a decision.
var clusterWrites = map[string][]string{
	"nodes":                         {"patch"}, // the startup taint
	"persistentvolumes":             {"create", "patch", "delete"},
	"persistentvolumeclaims":        {"update"},
	"persistentvolumeclaims/status": {"patch"},
	"volumeattachments":             {"patch"},
	"volumeattachments/status":      {"patch"},
	"events":                        {"create", "patch"},
	"volumesnapshots":               {"update"},
	"volumesnapshotcontents":        {"update", "patch"},
	"volumesnapshotcontents/status": {"update", "patch"},
}

func TestRights(t *testing.T) {
	all := template(t, everything, theirAPIs)
	cluster := one[*rbacv1.ClusterRole](t, all).Rules
	for _, rule := range append(slices.Clone(cluster), one[*rbacv1.Role](t, all).Rules...) {
		for _, words := range [][]string{rule.APIGroups, rule.Resources, rule.Verbs} {
			if slices.Contains(words, "*") {
				t.Errorf("a wildcard in %v", rule)
			}
		}
		if slices.Contains(rule.Resources, "secrets") {
			t.Errorf("a right to secrets in %v", rule)
		}
	}
	for _, rule := range cluster {
		for _, verb := range rule.Verbs {
			for _, resource := range rule.Resources {
				if !slices.Contains([]string{"get", "list", "watch"}, verb) && !slices.Contains(clusterWrites[resource], verb) {
					t.Errorf("%s %s: no one is known to need it", verb, resource)
				}
			}
		}
	}
	if slices.ContainsFunc(one[*rbacv1.ClusterRole](t, template(t, "config: {startupTaint: false}")).Rules, func(r rbacv1.PolicyRule) bool {
		return slices.Contains(r.Resources, "nodes") && slices.Contains(r.Verbs, "patch")
	}) {
		t.Error("without startupTaint nobody has to patch nodes")
	}
}

// TestContainers: what every container of the pod may and says.
func TestContainers(t *testing.T) {
	set := one[*appsv1.DaemonSet](t, template(t, everything, theirAPIs))
	if auto := set.Spec.Template.Spec.AutomountServiceAccountToken; auto == nil || *auto {
		t.Error("the token is mounted into every container")
	}
	for _, c := range set.Spec.Template.Spec.Containers {
		s := c.SecurityContext
		if s == nil || s.ReadOnlyRootFilesystem == nil || !*s.ReadOnlyRootFilesystem {
			t.Errorf("%s: its root filesystem can be written", c.Name)
		}
		if c.TerminationMessagePolicy != corev1.TerminationMessageFallbackToLogsOnError {
			t.Errorf("%s: its last words are lost", c.Name)
		}
		if c.Resources.Requests.Cpu().IsZero() || c.Resources.Requests.Memory().IsZero() || c.Resources.Limits.Memory().IsZero() {
			t.Errorf("%s: no requests, or no bound for memory", c.Name)
		}
		hasToken := slices.ContainsFunc(c.VolumeMounts, func(m corev1.VolumeMount) bool { return m.Name == "api-token" })
		if want := !slices.Contains([]string{"node-driver-registrar", "liveness-probe"}, c.Name); hasToken != want {
			t.Errorf("%s: token mounted: %t", c.Name, hasToken)
		}
		if c.Name == "trivet" {
			continue
		}
		if *s.Privileged || *s.AllowPrivilegeEscalation || !slices.Equal(s.Capabilities.Drop, []corev1.Capability{"ALL"}) || s.SeccompProfile.Type != corev1.SeccompProfileTypeRuntimeDefault {
			t.Errorf("%s: may more than a sidecar needs: %v", c.Name, s)
		}
		for _, m := range c.VolumeMounts {
			if !slices.Contains([]string{"plugin-dir", "registration-dir", "api-token"}, m.Name) {
				t.Errorf("%s: has the node's %s", c.Name, m.MountPath)
			}
		}
	}
}

// TestDriverName: the name is in every place that has to agree.
func TestDriverName(t *testing.T) {
	set := one[*appsv1.DaemonSet](t, template(t, everything, theirAPIs))
	const socket = "/var/lib/k0s/kubelet/plugins/storage.example.com"
	if args := container(set, "trivet").Args; !slices.Contains(args, "--driver-name=storage.example.com") {
		t.Errorf("driver: %q", args)
	}
	if args := container(set, "node-driver-registrar").Args; !slices.Contains(args, "--kubelet-registration-path="+socket+"/csi.sock") {
		t.Errorf("registrar: %q", args)
	}
	for _, v := range set.Spec.Template.Spec.Volumes {
		if v.Name == "plugin-dir" && v.HostPath.Path != socket {
			t.Errorf("plugin directory: %s", v.HostPath.Path)
		}
	}
	stdout, _, _ := tryTemplate(t, everything, theirAPIs)
	for _, line := range strings.Split(stdout, "\n") {
		if strings.Contains(line, "csi.trivet.dev") && !strings.Contains(line, "csi.trivet.dev/namespace") {
			t.Errorf("the default name is still in: %s", line)
		}
	}
}
