package chart

import (
	"encoding/base64"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"go.yaml.in/yaml/v3"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	policyv1 "k8s.io/api/policy/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/backend/disk"
	"github.com/trivet-csi/trivet/backend/lvm"
	"github.com/trivet-csi/trivet/driver"
	"github.com/trivet-csi/trivet/volume"
)

// everything enables all features that both shapes have, with several entries in each list.
const everything = `
driverName: storage.example.com
kubeletDir: /var/lib/k0s/kubelet
stateDir: /srv/state
pools:
  default:
    directory: {path: /srv/pools/default}
    maxVolumes: 1000000
    storageClasses:
    - {name: thin, default: true, labels: {tier: one}, annotations: {note: x}, mountOptions: [noatime]}
    - {name: thick, fsType: xfs, allocation: thick, reclaimPolicy: Retain, allowVolumeExpansion: false, parameters: {mkfsOptions: -i size=1024}}
  fast:
    directory: {path: /mnt/nvme}
    requireMount: true
    uuid: 3f0c9a52-6f1e-4b7d-9a53-0d6a7f6f2b11
    size: 800Gi
    reserve: 5%
    overcommit: 1.5
    freezeLimit: 30s
    ephemeral: true
ephemeral: {enabled: true, memory: 1Gi}
config: {maxVolumesPerNode: 1000000, pprof: true}
snapshots:
  enabled: true
  classes:
  - {name: often, default: true, labels: {tier: one}, annotations: {note: x}}
  - {name: kept, deletionPolicy: Retain, consistency: frozen}
  groups: true
  metadata: {enabled: true, secretName: metadata-tls, caCert: "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n"}
image: {tag: v1.2.3, digest: "sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"}
imagePullSecrets: [registry]
sidecars:
  seLinuxOptions: {type: spc_t}
node:
  nodeSelector: {kubernetes.io/hostname: one}
  affinity: {nodeAffinity: {requiredDuringSchedulingIgnoredDuringExecution: {nodeSelectorTerms: [{matchExpressions: [{key: disk, operator: Exists}]}]}}}
  podLabels: {team: storage}
  podAnnotations: {note: x}
  serviceAccount: {name: storage-node, annotations: {note: x}}
  podDisruptionBudget: {enabled: true}
controller:
  replicas: 3
  nodeSelector: {pool: system}
  affinity: {nodeAffinity: {requiredDuringSchedulingIgnoredDuringExecution: {nodeSelectorTerms: [{matchExpressions: [{key: disk, operator: DoesNotExist}]}]}}}
  podLabels: {team: storage}
  podAnnotations: {note: x}
  serviceAccount: {annotations: {note: x}}
  nodeLoss: {delay: 30m}
certificates: {certManager: {enabled: true, issuerRef: {name: ours, kind: ClusterIssuer}}}
networkPolicy: {enabled: true, metricsFrom: [{namespaceSelector: {}}], apiServer: {cidrs: [10.0.0.1/32]}}
metrics:
  serviceMonitor: {enabled: true, labels: {release: prometheus}}
  prometheusRule: {enabled: true, labels: {release: prometheus}}
  grafanaDashboard: {enabled: true, annotations: {folder: x}}
`

// externalAPIs tells helm that the cluster has the APIs that everything needs.
const externalAPIs = "--api-versions=snapshot.storage.k8s.io/v1,groupsnapshot.storage.k8s.io/v1,cbt.storage.k8s.io/v1beta1,monitoring.coreos.com/v1,cert-manager.io/v1"

// oneNode selects the shape oneNode. The default shape is cluster.
const oneNode = "shape: oneNode\n"

// TestLint checks that helm lint reports no errors and no warnings.
func TestLint(t *testing.T) {
	if stdout, stderr, ok := tryHelm(t, "lint", "--strict", chart); !ok {
		t.Error(stdout, stderr)
	}
}

// TestManifestsAreCurrent checks that deploy/trivet.yaml contains what the chart renders.
func TestManifestsAreCurrent(t *testing.T) {
	have, err := os.ReadFile(manifests)
	must(t, err)
	stdout, stderr, ok := tryHelm(t, "template", release, chart, "--namespace", namespace, "--set", "plainManifests=true")
	if !ok {
		t.Fatal(stderr)
	}
	if _, objects, _ := strings.Cut(string(have), "\n---\n"); objects != strings.TrimPrefix(stdout, "---\n") {
		t.Error("deploy/trivet.yaml differs from what the chart renders: run `make manifests`")
	}
	if strings.Contains(stdout, "Helm") || strings.Contains(stdout, "helm.sh") {
		t.Error("deploy/trivet.yaml contains labels or annotations of Helm")
	}
}

// TestSchemaIsCurrent checks the copy of the schema that the templates read. They cannot read the schema
// itself.
func TestSchemaIsCurrent(t *testing.T) {
	schema, err := os.ReadFile(chart + "/values.schema.json")
	must(t, err)
	if have, err := os.ReadFile(chart + "/files/schema.json"); err != nil || string(have) != string(schema) {
		t.Errorf("files/schema.json differs from values.schema.json (%v): run `make manifests`", err)
	}
}

// TestRenders checks that all objects of the chart fit the types of the Kubernetes API.
func TestRenders(t *testing.T) {
	for name, values := range map[string]string{
		"defaults": "", "plain": "plainManifests: true", "no classes": "pools: {default: null, p: {directory: {path: /srv/p}}}",
		"everything": everything, "optional objects disabled": "attachRequired: false\nstorageCapacity: {enabled: false}\nmetrics: {service: false}\ntest: {enabled: false}\nnode: {tolerations: []}\ncontroller: {replicas: 1, tolerations: []}",
	} {
		t.Run(name, func(t *testing.T) { template(t, values, externalAPIs) })
		t.Run(name+" on one node", func(t *testing.T) { template(t, oneNode+values, externalAPIs) })
	}
}

// TestShapes checks the workloads of each shape and their containers.
func TestShapes(t *testing.T) {
	for values, want := range map[string]map[string][]string{
		"": {
			"trivet-node":       {"trivet", "node-driver-registrar", "liveness-probe"},
			"trivet-controller": {"trivet", "csi-provisioner", "csi-attacher", "csi-resizer", "liveness-probe"},
		},
		"attachRequired: false\nsnapshots: {enabled: true}": {
			"trivet-node":       {"trivet", "node-driver-registrar", "liveness-probe"},
			"trivet-controller": {"trivet", "csi-provisioner", "csi-resizer", "csi-snapshotter", "liveness-probe"},
		},
		oneNode: {"trivet": {"trivet", "node-driver-registrar", "liveness-probe", "csi-provisioner", "csi-attacher", "csi-resizer"}},
	} {
		have := pods(template(t, values, externalAPIs))
		if len(have) != len(want) {
			t.Errorf("%q: got workloads %v, want %v", values, have, want)
		}
		for name, containers := range want {
			if got := names(have[name]); !slices.Equal(got, containers) {
				t.Errorf("%q: got containers %q of %s, want %q", values, got, name, containers)
			}
		}
	}
}

// TestServices checks the flags of the drivers and provisioners that depend on the shape.
func TestServices(t *testing.T) {
	cluster, single := pods(template(t, "")), pods(template(t, oneNode))
	for _, tc := range []struct {
		pod             corev1.PodTemplateSpec
		container, flag string
		has             bool
	}{
		{cluster["trivet-node"], "trivet", "--services=node", true},
		{cluster["trivet-node"], "trivet", "--node-id=$(NODE_NAME)", true},
		{cluster["trivet-controller"], "trivet", "--services=controller", true},
		{cluster["trivet-controller"], "csi-provisioner", "--capacity-ownerref-level=2", true},
		{single["trivet"], "csi-provisioner", "--capacity-ownerref-level=1", true},
		{single["trivet"], "csi-provisioner", "--leader-election", false},
	} {
		if slices.Contains(container(tc.pod, tc.container).Args, tc.flag) != tc.has {
			t.Errorf("%s: got arguments %q, want %s: %t", tc.container, container(tc.pod, tc.container).Args, tc.flag, tc.has)
		}
	}
	if args := container(single["trivet"], "trivet").Args; slices.ContainsFunc(args, func(a string) bool { return strings.HasPrefix(a, "--services") }) {
		t.Errorf("shape oneNode: got arguments %q of the driver, want no --services because all services are the default", args)
	}
}

// TestLeaders checks that the sidecars of the controller elect leaders, which release their leases while the
// driver still runs.
func TestLeaders(t *testing.T) {
	pod := pods(template(t, everything, externalAPIs))["trivet-controller"]
	for name, gates := range map[string]string{"csi-provisioner": "", "csi-attacher": "", "csi-resizer": "", "csi-snapshotter": "CSIVolumeGroupSnapshot=true,"} {
		for _, flag := range []string{"--leader-election", "--leader-election-namespace=" + namespace, "--feature-gates=" + gates + "ReleaseLeaderElectionOnExit=true"} {
			if !slices.Contains(container(pod, name).Args, flag) {
				t.Errorf("%s: got arguments %q, want %s", name, container(pod, name).Args, flag)
			}
		}
	}
	const drains = 20 // the seconds in which the driver ends its running calls after SIGTERM
	stop := container(pod, "trivet").Lifecycle.PreStop.Sleep.Seconds
	if stop < 1 || *pod.Spec.TerminationGracePeriodSeconds <= stop+drains {
		t.Errorf("got preStop sleep of %d s and grace period of %d s, want at least 1 s and more than %d s", stop, *pod.Spec.TerminationGracePeriodSeconds, stop+drains)
	}
}

// TestController checks that the replicas prefer different nodes, have a disruption budget and tolerate the
// startup taint.
func TestController(t *testing.T) {
	all := template(t, "")
	deployment := one[*appsv1.Deployment](t, all)
	affinity := deployment.Spec.Template.Spec.Affinity.PodAntiAffinity
	if *deployment.Spec.Replicas != 2 || len(affinity.RequiredDuringSchedulingIgnoredDuringExecution) != 0 || len(affinity.PreferredDuringSchedulingIgnoredDuringExecution) != 1 {
		t.Errorf("got %d replicas with anti-affinity %v, want 2 with a preferred one", *deployment.Spec.Replicas, affinity)
	}
	if budget := one[*policyv1.PodDisruptionBudget](t, all); budget.Spec.MaxUnavailable.IntValue() != 1 || !maps.Equal(budget.Spec.Selector.MatchLabels, deployment.Spec.Selector.MatchLabels) {
		t.Errorf("got disruption budget %v, want maxUnavailable 1 for the pods of the deployment", budget.Spec)
	}
	changed := template(t, "controller: {replicas: 1, affinity: {podAntiAffinity: {requiredDuringSchedulingIgnoredDuringExecution: [{topologyKey: zone}]}}}")
	if affinity := one[*appsv1.Deployment](t, changed).Spec.Template.Spec.Affinity.PodAntiAffinity; len(affinity.PreferredDuringSchedulingIgnoredDuringExecution) != 0 {
		t.Errorf("got anti-affinity %v, want only the one of the values", affinity)
	}
	for _, budget := range ofType[*policyv1.PodDisruptionBudget](changed) {
		t.Errorf("got disruption budget %v, want none because a node with a single replica could not be drained", budget.Spec)
	}
	if !slices.ContainsFunc(deployment.Spec.Template.Spec.Tolerations, func(t corev1.Toleration) bool { return t.Key == "csi.trivet.dev/agent-not-ready" }) {
		t.Error("got no toleration of the startup taint for the controller, want one")
	}
}

// TestForwarding checks that only the controller and the other nodes can connect to the forwarding ports of the nodes.
func TestForwarding(t *testing.T) {
	all := template(t, "ports: {forwarding: 2004}\nnetworkPolicy: {enabled: true}")
	service := named[*corev1.Service](t, all, "trivet-node")
	node, controller := pods(all)["trivet-node"], pods(all)["trivet-controller"]
	port := service.Spec.Ports[0]
	if service.Spec.ClusterIP != corev1.ClusterIPNone || !service.Spec.PublishNotReadyAddresses || len(service.Spec.Ports) != 1 || port.Name != "forwarding" || port.Port != 2004 {
		t.Errorf("got service %v, want a headless one that publishes the port forwarding, 2004, of pods that are not ready", service.Spec)
	}
	if !selects(service.Spec.Selector, node) || selects(service.Spec.Selector, controller) {
		t.Errorf("got selector %v of the service, want one that only selects the nodes' pods", service.Spec.Selector)
	}
	if !slices.Contains(container(node, "trivet").Ports, corev1.ContainerPort{Name: port.TargetPort.StrVal, ContainerPort: 2004, Protocol: corev1.ProtocolTCP}) {
		t.Errorf("got ports %v of the driver, want 2004", container(node, "trivet").Ports)
	}
	in := ports(named[*networkingv1.NetworkPolicy](t, all, "trivet-node").Spec.Ingress)
	from := in["forwarding"]
	if len(from) != 2 || !selects(from[0].PodSelector.MatchLabels, controller) || !selects(from[1].PodSelector.MatchLabels, node) ||
		selects(from[0].PodSelector.MatchLabels, node) || selects(from[1].PodSelector.MatchLabels, controller) || from[0].NamespaceSelector != nil || from[1].NamespaceSelector != nil {
		t.Errorf("got forwarding open to %v, want only the pods of the controller and of the nodes", from)
	}
	for _, name := range []string{"metrics", "health", "registrar"} {
		if from, open := in[name]; !open || len(from) != 0 {
			t.Errorf("got port %s open: %t, to %v, want it open to all", name, open, from)
		}
	}
	out := named[*networkingv1.NetworkPolicy](t, all, "trivet-controller").Spec.Egress
	if !slices.ContainsFunc(out, func(r networkingv1.NetworkPolicyEgressRule) bool {
		return r.Ports[0].Port.IntValue() == 2004 && len(r.To) == 1 && selects(r.To[0].PodSelector.MatchLabels, node)
	}) {
		t.Errorf("got egress rules %v of the controller, want port 2004 of the nodes' pods", out)
	}
}

// ports returns the peers that may connect to each named port. No peers means all.
func ports(rules []networkingv1.NetworkPolicyIngressRule) map[string][]networkingv1.NetworkPolicyPeer {
	open := map[string][]networkingv1.NetworkPolicyPeer{}
	for _, r := range rules {
		for _, p := range r.Ports {
			open[p.Port.StrVal] = r.From
		}
	}
	return open
}

// selects reports whether a selector matches a pod.
func selects(selector map[string]string, pod corev1.PodTemplateSpec) bool {
	return labels.SelectorFromSet(selector).Matches(labels.Set(pod.Labels))
}

// TestSelectors checks that no selector of the nodes matches the controller's pods, and the reverse.
func TestSelectors(t *testing.T) {
	all := template(t, everything, externalAPIs)
	node, controller := pods(all)["trivet-node"], pods(all)["trivet-controller"]
	for _, o := range all.known {
		var name string
		var selector map[string]string
		switch o := o.(type) {
		case *appsv1.DaemonSet:
			name, selector = o.Name, o.Spec.Selector.MatchLabels
		case *appsv1.Deployment:
			name, selector = o.Name, o.Spec.Selector.MatchLabels
		case *policyv1.PodDisruptionBudget:
			name, selector = o.Name, o.Spec.Selector.MatchLabels
		case *networkingv1.NetworkPolicy:
			name, selector = o.Name, o.Spec.PodSelector.MatchLabels
		case *corev1.Service:
			name, selector = o.Name, o.Spec.Selector
		default:
			continue
		}
		// The Service of the metrics selects all pods. The Service of the snapshot metadata selects the
		// controller's pods, which contain its sidecar.
		wantNode := name != "trivet-controller" && name != "trivet-snapshot-metadata"
		wantController := name != "trivet-node"
		if ofNode, ofController := selects(selector, node), selects(selector, controller); ofNode != wantNode || ofController != wantController {
			t.Errorf("%T %s: got a selector that matches the nodes' pods: %t, the controller's pods: %t, want %t and %t", o, name, ofNode, ofController, wantNode, wantController)
		}
	}
}

// TestConfiguration checks the configurations in the ConfigMaps with the driver's parser.
func TestConfiguration(t *testing.T) {
	for name, values := range map[string]string{"trivet-node-config": "", "trivet-config": oneNode} {
		c := configuration(t, values, name)
		if len(c.Pools) != 1 || c.Kubernetes.KubeletDir != "/var/lib/kubelet" || !c.Kubernetes.StartupTaint {
			t.Errorf("%s: got configuration %+v, want the default values", name, c)
		}
	}
	for name, values := range map[string]string{"trivet-node-config": everything, "trivet-config": oneNode + everything} {
		c := configuration(t, values, name)
		if len(c.Pools) != 2 || c.MaxVolumesPerNode != 1000000 || c.Pools[0].MaxVolumes != 1000000 || !c.Pools[1].RequireMount || c.Pools[1].FreezeTime() != 30*time.Second {
			t.Errorf("%s: got configuration %+v, want the values of everything", name, c)
		}
	}
	if c := configuration(t, oneNode, "trivet-config"); c.Forwarding != nil || c.Kubernetes.Authority != "" {
		t.Errorf("shape oneNode: got forwarding %+v and kubernetes %+v, want no forwarding and no authority", c.Forwarding, c.Kubernetes)
	}
	if c := configuration(t, "ports: {forwarding: 2004}", "trivet-node-config"); c.Forwarding.Listen != ":2004" || c.Kubernetes.Authority != "trivet-ca" {
		t.Errorf("node: got forwarding %+v and kubernetes %+v, want :2004 and authority trivet-ca", c.Forwarding, c.Kubernetes)
	}
	c := configuration(t, everything, "trivet-controller-config")
	if k := c.Kubernetes; len(c.Pools) != 0 || c.Forwarding == nil || k.Authority != "trivet-ca" || k.NodeService != "trivet-node" || k.NodeServiceAccount != "storage-node" || k.NodeLossDelay != "" || !k.Events {
		t.Errorf("controller: got configuration %+v, want forwarding to trivet-node, authority trivet-ca, events, no pools and no nodeLossDelay", c)
	}
	all := template(t, everything, externalAPIs, "--set", "controller.nodeLoss.enabled=true")
	if k := parsed(t, all, "trivet-controller-config").Kubernetes; k.NodeLossDelay != "30m" {
		t.Errorf("controller: got nodeLossDelay %q, want 30m", k.NodeLossDelay)
	}
	if enabled := parsed(t, template(t, everything, externalAPIs, "--set", "protection.enabled=true"), "trivet-controller-config").Kubernetes; c.Kubernetes.ProtectClaims || !enabled.ProtectClaims {
		t.Errorf("controller: got protectClaims %t by default and %t with protection.enabled, want false and true", c.Kubernetes.ProtectClaims, enabled.ProtectClaims)
	}
}

// configuration renders the chart and parses the configuration of a ConfigMap.
func configuration(t *testing.T, values, name string) driver.Config {
	t.Helper()
	return parsed(t, template(t, values, externalAPIs), name)
}

// parsed parses the configuration of a ConfigMap with the driver's parser.
func parsed(t *testing.T, all objects, name string) driver.Config {
	t.Helper()
	c, err := driver.ParseConfig([]byte(named[*corev1.ConfigMap](t, all, name).Data["config.yaml"]), backend.Kinds{disk.Kind, lvm.Kind})
	must(t, err)
	return c
}

// TestCertManager checks that the Certificate of cert-manager is a CA, in the Secret that the drivers use.
func TestCertManager(t *testing.T) {
	type certificate struct {
		Spec struct {
			IsCA       bool   `yaml:"isCA"`
			SecretName string `yaml:"secretName"`
			CommonName string `yaml:"commonName"`
			Usages     []string
			PrivateKey struct {
				Algorithm string
				Size      int
			} `yaml:"privateKey"`
			IssuerRef struct{ Name, Kind, Group string } `yaml:"issuerRef"`
		}
	}
	found := decoded[certificate](t, template(t, everything, externalAPIs), "Certificate")
	if len(found) != 1 {
		t.Fatalf("got certificates %+v, want one", found)
	}
	s := found[0].Spec
	if !s.IsCA || s.SecretName != "trivet-ca" || s.CommonName == "" || s.PrivateKey.Algorithm != "ECDSA" || s.PrivateKey.Size != 256 || s.IssuerRef.Kind != "ClusterIssuer" {
		t.Errorf("got certificate %+v, want a CA with an ECDSA key in the Secret trivet-ca", s)
	}
	// An extended key usage of the CA would restrict the certificates that it signs to that usage.
	if slices.Contains(s.Usages, "server auth") || slices.Contains(s.Usages, "client auth") || !slices.Contains(s.Usages, "cert sign") {
		t.Errorf("got usages %q, want cert sign without server auth and client auth", s.Usages)
	}
	if found := decoded[certificate](t, template(t, oneNode+everything, externalAPIs), "Certificate"); len(found) > 0 {
		t.Errorf("shape oneNode: got certificates %+v, want none", found)
	}
}

// TestAttachRequired checks the CSIDriver, and that the controller may change VolumeAttachments only if
// it attaches volumes.
func TestAttachRequired(t *testing.T) {
	for values, want := range map[string]bool{"": true, "attachRequired: false": false} {
		all := template(t, values)
		if got := *one[*storagev1.CSIDriver](t, all).Spec.AttachRequired; got != want {
			t.Errorf("%q: got attachRequired %t, want %t", values, got, want)
		}
		for _, rule := range named[*rbacv1.ClusterRole](t, all, namespace+":trivet-controller").Rules {
			if slices.Contains(rule.Resources, "volumeattachments") && slices.Contains(rule.Verbs, "patch") && !want {
				t.Errorf("%q: got permission of the controller to patch VolumeAttachments, want none", values)
			}
		}
	}
}

// TestSELinuxMount checks that the kubelet passes SELinux contexts only on request, because directories of a node share a
// filesystem.
func TestSELinuxMount(t *testing.T) {
	for values, want := range map[string]bool{"": false, "seLinuxMount: true": true} {
		if got := *one[*storagev1.CSIDriver](t, template(t, values)).Spec.SELinuxMount; got != want {
			t.Errorf("%q: got seLinuxMount %t, want %t", values, got, want)
		}
	}
}

// TestEphemeral checks that inline volumes are enabled either both in the CSIDriver and in the nodes'
// drivers, or in neither.
func TestEphemeral(t *testing.T) {
	const on = "ephemeral: {enabled: true, memory: 1Gi}\npools: {default: {ephemeral: true}}"
	for values, want := range map[string]bool{"": false, on: true, oneNode + on: true} {
		all := template(t, values)
		spec := one[*storagev1.CSIDriver](t, all).Spec
		if got := slices.Contains(spec.VolumeLifecycleModes, storagev1.VolumeLifecycleEphemeral); got != want || *spec.PodInfoOnMount != want || !slices.Contains(spec.VolumeLifecycleModes, storagev1.VolumeLifecyclePersistent) {
			t.Errorf("%q: got volumeLifecycleModes %v and podInfoOnMount %t, want Persistent, and Ephemeral with podInfoOnMount: %t", values, spec.VolumeLifecycleModes, *spec.PodInfoOnMount, want)
		}
		name := "trivet-node-config"
		if strings.HasPrefix(values, oneNode) {
			name = "trivet-config"
		}
		if config := parsed(t, all, name); config.Pools[0].Ephemeral != want || (config.EphemeralMemory == "1Gi") != want {
			t.Errorf("%q: got configuration %+v, want inline volumes enabled: %t", values, config, want)
		}
	}
}

// TestAddedPool checks that an added pool replaces no other pool, that null removes a pool, and that the
// default pool is the first one, because StorageClasses without a pool use the first.
func TestAddedPool(t *testing.T) {
	const add = "pools: {a-disk: {directory: {path: /mnt/nvme/trivet}, storageClasses: [{name: a-disk}]}, z: {nfs: {server: nas, export: /e}}}"
	for _, tc := range []struct {
		values, set string
		want        []string
	}{
		{"", "", []string{"default"}},
		{add, "", []string{"default", "a-disk", "z"}},
		{add, "pools.a-disk=null", []string{"default", "z"}},
		{add, "pools.default=null", []string{"a-disk", "z"}},
		{"", "pools.default.size=1Gi", []string{"default"}},
	} {
		config := parsed(t, template(t, tc.values, "--set", tc.set), "trivet-node-config")
		if have := driver.PoolNames(config.Pools); !slices.Equal(have, tc.want) {
			t.Errorf("%q, --set %q: got pools %q, want %q", tc.values, tc.set, have, tc.want)
		}
	}
}

// TestLogFormat checks that each driver gets the format of its log, and that the sidecars, which have no such flag,
// do not.
func TestLogFormat(t *testing.T) {
	for values, want := range map[string]string{"": "--log-format=text", "logFormat: json\n": "--log-format=json", oneNode + "logFormat: json\n": "--log-format=json"} {
		for name, pod := range pods(template(t, values)) {
			for _, c := range pod.Spec.Containers {
				if has := slices.Contains(c.Args, want); has != (c.Name == "trivet") {
					t.Errorf("%q: container %s of %s has argument %s: %t, want %t", values, c.Name, name, want, has, !has)
				}
			}
		}
	}
}

// TestEnvironment checks that each driver gets the variables of env, and that the sidecars do not.
func TestEnvironment(t *testing.T) {
	const values = "env:\n- {name: OTEL_EXPORTER_OTLP_ENDPOINT, value: http://collector:4318}\n- {name: TOKEN, valueFrom: {secretKeyRef: {name: s, key: k}}}\n"
	for _, shape := range []string{"", oneNode} {
		for name, pod := range pods(template(t, shape+values)) {
			for _, c := range pod.Spec.Containers {
				has := slices.ContainsFunc(c.Env, func(v corev1.EnvVar) bool {
					return v.Name == "OTEL_EXPORTER_OTLP_ENDPOINT" && v.Value == "http://collector:4318"
				}) &&
					slices.ContainsFunc(c.Env, func(v corev1.EnvVar) bool { return v.Name == "TOKEN" && v.ValueFrom.SecretKeyRef.Key == "k" })
				if has != (c.Name == "trivet") {
					t.Errorf("%q: container %s of %s has the variables: %t, want %t", shape, c.Name, name, has, !has)
				}
			}
		}
	}
}

// TestConfigurationRestarts checks that a changed configuration restarts only the drivers that read it.
func TestConfigurationRestarts(t *testing.T) {
	sums := func(values string) (node, controller string) {
		all := pods(template(t, values))
		return all["trivet-node"].Annotations["checksum/config"], all["trivet-controller"].Annotations["checksum/config"]
	}
	node, controller := sums("")
	if n, c := sums("config: {pprof: true}"); node == "" || controller == "" || n == node || c == controller {
		t.Error("config.pprof: got equal checksums in the pod templates, want both to change")
	}
	if n, c := sums("logLevel: 3"); n != node || c != controller {
		t.Error("logLevel: got changed checksums, want equal ones")
	}
	if n, c := sums("config: {maxVolumesPerNode: 8}"); n == node || c != controller {
		t.Error("config.maxVolumesPerNode: want only the checksum of the nodes' pod template to change")
	}
}

// TestPoolMounts checks which directories of the node the driver's container mounts for the paths of pools.
func TestPoolMounts(t *testing.T) {
	for _, tc := range []struct{ paths, want string }{
		{"/var/lib/trivet/pools/default", ""}, // the state directory is mounted anyway
		{"/mnt/nvme/trivet", "/mnt/nvme"},     // the parent, so that a disk that is mounted later is visible
		{"/mnt/a /mnt/b", "/mnt"},             // one mount for two pools
		{"/mnt/a /mnt/deep/b", "/mnt"},        // no mount inside another
		{"/data", "/data"},                    // the parent is the root directory of the node
		{"/var/pool", "/var/pool"},            // the parent contains the kubelet's directory
		{"/var/lib/pool/ /srv/x", "/srv /var/lib/pool"},
	} {
		values := "pools:\n  default: null\n"
		for i, path := range strings.Fields(tc.paths) {
			values += "  p" + string(rune('0'+i)) + ": {directory: {path: " + path + "}}\n"
		}
		pod := one[*appsv1.DaemonSet](t, template(t, values)).Spec.Template
		var got []string
		for _, m := range container(pod, "trivet").VolumeMounts {
			if !strings.HasPrefix(m.Name, "pool-") {
				continue
			}
			got = append(got, m.MountPath)
			if m.MountPropagation == nil || *m.MountPropagation != corev1.MountPropagationHostToContainer {
				t.Errorf("%s: got mount propagation %v of %s, want HostToContainer", tc.paths, m.MountPropagation, m.MountPath)
			}
			for _, v := range pod.Spec.Volumes {
				if v.Name == m.Name && v.HostPath.Path != m.MountPath {
					t.Errorf("%s: got hostPath %s mounted at %s, want equal paths", tc.paths, v.HostPath.Path, m.MountPath)
				}
			}
		}
		if strings.Join(got, " ") != tc.want {
			t.Errorf("%s: got mounts %q, want %q", tc.paths, got, tc.want)
		}
	}
}

// TestStorageClasses checks the StorageClasses of everything.
func TestStorageClasses(t *testing.T) {
	classes := map[string]*storagev1.StorageClass{}
	for _, c := range ofType[*storagev1.StorageClass](template(t, everything, externalAPIs)) {
		classes[c.Name] = c
	}
	thin, thick := classes["thin"], classes["thick"]
	if len(classes) != 2 || thin == nil || thick == nil {
		t.Fatalf("got classes %v, want thin and thick", classes)
	}
	if thin.Annotations["storageclass.kubernetes.io/is-default-class"] != "true" || thick.Annotations["storageclass.kubernetes.io/is-default-class"] != "" {
		t.Errorf("got annotations %v of thin and %v of thick, want only thin to be the default class", thin.Annotations, thick.Annotations)
	}
	if !*thin.AllowVolumeExpansion || *thick.AllowVolumeExpansion {
		t.Errorf("got allowVolumeExpansion %t of thin and %t of thick, want true and false", *thin.AllowVolumeExpansion, *thick.AllowVolumeExpansion)
	}
	if thick.Provisioner != "storage.example.com" || thick.Parameters["pool"] != "default" || thick.Parameters["mkfsOptions"] != "-i size=1024" ||
		thick.Parameters["csi.storage.k8s.io/fstype"] != "xfs" || thick.Parameters["allocation"] != "thick" {
		t.Errorf("got provisioner %s and parameters %v of thick, want those of everything", thick.Provisioner, thick.Parameters)
	}
}

// TestDiskClasses checks that a class of a pool of disks has the backend disk and no allocation.
func TestDiskClasses(t *testing.T) {
	const values = `pools: {default: null, fast: {disks: {match: [/dev/disk/by-id/nvme-*]}, storageClasses: [{name: plain}, {name: large, fsType: xfs, parameters: {mkfsOptions: -i size=1024}}]}}`
	want := map[string]map[string]string{
		"plain": {"backend": "disk", "pool": "fast"},
		"large": {"backend": "disk", "pool": "fast", "csi.storage.k8s.io/fstype": "xfs", "mkfsOptions": "-i size=1024"},
	}
	classes := ofType[*storagev1.StorageClass](template(t, values))
	for _, c := range classes {
		if !maps.Equal(c.Parameters, want[c.Name]) || *c.VolumeBindingMode != storagev1.VolumeBindingWaitForFirstConsumer {
			t.Errorf("%s: got parameters %v and binding mode %s, want %v and WaitForFirstConsumer", c.Name, c.Parameters, *c.VolumeBindingMode, want[c.Name])
		}
	}
	if len(classes) != len(want) {
		t.Errorf("got %d classes, want %d", len(classes), len(want))
	}
}

// TestVolumeGroup checks that a class of a pool of a volume group has the backend lvm, and that the driver shares the
// locks of LVM with the node only if there is such a pool.
func TestVolumeGroup(t *testing.T) {
	const values = `pools: {default: null, fast: {lvm: {volumeGroup: vg0}, storageClasses: [{name: plain}, {name: large, fsType: xfs}]}}`
	want := map[string]map[string]string{
		"plain": {"backend": "lvm", "pool": "fast"},
		"large": {"backend": "lvm", "pool": "fast", "csi.storage.k8s.io/fstype": "xfs"},
	}
	all := template(t, values, externalAPIs)
	for _, c := range ofType[*storagev1.StorageClass](all) {
		if !maps.Equal(c.Parameters, want[c.Name]) {
			t.Errorf("%s: got parameters %v, want %v", c.Name, c.Parameters, want[c.Name])
		}
	}
	if got := parsed(t, all, "trivet-node-config").Pools[0].Section; !reflect.DeepEqual(got, &lvm.Group{VolumeGroup: "vg0"}) {
		t.Errorf("got the section %+v in the configuration, want vg0", got)
	}
	const thin = `pools: {default: null, fast: {lvm: {volumeGroup: vg0, thinPool: pool0}, size: 1Ti, reserve: 5%, overcommit: 2, freezeLimit: 20s}}`
	if got := parsed(t, template(t, thin, externalAPIs), "trivet-node-config").Pools[0]; !reflect.DeepEqual(got.Section, &lvm.Group{VolumeGroup: "vg0", ThinPool: "pool0"}) || got.Overcommit != 2 {
		t.Errorf("got the pool %+v in the configuration, want one with a thin pool", got)
	}
	for values, want := range map[string]bool{values: true, `pools: {default: {directory: {path: /srv/a}}}`: false} {
		pod := one[*appsv1.DaemonSet](t, template(t, values, externalAPIs)).Spec.Template.Spec
		shares := slices.ContainsFunc(pod.Volumes, func(v corev1.Volume) bool { return v.HostPath != nil && v.HostPath.Path == "/run/lock/lvm" })
		if shares != want {
			t.Errorf("%s: the pod has the locks of LVM: %t, want %t", values, shares, want)
		}
	}
}

// TestNamesLikeNumbers checks that the templates quote names that YAML would parse as numbers.
func TestNamesLikeNumbers(t *testing.T) {
	const values = `
driverName: "1.2"
pools: {"1": {directory: {path: /srv/1}, storageClasses: [{name: "123"}]}}
imagePullSecrets: ["1"]
node: {serviceAccount: {name: "1e3"}, priorityClassName: "1", podDisruptionBudget: {enabled: true}}
controller: {serviceAccount: {name: "1e4"}, priorityClassName: "1"}
certificates: {certManager: {enabled: true, issuerRef: {name: "5"}}}
snapshots: {enabled: true, classes: [{name: "7"}], groups: true, metadata: {enabled: true, secretName: "8", caCert: "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n"}}
metrics: {serviceMonitor: {enabled: true}, prometheusRule: {enabled: true}, grafanaDashboard: {enabled: true}}
networkPolicy: {enabled: true}
`
	for _, more := range []string{"plainManifests=false", "plainManifests=true", "shape=oneNode"} {
		file := filepath.Join(t.TempDir(), "values.yaml")
		must(t, os.WriteFile(file, []byte(values), 0o600))
		stdout, stderr, ok := tryHelm(t, "template", "99", chart, "--namespace", "42", "--values", file, "--set", more, externalAPIs)
		if !ok {
			t.Fatal(stderr)
		}
		for _, text := range decode(t, stdout).foreign {
			var object map[string]any
			if err := yaml.Unmarshal([]byte(text), &object); err != nil {
				t.Error(err)
			}
		}
	}
}

// snapshotClass is a VolumeSnapshotClass or VolumeGroupSnapshotClass.
type snapshotClass struct {
	Metadata struct {
		Name        string
		Annotations map[string]string
	}
	Driver         string
	DeletionPolicy string `yaml:"deletionPolicy"`
	Parameters     map[string]string
}

// decoded returns the objects of a kind that belongs to a foreign API.
func decoded[T any](t *testing.T, all objects, kind string) (found []T) {
	t.Helper()
	for _, text := range all.foreign {
		var one T
		if !strings.Contains(text, "kind: "+kind+"\n") {
			continue
		}
		must(t, yaml.Unmarshal([]byte(text), &one))
		found = append(found, one)
	}
	return found
}

// TestSnapshotClasses checks that each class also exists for groups if groups are enabled, and that the
// driver accepts its parameters.
func TestSnapshotClasses(t *testing.T) {
	for kind, isDefault := range map[string]string{
		"VolumeSnapshotClass":      "snapshot.storage.kubernetes.io/is-default-class",
		"VolumeGroupSnapshotClass": "groupsnapshot.storage.kubernetes.io/is-default-class",
	} {
		classes := decoded[snapshotClass](t, template(t, everything, externalAPIs), kind)
		if len(classes) != 2 || classes[0].Metadata.Name != "often" || classes[1].Metadata.Name != "kept" {
			t.Fatalf("%s: got classes %+v, want often and kept", kind, classes)
		}
		often, kept := classes[0], classes[1]
		if often.Metadata.Annotations[isDefault] != "true" || often.Metadata.Annotations["note"] != "x" || len(kept.Metadata.Annotations) != 0 {
			t.Errorf("%s: got annotations %v of often and %v of kept, want often to be the default class with a note", kind, often.Metadata.Annotations, kept.Metadata.Annotations)
		}
		if often.Driver != "storage.example.com" || often.DeletionPolicy != "Delete" || kept.DeletionPolicy != "Retain" {
			t.Errorf("%s: got %+v and %+v, want driver storage.example.com with deletion policies Delete and Retain", kind, often, kept)
		}
		for class, want := range map[*snapshotClass]volume.Consistency{&often: volume.ConsistencyCrash, &kept: volume.ConsistencyFrozen} {
			if p, err := volume.ParseSnapshotParameters(class.Parameters); err != nil || p.Consistency != want {
				t.Errorf("%s: got %v and error %v from the parameters %v, want consistency %v", kind, p, err, class.Parameters, want)
			}
		}
	}
}

// TestSnapshotsDisabled checks that disabled features of snapshots have no objects and no permissions.
func TestSnapshotsDisabled(t *testing.T) {
	for values, want := range map[string][]string{"": nil, "snapshots: {enabled: true}": {"VolumeSnapshotClass"}} {
		all := template(t, values, externalAPIs)
		var kinds []string
		for _, text := range all.foreign {
			_, kind, _ := strings.Cut(text, "kind: ")
			kind, _, _ = strings.Cut(kind, "\n")
			kinds = append(kinds, kind)
		}
		if !slices.Equal(kinds, want) {
			t.Errorf("%q: got objects %q, want %q", values, kinds, want)
		}
		allowed := slices.Collect(maps.Keys(writes(t, all, "trivet-controller")))
		for _, resource := range []string{"volumegroupsnapshotcontents", "tokenreviews", "subjectaccessreviews"} {
			if slices.Contains(allowed, resource) {
				t.Errorf("%q: got permissions of the controller for %s, want none", values, resource)
			}
		}
	}
}

// TestSnapshotMetadata checks that backup programs can find the sidecar by the name of the driver, and can
// connect to it in both shapes.
func TestSnapshotMetadata(t *testing.T) {
	for pod, values := range map[string]string{"trivet-controller": everything, "trivet": oneNode + everything} {
		all := template(t, values, externalAPIs)
		services := decoded[struct {
			Metadata struct{ Name string }
			Spec     struct {
				Address, Audience string
				CACert            string `yaml:"caCert"`
			}
		}](t, all, "SnapshotMetadataService")
		if len(services) != 1 || services[0].Metadata.Name != "storage.example.com" || services[0].Spec.Address != "trivet-snapshot-metadata.trivet-system:443" {
			t.Fatalf("%s: got SnapshotMetadataServices %+v, want storage.example.com with the address of the Service", pod, services)
		}
		if services[0].Spec.Audience != "storage.example.com" {
			t.Errorf("%s: got audience %q, want storage.example.com", pod, services[0].Spec.Audience)
		}
		if ca, err := base64.StdEncoding.DecodeString(services[0].Spec.CACert); err != nil || !strings.HasPrefix(string(ca), "-----BEGIN CERTIFICATE-----\n") {
			t.Errorf("%s: got CA %q and error %v, want a certificate in PEM", pod, ca, err)
		}
		sidecar := container(pods(all)[pod], "csi-snapshot-metadata")
		for _, flag := range []string{"--port=9812", "--tls-cert=/tls/tls.crt", "--tls-key=/tls/tls.key"} {
			if !slices.Contains(sidecar.Args, flag) {
				t.Errorf("%s: got arguments %q, want %s", pod, sidecar.Args, flag)
			}
		}
		service := named[*corev1.Service](t, all, "trivet-snapshot-metadata")
		target := service.Spec.Ports[0]
		if target.Port != 443 || !slices.Contains(sidecar.Ports, corev1.ContainerPort{Name: target.TargetPort.StrVal, ContainerPort: 9812, Protocol: corev1.ProtocolTCP}) {
			t.Errorf("%s: got service port %v and container ports %v, want 443 and 9812", pod, target, sidecar.Ports)
		}
		if !selects(service.Spec.Selector, pods(all)[pod]) {
			t.Errorf("%s: got selector %v of the service, want one that matches the pod", pod, service.Spec.Selector)
		}
		policy := named[*networkingv1.NetworkPolicy](t, all, pod)
		if from, open := ports(policy.Spec.Ingress)[target.TargetPort.StrVal]; !open || len(from) != 0 {
			t.Errorf("%s: got port open: %t, to %v, want it open to all", pod, open, from)
		}
	}
}

// TestMissingSnapshotAPIs checks that the error names the missing API.
func TestMissingSnapshotAPIs(t *testing.T) {
	const metadata = `{enabled: true, metadata: {enabled: true, secretName: a, caCert: "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----"}}`
	for values, api := range map[string]string{
		"snapshots: {enabled: true, groups: true}": "groupsnapshot.storage.k8s.io/v1",
		"snapshots: " + metadata:                   "cbt.storage.k8s.io/v1beta1",
	} {
		checkMessage(t, values, []string{"the cluster has no API " + api}, "--api-versions=snapshot.storage.k8s.io/v1")
	}
}
