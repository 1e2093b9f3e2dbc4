package chart

import (
	"maps"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	storagev1 "k8s.io/api/storage/v1"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/backend/disk"
	"github.com/trivet-csi/trivet/backend/local"
	"github.com/trivet-csi/trivet/backend/loop"
	"github.com/trivet-csi/trivet/backend/lvm"
	"github.com/trivet-csi/trivet/backend/nfs"
)

// volumeKinds contains the kinds whose parameters the driver accepts in StorageClasses.
var volumeKinds = backend.Kinds{loop.Kind, nfs.Kind, local.Kind, disk.Kind, lvm.Kind}

// exports contains a pool on the nodes, a pool on an export, and classes for an export that is no pool.
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
  - {name: direct, server: nas.lan, export: /tank/shared}
  - {name: direct-images, backend: loop, server: nas.lan, export: /tank/shared, allocation: thick}
`

// nasOnly contains the values of an installation whose volumes are all on one export.
const nasOnly = "pools: {default: null}\nnfs: {server: nas.lan, export: /tank/volumes}\n"

// withNFS contains values that enable NFS volumes in different ways.
var withNFS = map[string]string{
	"pool":    "pools: {nas: {nfs: {server: nas.lan, export: /e}}}\n",
	"enabled": "nfs: {enabled: true}\n",
	"server":  nasOnly,
	"class":   "nfs: {storageClasses: [{name: a, server: nas.lan, export: /e}]}\n",
	"all":     exports,
}

// TestNFSNetwork checks that the pods on the nodes use the network of the node. The connections of an NFS
// mount are in the network of the pod that mounted, and the mounts on a node outlive the pod.
func TestNFSNetwork(t *testing.T) {
	for name, values := range withNFS {
		t.Run(name, func(t *testing.T) {
			all := pods(template(t, values))
			maps.Copy(all, pods(template(t, oneNode+values)))
			for name, pod := range all {
				spec, wantHost, wantDNS := pod.Spec, true, corev1.DNSClusterFirstWithHostNet
				if name == "trivet-controller" {
					wantHost, wantDNS = false, corev1.DNSClusterFirst
				}
				if spec.HostNetwork != wantHost || spec.DNSPolicy != wantDNS || spec.HostPID || spec.HostIPC {
					t.Errorf("%s: got hostNetwork %t, dnsPolicy %s, hostPID %t and hostIPC %t, want %t, %s, false and false",
						name, spec.HostNetwork, spec.DNSPolicy, spec.HostPID, spec.HostIPC, wantHost, wantDNS)
				}
			}
		})
	}
	for name, pod := range pods(template(t, "")) {
		if pod.Spec.HostNetwork || pod.Spec.DNSPolicy != corev1.DNSDefault {
			t.Errorf("%s without NFS: got hostNetwork %t and dnsPolicy %s, want false and %s", name, pod.Spec.HostNetwork, pod.Spec.DNSPolicy, corev1.DNSDefault)
		}
	}
}

// TestKerberosNetwork checks that, with Kerberos, the controller's pods also use the network of their node, with ports
// that differ from those of the node's pod, and that an update does not need room for a second pod on a node.
func TestKerberosNetwork(t *testing.T) {
	for name, values := range withNFS {
		t.Run(name, func(t *testing.T) {
			all := template(t, values, "--set", "nfs.kerberos=true")
			controller := named[*appsv1.Deployment](t, all, "trivet-controller").Spec
			if pod := controller.Template.Spec; !pod.HostNetwork || pod.DNSPolicy != corev1.DNSClusterFirstWithHostNet {
				t.Errorf("got hostNetwork %t and dnsPolicy %s, want true and %s", pod.HostNetwork, pod.DNSPolicy, corev1.DNSClusterFirstWithHostNet)
			}
			taken := map[int32]string{}
			for name, pod := range pods(all) {
				for _, c := range pod.Spec.Containers {
					for _, p := range c.Ports {
						if other := taken[p.ContainerPort]; other != "" {
							t.Errorf("got port %d in %s and in %s, want different ports", p.ContainerPort, other, name)
						}
						taken[p.ContainerPort] = name
					}
				}
			}
			driver, probe := container(controller.Template, "trivet"), container(controller.Template, "liveness-probe")
			if !slices.Contains(driver.Args, "--http-address=:9813") || !slices.Contains(probe.Args, "--http-endpoint=:9814") {
				t.Errorf("got arguments %q of the driver and %q of liveness-probe, want the ports 9813 and 9814", driver.Args, probe.Args)
			}
			if r := controller.Strategy.RollingUpdate; r.MaxSurge.IntValue() != 0 || r.MaxUnavailable.IntValue() != 1 {
				t.Errorf("got strategy %v, want that an old pod ends before a new one starts", r)
			}
		})
	}
	if pod := pods(template(t, "", "--set", "nfs.kerberos=true"))["trivet-controller"]; pod.Spec.HostNetwork {
		t.Error("without NFS: got hostNetwork true, want false")
	}
	checkMessage(t, nasOnly+"ports: {controllerHealth: 9810}\n", []string{"must be different"}, "--set", "nfs.kerberos=true")
}

// TestNFSRights checks that, in the controller's pod, only the driver may mount and remove files of other
// users.
func TestNFSRights(t *testing.T) {
	for name, values := range withNFS {
		t.Run(name, func(t *testing.T) {
			pod := pods(template(t, values+"sidecars: {seLinuxOptions: {type: spc_t}}\n"))["trivet-controller"].Spec
			if s := pod.SecurityContext; *s.RunAsUser != 0 || s.RunAsNonRoot != nil || s.SeccompProfile.Type != corev1.SeccompProfileTypeRuntimeDefault {
				t.Errorf("got security context %v of the pod, want root with the seccomp profile RuntimeDefault", s)
			}
			for _, v := range pod.Volumes {
				if v.EmptyDir == nil && v.ConfigMap == nil && v.Projected == nil {
					t.Errorf("got volume %s, want only emptyDir, configMap and projected volumes", v.Name)
				}
			}
			for _, c := range pod.Containers {
				s := c.SecurityContext
				var added []corev1.Capability
				if c.Name == "trivet" {
					added = []corev1.Capability{"SYS_ADMIN", "FOWNER", "SETUID", "SETGID", "MKNOD"}
				}
				if !slices.Equal(s.Capabilities.Add, added) || (s.AppArmorProfile != nil) != (added != nil) {
					t.Errorf("%s: got capabilities %v and AppArmor profile %v, want %v and a profile: %t", c.Name, s.Capabilities, s.AppArmorProfile, added, added != nil)
				}
				if s.SELinuxOptions == nil || s.SELinuxOptions.Type != "spc_t" || s.RunAsUser != nil {
					t.Errorf("%s: got security context %v, want SELinux type spc_t and no user", c.Name, s)
				}
				checkContainer(t, c)
				checkUnprivileged(t, c)
			}
		})
	}
	for _, c := range workloads(t)["trivet-controller"].Spec.Containers {
		if s := c.SecurityContext; len(s.Capabilities.Add) > 0 || s.AppArmorProfile != nil {
			t.Errorf("%s without NFS: got security context %v, want no added capabilities and no AppArmor profile", c.Name, s)
		}
	}
}

// TestNFSMounts checks that the mounts of images, which are in the kubelet's directory, propagate to the
// node.
func TestNFSMounts(t *testing.T) {
	c := container(pods(template(t, exports))["trivet-node"], "trivet")
	i := slices.IndexFunc(c.VolumeMounts, func(m corev1.VolumeMount) bool { return m.MountPath == "/var/lib/k0s/kubelet" })
	if i < 0 || *c.VolumeMounts[i].MountPropagation != corev1.MountPropagationBidirectional {
		t.Errorf("got volume mounts %v, want the kubelet's directory with bidirectional propagation", c.VolumeMounts)
	}
}

// TestNFSConfiguration checks, with the driver's parser, that all drivers have the pools on exports, and
// that only the drivers of nodes have the pools on nodes.
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
			t.Fatalf("%s: got pools %q, want %q", name, have, tc.want)
		}
		nas := c.Pools[len(c.Pools)-1]
		if n := nas.NFS; n.Server != "[fd00::1]" || n.Export != "/tank/all volumes" || len(n.MountOptions) != 2 || !n.Init || n.Fencing != "none" || n.Outage != "5m" || nas.Size != "8Ti" || nas.MaxVolumes != 2000000 {
			t.Errorf("%s: got pool %+v with nfs %+v, want the values of nas", name, nas, n)
		}
	}
	for name, values := range withNFS {
		if c := configuration(t, values, "trivet-node-config"); !c.Kubernetes.NFS {
			t.Errorf("%s: got kubernetes.nfs false for the nodes' drivers, want true", name)
		}
		if c := configuration(t, oneNode+values, "trivet-config"); !c.Kubernetes.NFS {
			t.Errorf("%s, shape oneNode: got kubernetes.nfs false, want true", name)
		}
	}
	if c := configuration(t, "", "trivet-node-config"); c.Kubernetes.NFS {
		t.Error("without NFS: got kubernetes.nfs true, want false because the pod is not in the node's network")
	}
	if c := configuration(t, withNFS["enabled"], "trivet-controller-config"); len(c.Pools) != 0 {
		t.Errorf("got pools %v of the controller, want none", c.Pools)
	}
}

// TestNFSClasses checks that the driver accepts the parameters, and that the binding mode fits the pool.
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
			t.Errorf("%s: got parameters %v and error %v, want %v", c.Name, c.Parameters, err, want[c.Name])
		}
		waits := *c.VolumeBindingMode == storagev1.VolumeBindingWaitForFirstConsumer
		if waits != (c.Name == "local" || c.Name == "node-directories" || c.Name == "images") {
			t.Errorf("%s: got volumeBindingMode %s, want WaitForFirstConsumer: %t", c.Name, *c.VolumeBindingMode, !waits)
		}
		delete(want, c.Name)
	}
	if len(want) > 0 {
		t.Errorf("got no StorageClasses for %v, want one for each", want)
	}
}

// TestNASOnly checks that server and export define a class, and that the nodes have no pool.
func TestNASOnly(t *testing.T) {
	for _, values := range []string{nasOnly, "pools: []\nnfs: {server: nas.lan, export: /tank/volumes}\n", oneNode + nasOnly} {
		all := template(t, values)
		class := one[*storagev1.StorageClass](t, all)
		want := map[string]string{"backend": "nfs", "server": "nas.lan", "share": "/tank/volumes"}
		if class.Name != "trivet-nfs" || !maps.Equal(class.Parameters, want) || *class.VolumeBindingMode != storagev1.VolumeBindingImmediate {
			t.Errorf("%q: got class %s with parameters %v and binding mode %s, want trivet-nfs with %v and Immediate", values, class.Name, class.Parameters, *class.VolumeBindingMode, want)
		}
		name := "trivet-node-config"
		if strings.HasPrefix(values, oneNode) {
			name = "trivet-config"
		}
		if c := configuration(t, values, name); len(c.Pools) != 0 || !c.Kubernetes.NFS {
			t.Errorf("%q: got configuration %+v, want kubernetes.nfs and no pools", values, c)
		}
	}
}

// TestExport checks that classes use their own server and export, or those of nfs.
func TestExport(t *testing.T) {
	const values = `
pools: {default: null, nas: {nfs: {server: a, export: /pool}, storageClasses: [{name: pool}]}}
nfs: {server: b, export: /nfs, storageClasses: [{name: of-nfs, backend: loop}, {name: export, export: /own}, {name: both, server: c, export: /own}]}
`
	want := map[string]string{"pool": "nas", "of-nfs": "b:/nfs", "export": "b:/own", "both": "c:/own"}
	for _, c := range ofType[*storagev1.StorageClass](template(t, values)) {
		if place := c.Parameters["pool"]; place != want[c.Name] && c.Parameters["server"]+":"+c.Parameters["share"] != want[c.Name] {
			t.Errorf("%s: got parameters %v, want %s", c.Name, c.Parameters, want[c.Name])
		}
		delete(want, c.Name)
	}
	if len(want) > 0 {
		t.Errorf("got no StorageClasses for %v, want one for each", want)
	}
	if c := configuration(t, values, "trivet-controller-config"); c.Pools[0].NFS.Export != "/pool" {
		t.Errorf("got nfs %+v of the pool, want export /pool", c.Pools[0].NFS)
	}
}

// TestProvisionerFilesystem checks that the provisioner sets no default filesystem, because a directory has
// none.
func TestProvisionerFilesystem(t *testing.T) {
	args := container(pods(template(t, exports))["trivet-controller"], "csi-provisioner").Args
	if slices.ContainsFunc(args, func(a string) bool { return strings.HasPrefix(a, "--default-fstype") }) || !slices.Contains(args, "--extra-create-metadata") {
		t.Errorf("got arguments %q, want --extra-create-metadata and no --default-fstype", args)
	}
}

// TestNFSPolicies checks that pods in the network of the node have no network policies, and that the
// controller's policy opens its ports to all addresses, because it cannot select such pods as peers.
func TestNFSPolicies(t *testing.T) {
	policy := one[*networkingv1.NetworkPolicy](t, template(t, exports+"networkPolicy: {enabled: true}\n"))
	if policy.Name != "trivet-controller" {
		t.Errorf("got network policy %s, want trivet-controller", policy.Name)
	}
	open := map[int]bool{}
	for _, rule := range policy.Spec.Egress {
		for _, p := range rule.Ports {
			open[p.Port.IntValue()] = len(rule.To) == 0
		}
	}
	for _, port := range []int{53, 2049, 9811} {
		if !open[port] {
			t.Errorf("got open ports %v of the controller, want port %d open to all addresses", open, port)
		}
	}
	for _, policy := range ofType[*networkingv1.NetworkPolicy](template(t, oneNode+exports+"networkPolicy: {enabled: true}\n")) {
		t.Errorf("shape oneNode: got network policy %s, want none", policy.Name)
	}
}
