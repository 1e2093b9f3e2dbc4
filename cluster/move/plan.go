package move

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/trivet-csi/trivet/cluster/kube"
	"github.com/trivet-csi/trivet/cluster/status"
	"github.com/trivet-csi/trivet/internal/translate"
	"github.com/trivet-csi/trivet/volume"
)

// defaultSnapshotClass is the annotation of the default VolumeSnapshotClass of a driver.
const defaultSnapshotClass = "snapshot.storage.kubernetes.io/is-default-class"

// Plan is what a move will do.
type Plan struct {
	Volume    kube.PersistentVolume
	From, To  string
	SizeBytes int64
	UsedBytes int64
	// SnapshotClass is the class of the snapshots. It is empty if the volume is copied without snapshots, while no pod uses it.
	// NoSnapshots is then the reason.
	SnapshotClass, NoSnapshots string
	// Pods are the pods that use the claim, with their controllers.
	Pods []PlannedPod
	// Cordon is true if the node From is not cordoned, and will be during the stop.
	Cordon bool
	// Locked is true if the volume cannot be used while it is copied.
	Locked bool
	// Single is true if nothing is copied while the pods run, for the reason NoSnapshots, or because the node To has no room for two
	// copies.
	Single bool

	old kube.Object
}

// PlannedPod is a pod that the move stops.
type PlannedPod struct {
	Name string
	// Controller is the kind and the name of the controller, as kind/name.
	Controller string
}

// Plan examines whether the volume can be moved. report is the report of the drivers. The error tells why it cannot be moved.
func (m *Mover) Plan(ctx context.Context, report status.Report) (Plan, error) {
	p := Plan{To: m.To}
	if err := m.checkClaim(); err != nil {
		return p, err
	}
	if err := m.checkRights(ctx, m.rights()); err != nil {
		return p, err
	}
	if err := m.planVolume(ctx, &p, report); err != nil {
		return p, err
	}
	class, err := m.checkClass(ctx, report.Driver, p)
	if err != nil {
		return p, err
	}
	if err := m.checkDestination(ctx, report.Driver, p); err != nil {
		return p, err
	}
	if err := m.planSnapshots(ctx, report.Driver, &p); err != nil {
		return p, err
	}
	pods, err := m.users(ctx)
	if err != nil {
		return p, err
	}
	if p.Pods, err = m.checkPods(ctx, pods, p.From, p.To); err != nil {
		return p, err
	}
	return p, m.planCopies(ctx, &p, report, class)
}

// checkClaim checks the claim itself.
func (m *Mover) checkClaim() error {
	c := m.claim
	name := c.Metadata.Namespace + "/" + c.Metadata.Name
	switch owner := slices.IndexFunc(c.Metadata.OwnerReferences, func(o kube.Owner) bool { return o.Kind == "Pod" }); {
	case c.Metadata.DeletionTimestamp != "":
		return fmt.Errorf("claim %s is being deleted: its volume cannot be moved", name)
	case owner >= 0:
		return fmt.Errorf("claim %s belongs to pod %s, and is deleted with that pod: it cannot be moved", name, c.Metadata.OwnerReferences[owner].Name)
	case c.Status.Phase != "Bound":
		return fmt.Errorf("claim %s is %s: only the volume of a bound claim can be moved: wait until the claim is Bound", name, cmp.Or(c.Status.Phase, "Pending"))
	case slices.Contains(c.Spec.AccessModes, "ReadWriteMany"), slices.Contains(c.Spec.AccessModes, "ReadOnlyMany"):
		return fmt.Errorf("claim %s has the access modes %q: only claims with ReadWriteOnce or ReadWriteOncePod can be moved", name, c.Spec.AccessModes)
	}
	return nil
}

// planVolume checks the volume of the claim.
func (m *Mover) planVolume(ctx context.Context, p *Plan, report status.Report) error {
	if err := m.planSource(ctx, p, report.Driver); err != nil {
		return err
	}
	handle := p.Volume.Spec.CSI.VolumeHandle
	i := slices.IndexFunc(report.Volumes, func(v status.Volume) bool { return v.ID == handle })
	if i < 0 {
		return fmt.Errorf("volume %v is not in the report of the drivers: see 'kubectl trivet status' for node %s", handle, p.From)
	}
	if of := m.claim.Metadata.Labels[protectLabel]; of != "" && report.Volumes[i].CopyOf != "" {
		return fmt.Errorf("claim %s/%s is a copy of the claim with the UID %s: to have the copies on another node, run 'kubectl trivet protect' for that claim, with that node", m.Namespace, m.ClaimName, of)
	}
	p.SizeBytes, p.UsedBytes = report.Volumes[i].SizeBytes, report.Volumes[i].UsedBytes
	if report.Volumes[i].NoLiveSnapshots {
		p.Locked, p.NoSnapshots = true, "no snapshot of the volume can be taken while it is in use"
	}
	return nil
}

// planSource checks the PersistentVolume of the claim.
func (m *Mover) planSource(ctx context.Context, p *Plan, driver string) error {
	if err := m.readVolume(ctx, p); err != nil {
		return err
	}
	name, csi := p.Volume.Metadata.Name, p.Volume.Spec.CSI
	if csi.Driver != driver {
		return fmt.Errorf("PersistentVolume %s has the driver %q: only volumes of %s can be moved", name, csi.Driver, driver)
	}
	id, err := volume.ParseID(csi.VolumeHandle)
	if err != nil {
		return fmt.Errorf("PersistentVolume %s: %w", name, err)
	}
	if id.Shared() {
		return fmt.Errorf("volume %v is on an export, which every node can reach: its pods can run on every node without a move", id)
	}
	if !m.Transfers(id.Backend) {
		return fmt.Errorf("volume %v: backend %s cannot send a volume to another node: restore a backup there (docs/operations/backup.md), or move the disk with its pool to that node", id, id.Backend)
	}
	return nil
}

// readVolume reads the PersistentVolume of the claim, which must belong to it and be on one node.
func (m *Mover) readVolume(ctx context.Context, p *Plan) (err error) {
	if p.old, err = m.api.PersistentVolume(ctx, m.claim.Spec.VolumeName); err != nil {
		return err
	}
	if p.Volume, err = kube.AsPersistentVolume(p.old); err != nil {
		return err
	}
	name := p.Volume.Metadata.Name
	if ref := p.Volume.Spec.ClaimRef; ref.UID != m.claim.Metadata.UID {
		return fmt.Errorf("PersistentVolume %s belongs to claim %s/%s with the UID %q, and not to claim %s/%s", name, ref.Namespace, ref.Name, ref.UID, m.Namespace, m.ClaimName)
	}
	if p.From = p.Volume.OnlyNode(translate.TopologyKey); p.From == "" {
		return fmt.Errorf("PersistentVolume %s: its node affinity does not select one node by %s: only a volume of one node can be copied", name, translate.TopologyKey)
	}
	return nil
}

// checkClass checks the StorageClass, with which the copies are created.
func (m *Mover) checkClass(ctx context.Context, driver string, p Plan) (kube.StorageClass, error) {
	name := m.claim.Spec.StorageClassName
	if name == "" {
		return kube.StorageClass{}, fmt.Errorf("claim %s/%s has no StorageClass, with which the copy could be created", m.Namespace, m.ClaimName)
	}
	class, err := m.api.StorageClass(ctx, name)
	switch {
	case apierrors.IsNotFound(err):
		return class, fmt.Errorf("StorageClass %q of the claim does not exist: create it again, because the copy is created with it", name)
	case err != nil:
		return class, err
	case class.Provisioner != driver:
		return class, fmt.Errorf("StorageClass %q has the provisioner %q: it must be %s, because the copy is created with it", name, class.Provisioner, driver)
	case class.Parameters[volume.ParamCopies] == volume.CopiesLocal:
		return class, fmt.Errorf("StorageClass %q has the parameter %s: %s, so that copies stay on node %s: delete the class, and create it again without this parameter", name, volume.ParamCopies, volume.CopiesLocal, p.From)
	}
	return class, nil
}

// checkDestination checks the node to which the volume is moved.
func (m *Mover) checkDestination(ctx context.Context, driver string, p Plan) error {
	node, err := m.checkNode(ctx, p)
	if err != nil {
		return err
	}
	if node.Spec.Unschedulable {
		return fmt.Errorf("node %q is cordoned, so that no pod can start there: run 'kubectl uncordon %s'", p.To, p.To)
	}
	registered, err := m.api.CSINode(ctx, p.To)
	if err != nil && !apierrors.IsNotFound(err) {
		return err
	}
	if _, found := registered.Driver(driver); !found {
		return fmt.Errorf("node %q: the driver %s is not registered on the node: see 'kubectl trivet status'", p.To, driver)
	}
	return nil
}

// checkNode checks that the node of a copy is another one than that of the volume, and ready.
func (m *Mover) checkNode(ctx context.Context, p Plan) (kube.Node, error) {
	if p.From == p.To {
		return kube.Node{}, fmt.Errorf("node %q: the volume is already on this node: name another one", p.To)
	}
	node, err := m.api.Node(ctx, p.To)
	switch {
	case apierrors.IsNotFound(err):
		return node, fmt.Errorf("node %q: the cluster has no such node", p.To)
	case err != nil:
		return node, err
	case !node.Ready():
		return node, fmt.Errorf("node %q: the node is not ready", p.To)
	}
	return node, nil
}

// planSnapshots chooses the class of the snapshots, if snapshots are possible.
func (m *Mover) planSnapshots(ctx context.Context, driver string, p *Plan) (err error) {
	if p.NoSnapshots != "" {
		return nil
	}
	if p.SnapshotClass, err = m.chooseSnapshotClass(ctx, driver); err == nil && p.SnapshotClass == "" {
		p.NoSnapshots = fmt.Sprintf("driver %s has no VolumeSnapshotClass with the deletionPolicy Delete: enable snapshots as in docs/snapshots.md", driver)
	}
	return err
}

// chooseSnapshotClass returns the class that the user has named, otherwise the only one or the default one of the driver, and "" if
// there is none. A class with the deletion policy Retain would keep the snapshots of the move.
func (m *Mover) chooseSnapshotClass(ctx context.Context, driver string) (string, error) {
	all, err := m.api.SnapshotClasses(ctx, driver)
	if err != nil {
		return "", err
	}
	var names, defaults []string
	for _, c := range all {
		if c.DeletionPolicy != "Delete" {
			continue
		}
		names = append(names, c.Metadata.Name)
		if c.Metadata.Annotations[defaultSnapshotClass] == "true" {
			defaults = append(defaults, c.Metadata.Name)
		}
	}
	switch {
	case m.SnapshotClass != "" && !slices.Contains(names, m.SnapshotClass):
		return "", fmt.Errorf("--snapshot-class %q is not a VolumeSnapshotClass of %s with the deletionPolicy Delete: it has %q", m.SnapshotClass, driver, names)
	case m.SnapshotClass != "":
		return m.SnapshotClass, nil
	case len(names) == 1:
		return names[0], nil
	case len(defaults) == 1:
		return defaults[0], nil
	case len(names) == 0:
		return "", nil
	}
	return "", fmt.Errorf("driver %s has the VolumeSnapshotClasses %q, and not exactly one of them is the default: name one by --snapshot-class", driver, names)
}

// planCopies checks the room on the node To. With snapshots, two copies exist there at the same time, so that only changes are sent for
// the second one.
func (m *Mover) planCopies(ctx context.Context, p *Plan, report status.Report, class kube.StorageClass) error {
	pool := class.Parameters[volume.ParamPool]
	room, largest, known := roomOn(report, p.To, pool)
	switch {
	case !known:
		return fmt.Errorf("node %q has no open pool %q for the copy: see 'kubectl trivet status'", p.To, pool)
	case min(room, largest) < p.SizeBytes: // room is reduced by the volumes that a drain moves before
		return fmt.Errorf("node %q has room for a volume of %s, and the volume has %s: see docs/operations/capacity.md", p.To, volume.FormatSize(min(room, largest)), volume.FormatSize(p.SizeBytes))
	}
	p.Single = p.NoSnapshots != "" || room < 2*p.SizeBytes
	from, err := m.api.Node(ctx, p.From)
	if err != nil && !apierrors.IsNotFound(err) {
		return err
	}
	p.Cordon = err == nil && !from.Spec.Unschedulable
	return nil
}

// roomOn returns the largest room, and the size of the largest volume, of a pool with a name on a node, or of any pool if the name is
// empty.
func roomOn(report status.Report, node, name string) (room, largest int64, known bool) {
	for _, p := range report.Pools {
		if p.Node == node && p.Problem == "" && (name == "" || p.Name == name) {
			room, largest, known = max(room, p.RoomBytes), max(largest, p.LargestBytes), true
		}
	}
	return room, largest, known
}

// rights are the rights that a move needs, beside those for the report of the drivers.
func (m *Mover) rights() (all []kube.Right) {
	all = append(m.swapRights(), rights(m.Namespace, "", "persistentvolumeclaims", "create")...)
	all = append(all, rights(m.Namespace, "", "events", "list")...)
	all = append(all, rights(m.Namespace, "snapshot.storage.k8s.io", "volumesnapshots", "get", "create")...)
	all = append(all, rights("", "snapshot.storage.k8s.io", "volumesnapshotclasses", "list")...)
	all = append(all, rights("", "storage.k8s.io", "storageclasses", "get")...)
	all = append(all, rights("", "storage.k8s.io", "csidrivers", "get")...)
	all = append(all, rights("", "", "nodes", "patch")...)
	return append(all, kube.Right{Verb: "create", Resource: "pods", Subresource: "eviction", Namespace: m.Namespace})
}

// swapRights are the rights with which the volume of the claim is replaced by a copy that exists.
func (m *Mover) swapRights() (all []kube.Right) {
	all = append(all, rights(m.Namespace, "", "persistentvolumeclaims", "get", "patch", "delete")...)
	all = append(all, rights(m.api.Namespace, "", "configmaps", "get", "list", "create", "patch", "delete")...)
	all = append(all, rights(m.Namespace, "", "pods", "get", "list")...)
	all = append(all, rights(m.Namespace, "snapshot.storage.k8s.io", "volumesnapshots", "delete")...)
	all = append(all, rights("", "storage.k8s.io", "csinodes", "get")...)
	all = append(all, rights("", "storage.k8s.io", "volumeattachments", "list")...)
	all = append(all, rights("", "", "nodes", "get")...)
	return append(all, rights("", "", "persistentvolumes", "get", "create", "patch", "delete")...)
}

// rights returns rights for a resource.
func rights(namespace, group, resource string, verbs ...string) (all []kube.Right) {
	for _, verb := range verbs {
		all = append(all, kube.Right{Verb: verb, Group: group, Resource: resource, Namespace: namespace})
	}
	return all
}

// checkRights returns an error with the rights that the user does not have, so that a command does not stop half-way.
func (m *Mover) checkRights(ctx context.Context, all []kube.Right) error {
	var missing []error
	for _, r := range all {
		allowed, err := m.api.May(ctx, r)
		if err != nil {
			return err
		}
		if !allowed {
			missing = append(missing, fmt.Errorf("this command needs the right to %v", r))
		}
	}
	return errors.Join(missing...)
}
