package doctor

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/cluster/kube"
	"github.com/trivet-csi/trivet/driver"
	"github.com/trivet-csi/trivet/internal/mountflags"
	"github.com/trivet-csi/trivet/internal/translate"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// ownerLabel is a label of the CSIDriver object. Its value is the namespace of the installation that owns the
// object.
const ownerLabel = "csi.trivet.dev/namespace"

// kubernetesChecks checks the kubelet's directory and the driver's objects in the cluster.
func kubernetesChecks(ctx context.Context, o Options, driverName string, config driver.Config) []Check {
	pod := o.Pod
	if !pod.InCluster {
		return []Check{skipped("kubernetes", "not in a pod (KUBERNETES_SERVICE_HOST is not set)")}
	}
	var checks []Check
	controller := config.Forwarding.Controller()
	if !controller {
		checks = checkWithin(o.Patience, kubeletDirectory, func() []Check { return kubeletChecks(config.Kubernetes, pod.UID) })
	}
	if pod.Node == "" && !controller || pod.Namespace == "" || pod.Name == "" {
		return append(checks, warning(apiServer, "the environment lacks POD_NAMESPACE, POD_NAME or, on a node, NODE_NAME", "give them to the container by the downward API"))
	}
	client, err := kube.InCluster()
	if err != nil {
		return append(checks, warning(apiServer, err.Error(), "mount the service account's token into the container"))
	}
	c := cluster{
		api: client, pod: pod, driver: driverName, controller: controller, pools: config.Pools, kinds: o.Kinds,
		inline: hasInline(config), untaints: config.Kubernetes != nil && config.Kubernetes.StartupTaint,
		releases: config.Kubernetes != nil && config.Kubernetes.NodeLossDelay != "",
	}
	return append(checks, c.checks(ctx)...)
}

// hasInline reports whether the configuration allows inline volumes.
func hasInline(config driver.Config) bool {
	return config.EphemeralMemory != "" || slices.ContainsFunc(config.Pools, func(p pool.Config) bool { return p.Ephemeral })
}

const kubeletDirectory = "kubelet directory"

// kubeletChecks checks the kubelet's directory and the propagation of mounts. config is nil if the
// configuration has no section kubernetes.
func kubeletChecks(config *driver.Kubernetes, podUID string) []Check {
	const directory, propagation = kubeletDirectory, "mount propagation"
	if config == nil {
		return []Check{warning(directory, "the configuration has no section kubernetes", "add it, with kubeletDir, so that the driver checks that its mounts propagate to the node")}
	}
	kubelet := kube.Kubelet{Dir: config.KubeletDir, PodUID: podUID}
	if err := kubelet.CheckDir(); err != nil {
		return []Check{failure(directory, err.Error(), "correct kubeletDir and the mount of that path"), skipped(propagation, "no kubelet directory")}
	}
	found := ok(directory, "%s has pods/%s", config.KubeletDir, podUID)
	if err := kubelet.CheckPropagation(); err != nil {
		return []Check{found, failure(propagation, err.Error(), "set mountPropagation: Bidirectional, which needs privileged: true")}
	}
	return []Check{found, ok(propagation, "%s is shared with the node", config.KubeletDir)}
}

const apiServer = "API server"

// cluster reads the driver's objects from the API server and checks them.
type cluster struct {
	api    *kube.Client
	pod    Pod
	driver string
	pools  []pool.Config
	kinds  backend.Kinds
	// controller is true if the doctor runs in a pod of the controller.
	controller bool
	// inline is true if the node's configuration allows inline volumes.
	inline bool
	// untaints is true if the driver is configured to remove the startup taint.
	untaints bool
	// seLinuxMount is that of the CSIDriver object.
	seLinuxMount bool
	// releases is true if the controller's driver is configured to release the claims of lost nodes.
	releases bool

	// forbidden are the missing permissions. unreachable is the error of connecting to the API server.
	forbidden   []string
	unreachable error
}

// checks reads each object once, and judges the objects that could be read.
func (c *cluster) checks(ctx context.Context) []Check {
	var checks []Check
	for _, check := range []func(context.Context) []Check{c.csiDriver, c.node, c.sidecars, c.classes} {
		if checks = append(checks, check(ctx)...); c.unreachable != nil {
			return append(checks, warning(apiServer, c.unreachable.Error(), "allow the pod to connect to the API server (network policy, proxy); the checks of the cluster's objects are omitted"))
		}
	}
	if len(c.forbidden) > 0 {
		return append(checks, warning(apiServer, "not permitted: "+strings.Join(c.forbidden, ", "), "grant these permissions to the pod's service account; checks that need them are omitted"))
	}
	return append(checks, ok(apiServer, "answers, and permits the checks"))
}

// recordUnread records the error of reading an object if a permission is missing or the server is
// unreachable, and reports whether it recorded it. The check of the object judges other errors.
func (c *cluster) recordUnread(permission string, err error) bool {
	switch {
	case err == nil:
		return false
	case apierrors.IsForbidden(err), apierrors.IsUnauthorized(err):
		c.forbidden = append(c.forbidden, permission)
		return true
	case apierrors.IsNotFound(err):
		return false
	}
	c.unreachable = fmt.Errorf("%s: %w", permission, err)
	return true
}

func (c *cluster) csiDriver(ctx context.Context) []Check {
	object, err := c.api.CSIDriver(ctx, c.driver)
	if c.recordUnread("get csidrivers", err) {
		return nil
	}
	c.seLinuxMount = object.Spec.SELinuxMount
	checks := []Check{judgeCSIDriver(object, err, c.driver, c.pod.Namespace)}
	if err == nil && !c.controller {
		checks = append(checks, judgeInline(object, c.inline))
	}
	return checks
}

func (c *cluster) node(ctx context.Context) []Check {
	if c.controller {
		return nil
	}
	csiNode, err := c.api.CSINode(ctx, c.pod.Node) // a missing CSINode object is empty: no driver is registered
	if c.recordUnread("get csinodes", err) {
		return nil
	}
	registration := judgeRegistration(csiNode, c.pod.Node, c.driver)
	node, err := c.api.Node(ctx, c.pod.Node)
	if c.recordUnread("get nodes", err) {
		return []Check{registration}
	}
	return []Check{registration, judgeTaint(node, registration.Result == OK, c.untaints, c.driver)}
}

func (c *cluster) sidecars(ctx context.Context) []Check {
	pod, err := c.api.Pod(ctx, c.pod.Namespace, c.pod.Name)
	if c.recordUnread("get pods in namespace "+c.pod.Namespace, err) {
		return nil
	}
	snapshots, err := c.api.Serves(ctx, "snapshot.storage.k8s.io", "v1")
	if c.recordUnread("get /apis/snapshot.storage.k8s.io/v1", err) {
		snapshots = true // unknown
	}
	return judgeSidecars(pod, snapshots)
}

func (c *cluster) classes(ctx context.Context) []Check {
	classes, err := c.api.StorageClasses(ctx, c.driver)
	if c.recordUnread("list storageclasses", err) {
		return nil
	}
	checks := judgeClasses(classes, c.kinds, c.pools, c.controller)
	if c.seLinuxMount {
		checks = append(checks, judgeContexts(classes, c.kinds)...)
	}
	if c.controller && !c.releases {
		checks = append(checks, judgeNodeLoss(classes)...)
	}
	return checks
}

// judgeNodeLoss returns a warning if classes need a controller that releases the claims of lost nodes.
func judgeNodeLoss(classes []kube.StorageClass) []Check {
	var names []string
	for _, c := range classes {
		if c.Parameters[volume.ParamOnNodeLoss] == volume.NodeLossRelease {
			names = append(names, c.Metadata.Name)
		}
	}
	if len(names) == 0 {
		return nil
	}
	return []Check{warning("lost nodes", "onNodeLoss: release of StorageClass "+strings.Join(names, ", ")+" has no effect, because the controller's driver is not configured to release claims", "set controller.nodeLoss.enabled of the chart, or kubernetes.nodeLossDelay")}
}

// judgeCSIDriver judges the CSIDriver object of the driver with a name. namespace is that of this installation.
func judgeCSIDriver(d kube.CSIDriver, err error, name, namespace string) Check {
	check := "CSIDriver " + name
	if err != nil {
		return failure(check, err.Error(), "apply the chart's CSIDriver object")
	}
	owner := d.Metadata.Labels[ownerLabel]
	if owner == "" {
		return warning(check, "has no label "+ownerLabel+", so the chart did not create it", "create it with the chart (kubectl delete csidriver "+name+", then upgrade)")
	}
	if owner != namespace {
		return failure(check, fmt.Sprintf("belongs to the installation in namespace %q, this one is in %q: two installations share one driver name", owner, namespace),
			"uninstall one of them, or give it another driverName")
	}
	seen := fmt.Sprintf("attachRequired %t, fsGroupPolicy %s, storageCapacity %t, seLinuxMount %t", d.Spec.AttachRequired, d.Spec.FSGroupPolicy, d.Spec.StorageCapacity, d.Spec.SELinuxMount)
	switch {
	case d.Spec.FSGroupPolicy != "File":
		return warning(check, seen, "set fsGroupPolicy: File; otherwise fsGroup is not applied to every volume")
	case !d.Spec.StorageCapacity:
		return warning(check, seen, "set storageCapacity: true; otherwise pods are scheduled on nodes whose pool is full")
	}
	return ok(check, "%s", seen)
}

// judgeInline compares the node's configuration of inline volumes with the CSIDriver object.
func judgeInline(d kube.CSIDriver, inline bool) Check {
	const name = "inline volumes"
	modes := "the CSIDriver object's volumeLifecycleModes are [" + strings.Join(d.Spec.VolumeLifecycleModes, ", ") + "]"
	allowed := slices.Contains(d.Spec.VolumeLifecycleModes, "Ephemeral")
	switch {
	case inline && !allowed:
		return warning(name, "this node's configuration allows them, but "+modes, "set ephemeral.enabled of the chart, or recreate the object with Ephemeral (docs/kinds/inline.md, \"Enable inline volumes\")")
	case inline && !d.Spec.PodInfoOnMount:
		return warning(name, "the CSIDriver object has podInfoOnMount false, without which the driver refuses them", "set podInfoOnMount: true")
	case !inline && allowed:
		return warning(name, modes+", but this node's configuration does not allow them", "set ephemeral: true for a pool, or set ephemeralMemory, because pods with an inline volume do not start on this node; or recreate the object without Ephemeral")
	case !inline:
		return ok(name, "not enabled")
	}
	return ok(name, "enabled on this node and in the CSIDriver object")
}

func judgeRegistration(n kube.CSINode, node, driverName string) Check {
	const name = "registration"
	d, found := n.Driver(driverName)
	switch {
	case !found:
		return failure(name, "the kubelet of "+node+" has not registered "+driverName, "read the log of node-driver-registrar; if it has no error, its registration path is not that of the kubelet: correct kubeletDir")
	case d.NodeID != node:
		return failure(name, fmt.Sprintf("registered as node %q, but this is %q", d.NodeID, node), "give the driver --node-id=$(NODE_NAME), and restart its pod")
	case !slices.Contains(d.TopologyKeys, translate.TopologyKey):
		return failure(name, "registered without the topology key "+translate.TopologyKey, "restart the pod, so that the kubelet registers it again; another driver may use the name")
	}
	return ok(name, "registered on %s with %s", node, translate.TopologyKey)
}

// judgeTaint judges the startup taint of a node. registered is true if the kubelet has registered the driver,
// untaints if the driver is configured to remove the taint.
func judgeTaint(n kube.Node, registered, untaints bool, driverName string) Check {
	name, key := "startup taint", kube.StartupTaint(driverName)
	switch {
	case !n.HasTaint(key):
		return ok(name, "%s is not on the node", key)
	case !registered:
		return warning(name, key+" is on the node", "register the driver: the taint is removed after that")
	case untaints:
		return warning(name, key+" is still on the node, although the driver removes it", "repeat the check in a minute; if the taint is still there, the driver's log contains the reason")
	}
	return failure(name, key+" is still on the node, so pods are not scheduled there", "set startupTaint: true, and permit the service account to patch nodes")
}

// judgeClasses judges the driver's StorageClasses. On a node, it compares them with the node's pools.
func judgeClasses(classes []kube.StorageClass, kinds backend.Kinds, pools []pool.Config, controller bool) []Check {
	var checks []Check
	for _, c := range classes {
		checks = append(checks, judgeClass(c, kinds, pools, controller))
	}
	if len(checks) == 0 {
		return []Check{warning("storage classes", "no StorageClass uses this driver", "create one (docs/reference/parameters.md)")}
	}
	return checks
}

func judgeClass(c kube.StorageClass, kinds backend.Kinds, pools []pool.Config, controller bool) Check {
	name := "StorageClass " + c.Metadata.Name
	p, err := checkClass(c, kinds)
	known, shared := poolOf(p, kinds, pools)
	switch {
	case err != nil:
		return failure(name, err.Error(), "parameters cannot be changed: delete and recreate the class")
	case misplaced(p, kinds, pools):
		return failure(name, fmt.Sprintf("backend %s cannot use pool %q of this driver's configuration", p.Backend, p.Pool), "delete and recreate the class with another backend, or with a pool that the backend can use")
	case shared && !known && p.Pool == "":
		return failure(name, "no nfs pool is in this driver's configuration", "add one, or give the class server and share")
	case !known && !controller:
		return warning(name, fmt.Sprintf("pool %q is not in this node's configuration", p.Pool), "if another node has the pool, volumes of the class are created there; otherwise recreate the class with the name of a pool, or add the pool")
	case !shared && c.VolumeBindingMode != "WaitForFirstConsumer":
		return warning(name, "volumeBindingMode "+c.VolumeBindingMode+": volumes are created before the node of their pod is known", "recreate the class with WaitForFirstConsumer")
	}
	return ok(name, "its parameters are valid")
}

// judgeContexts returns a warning if a class has volumes that cannot be mounted with the SELinux context of a pod, or sets
// a context itself.
func judgeContexts(classes []kube.StorageClass, kinds backend.Kinds) []Check {
	var names []string
	for _, c := range classes {
		_, err := checkClass(c, kinds)
		hasContext := slices.ContainsFunc(mountflags.Split(c.MountOptions), mountflags.IsContext)
		c.MountOptions = append(slices.Clip(c.MountOptions), mountflags.ForContext(podContext))
		if _, contextErr := checkClass(c, kinds); err == nil && (hasContext || contextErr != nil) {
			names = append(names, c.Metadata.Name)
		}
	}
	if len(names) == 0 {
		return nil
	}
	return []Check{warning("SELinux contexts", "the CSIDriver object has seLinuxMount true, but the kubelet cannot mount the volumes of StorageClass "+strings.Join(names, ", ")+" with the context of a pod",
		"remove a context from mountOptions of the class, or set seLinuxMount: false of the chart or, with Kubernetes 1.33 and later, seLinuxChangePolicy: Recursive in the pods that use these volumes on nodes with SELinux (docs/operations/selinux.md)")}
}

// checkClass refuses (ErrInvalid) a class with which csi-provisioner or the driver refuses to create a volume with a
// filesystem.
func checkClass(c kube.StorageClass, kinds backend.Kinds) (volume.Parameters, error) {
	p, err := kinds.Parse(c.Parameters)
	if err != nil {
		return p, err
	}
	spec := volume.Spec{Parameters: p, Capabilities: []volume.Capability{{
		Mode: volume.SingleNodeWriter, FSType: c.Parameters[volume.ParamFSType], MountFlags: c.MountOptions,
	}}}
	return p, cmp.Or(
		checkProvisionerKeys(c.Parameters),
		backend.CheckMkfsOptions(p, spec.FSType(), math.MaxInt64),
		kinds.CheckCapabilities(spec),
	)
}

// checkProvisionerKeys refuses (ErrInvalid) keys with volume.ProvisionerPrefix that csi-provisioner does not know.
func checkProvisionerKeys(class map[string]string) error {
	known := []string{volume.ParamFSType}
	for _, call := range []string{"", "provisioner-", "controller-publish-", "controller-expand-", "controller-modify-", "node-stage-", "node-publish-", "node-expand-"} {
		known = append(known, volume.ProvisionerPrefix+call+"secret-name", volume.ProvisionerPrefix+call+"secret-namespace")
	}
	for _, key := range slices.Sorted(maps.Keys(class)) {
		if !strings.HasPrefix(key, volume.ProvisionerPrefix) || slices.Contains(known, key) {
			continue
		}
		meant := ""
		if nearest, near := volume.Nearest(key, known); near {
			meant = "; did you mean " + nearest + "?"
		}
		return volume.Errorf(volume.ErrInvalid, "parameter %s=%q is unknown to csi-provisioner%s", key, class[key], meant)
	}
	return nil
}

// misplaced reports whether the pool of a class is in the configuration and cannot contain volumes of the class.
func misplaced(p volume.Parameters, kinds backend.Kinds, pools []pool.Config) bool {
	k, err := kinds.Named(p.Backend)
	i := slices.IndexFunc(pools, func(c pool.Config) bool { return c.Name == p.Pool })
	return err == nil && i >= 0 && !k.Uses(string(pools[i].Kind()))
}

// poolOf describes the pool of a class. known is true if the pool is in the configuration, or need not be. shared
// is true if all nodes can access the pool.
func poolOf(p volume.Parameters, kinds backend.Kinds, pools []pool.Config) (known, shared bool) {
	if _, _, direct := volume.ParseDirectPool(p.Pool); direct {
		return true, true
	}
	shared = kinds.Shared(p)
	if p.Pool == "" {
		return !shared || slices.ContainsFunc(pools, pool.Config.Shared), shared
	}
	i := slices.IndexFunc(pools, func(c pool.Config) bool { return c.Name == p.Pool })
	if i < 0 {
		return false, shared
	}
	return true, pools[i].Shared()
}

// leastSidecars holds the minimum version of each sidecar, by the last part of the image's name.
var leastSidecars = map[string]string{
	// It supports long node names in the labels of capacity objects (since 5.3), and does not lose a
	// volume whose node is removed while the volume is created.
	"csi-provisioner": "6.0",
	// Earlier versions repeat ControllerUnpublishVolume until the attachment is removed.
	"csi-attacher": "4.9",
	// With it, a failed expansion can be cancelled by requesting a smaller size.
	"csi-resizer": "1.13",
}

// snapshotter is the sidecar that needs the snapshot API.
const snapshotter = "csi-snapshotter"

// judgeSidecars judges the versions of the sidecars in the driver's pod. snapshots is true if the API server
// serves the snapshot API.
func judgeSidecars(pod kube.Pod, snapshots bool) []Check {
	var checks []Check
	for _, c := range slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers) {
		image, tag := splitImage(c.Image)
		if least, known := leastSidecars[image]; known {
			checks = append(checks, judgeSidecar(image, tag, least))
		}
		if image == snapshotter && !snapshots {
			checks = append(checks, failure("sidecar "+image, "the API server does not serve snapshot.storage.k8s.io/v1", "install the snapshot CRDs and the snapshot-controller, or disable snapshots"))
		}
	}
	return checks
}

// judgeSidecar judges the version of a sidecar. tag is the tag of its image, and least is the minimum version.
func judgeSidecar(image, tag, least string) Check {
	name := "sidecar " + image
	switch {
	case tag == "":
		return skipped(name, "its image has only a digest")
	case !atLeast(strings.TrimPrefix(tag, "v"), least):
		return warning(name, tag+" is older than "+least, "use "+least+" or newer")
	}
	return ok(name, "%s", tag)
}

// splitImage parses [registry[:port]/][path/]name[:tag][@digest].
func splitImage(image string) (name, tag string) {
	image, _, _ = strings.Cut(image, "@")
	last := image[strings.LastIndex(image, "/")+1:]
	name, tag, _ = strings.Cut(last, ":")
	return name, tag
}
