package chart

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
)

// The permissions of the ServiceAccounts with all features enabled, without those to read objects other
// than Secrets. A new line needs a review.
var (
	nodeWrites = map[string][]string{
		"nodes":                      {"patch"}, // the startup taint
		"certificatesigningrequests": {"create"},
	}
	sidecarWrites = map[string][]string{
		"persistentvolumes":             {"create", "patch", "delete"},
		"persistentvolumeclaims":        {"update"},
		"persistentvolumeclaims/status": {"patch"},
		"volumeattachments":             {"patch"},
		"volumeattachments/status":      {"patch"},
		"events":                        {"create", "patch"},
		"volumesnapshots":               {"update"},
		"volumesnapshotcontents":        {"update", "patch"},
		"volumesnapshotcontents/status": {"update", "patch"},
		"csistoragecapacities":          {"create", "update", "patch", "delete"},

		"volumegroupsnapshotcontents":        {"update", "patch"},
		"volumegroupsnapshotcontents/status": {"update", "patch"},
		"tokenreviews":                       {"create"},
		"subjectaccessreviews":               {"create"},
	}
	nodeLossWrites = map[string][]string{
		"persistentvolumes":      {"patch", "delete"},
		"persistentvolumeclaims": {"delete"},
		"events":                 {"create"},
	}
	protectWrites = map[string][]string{
		"cronjobs":     {"create", "patch", "delete"},
		"jobs":         {"delete"},
		"events":       {"create"},
		"rolebindings": {"create"},
		"rolebindings trivet-system:trivet-protection": {"delete"},
		"clusterroles trivet-system:trivet-protection": {"bind"},
	}
	authorityWrites = map[string][]string{
		"leases":                              {"create", "update"},
		"configmaps":                          {"create"},
		"configmaps trivet-ca trivet-pools":   {"patch"},
		"secrets":                             {"create"},
		"secrets trivet-ca":                   {"list", "watch", "patch"},
		"certificatesigningrequests/approval": {"patch"},
		"certificatesigningrequests/status":   {"patch"},
		"signers storage.example.com/node":    {"approve", "sign"},
	}
)

// join merges permissions.
func join(rights ...map[string][]string) map[string][]string {
	all := map[string][]string{}
	for _, some := range rights {
		for resource, verbs := range some {
			all[resource] = append(all[resource], verbs...)
		}
	}
	return all
}

// TestRights checks the permissions of each ServiceAccount.
func TestRights(t *testing.T) {
	byCertManager := join(sidecarWrites, authorityWrites)
	delete(byCertManager, "secrets")
	byCertManager["secrets trivet-ca"] = []string{"list", "watch"}
	for _, tc := range []struct {
		name, values, set string
		want              map[string]map[string][]string // by ServiceAccount
	}{
		{"release of claims", everything, "controller.nodeLoss.enabled=true,certificates.certManager.enabled=false", map[string]map[string][]string{
			"storage-node": nodeWrites, "trivet-controller": join(sidecarWrites, authorityWrites, nodeLossWrites),
		}},
		{"protection", everything, "protection.enabled=true,certificates.certManager.enabled=false", map[string]map[string][]string{
			"storage-node": nodeWrites, "trivet-controller": join(sidecarWrites, authorityWrites, protectWrites),
		}},
		{"cluster", everything, "certificates.certManager.enabled=false", map[string]map[string][]string{
			"storage-node": nodeWrites, "trivet-controller": join(sidecarWrites, authorityWrites),
		}},
		{"cert-manager", everything, "certificates.certManager.enabled=true", map[string]map[string][]string{
			"storage-node": nodeWrites, "trivet-controller": byCertManager,
		}},
		{"no startup taint", everything, "config.startupTaint=false", map[string]map[string][]string{
			"storage-node": {"certificatesigningrequests": {"create"}}, "trivet-controller": byCertManager,
		}},
		{"one node", everything, "shape=oneNode", map[string]map[string][]string{
			"storage-node": join(sidecarWrites, map[string][]string{"nodes": {"patch"}}),
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			all := template(t, tc.values, "--set", tc.set, externalAPIs)
			for name, pod := range pods(all) {
				account := pod.Spec.ServiceAccountName
				named[*corev1.ServiceAccount](t, all, account)
				want, known := tc.want[account]
				if !known {
					t.Errorf("got ServiceAccount %q of %s, want one of the test case", account, name)
				}
				if have := writes(t, all, account); !maps.EqualFunc(have, want, sameVerbs) {
					t.Errorf("%s: got permissions\n%v\nwant\n%v", account, have, want)
				}
			}
		})
	}
}

// TestProtection checks the permissions of the ServiceAccount that makes copies: in the cluster it may only read, and what it may
// write is in a role that the chart does not bind. kubectl trivet protect finds both by the labels of the ServiceAccount.
func TestProtection(t *testing.T) {
	all := template(t, "protection: {enabled: true, maxLagSeconds: 300}\nsnapshots: {enabled: true}\nimagePullSecrets: [registry]\nmetrics: {prometheusRule: {enabled: true}}\n", externalAPIs)
	const account = "trivet-protection"
	if got := writes(t, all, account); len(got) > 0 {
		t.Errorf("got permissions %v in the whole cluster, want none to write", got)
	}
	for _, rule := range rules(t, all, account) {
		if !slices.Equal(rule.Verbs, []string{"get"}) {
			t.Errorf("got rule %v in the whole cluster, want only get", rule)
		}
	}
	want := map[string][]string{"persistentvolumeclaims": {"get", "list", "create", "delete"}, "volumesnapshots": {"get", "list", "create", "delete"}, "events": {"list"}}
	got := map[string][]string{}
	for _, rule := range named[*rbacv1.ClusterRole](t, all, namespace+":"+account).Rules {
		for _, resource := range rule.Resources {
			got[resource] = append(got[resource], rule.Verbs...)
		}
	}
	if !maps.EqualFunc(got, want, sameVerbs) {
		t.Errorf("got permissions %v in the namespaces of claims, want %v", got, want)
	}
	policy := named[*admissionregistrationv1.ValidatingAdmissionPolicy](t, all, namespace+"."+account)
	binding := named[*admissionregistrationv1.ValidatingAdmissionPolicyBinding](t, all, namespace+"."+account)
	if c, v := policy.Spec.MatchConditions, policy.Spec.Validations; binding.Spec.PolicyName != policy.Name || len(c) != 1 || c[0].Expression != "request.userInfo.username == 'system:serviceaccount:trivet-system:trivet-protection'" || len(v) != 1 || !strings.Contains(v[0].Expression, "'trivet-copy-'") {
		t.Errorf("got the policy %+v with the binding %+v, want one that limits the names for the ServiceAccount", policy.Spec, binding.Spec)
	}
	bindings := named[*admissionregistrationv1.ValidatingAdmissionPolicy](t, all, namespace+"."+account+"-bindings")
	if v := bindings.Spec.Validations; len(v) != 1 || !strings.Contains(v[0].Expression, "object.roleRef.name == 'trivet-system:trivet-protection'") {
		t.Errorf("got the policy %+v, want one that limits the RoleBindings of the controller's driver", bindings.Spec)
	}
	named[*admissionregistrationv1.ValidatingAdmissionPolicyBinding](t, all, bindings.Name)
	cronJobs := named[*admissionregistrationv1.ValidatingAdmissionPolicy](t, all, namespace+"."+account+"-cronjobs")
	if v := cronJobs.Spec.Validations; len(v) != 1 || !strings.Contains(v[0].Expression, "serviceAccountName == 'trivet-protection'") || !strings.Contains(v[0].Expression, "!has(variables.pod.volumes)") {
		t.Errorf("got the policy %+v, want one that limits the CronJobs of the controller's driver", cronJobs.Spec)
	}
	named[*admissionregistrationv1.ValidatingAdmissionPolicyBinding](t, all, cronJobs.Name)
	a := named[*corev1.ServiceAccount](t, all, account)
	if a.Labels["app.kubernetes.io/name"] != "trivet" || a.Labels["app.kubernetes.io/component"] != "protection" || len(a.ImagePullSecrets) != 1 {
		t.Errorf("got %+v, want the labels and the Secret for images", a)
	}
	out, _, ok := tryHelm(t, "template", "trivet", chart, "--set", "metrics.prometheusRule.enabled=true,protection.maxLagSeconds=300", externalAPIs)
	if !ok || !strings.Contains(out, "(trivet_copy_timestamp_seconds) > 300\n") {
		t.Error("got no alert with the age of protection.maxLagSeconds")
	}
	for _, a := range ofType[*corev1.ServiceAccount](template(t, "", externalAPIs)) {
		if a.Name == account {
			t.Errorf("got ServiceAccount %s by default, want none", a.Name)
		}
	}
}

// TestNodePolicy checks that an admission policy limits the permission of the nodes' drivers to patch Nodes.
// The policy is omitted if the drivers lack the permission or the cluster has no such policies.
func TestNodePolicy(t *testing.T) {
	// Helm lists the kinds of a cluster, such as v1/Pod. `helm template` lists only the versions of the APIs.
	const kinds, policies = "v1/Pod", "admissionregistration.k8s.io/v1/ValidatingAdmissionPolicy"
	for _, tc := range []struct {
		values, apis string
		want         bool
	}{
		{everything, "", true}, // helm template
		{oneNode + everything, "", true},
		{everything, kinds + "," + policies, true},
		{everything, kinds, false},
		{everything + "plainManifests: true\n", "", true},
		{"config: {startupTaint: false}\n", "", false},
	} {
		apis := externalAPIs
		if tc.apis != "" {
			apis += "," + tc.apis
		}
		all := template(t, tc.values, apis)
		if !tc.want {
			for _, policy := range ofType[*admissionregistrationv1.ValidatingAdmissionPolicy](all) {
				t.Errorf("APIs %q: got policy %s, want none", tc.apis, policy.Name)
			}
			continue
		}
		policy, binding := one[*admissionregistrationv1.ValidatingAdmissionPolicy](t, all), one[*admissionregistrationv1.ValidatingAdmissionPolicyBinding](t, all)
		if binding.Spec.PolicyName != policy.Name || !slices.Equal(binding.Spec.ValidationActions, []admissionregistrationv1.ValidationAction{admissionregistrationv1.Deny}) || *policy.Spec.FailurePolicy != admissionregistrationv1.Fail {
			t.Errorf("got binding %+v and failurePolicy %s of %s, want Deny and Fail", binding.Spec, *policy.Spec.FailurePolicy, policy.Name)
		}
		if conditions := policy.Spec.MatchConditions; len(conditions) != 1 || conditions[0].Expression != "request.userInfo.username == 'system:serviceaccount:trivet-system:storage-node'" {
			t.Errorf("got match conditions %+v of the policy, want only the ServiceAccount of the nodes", conditions)
		}
		if !slices.ContainsFunc(policy.Spec.Validations, func(v admissionregistrationv1.Validation) bool {
			return strings.Contains(v.Expression, "'storage.example.com/agent-not-ready'")
		}) {
			t.Errorf("got validations %+v, want one that names the driver's taint", policy.Spec.Validations)
		}
	}
}

// sameVerbs reports whether two lists contain the same verbs, in any order and any number of times.
func sameVerbs(a, b []string) bool {
	return slices.Equal(slices.Compact(slices.Sorted(slices.Values(a))), slices.Compact(slices.Sorted(slices.Values(b))))
}

// writes returns the permissions of a ServiceAccount, without those to read objects other than Secrets. The
// keys are the resource and the names to which a rule is limited. It fails for wildcards.
func writes(t *testing.T, all objects, account string) map[string][]string {
	t.Helper()
	found := map[string][]string{}
	for _, rule := range rules(t, all, account) {
		for _, words := range [][]string{rule.APIGroups, rule.Resources, rule.Verbs} {
			if slices.Contains(words, "*") {
				t.Errorf("got a wildcard in rule %v of %s, want none", rule, account)
			}
		}
		for _, resource := range rule.Resources {
			for _, verb := range rule.Verbs {
				if reads := slices.Contains([]string{"get", "list", "watch"}, verb); !reads || resource == "secrets" {
					key := strings.Join(append([]string{resource}, rule.ResourceNames...), " ")
					found[key] = append(found[key], verb)
				}
			}
		}
	}
	return found
}

// rules returns the rules of the roles that are bound to a ServiceAccount.
func rules(t *testing.T, all objects, account string) (found []rbacv1.PolicyRule) {
	t.Helper()
	isAccount := func(subjects []rbacv1.Subject) bool {
		return slices.Equal(subjects, []rbacv1.Subject{{Kind: "ServiceAccount", Name: account, Namespace: namespace}})
	}
	for _, binding := range ofType[*rbacv1.ClusterRoleBinding](all) {
		if isAccount(binding.Subjects) {
			found = append(found, named[*rbacv1.ClusterRole](t, all, binding.RoleRef.Name).Rules...)
		}
	}
	for _, binding := range ofType[*rbacv1.RoleBinding](all) {
		if isAccount(binding.Subjects) {
			found = append(found, named[*rbacv1.Role](t, all, binding.RoleRef.Name).Rules...)
		}
	}
	return found
}

// workloads returns the pod templates of both shapes with all features enabled.
func workloads(t *testing.T) map[string]corev1.PodTemplateSpec {
	t.Helper()
	both := pods(template(t, everything, externalAPIs))
	maps.Copy(both, pods(template(t, oneNode+everything, externalAPIs)))
	return both
}

// TestContainers checks the security context, the resources and the mounts of every container.
func TestContainers(t *testing.T) {
	for name, pod := range workloads(t) {
		if auto := pod.Spec.AutomountServiceAccountToken; auto == nil || *auto {
			t.Errorf("%s: got no automountServiceAccountToken: false, so every container gets the token", name)
		}
		for _, c := range pod.Spec.Containers {
			t.Run(name+" "+c.Name, func(t *testing.T) {
				checkContainer(t, c)
				// Only the driver in the nodes' pods may be privileged.
				if c.Name != "trivet" || name == "trivet-controller" {
					checkUnprivileged(t, c)
				}
			})
		}
	}
}

// checkContainer checks the rules for all containers.
func checkContainer(t *testing.T, c corev1.Container) {
	t.Helper()
	if s := c.SecurityContext; s == nil || s.ReadOnlyRootFilesystem == nil || !*s.ReadOnlyRootFilesystem {
		t.Error("got a writable root filesystem, want a read-only one")
	}
	if c.TerminationMessagePolicy != corev1.TerminationMessageFallbackToLogsOnError {
		t.Errorf("got terminationMessagePolicy %s, want %s", c.TerminationMessagePolicy, corev1.TerminationMessageFallbackToLogsOnError)
	}
	if c.Resources.Requests.Cpu().IsZero() || c.Resources.Requests.Memory().IsZero() {
		t.Errorf("got resource requests %v, want CPU and memory", c.Resources.Requests)
	}
	if c.Resources.Limits.Memory().IsZero() {
		t.Error("got no memory limit, want one")
	}
	// The default path is in /dev, which may be the node's.
	if hasDev := slices.ContainsFunc(c.VolumeMounts, func(m corev1.VolumeMount) bool { return m.MountPath == "/dev" }); hasDev && c.TerminationMessagePath != "/run/termination-log" {
		t.Errorf("got terminationMessagePath %q in a container with the node's /dev, want /run/termination-log", c.TerminationMessagePath)
	}
	hasToken := slices.ContainsFunc(c.VolumeMounts, func(m corev1.VolumeMount) bool { return m.Name == "api-token" })
	if want := !slices.Contains([]string{"node-driver-registrar", "liveness-probe"}, c.Name); hasToken != want {
		t.Errorf("got token mounted: %t, want %t", hasToken, want)
	}
}

// checkUnprivileged checks the rules for unprivileged containers.
func checkUnprivileged(t *testing.T, c corev1.Container) {
	t.Helper()
	s := c.SecurityContext
	if *s.Privileged || *s.AllowPrivilegeEscalation || !slices.Equal(s.Capabilities.Drop, []corev1.Capability{"ALL"}) || s.SeccompProfile.Type != corev1.SeccompProfileTypeRuntimeDefault {
		t.Errorf("got security context %v, want an unprivileged one that drops all capabilities", s)
	}
	if c.Name == "trivet" {
		return
	}
	for _, m := range c.VolumeMounts {
		if !slices.Contains([]string{"plugin-dir", "registration-dir", "api-token", "snapshot-metadata-tls"}, m.Name) {
			t.Errorf("got mount %s (%s), want none", m.MountPath, m.Name)
		}
	}
}

// TestControllersPod checks that a namespace with the Pod Security level restricted accepts the controller's
// pod.
func TestControllersPod(t *testing.T) {
	pod := workloads(t)["trivet-controller"].Spec
	if s := pod.SecurityContext; !*s.RunAsNonRoot || *s.RunAsUser == 0 || *s.FSGroup == 0 {
		t.Errorf("got security context %v, want runAsNonRoot with a user and an fsGroup", s)
	}
	for _, v := range pod.Volumes {
		if v.EmptyDir == nil && v.ConfigMap == nil && v.Projected == nil {
			t.Errorf("got volume %s, want only emptyDir, configMap and projected volumes", v.Name)
		}
	}
	// Only the user of the driver can access its socket.
	for _, c := range pod.Containers {
		if c.SecurityContext.RunAsUser != nil || c.SecurityContext.RunAsNonRoot != nil {
			t.Errorf("got a user in the security context of %s, want the pod's user", c.Name)
		}
	}
	if pod.HostNetwork || pod.HostPID || pod.HostIPC {
		t.Errorf("got hostNetwork %t, hostPID %t and hostIPC %t, want false", pod.HostNetwork, pod.HostPID, pod.HostIPC)
	}
}

// TestPodOfHelmTest checks that a namespace with the Pod Security level restricted accepts the pod of `helm test`, and that its root
// filesystem is read-only.
func TestPodOfHelmTest(t *testing.T) {
	pod := one[*corev1.Pod](t, template(t, "")).Spec
	if s := pod.SecurityContext; !*s.RunAsNonRoot || *s.RunAsUser == 0 || s.SeccompProfile.Type != corev1.SeccompProfileTypeRuntimeDefault {
		t.Errorf("got security context %v, want runAsNonRoot with a user and the seccomp profile RuntimeDefault", s)
	}
	for _, c := range pod.Containers {
		s := c.SecurityContext
		if *s.AllowPrivilegeEscalation || !*s.ReadOnlyRootFilesystem || !slices.Equal(s.Capabilities.Drop, []corev1.Capability{"ALL"}) || len(s.Capabilities.Add) > 0 {
			t.Errorf("container %s: got security context %v: it must drop all capabilities, and allow no escalation and no writes to /", c.Name, s)
		}
	}
}

// TestDriverName checks that all objects use the configured name of the driver.
func TestDriverName(t *testing.T) {
	const socket = "/var/lib/k0s/kubelet/plugins/storage.example.com"
	for name, pod := range workloads(t) {
		if args := container(pod, "trivet").Args; !slices.Contains(args, "--driver-name=storage.example.com") {
			t.Errorf("%s: got arguments %q of the driver, want --driver-name=storage.example.com", name, args)
		}
		if !slices.Contains(container(pod, "trivet").Env, corev1.EnvVar{Name: "CSI_DRIVER_NAME", Value: "storage.example.com"}) {
			t.Errorf("%s: got environment %v, want CSI_DRIVER_NAME=storage.example.com", name, container(pod, "trivet").Env)
		}
		if name == "trivet-controller" {
			continue
		}
		if args := container(pod, "node-driver-registrar").Args; !slices.Contains(args, "--kubelet-registration-path="+socket+"/csi.sock") {
			t.Errorf("%s: got arguments %q of the registrar, want the socket in %s", name, args, socket)
		}
		for _, v := range pod.Spec.Volumes {
			if v.Name == "plugin-dir" && v.HostPath.Path != socket {
				t.Errorf("%s: got plugin directory %s, want %s", name, v.HostPath.Path, socket)
			}
		}
	}
	stdout, _, _ := tryTemplate(t, everything, externalAPIs)
	for _, line := range strings.Split(stdout, "\n") {
		if strings.Contains(line, "csi.trivet.dev") && !strings.Contains(line, "csi.trivet.dev/namespace") {
			t.Errorf("got the default name in %q, want only storage.example.com", line)
		}
	}
}

// TestProbes checks that each probe uses a configured port, that the startup probe does not depend on a
// sidecar, and that the liveness probe leaves the driver time to open its pools.
func TestProbes(t *testing.T) {
	all := pods(template(t, "ports: {metrics: 2001, health: 2002, registrar: 2003}"))
	type probes struct{ startup, liveness, readiness string }
	port := func(c *corev1.Container, p *corev1.Probe) string {
		if p == nil {
			return ""
		}
		// The kubelet looks up a port name in the ports of the probed container.
		for _, named := range c.Ports {
			if named.Name == p.HTTPGet.Port.StrVal {
				return fmt.Sprintf(":%d%s", named.ContainerPort, p.HTTPGet.Path)
			}
		}
		return "no port"
	}
	for _, tc := range []struct {
		pod, name, arg string
		want           probes
	}{
		{"trivet-node", "trivet", "--http-address=:2001", probes{":2001/healthz", ":2002/healthz", ":2001/readyz"}},
		{"trivet-node", "liveness-probe", "--http-endpoint=:2002", probes{}},
		{"trivet-node", "node-driver-registrar", "--http-endpoint=:2003", probes{":2003/healthz", ":2003/healthz", ""}},
		{"trivet-controller", "trivet", "--http-address=:2001", probes{":2001/healthz", ":2002/healthz", ":2001/readyz"}},
		{"trivet-controller", "liveness-probe", "--http-endpoint=:2002", probes{}},
	} {
		c := container(all[tc.pod], tc.name)
		if got := (probes{port(c, c.StartupProbe), port(c, c.LivenessProbe), port(c, c.ReadinessProbe)}); got != tc.want {
			t.Errorf("%s, %s: got probes %v, want %v", tc.pod, tc.name, got, tc.want)
		}
		if !slices.Contains(c.Args, tc.arg) {
			t.Errorf("%s, %s: got arguments %q, want %s", tc.pod, tc.name, c.Args, tc.arg)
		}
		// Probe may report that the driver is not ready for 30 s after its start.
		if p := c.LivenessProbe; tc.name == "trivet" && p.PeriodSeconds*(p.FailureThreshold-1) < 60 {
			t.Errorf("%s: got a liveness probe with period %d s and failure threshold %d, want the driver killed after 60 s or later", tc.pod, p.PeriodSeconds, p.FailureThreshold)
		}
	}
}

// TestSecondRelease checks that two releases with the same name in different namespaces share no
// cluster-scoped roles.
func TestSecondRelease(t *testing.T) {
	seen := map[string]string{}
	for _, in := range []string{"a", "b"} {
		for _, binding := range ofType[*rbacv1.ClusterRoleBinding](template(t, "", "--namespace", in)) {
			if binding.RoleRef.Name != binding.Name || binding.Subjects[0].Namespace != in {
				t.Errorf("namespace %s: got binding %s of %v to role %s, want equal names and subjects in the namespace", in, binding.Name, binding.Subjects, binding.RoleRef.Name)
			}
			if other, taken := seen[binding.Name]; taken {
				t.Errorf("got binding %s in the releases of %s and %s, want different names", binding.Name, other, in)
			}
			seen[binding.Name] = in
		}
	}
	if len(seen) != 4 {
		t.Errorf("got bindings %v, want 4", seen)
	}
}
