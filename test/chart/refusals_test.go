package chart

import (
	"os"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"
)

// TestRefusals checks that the chart refuses invalid values with an error that names the value and the
// reason.
func TestRefusals(t *testing.T) {
	pools := func(pool string) string { return "pools: {p: {directory: {path: /srv/p}, " + pool + "}}" }
	for _, tc := range []struct {
		name, values string
		texts        []string
	}{
		// Refused by the schema.
		{"unknown key", "imagee: {}", []string{"imagee is not a key", "did you mean image?"}},
		{"misspelled key", "nfs: {exprot: /e}", []string{"nfs.exprot is not a key", "did you mean export?"}},
		{"unknown key of a pool", pools("siez: 1Gi"), []string{"pools.p.siez is not a key", "did you mean size?"}},
		{"unknown key of a class", "nfs: {storageClasses: [{name: a, exprot: /e}]}", []string{"nfs.storageClasses[0].exprot is not a key", "did you mean export?"}},
		{"unknown key without a similar one", "snapshots: {xyz: 1}", []string{"snapshots.xyz is not a key", "known there are classes, enabled, groups, metadata"}},
		{"key of a pod at the top", "tolerations: []", []string{"tolerations is not a key"}},
		{"unknown shape", "shape: twoNodes", []string{"/shape"}},
		{"unknown key of a sidecar", "sidecars: {attacher: {worker: 1}}", []string{"sidecars.attacher.worker is not a key", "did you mean workers?"}},
		{"driver name in capitals", "driverName: CSI.trivet.dev", []string{"/driverName"}},
		{"long driver name", "driverName: " + strings.Repeat("a", 64), []string{"/driverName"}},
		{"relative kubelet directory", "kubeletDir: var/lib/kubelet", []string{"/kubeletDir"}},
		{"path with ..", "stateDir: /var/lib/../x", []string{"/stateDir"}},
		{"no storage", "pools: []", []string{"pools is empty", "nfs.server"}},
		{"pool name in capitals", "pools: {Fast: {directory: {path: /srv/p}}}", []string{"pools.Fast: must be a name"}},
		{"pool name that begins with a dash", "pools: {-a: {directory: {path: /srv/p}}}", []string{"pools.-a: must be a name"}},
		{"pool without path", "pools: {p: {directory: {}}}", []string{"/pools/p/directory", "path"}},
		{"fractional pool size", pools("size: 1.5Gi"), []string{"/pools/p/size"}},
		{"pool size without a unit", pools("size: 10"), []string{"/pools/p/size"}},
		{"reserve over 100%", pools("reserve: 200%"), []string{"/pools/p/reserve"}},
		{"overcommit below 1", pools("overcommit: 0.5"), []string{"/pools/p/overcommit"}},
		{"invalid UUID", pools("uuid: abc"), []string{"/pools/p/uuid"}},
		{"unknown filesystem", pools("storageClasses: [{name: a, fsType: ext3}]"), []string{"/pools/p/storageClasses/0/fsType"}},
		{"unknown allocation", pools("storageClasses: [{name: a, allocation: fat}]"), []string{"/pools/p/storageClasses/0/allocation"}},
		{"unknown reclaim policy", pools("storageClasses: [{name: a, reclaimPolicy: Recycle}]"), []string{"reclaimPolicy"}},
		{"class without a name", pools("storageClasses: [{fsType: ext4}]"), []string{"/pools/p/storageClasses/0", "name"}},
		{"parameter that is not a string", pools("storageClasses: [{name: a, parameters: {x: 1}}]"), []string{"/parameters/x"}},
		{"tag that is not a version", "sidecars: {resizer: {tag: latest}}", []string{"/sidecars/resizer/tag"}},
		{"invalid digest", "image: {digest: abc}", []string{"/image/digest"}},
		{"duration without a unit", "storageCapacity: {pollInterval: 10}", []string{"/storageCapacity/pollInterval"}},
		{"short grace period", "node: {terminationGracePeriodSeconds: 10}", []string{"/node/terminationGracePeriodSeconds"}},
		{"grace period of the controller shorter than its preStop", "controller: {terminationGracePeriodSeconds: 25}", []string{"/controller/terminationGracePeriodSeconds"}},
		{"maxSurge", "node: {updateStrategy: {rollingUpdate: {maxSurge: 1}}}", []string{"node.updateStrategy.rollingUpdate.maxSurge is not a key", "known there are maxUnavailable"}},
		{"maxUnavailable 0", "node: {updateStrategy: {rollingUpdate: {maxUnavailable: 0}}}", []string{"/node/updateStrategy/rollingUpdate/maxUnavailable"}},
		{"maxUnavailable 0%", "node: {updateStrategy: {rollingUpdate: {maxUnavailable: 0%}}}", []string{"/node/updateStrategy/rollingUpdate/maxUnavailable"}},
		{"label of the selector: name", "node: {podLabels: {app.kubernetes.io/name: x}}", []string{"/node/podLabels/app.kubernetes.io~1name"}},
		{"label of the selector: instance", "controller: {podLabels: {app.kubernetes.io/instance: x}}", []string{"/controller/podLabels/app.kubernetes.io~1instance"}},
		{"label of the selector: component", "controller: {podLabels: {app.kubernetes.io/component: node}}", []string{"/controller/podLabels/app.kubernetes.io~1component"}},
		{"class label that the chart sets", pools("storageClasses: [{name: a, labels: {app.kubernetes.io/name: x}}]"), []string{"/storageClasses/0/labels"}},
		{"annotation for the default class", pools(`storageClasses: [{name: a, annotations: {storageclass.kubernetes.io/is-default-class: "true"}}]`), []string{"/storageClasses/0/annotations"}},
		{"pod annotation that the chart sets", "node: {podAnnotations: {checksum/config: x}}", []string{"/node/podAnnotations"}},
		{"removed section", "config: null", []string{"config"}},
		{"removed ports", "ports: null", []string{"ports"}},
		{"removed port", "ports: {registrar: null}", []string{"/ports", "registrar"}},
		{"removed timeout", "sidecars: {resizer: {timeout: null}}", []string{"/sidecars/resizer", "timeout"}},
		{"pod affinity", "node: {affinity: {podAffinity: {}}}", []string{"node.affinity.podAffinity is not a key", "did you mean nodeAffinity?"}},
		{"export without a server", "pools: {p: {nfs: {export: /e}}}", []string{"/pools/p/nfs", "server"}},
		{"server that contains the export", "pools: {p: {nfs: {server: 'nas:/e', export: /e}}}", []string{"/pools/p/nfs/server"}},
		{"relative export", "pools: {p: {nfs: {server: nas, export: e}}}", []string{"/pools/p/nfs/export"}},
		{"export with ..", "pools: {p: {nfs: {server: nas, export: /e/../f}}}", []string{"/pools/p/nfs/export"}},
		{"unknown log format", "logFormat: xml", []string{"/logFormat"}},
		{"variable without a name", "env: [{value: x}]", []string{"/env/0"}},
		{"unknown key of a variable", "env: [{name: X, vallue: x}]", []string{"env[0].vallue is not a key of this chart: did you mean value?"}},
		{"unknown fencing", "pools: {p: {nfs: {server: nas, export: /e, fencing: maybe}}}", []string{"/pools/p/nfs/fencing"}},
		{"outage without a unit", "pools: {p: {nfs: {server: nas, export: /e, outage: 600}}}", []string{"/pools/p/nfs/outage"}},
		{"class without an export", "nfs: {storageClasses: [{name: a, server: nas}]}", []string{"storageClass a", "nfs.export"}},
		{"server without an export", "nfs: {server: nas}", []string{"storageClass trivet-nfs", "nfs.export"}},
		{"export without a server of the section", "nfs: {export: /e}", []string{"nfs.server is missing", "/e"}},
		{"pool without an export", "pools: {p: {nfs: {server: nas}}}", []string{"pools.p.nfs.export is missing"}},
		{"class of a pool with a server", pools("storageClasses: [{name: a, server: nas}]"), []string{"pools.p.storageClasses[0].server is not a key"}},
		{"no replicas", "controller: {replicas: 0}", []string{"/controller/replicas"}},
		{"duration in days", "certificates: {certManager: {duration: 365d}}", []string{"/certificates/certManager/duration"}},
		{"fractional memory of inline volumes", "ephemeral: {enabled: true, memory: 1.5Gi}", []string{"/ephemeral/memory"}},
		{"privileged port", "ports: {metrics: 80}", []string{"/ports/metrics"}},

		// Refused by the chart.
		{"old sidecar", "sidecars: {provisioner: {tag: v5.0.0}}", []string{"sidecars.provisioner.tag v5.0.0 is too old", "v6.3.0"}},
		{"old release candidate of a sidecar", "sidecars: {resizer: {tag: v2.1.9-rc1}}", []string{"sidecars.resizer.tag", "too old"}},
		{"two default classes", pools("storageClasses: [{name: a, default: true}, {name: b, default: true}]"), []string{"a, b are all default"}},
		{"two classes with one name", pools("storageClasses: [{name: a}, {name: a}]"), []string{"two storageClasses are named a"}},
		{"list of pools", "pools: [{name: fast, directory: {path: /srv/fast}, size: 1Gi}]", []string{"pools is a list, but must be a map by name", "\npools:\n  default: null\n  fast:\n    directory:\n      path: /srv/fast\n    size: 1Gi\n"}},
		{"list of pools with the default pool", "pools: [{name: default, directory: {path: /srv/p}}]", []string{"\npools:\n  default:\n    directory:\n      path: /srv/p\n"}},
		{"two pools with one path", "pools: {a: {directory: {path: /srv/p}}, b: {directory: {path: /srv/p/}}}", []string{"pools.b.directory.path /srv/p: pool a already has that location"}},
		{"pool inside another", "pools: {a: {directory: {path: /srv/p}}, b: {directory: {path: /srv/p/q/}}}", []string{"pools.b.directory.path /srv/p/q: pool b is inside pool a"}},
		{"pool that contains another", "pools: {a: {directory: {path: /srv/p/q}}, b: {directory: {path: /srv/p}}}", []string{"pools.b.directory.path /srv/p: pool a is inside pool b"}},
		{"export inside another", "pools: {a: {nfs: {server: nas, export: /}}, b: {nfs: {server: NAS, export: /e}}}", []string{"pools.b.nfs.export nas:/e: pool b is inside pool a"}},
		{"size of only one of two exports of a server", "pools: {a: {nfs: {server: nas, export: /e}, size: 1Gi}, b: {nfs: {server: NAS, export: /f}}}", []string{"pools.b.size: pools a and b are exports of server nas"}},
		{"pool in /etc", "pools: {p: {directory: {path: /etc/p}}}", []string{"pools.p.directory.path /etc/p", "elsewhere"}},
		{"pool in the kubelet's directory", "pools: {p: {directory: {path: /var/lib/kubelet/p}}}", []string{"pools.p.directory.path"}},
		{"pool that is the state directory", "pools: {p: {directory: {path: /var/lib/trivet}}}", []string{"pools.p.directory.path", "own"}},
		{"pool that contains the kubelet's directory", "kubeletDir: /srv/k0s/kubelet\npools: {p: {directory: {path: /srv/k0s}}}", []string{"pools.p.directory.path /srv/k0s", "/srv/k0s/kubelet"}},
		{"pool that contains the state directory", "stateDir: /srv/a/state\npools: {p: {directory: {path: /srv/a}}}", []string{"pools.p.directory.path /srv/a", "stateDir"}},
		{"state directory in /etc", "stateDir: /etc/trivet", []string{"stateDir /etc/trivet", "elsewhere"}},
		{"state directory with the socket", "stateDir: /csi/", []string{"stateDir /csi", "elsewhere"}},
		{"state directory in the kubelet's directory", "stateDir: /var/lib/kubelet/trivet", []string{"stateDir", "/var/lib/kubelet has"}},
		{"state directory that is the kubelet's directory", "stateDir: /var/lib/kubelet", []string{"stateDir", "/var/lib/kubelet has"}},
		{"state directory that contains the kubelet's directory", "stateDir: /var/lib", []string{"stateDir /var/lib", "below"}},
		{"requireMount of a path that the chart mounts", "pools: {p: {directory: {path: /data}, requireMount: true}}", []string{"pools.p.requireMount", "/data"}},
		{"parameter pool", pools("storageClasses: [{name: a, parameters: {pool: x}}]"), []string{"storageClass a", "parameters.pool"}},
		{"pool without a location", "pools: {p: {}}", []string{"pools.p", "directory", "nfs"}},
		{"pool with two locations", pools("nfs: {server: nas, export: /e}"), []string{"pools.p", "one of them"}},
		{"requireMount of an export", "pools: {p: {nfs: {server: nas, export: /e}, requireMount: true}}", []string{"pools.p.requireMount"}},
		{"two pools on one export", "pools: {a: {nfs: {server: nas, export: /e}}, b: {nfs: {server: NAS, export: /e/}}}", []string{"pools.b.nfs.export nas:/e: pool a already has that location"}},
		{"unknown quota", pools("quota: always"), []string{"/pools/p/quota"}},
		{"allocation of a directory", pools("storageClasses: [{name: a, backend: local, allocation: thick}]"), []string{"storageClass a", "allocation"}},
		{"class with backend local in a pool on an export", "pools: {p: {nfs: {server: s, export: /e}, storageClasses: [{name: a, backend: local}]}}", []string{"storageClass a", "pool of the nodes"}},
		{"class with backend nfs in a pool on the nodes", pools("storageClasses: [{name: a, backend: nfs}]"), []string{"storageClass a", "pool with nfs"}},
		{"directories with a filesystem", "pools: {p: {nfs: {server: nas, export: /e}, storageClasses: [{name: a, fsType: xfs}]}}", []string{"storageClass a", "fsType", "backend=loop"}},
		{"directories with an allocation", "nfs: {storageClasses: [{name: a, server: nas, export: /e, allocation: thick}]}", []string{"storageClass a", "allocation"}},
		{"parameter server", pools("storageClasses: [{name: a, parameters: {server: nas, share: /e}}]"), []string{"storageClass a", "parameters.server", "nfs.storageClasses"}},
		{"parameter of a secret", pools(`storageClasses: [{name: a, parameters: {csi.storage.k8s.io/provisioner-secret-name: x}}]`), []string{"storageClass a", "secret"}},
		{"encryption without a secret", pools(`storageClasses: [{name: a, parameters: {encryption: luks2}}]`), []string{"storageClass a", "node-stage-secret-name"}},
		{"disks without a glob", "pools: {p: {disks: {match: []}}}", []string{"/pools/p/disks/match"}},
		{"disks and a directory", pools("disks: {match: [/dev/sd*]}"), []string{"pools.p", "one of them"}},
		{"size of disks", "pools: {p: {disks: {match: [/dev/sd*]}, size: 1Gi}}", []string{"pools.p.size", "one whole disk"}},
		{"volume group with a slash", "pools: {p: {lvm: {volumeGroup: a/b}}}", []string{"/pools/p/lvm/volumeGroup"}},
		{"volume group and a directory", pools("lvm: {volumeGroup: vg0}"), []string{"pools.p", "one of them"}},
		{"size of a volume group", "pools: {p: {lvm: {volumeGroup: vg0}, size: 1Gi}}", []string{"pools.p.size", "free extents"}},
		{"mount of a thin pool", "pools: {p: {lvm: {volumeGroup: vg0, thinPool: a}, requireMount: true}}", []string{"pools.p.requireMount"}},
		{"thin pool with a slash", "pools: {p: {lvm: {volumeGroup: vg0, thinPool: a/b}}}", []string{"/pools/p/lvm/thinPool"}},
		{"class with backend loop in a pool of a volume group", "pools: {p: {lvm: {volumeGroup: vg0}, storageClasses: [{name: a, backend: loop}]}}", []string{"storageClass a", "pool of a volume group"}},
		{"class with backend lvm in a pool of a directory", pools("storageClasses: [{name: a, backend: lvm}]"), []string{"storageClass a", "requires a pool of a volume group"}},
		{"class with backend loop in a pool of disks", "pools: {p: {disks: {match: [/dev/sd*]}, storageClasses: [{name: a, backend: loop}]}}", []string{"storageClass a", "pool of disks"}},
		{"filesystem of a directory of the nodes", pools("storageClasses: [{name: a, backend: local, fsType: xfs}]"), []string{"storageClass a", "fsType"}},
		{"inline volumes on an export", "ephemeral: {enabled: true}\npools: {p: {nfs: {server: nas, export: /e}, ephemeral: true}}", []string{"pools.p.ephemeral", "directory"}},
		{"inline volumes without a pool and memory", "ephemeral: {enabled: true}", []string{"ephemeral.enabled", "ephemeral=true for a pool, or ephemeral.memory"}},
		{"pool for disabled inline volumes", pools("ephemeral: true"), []string{"ephemeral.enabled is false", "in p:"}},
		{"memory for disabled inline volumes", "ephemeral: {memory: 1Gi}", []string{"ephemeral.enabled is false", "in memory:"}},
		{"snapshot class with an unknown consistency", "snapshots: {classes: [{name: a, consistency: clean}]}", []string{"/snapshots/classes/0/consistency"}},
		{"annotation for the default snapshot class", `snapshots: {classes: [{name: a, annotations: {snapshot.storage.kubernetes.io/is-default-class: "true"}}]}`, []string{"/snapshots/classes/0/annotations"}},
		{"two snapshot classes with one name", "snapshots: {classes: [{name: a}, {name: a}]}", []string{"snapshots.classes: two are named a"}},
		{"two default snapshot classes", "snapshots: {classes: [{name: a, default: true}, {name: b, default: true}]}", []string{"snapshots.classes: a, b are all default"}},
		{"groups without snapshots", "snapshots: {groups: true}", []string{"snapshots.groups requires snapshots.enabled=true"}},
		{"protection without snapshots", "protection: {enabled: true}", []string{"protection.enabled requires snapshots.enabled=true"}},
		{"protection on one node", "shape: oneNode\nprotection: {enabled: true}\nsnapshots: {enabled: true}", []string{"protection.enabled requires shape=cluster"}},
		{"metadata without snapshots", "snapshots: {metadata: {enabled: true}}", []string{"snapshots.metadata.enabled requires snapshots.enabled=true"}},
		{"metadata without a Secret", "snapshots: {enabled: true, metadata: {enabled: true}}", []string{"snapshots.metadata.secretName", "trivet-snapshot-metadata.trivet-system"}},
		{"invalid CA", "snapshots: {metadata: {caCert: MIIB}}", []string{"/snapshots/metadata/caCert"}},
		{"freezeLimit without a unit", pools("freezeLimit: 10"), []string{"/pools/p/freezeLimit"}},
		{"freezeLimit of disks", "pools: {p: {disks: {match: [/dev/sd*]}, freezeLimit: 10s}}", []string{"pools.p.freezeLimit", "one whole disk"}},
		{"invalid trim", pools("trim: hourly"), []string{"/pools/p/trim"}},
		{"invalid trimWindow", pools("trimWindow: 1-5"), []string{"/pools/p/trimWindow"}},
		{"trim of disks", "pools: {p: {disks: {match: [/dev/sd*]}, trim: daily}}", []string{"pools.p.trim", "one whole disk"}},
		{"invalid check", pools("check: hourly"), []string{"/pools/p/check"}},
		{"check of disks", "pools: {p: {disks: {match: [/dev/sd*]}, check: daily}}", []string{"pools.p.check", "one whole disk"}},
		{"metrics port that is the health port", "ports: {metrics: 9808}", []string{"ports.metrics", "ports.health"}},
		{"forwarding port that is the metrics port", "ports: {forwarding: 9810}", []string{"ports.metrics", "ports.forwarding"}},
		{"registrar port that is the metrics port", "ports: {registrar: 9810}", []string{"ports.metrics", "ports.registrar"}},
		{"snapshots without their API", "snapshots: {enabled: true}", []string{"snapshots.enabled", "snapshot.storage.k8s.io/v1", "Install"}},
		{"cert-manager without its API", "certificates: {certManager: {enabled: true, issuerRef: {name: a}}}", []string{"certificates.certManager", "cert-manager.io/v1", "Install"}},
		{"cert-manager without an issuer", "certificates: {certManager: {enabled: true}}", []string{"certificates.certManager.issuerRef.name"}},
		{"one ServiceAccount for nodes and controller", "node: {serviceAccount: {name: x}}\ncontroller: {serviceAccount: {name: x}}", []string{"node.serviceAccount.name and controller.serviceAccount.name are both x", "its own"}},
		{"ServiceAccount of the controller for the nodes", "node: {serviceAccount: {name: trivet-controller}}", []string{"both trivet-controller"}},
		{"driver name without a domain", "driverName: storage", []string{"driverName storage", "a dot", "oneNode"}},
		{"short delay of nodeLoss", "controller: {nodeLoss: {delay: 9.5s}}", []string{"controller.nodeLoss.delay 9.5s", "at least 10s"}},
		{"delay of nodeLoss in milliseconds", "controller: {nodeLoss: {delay: 600ms}}", []string{"controller.nodeLoss.delay 600ms"}},
		{"nodeLoss with one node", oneNode + "controller: {nodeLoss: {enabled: true}}", []string{"controller.nodeLoss.enabled", "oneNode"}},
		{"ServiceMonitor without its API", "metrics: {serviceMonitor: {enabled: true}}", []string{"metrics.serviceMonitor", "Prometheus operator"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			checkMessage(t, tc.values, tc.texts)
		})
	}
}

// TestRenewal checks that the chart refuses a CA that would be renewed immediately after its creation.
func TestRenewal(t *testing.T) {
	const values = "certificates: {certManager: {enabled: true, issuerRef: {name: a}, duration: 24h, renewBefore: 24h}}"
	checkMessage(t, values, []string{"certificates.certManager.renewBefore 24h"}, externalAPIs)
}

// TestOneNodeValues checks that, in the shape oneNode, the name of the driver need not be a domain, because
// no certificates are issued, and that conflicting values of the shape cluster are ignored.
func TestOneNodeValues(t *testing.T) {
	template(t, oneNode+"driverName: storage")
	template(t, oneNode+"ports: {forwarding: 9810}")
	template(t, oneNode+"node: {serviceAccount: {name: x}}\ncontroller: {serviceAccount: {name: x}}")
}

// TestLaterSidecars checks that the chart accepts a newer sidecar from a private registry, with a digest.
func TestLaterSidecars(t *testing.T) {
	values := "sidecars: {registry: 'registry.lan:5000/csi', provisioner: {tag: v7.0.0-rc1, digest: 'sha256:" + strings.Repeat("a", 64) + "'}}"
	stdout, stderr, ok := tryTemplate(t, values)
	if !ok {
		t.Fatal(stderr)
	}
	if want := "image: registry.lan:5000/csi/csi-provisioner:v7.0.0-rc1@sha256:" + strings.Repeat("a", 64) + "\n"; !strings.Contains(stdout, want) {
		t.Errorf("got no %q in the manifests", want)
	}
}

// TestSchemaRequires checks that the schema requires every key of values.yaml, so that the chart refuses to
// remove a key with null.
func TestSchemaRequires(t *testing.T) {
	type schema struct {
		Ref        string `yaml:"$ref"`
		Properties map[string]schema
		Required   []string
	}
	var root schema
	var values map[string]any
	for file, into := range map[string]any{"/values.schema.json": &root, "/values.yaml": &values} {
		b, err := os.ReadFile(chart + file)
		if err == nil {
			err = yaml.Unmarshal(b, into)
		}
		must(t, err)
	}
	var check func(path string, s schema, values map[string]any)
	check = func(path string, s schema, values map[string]any) {
		for key, value := range values {
			if !slices.Contains(s.Required, key) {
				t.Errorf("values.schema.json does not require %s/%s", path, key)
			}
			// Maps with arbitrary keys have no properties. Parts of resources, which the schema describes by a
			// reference, may be removed.
			if below, ok := value.(map[string]any); ok && len(s.Properties[key].Properties) > 0 && s.Properties[key].Ref == "" {
				check(path+"/"+key, s.Properties[key], below)
			}
		}
	}
	check("", root, values)
}
