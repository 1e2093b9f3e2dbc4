package chart

import (
	"fmt"
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
		if c.Resources.Requests.Cpu().IsZero() || c.Resources.Requests.Memory().IsZero() {
			t.Errorf("%s: no requests", c.Name)
		}
		// A check of a large filesystem runs in the driver's, and takes what it needs.
		if bounded := !c.Resources.Limits.Memory().IsZero(); bounded != (c.Name != "trivet") {
			t.Errorf("%s: its memory is bounded: %t", c.Name, bounded)
		}
		// The default is in /dev, which is the node's where it is mounted.
		if hasDev := slices.ContainsFunc(c.VolumeMounts, func(m corev1.VolumeMount) bool { return m.MountPath == "/dev" }); hasDev && c.TerminationMessagePath != "/run/termination-log" {
			t.Errorf("%s: its last words go to %q of the node", c.Name, c.TerminationMessagePath)
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
	if !slices.Contains(container(set, "trivet").Env, corev1.EnvVar{Name: "CSI_DRIVER_NAME", Value: "storage.example.com"}) {
		t.Errorf("environment: %v", container(set, "trivet").Env)
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

// TestProbes: each goes to a port of the chart's; whether the driver has started no
// sidecar has a say in, and pools may be opened slowly.
func TestProbes(t *testing.T) {
	set := one[*appsv1.DaemonSet](t, template(t, "ports: {metrics: 2001, health: 2002, registrar: 2003}"))
	type probes struct{ startup, liveness, readiness string }
	port := func(c *corev1.Container, p *corev1.Probe) string {
		if p == nil {
			return ""
		}
		// The kubelet looks a name up among the container's own ports.
		for _, named := range c.Ports {
			if named.Name == p.HTTPGet.Port.StrVal {
				return fmt.Sprintf(":%d%s", named.ContainerPort, p.HTTPGet.Path)
			}
		}
		return "no port"
	}
	for name, want := range map[string]probes{
		"trivet":                {":2001/healthz", ":2002/healthz", ":2001/readyz"},
		"node-driver-registrar": {":2003/healthz", ":2003/healthz", ""},
	} {
		c := container(set, name)
		if got := (probes{port(c, c.StartupProbe), port(c, c.LivenessProbe), port(c, c.ReadinessProbe)}); got != want {
			t.Errorf("%s: %v, want %v", name, got, want)
		}
	}
	for name, arg := range map[string]string{"trivet": "--http-address=:2001", "liveness-probe": "--http-endpoint=:2002", "node-driver-registrar": "--http-endpoint=:2003"} {
		if !slices.Contains(container(set, name).Args, arg) {
			t.Errorf("%s: no %s in %q", name, arg, container(set, name).Args)
		}
	}
	// Probe says that the driver is not ready for up to 30 s after its start.
	if p := container(set, "trivet").LivenessProbe; p.PeriodSeconds*(p.FailureThreshold-1) < 60 {
		t.Errorf("the driver is killed after %d failures, one each %d s", p.FailureThreshold, p.PeriodSeconds)
	}
}

// TestSecondRelease: one of the same name in another namespace has objects of its own.
func TestSecondRelease(t *testing.T) {
	names := func(namespace string) []string {
		all := template(t, "", "--namespace", namespace)
		binding := one[*rbacv1.ClusterRoleBinding](t, all)
		role := one[*rbacv1.ClusterRole](t, all).Name
		if binding.RoleRef.Name != role || binding.Subjects[0].Namespace != namespace {
			t.Errorf("%s: the binding is of %v to %v, the role %s", namespace, binding.Subjects, binding.RoleRef, role)
		}
		return []string{role, binding.Name}
	}
	if first, second := names("a"), names("b"); first[0] == second[0] || first[1] == second[1] {
		t.Errorf("%q and %q", first, second)
	}
}
