package chart

import (
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	storagev1 "k8s.io/api/storage/v1"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/backend/disk"
	"github.com/trivet-csi/trivet/backend/local"
	"github.com/trivet-csi/trivet/backend/loop"
	"github.com/trivet-csi/trivet/backend/nfs"
	"github.com/trivet-csi/trivet/volume"
)

var volumeKinds = backend.Kinds{loop.Kind, nfs.Kind, local.Kind, disk.Kind}

// exports has pools of both kinds, and an export that is not a pool.
const exports = `
kubeletDir: /var/lib/k0s/kubelet
pools:
  default:
    directory: {path: /srv/pools/default}
    quota: required
    storageClasses: [{name: local}, {name: node-directories, backend: local, parameters: {onDelete: retain}}]
  nas:
    nfs: {server: "[fd00::1]", export: /tank/all volumes, mountOptions: ["nfsvers=4.2,hard", noatime], init: true, fencing: none, outage: 5m}
    size: 8Ti
    maxVolumes: 2000000
    storageClasses:
    - {name: directories, mountOptions: [noatime], parameters: {subDir: "${pvc.metadata.name}", onDelete: archive, mode: "0770"}}
    - {name: images, backend: loop, fsType: xfs, volumeBindingMode: WaitForFirstConsumer}
nfs:
  storageClasses:
  - {name: direct, server: nas.lan, share: /tank/shared}
  - {name: direct-images, backend: loop, server: nas.lan, share: /tank/shared, allocation: thick}
`

// nasOnly has all values of an installation whose volumes are on one server.
const nasOnly = "pools: {default: null}\nnfs: {server: nas.lan, share: /tank/volumes}\n"

// withNFS holds the values that enable NFS volumes.
var withNFS = map[string]string{
	"pool":    "pools: {nas: {nfs: {server: nas.lan, export: /e}}}\n",
	"enabled": "nfs: {enabled: true}\n",
	"server":  nasOnly,
	"class":   "nfs: {storageClasses: [{name: a, server: nas.lan, share: /e}]}\n",
	"all":     exports,
}

// TestNFSNetwork: the connections of a mount are in the network of the pod that mounts. The mounts of
// a node's pod outlive the pod, so it uses the network of the node.
func TestNFSNetwork(t *testing.T) {
	for name, values := range withNFS {
		t.Run(name, func(t *testing.T) {
			all := pods(template(t, values))
			maps.Copy(all, pods(template(t, oneNode+values)))
			for name, pod := range all {
				of, want := pod.Spec, corev1.DNSClusterFirstWithHostNet
				if name == "trivet-controller" {
					want = corev1.DNSClusterFirst
				}
				if of.HostNetwork != (name != "trivet-controller") || of.DNSPolicy != want || of.HostPID || of.HostIPC {
					t.Errorf("%s: in the node's network: %t, DNS: %s", name, of.HostNetwork, of.DNSPolicy)
				}
			}
		})
	}
	for name, pod := range pods(template(t, "")) {
		if pod.Spec.HostNetwork || pod.Spec.DNSPolicy != corev1.DNSDefault {
			t.Errorf("without NFS %s is in the node's network: %t, DNS: %s", name, pod.Spec.HostNetwork, pod.Spec.DNSPolicy)
		}
	}
}

// TestNFSRights: in the controller's pod, only the driver may mount, and remove files of other users.
func TestNFSRights(t *testing.T) {
	for name, values := range withNFS {
		t.Run(name, func(t *testing.T) {
			pod := pods(template(t, values+"sidecars: {seLinuxOptions: {type: spc_t}}\n"))["trivet-controller"].Spec
			if s := pod.SecurityContext; *s.RunAsUser != 0 || s.RunAsNonRoot != nil || s.SeccompProfile.Type != corev1.SeccompProfileTypeRuntimeDefault {
				t.Errorf("it runs as %v", s)
			}
			for _, v := range pod.Volumes {
				if v.EmptyDir == nil && v.ConfigMap == nil && v.Projected == nil {
					t.Errorf("volume %s is not allowed", v.Name)
				}
			}
			for _, c := range pod.Containers {
				s := c.SecurityContext
				var added []corev1.Capability
				if c.Name == "trivet" {
					added = []corev1.Capability{"SYS_ADMIN", "FOWNER", "SETUID", "SETGID", "MKNOD"}
				}
				if !slices.Equal(s.Capabilities.Add, added) || (s.AppArmorProfile != nil) != (added != nil) {
					t.Errorf("%s may %v with AppArmor %v", c.Name, s.Capabilities, s.AppArmorProfile)
				}
				if s.SELinuxOptions == nil || s.SELinuxOptions.Type != "spc_t" || s.RunAsUser != nil {
					t.Errorf("%s: %v", c.Name, s)
				}
				checkContainer(t, c)
				checkUnprivileged(t, c)
			}
		})
	}
	for name, pod := range workloads(t) {
		if name != "trivet-controller" {
			continue
		}
		for _, c := range pod.Spec.Containers {
			if s := c.SecurityContext; len(s.Capabilities.Add) > 0 || s.AppArmorProfile != nil {
				t.Errorf("without NFS %s may %v", c.Name, s)
			}
		}
	}
}

// TestNFSMounts: mounts of images are in the kubelet's directory, and propagate to the node.
func TestNFSMounts(t *testing.T) {
	c := container(pods(template(t, exports))["trivet-node"], "trivet")
	i := slices.IndexFunc(c.VolumeMounts, func(m corev1.VolumeMount) bool { return m.MountPath == "/var/lib/k0s/kubelet" })
	if i < 0 || *c.VolumeMounts[i].MountPropagation != corev1.MountPropagationBidirectional {
		t.Errorf("mounts: %v", c.VolumeMounts)
	}
}

// TestNFSConfiguration parses the ConfigMaps with the driver's parser: every driver has the exports,
// and the drivers of nodes also the directories.
func TestNFSConfiguration(t *testing.T) {
	for name, tc := range map[string]struct {
		values string
		want   []string
	}{
		"trivet-node-config":       {exports, []string{"default", "nas"}},
		"trivet-controller-config": {exports, []string{"nas"}},
		"trivet-config":            {oneNode + exports, []string{"default", "nas"}},
	} {
		c := configuration(t, tc.values, name)
		var have []string
		for _, p := range c.Pools {
			have = append(have, p.Name)
		}
		if !slices.Equal(have, tc.want) {
			t.Fatalf("%s has pools %q, want %q", name, have, tc.want)
		}
		nas := c.Pools[len(c.Pools)-1]
		if n := nas.NFS; n.Server != "[fd00::1]" || n.Export != "/tank/all volumes" || len(n.MountOptions) != 2 || !n.Init || n.Fencing != "none" || n.Outage != "5m" || nas.Size != "8Ti" || nas.MaxVolumes != 2000000 {
			t.Errorf("%s: the driver reads %+v, %+v", name, nas, n)
		}
	}
	for name, values := range withNFS {
		if c := configuration(t, values, "trivet-node-config"); !c.Kubernetes.NFS {
			t.Errorf("%s: the node's driver may not mount exports", name)
		}
		if c := configuration(t, oneNode+values, "trivet-config"); !c.Kubernetes.NFS {
			t.Errorf("%s, one node: the driver may not mount exports", name)
		}
	}
	if c := configuration(t, "", "trivet-node-config"); c.Kubernetes.NFS {
		t.Error("without NFS the node's driver may mount exports, and is not in the node's network")
	}
	if c := configuration(t, withNFS["enabled"], "trivet-controller-config"); len(c.Pools) != 0 {
		t.Errorf("the controller has %v", c.Pools)
	}
}

// TestNFSClasses: the driver accepts the parameters, and the binding mode fits the pool.
func TestNFSClasses(t *testing.T) {
	want := map[string]map[string]string{
		"local":            {"backend": "loop", "pool": "default", "allocation": "thin", "csi.storage.k8s.io/fstype": "ext4"},
		"node-directories": {"backend": "local", "pool": "default", "onDelete": "retain"},

		"directories":   {"backend": "nfs", "pool": "nas", "subDir": "${pvc.metadata.name}", "onDelete": "archive", "mode": "0770"},
		"images":        {"backend": "loop", "pool": "nas", "allocation": "thin", "csi.storage.k8s.io/fstype": "xfs"},
		"direct":        {"backend": "nfs", "server": "nas.lan", "share": "/tank/shared"},
		"direct-images": {"backend": "loop", "server": "nas.lan", "share": "/tank/shared", "allocation": "thick", "csi.storage.k8s.io/fstype": "ext4"},
	}
	for _, c := range ofType[*storagev1.StorageClass](template(t, exports)) {
		if _, err := volumeKinds.Parse(c.Parameters); err != nil || !maps.Equal(c.Parameters, want[c.Name]) {
			t.Errorf("%s: parameters %v, %v", c.Name, c.Parameters, err)
		}
		waits := *c.VolumeBindingMode == storagev1.VolumeBindingWaitForFirstConsumer
		if waits != (c.Name == "local" || c.Name == "node-directories" || c.Name == "images") {
			t.Errorf("%s is bound %s", c.Name, *c.VolumeBindingMode)
		}
		delete(want, c.Name)
	}
	if len(want) > 0 {
		t.Errorf("no classes %v", want)
	}
}

// TestNASOnly: server and share define a class, and the nodes have no pool.
func TestNASOnly(t *testing.T) {
	for _, values := range []string{nasOnly, "pools: []\nnfs: {server: nas.lan, export: /tank/volumes}\n", oneNode + nasOnly} {
		all := template(t, values)
		class := one[*storagev1.StorageClass](t, all)
		want := map[string]string{"backend": "nfs", "server": "nas.lan", "share": "/tank/volumes"}
		if class.Name != "trivet-nfs" || !maps.Equal(class.Parameters, want) || *class.VolumeBindingMode != storagev1.VolumeBindingImmediate {
			t.Errorf("%q: class %s with %v, bound %s", values, class.Name, class.Parameters, *class.VolumeBindingMode)
		}
		name := "trivet-node-config"
		if strings.HasPrefix(values, oneNode) {
			name = "trivet-config"
		}
		if c := configuration(t, values, name); len(c.Pools) != 0 || !c.Kubernetes.NFS {
			t.Errorf("%q: the driver reads %+v", values, c)
		}
	}
}

// TestShare: classes have their own server and share, or those of nfs. export is a synonym of share.
func TestShare(t *testing.T) {
	const values = `
pools: {default: null, nas: {nfs: {server: a, share: /pool}, storageClasses: [{name: pool}]}}
nfs: {server: b, export: /nfs, storageClasses: [{name: of-nfs, backend: loop}, {name: share, share: /own}, {name: both, server: c, export: /own}]}
`
	want := map[string]string{"pool": "nas", "of-nfs": "b:/nfs", "share": "b:/own", "both": "c:/own"}
	for _, c := range ofType[*storagev1.StorageClass](template(t, values)) {
		if place := c.Parameters["pool"]; place != want[c.Name] && c.Parameters["server"]+":"+c.Parameters["share"] != want[c.Name] {
			t.Errorf("%s: %v", c.Name, c.Parameters)
		}
		delete(want, c.Name)
	}
	if len(want) > 0 {
		t.Errorf("no classes %v", want)
	}
	if c := configuration(t, values, "trivet-controller-config"); c.Pools[0].NFS.Export != "/pool" {
		t.Errorf("the driver reads %+v", c.Pools[0].NFS)
	}
}

// TestProvisionerFilesystem: a directory has no filesystem type, so the provisioner sets no default.
func TestProvisionerFilesystem(t *testing.T) {
	args := container(pods(template(t, exports))["trivet-controller"], "csi-provisioner").Args
	if slices.ContainsFunc(args, func(a string) bool { return strings.HasPrefix(a, "--default-fstype") }) || !slices.Contains(args, "--extra-create-metadata") {
		t.Errorf("arguments: %q", args)
	}
}

// TestNFSPolicies: pods in the network of the node have no policies, and are not peers in policies.
func TestNFSPolicies(t *testing.T) {
	policy := one[*networkingv1.NetworkPolicy](t, template(t, exports+"networkPolicy: {enabled: true}\n"))
	if policy.Name != "trivet-controller" {
		t.Errorf("policy %s", policy.Name)
	}
	open := map[int]bool{}
	for _, rule := range policy.Spec.Egress {
		for _, p := range rule.Ports {
			open[p.Port.IntValue()] = len(rule.To) == 0
		}
	}
	for _, port := range []int{53, 2049, 9811} {
		if !open[port] {
			t.Errorf("the controller cannot connect to port %d of all addresses: %v", port, open)
		}
	}
	for _, policy := range ofType[*networkingv1.NetworkPolicy](template(t, oneNode+exports+"networkPolicy: {enabled: true}\n")) {
		t.Errorf("one node: policy %s", policy.Name)
	}
}

// TestExamples: the API server accepts the objects, and the driver accepts the parameters.
func TestExamples(t *testing.T) {
	err := filepath.WalkDir("../../examples", func(path string, _ fs.DirEntry, err error) error {
		if err != nil || filepath.Ext(path) != ".yaml" {
			return err
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		objects := decode(t, string(text))
		if len(objects.known)+len(objects.foreign) == 0 {
			t.Errorf("%s: no objects", path)
		}
		for _, c := range ofType[*storagev1.StorageClass](objects) {
			if _, err := volumeKinds.Parse(c.Parameters); err != nil {
				t.Errorf("%s: %v", path, err)
			}
		}
		for _, kind := range []string{"VolumeSnapshotClass", "VolumeGroupSnapshotClass"} {
			for _, c := range decoded[snapshotClass](t, objects, kind) {
				if _, err := volume.ParseSnapshotParameters(c.Parameters); err != nil {
					t.Errorf("%s: %v", path, err)
				}
			}
		}
		return nil
	})
	must(t, err)
}
