package chart

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	storagev1 "k8s.io/api/storage/v1"

	"github.com/trivet-csi/trivet/driver"
)

// everything switches all of the chart on, with more than one of what can be many.
const everything = `
driverName: storage.example.com
kubeletDir: /var/lib/k0s/kubelet
stateDir: /srv/state
pools:
- name: default
  directory: {path: /srv/pools/default}
  maxVolumes: 1000000
  storageClasses:
  - {name: thin, default: true, labels: {tier: one}, annotations: {note: x}, mountOptions: [noatime]}
  - {name: thick, fsType: xfs, allocation: thick, reclaimPolicy: Retain, allowVolumeExpansion: false, parameters: {mkfsOptions: -i size=1024}}
- name: fast
  directory: {path: /mnt/nvme}
  requireMount: true
  uuid: 3f0c9a52-6f1e-4b7d-9a53-0d6a7f6f2b11
  size: 800Gi
  reserve: 5%
  overcommit: 1.5
config: {maxVolumesPerNode: 1000000, pprof: true}
snapshots: {enabled: true, class: {default: true}}
image: {tag: v1.2.3, digest: "sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"}
imagePullSecrets: [registry]
sidecars:
  seLinuxOptions: {type: spc_t}
nodeSelector: {kubernetes.io/hostname: one}
affinity: {nodeAffinity: {requiredDuringSchedulingIgnoredDuringExecution: {nodeSelectorTerms: [{matchExpressions: [{key: disk, operator: Exists}]}]}}}
podLabels: {team: storage}
podAnnotations: {note: x}
serviceAccount: {annotations: {note: x}}
podDisruptionBudget: {enabled: true}
networkPolicy: {enabled: true, metricsFrom: [{namespaceSelector: {}}], apiServer: {cidrs: [10.0.0.1/32]}}
metrics:
  serviceMonitor: {enabled: true, labels: {release: prometheus}}
  prometheusRule: {enabled: true, labels: {release: prometheus}}
  grafanaDashboard: {enabled: true, annotations: {folder: x}}
`

// theirAPIs are what everything wants of the cluster.
const theirAPIs = "--api-versions=snapshot.storage.k8s.io/v1,monitoring.coreos.com/v1"

func TestLint(t *testing.T) {
	if stdout, stderr, ok := tryHelm(t, "lint", "--strict", chart); !ok {
		t.Error(stdout, stderr)
	}
}

func TestManifestsAreCurrent(t *testing.T) {
	have, err := os.ReadFile(manifests)
	if err != nil {
		t.Fatal(err)
	}
	stdout, stderr, ok := tryHelm(t, "template", release, chart, "--namespace", namespace, "--set", "plainManifests=true")
	if !ok {
		t.Fatal(stderr)
	}
	if _, objects, _ := strings.Cut(string(have), "\n---\n"); objects != strings.TrimPrefix(stdout, "---\n") {
		t.Error("deploy/trivet.yaml is not what the chart renders: run `make manifests`")
	}
	if strings.Contains(stdout, "Helm") || strings.Contains(stdout, "helm.sh") {
		t.Error("deploy/trivet.yaml speaks of Helm")
	}
}

// TestRenders decodes all that the chart can render by the types of the API.
func TestRenders(t *testing.T) {
	for name, values := range map[string]string{
		"defaults": "", "plain": "plainManifests: true", "no classes": "pools: [{name: p, directory: {path: /srv/p}}]",
		"everything": everything, "few": "attachRequired: false\nstorageCapacity: {enabled: false}\nmetrics: {service: false}\ntest: {enabled: false}\ntolerations: []",
	} {
		t.Run(name, func(t *testing.T) { template(t, values, theirAPIs) })
	}
}

// TestConfiguration gives the driver's own parser what the ConfigMap has.
func TestConfiguration(t *testing.T) {
	for name, values := range map[string]string{"defaults": "", "everything": everything} {
		t.Run(name, func(t *testing.T) {
			c, err := driver.ParseConfig([]byte(one[*corev1.ConfigMap](t, without(template(t, values, theirAPIs), "dashboard")).Data["config.yaml"]))
			if err != nil {
				t.Fatal(err)
			}
			if name == "everything" && (len(c.Pools) != 2 || c.MaxVolumesPerNode != 1000000 || c.Pools[0].MaxVolumes != 1000000 || !c.Pools[1].RequireMount) {
				t.Errorf("the driver reads %+v", c)
			}
		})
	}
}

// without leaves ConfigMaps out whose name has a word.
func without(all objects, word string) objects {
	for i, o := range all.known {
		if m, ok := o.(*corev1.ConfigMap); ok && strings.Contains(m.Name, word) {
			all.known = slices.Delete(slices.Clone(all.known), i, i+1)
			break
		}
	}
	return all
}

func TestAttachRequired(t *testing.T) {
	for values, want := range map[string]bool{"": true, "attachRequired: false": false} {
		all := template(t, values)
		if got := *one[*storagev1.CSIDriver](t, all).Spec.AttachRequired; got != want {
			t.Errorf("%q: the CSIDriver has attachRequired: %t", values, got)
		}
		if got := container(one[*appsv1.DaemonSet](t, all), "csi-attacher") != nil; got != want {
			t.Errorf("%q: attacher in the pod: %t", values, got)
		}
		for _, rule := range one[*rbacv1.ClusterRole](t, all).Rules {
			if slices.Contains(rule.Resources, "volumeattachments") && slices.Contains(rule.Verbs, "patch") && !want {
				t.Errorf("%q: the right to change VolumeAttachments is there", values)
			}
		}
	}
}

func container(set *appsv1.DaemonSet, name string) *corev1.Container {
	for i, c := range set.Spec.Template.Spec.Containers {
		if c.Name == name {
			return &set.Spec.Template.Spec.Containers[i]
		}
	}
	return nil
}

// TestConfigurationRestarts: the driver reads its configuration when it starts.
func TestConfigurationRestarts(t *testing.T) {
	sum := func(values string) string {
		return one[*appsv1.DaemonSet](t, template(t, values)).Spec.Template.Annotations["checksum/config"]
	}
	if a, b := sum(""), sum("config: {pprof: true}"); a == "" || a == b {
		t.Error("another configuration does not change the pod's template")
	}
	if sum("") != sum("logLevel: 3") {
		t.Error("the checksum is of more than the configuration")
	}
}

// TestPoolMounts: what of the node is in the driver's container, for a pool's path.
func TestPoolMounts(t *testing.T) {
	for _, tc := range []struct{ paths, want string }{
		{"/var/lib/trivet/pools/default", ""}, // in the state directory
		{"/mnt/nvme/trivet", "/mnt/nvme"},     // a disk mounted at /mnt/nvme later shows
		{"/mnt/a /mnt/b", "/mnt"},             // once
		{"/mnt/a /mnt/deep/b", "/mnt"},        // inside another
		{"/data", "/data"},                    // not all of the node
		{"/var/pool", "/var/pool"},            // nor what has the kubelet's directory
		{"/var/lib/pool/ /srv/x", "/srv /var/lib/pool"},
	} {
		values := "pools:\n"
		for i, path := range strings.Fields(tc.paths) {
			values += "- {name: p" + string(rune('0'+i)) + ", directory: {path: " + path + "}}\n"
		}
		set := one[*appsv1.DaemonSet](t, template(t, values))
		var got []string
		for _, m := range container(set, "trivet").VolumeMounts {
			if !strings.HasPrefix(m.Name, "pool-") {
				continue
			}
			got = append(got, m.MountPath)
			if m.MountPropagation == nil || *m.MountPropagation != corev1.MountPropagationHostToContainer {
				t.Errorf("%s: %s is mounted without HostToContainer", tc.paths, m.MountPath)
			}
			for _, v := range set.Spec.Template.Spec.Volumes {
				if v.Name == m.Name && v.HostPath.Path != m.MountPath {
					t.Errorf("%s: the node's %s is mounted at %s", tc.paths, v.HostPath.Path, m.MountPath)
				}
			}
		}
		if strings.Join(got, " ") != tc.want {
			t.Errorf("%s: mounted are %q, want %q", tc.paths, got, tc.want)
		}
	}
}

func TestStorageClasses(t *testing.T) {
	classes := map[string]*storagev1.StorageClass{}
	for _, o := range template(t, everything, theirAPIs).known {
		if c, ok := o.(*storagev1.StorageClass); ok {
			classes[c.Name] = c
		}
	}
	thin, thick := classes["thin"], classes["thick"]
	if len(classes) != 2 || thin == nil || thick == nil {
		t.Fatalf("classes: %v", classes)
	}
	if thin.Annotations["storageclass.kubernetes.io/is-default-class"] != "true" || thick.Annotations["storageclass.kubernetes.io/is-default-class"] != "" {
		t.Error("thin and only thin is to be the default")
	}
	if !*thin.AllowVolumeExpansion || *thick.AllowVolumeExpansion {
		t.Error("allowVolumeExpansion: want true by default, and false where it says so")
	}
	if thick.Provisioner != "storage.example.com" || thick.Parameters["pool"] != "default" || thick.Parameters["mkfsOptions"] != "-i size=1024" ||
		thick.Parameters["csi.storage.k8s.io/fstype"] != "xfs" || thick.Parameters["allocation"] != "thick" {
		t.Errorf("thick: %s, %v", thick.Provisioner, thick.Parameters)
	}
}

// TestNamesLikeNumbers: what YAML would take for a number, if it were not quoted.
func TestNamesLikeNumbers(t *testing.T) {
	const values = `
driverName: "12"
pools: [{name: "1", directory: {path: /srv/1}, storageClasses: [{name: "123"}]}]
imagePullSecrets: ["1"]
serviceAccount: {name: "1e3"}
priorityClassName: "1"
snapshots: {enabled: true, class: {name: "7"}}
metrics: {serviceMonitor: {enabled: true}, prometheusRule: {enabled: true}, grafanaDashboard: {enabled: true}}
networkPolicy: {enabled: true}
podDisruptionBudget: {enabled: true}
`
	for _, more := range []string{"plainManifests=false", "plainManifests=true"} {
		file := filepath.Join(t.TempDir(), "values.yaml")
		if err := os.WriteFile(file, []byte(values), 0o600); err != nil {
			t.Fatal(err)
		}
		stdout, stderr, ok := tryHelm(t, "template", "99", chart, "--namespace", "42", "--values", file, "--set", more, theirAPIs)
		if !ok {
			t.Fatal(stderr)
		}
		decode(t, stdout)
	}
}
