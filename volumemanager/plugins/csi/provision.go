package csi

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	domain "github.com/trivet-csi/trivet/volume"
	"github.com/trivet-csi/trivet/volumemanager/plugins"
)

// Annotations and attributes of a PersistentVolume, as external-provisioner sets them.
const (
	provisionedBy           = "pv.kubernetes.io/provisioned-by"
	deletionSecretName      = "volume.kubernetes.io/provisioner-deletion-secret-name"
	deletionSecretNamespace = "volume.kubernetes.io/provisioner-deletion-secret-namespace"
	provisionerIdentity     = "storage.kubernetes.io/csiProvisionerIdentity"
)

// Provisions reports whether the class's provisioner is a valid name of a driver. Names of in-tree
// provisioners are not valid, because they contain a slash.
func (p *Plugin) Provisions(class *storagev1.StorageClass) bool {
	return validDriver(class.Provisioner)
}

// Provision calls CreateVolume as external-provisioner does. It deletes a created volume that
// does not match the request.
func (p *Plugin) Provision(ctx context.Context, o plugins.ProvisionOptions) (*corev1.PersistentVolume, error) {
	d, err := p.driver(o.Class.Provisioner)
	if err != nil {
		return nil, err
	}
	parameters, err := newParameters(o)
	if err != nil {
		return nil, err
	}
	request, err := p.createRequest(d, parameters, o)
	if err != nil {
		return nil, err
	}
	answer, err := call(ctx, d, d.controller.CreateVolume, request)
	if err != nil {
		return nil, classifyCreateError(err)
	}
	created := answer.GetVolume()
	if created.GetVolumeId() == "" {
		return nil, &plugins.UncertainError{Err: fmt.Errorf("driver %s: CreateVolume: the response has no volume ID: check the driver's log", d.name)}
	}
	if mismatch := checkCreated(d, created, request); mismatch != nil {
		_, err := call(ctx, d, d.controller.DeleteVolume, &csi.DeleteVolumeRequest{VolumeId: created.GetVolumeId(), Secrets: request.GetSecrets()})
		if err != nil {
			return nil, &plugins.UncertainError{Err: errors.Join(mismatch, err)}
		}
		return nil, &plugins.RefusedError{Err: mismatch}
	}
	return p.persistentVolume(d, created, parameters, request, o), nil
}

// classifyCreateError returns the error of CreateVolume with the type that tells whether the volume may
// exist. After a final code, this call has created nothing, but an earlier call, before a restart of
// the driver or of this program, may have created the volume. After a code that refuses the request
// itself (*plugins.RefusedError), no call has created the volume.
func classifyCreateError(err error) error {
	callErr, ok := errors.AsType[*CallError](err)
	if !ok {
		return err
	}
	switch callErr.Code {
	case codes.InvalidArgument, codes.NotFound, codes.OutOfRange, codes.Unimplemented:
		return &plugins.RefusedError{Err: callErr}
	case codes.ResourceExhausted: // the driver has no room for the volume, so this call has created nothing
		return callErr
	default:
		return err
	}
}

// createRequest returns the request of CreateVolume.
func (p *Plugin) createRequest(d *driver, parameters *parameters, o plugins.ProvisionOptions) (*csi.CreateVolumeRequest, error) {
	if err := checkProvision(d, o); err != nil {
		return nil, err
	}
	secrets, err := p.secret(parameters.secrets[provisionerSecret])
	if err != nil {
		return nil, err
	}
	topology, err := d.topologyRequirement(o.Class)
	if err != nil {
		return nil, err
	}
	size := o.Claim.Spec.Resources.Requests[corev1.ResourceStorage]
	return &csi.CreateVolumeRequest{
		Name:                      o.PVName,
		CapacityRange:             &csi.CapacityRange{RequiredBytes: size.Value()},
		VolumeCapabilities:        d.capabilities(parameters.fsType, o),
		Parameters:                parameters.driver,
		Secrets:                   secrets,
		VolumeContentSource:       contentSource(o.Source),
		AccessibilityRequirements: topology,
	}, nil
}

// checkProvision returns an error for a request that the driver does not support.
func checkProvision(d *driver, o plugins.ProvisionOptions) error {
	source := o.Source
	switch {
	case o.Claim.Spec.Selector != nil:
		return plugins.Invalidf("claim %s/%s: spec.selector: a new volume has no labels to select by: remove the selector", o.Claim.Namespace, o.Claim.Name)
	case !d.controllerCan(csi.ControllerServiceCapability_RPC_CREATE_DELETE_VOLUME):
		return fmt.Errorf("driver %s cannot create volumes, because the endpoint %s lacks CREATE_DELETE_VOLUME: use a PersistentVolume, or start the driver's controller service at this endpoint", d.name, d.endpoint)
	case source.SnapshotHandle != "" && !d.controllerCan(csi.ControllerServiceCapability_RPC_CREATE_DELETE_SNAPSHOT):
		return fmt.Errorf("driver %s cannot restore snapshots, because it lacks CREATE_DELETE_SNAPSHOT: remove the claim's dataSource", d.name)
	case source.Volume == nil:
		return nil
	case source.Volume.Spec.CSI == nil || source.Volume.Spec.CSI.Driver != d.name:
		return plugins.Invalidf("claim %s/%s: dataSource: PersistentVolume %s is not of driver %s: use a StorageClass of the source's driver", o.Claim.Namespace, o.Claim.Name, source.Volume.Name, d.name)
	case !d.controllerCan(csi.ControllerServiceCapability_RPC_CLONE_VOLUME):
		return fmt.Errorf("driver %s cannot copy volumes, because it lacks CLONE_VOLUME: remove the claim's dataSource", d.name)
	default:
		return nil
	}
}

// capabilities returns one capability for each access mode of the claim.
func (d *driver) capabilities(fsType string, o plugins.ProvisionOptions) []*csi.VolumeCapability {
	modes := o.Claim.Spec.AccessModes
	if len(modes) == 0 {
		modes = []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}
	}
	var all []*csi.VolumeCapability
	for _, mode := range modes {
		m := &csi.VolumeCapability_MountVolume{FsType: fsType, MountFlags: o.Class.MountOptions}
		all = append(all, capability(mode, d.controllerCan(csi.ControllerServiceCapability_RPC_SINGLE_NODE_MULTI_WRITER), isBlock(o.Claim), m))
	}
	return all
}

func isBlock(claim *corev1.PersistentVolumeClaim) bool {
	return claim.Spec.VolumeMode != nil && *claim.Spec.VolumeMode == corev1.PersistentVolumeBlock
}

// contentSource returns the source of a new volume's content; nil if the volume is created empty.
func contentSource(source plugins.ProvisionSource) *csi.VolumeContentSource {
	switch {
	case source.SnapshotHandle != "":
		from := &csi.VolumeContentSource_SnapshotSource{SnapshotId: source.SnapshotHandle}
		return &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Snapshot{Snapshot: from}}
	case source.Volume != nil:
		from := &csi.VolumeContentSource_VolumeSource{VolumeId: source.Volume.Spec.CSI.VolumeHandle}
		return &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Volume{Volume: from}}
	}
	return nil
}

// hasTopology reports whether the driver's volumes may be inaccessible from some nodes.
func (d *driver) hasTopology() bool {
	return d.info().plugin[csi.PluginCapability_Service_VOLUME_ACCESSIBILITY_CONSTRAINTS]
}

// topologyRequirement requires a volume that this node can access. It returns nil if the driver has no
// topology.
func (d *driver) topologyRequirement(class *storagev1.StorageClass) (*csi.TopologyRequirement, error) {
	if !d.hasTopology() {
		return nil, nil
	}
	segments := d.info().topology
	if !isAllowed(class.AllowedTopologies, segments) {
		return nil, plugins.Invalidf("StorageClass %s: allowedTopologies do not include this node, whose topology is %v in driver %s: add this topology", class.Name, segments, d.name)
	}
	if len(segments) == 0 {
		return nil, nil
	}
	thisNode := []*csi.Topology{{Segments: segments}}
	return &csi.TopologyRequirement{Requisite: thisNode, Preferred: thisNode}, nil
}

// isAllowed reports whether a node with these segments matches one of the terms. An empty list matches
// every node.
func isAllowed(terms []corev1.TopologySelectorTerm, segments map[string]string) bool {
	return len(terms) == 0 || slices.ContainsFunc(terms, func(term corev1.TopologySelectorTerm) bool {
		return !slices.ContainsFunc(term.MatchLabelExpressions, func(r corev1.TopologySelectorLabelRequirement) bool {
			return !slices.Contains(r.Values, segments[r.Key])
		})
	})
}

// checkCreated returns an error if a created volume is too small, lacks its content, or is not
// accessible from this node.
func checkCreated(d *driver, created *csi.Volume, request *csi.CreateVolumeRequest) error {
	requested := request.GetCapacityRange().GetRequiredBytes()
	switch size := created.GetCapacityBytes(); {
	case size != 0 && size < requested: // 0 means unknown
		return fmt.Errorf("driver %s: CreateVolume: volume %s has %s, less than the requested %s: check the driver's log", d.name, created.GetVolumeId(), domain.ExactSize(size), domain.ExactSize(requested))
	case request.GetVolumeContentSource() != nil && created.GetContentSource() == nil:
		return fmt.Errorf("driver %s: CreateVolume: the response for volume %s does not contain its source, so the volume may lack the source's content: check the driver's log", d.name, created.GetVolumeId())
	case !d.canAccess(created.GetAccessibleTopology()):
		return fmt.Errorf("driver %s: CreateVolume: volume %s is at %v, which this node (%v) cannot access: check the parameters of the StorageClass", d.name, created.GetVolumeId(), created.GetAccessibleTopology(), d.info().topology)
	}
	return nil
}

// canAccess reports whether this node is in one of the topologies. An empty list includes every
// node.
func (d *driver) canAccess(topologies []*csi.Topology) bool {
	return !d.hasTopology() || len(topologies) == 0 || slices.ContainsFunc(topologies, func(t *csi.Topology) bool {
		for key, value := range t.GetSegments() {
			if d.info().topology[key] != value {
				return false
			}
		}
		return true
	})
}

// persistentVolume returns the PersistentVolume of a created volume.
func (p *Plugin) persistentVolume(d *driver, created *csi.Volume, parameters *parameters, request *csi.CreateVolumeRequest, o plugins.ProvisionOptions) *corev1.PersistentVolume {
	size := cmp.Or(created.GetCapacityBytes(), request.GetCapacityRange().GetRequiredBytes())
	pv := &corev1.PersistentVolume{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "PersistentVolume"},
		ObjectMeta: metav1.ObjectMeta{Name: o.PVName, Annotations: map[string]string{provisionedBy: d.name}},
		Spec: corev1.PersistentVolumeSpec{
			Capacity:                      corev1.ResourceList{corev1.ResourceStorage: *resource.NewQuantity(size, resource.BinarySI)},
			AccessModes:                   o.Claim.Spec.AccessModes,
			PersistentVolumeReclaimPolicy: corev1.PersistentVolumeReclaimDelete,
			StorageClassName:              o.Class.Name,
			MountOptions:                  o.Class.MountOptions,
			VolumeMode:                    o.Claim.Spec.VolumeMode,
			ClaimRef:                      &corev1.ObjectReference{APIVersion: "v1", Kind: "PersistentVolumeClaim", Namespace: o.Claim.Namespace, Name: o.Claim.Name, UID: o.Claim.UID},
			PersistentVolumeSource:        corev1.PersistentVolumeSource{CSI: p.csiSource(d, created, parameters)},
		},
	}
	if o.Class.ReclaimPolicy != nil {
		pv.Spec.PersistentVolumeReclaimPolicy = *o.Class.ReclaimPolicy
	}
	if isBlock(o.Claim) {
		pv.Spec.CSI.FSType = ""
	}
	if ref := parameters.secrets[provisionerSecret]; ref != nil {
		pv.Annotations[deletionSecretName], pv.Annotations[deletionSecretNamespace] = ref.Name, ref.Namespace
	}
	if d.hasTopology() {
		pv.Spec.NodeAffinity = nodeAffinity(created.GetAccessibleTopology())
	}
	return pv
}

// csiSource returns the source of the PersistentVolume of a created volume.
func (p *Plugin) csiSource(d *driver, created *csi.Volume, parameters *parameters) *corev1.CSIPersistentVolumeSource {
	identity := map[string]string{provisionerIdentity: p.host.NodeName() + "-" + d.name}
	return &corev1.CSIPersistentVolumeSource{
		Driver:                     d.name,
		VolumeHandle:               created.GetVolumeId(),
		FSType:                     parameters.fsType,
		VolumeAttributes:           merged(identity, created.GetVolumeContext()),
		ControllerPublishSecretRef: parameters.secrets[controllerPublishSecret],
		NodeStageSecretRef:         parameters.secrets[nodeStageSecret],
		NodePublishSecretRef:       parameters.secrets[nodePublishSecret],
		ControllerExpandSecretRef:  parameters.secrets[controllerExpandSecret],
		NodeExpandSecretRef:        parameters.secrets[nodeExpandSecret],
	}
}

// nodeAffinity returns a node affinity with one term for each topology; nil if there are no terms.
func nodeAffinity(topologies []*csi.Topology) *corev1.VolumeNodeAffinity {
	var terms []corev1.NodeSelectorTerm
	for _, t := range topologies {
		var all []corev1.NodeSelectorRequirement
		for _, key := range slices.Sorted(maps.Keys(t.GetSegments())) {
			all = append(all, corev1.NodeSelectorRequirement{Key: key, Operator: corev1.NodeSelectorOpIn, Values: []string{t.GetSegments()[key]}})
		}
		if len(all) > 0 {
			terms = append(terms, corev1.NodeSelectorTerm{MatchExpressions: all})
		}
	}
	if len(terms) == 0 {
		return nil
	}
	return &corev1.VolumeNodeAffinity{Required: &corev1.NodeSelector{NodeSelectorTerms: terms}}
}

// Delete calls DeleteVolume. It returns an error while the volume is in use on this node.
func (p *Plugin) Delete(ctx context.Context, pv *corev1.PersistentVolume) error {
	v, err := newVolume(&plugins.Spec{PersistentVolume: pv}, nil)
	if err != nil {
		return err
	}
	if err := p.checkUnused(v); err != nil {
		return err
	}
	d, err := p.driver(v.driver)
	if err != nil {
		return err
	}
	if !d.controllerCan(csi.ControllerServiceCapability_RPC_CREATE_DELETE_VOLUME) {
		return fmt.Errorf("driver %s cannot delete volumes, because the endpoint %s lacks CREATE_DELETE_VOLUME: delete volume %s by hand, or start the driver's controller service at this endpoint", d.name, d.endpoint, v.handle)
	}
	var ref *corev1.SecretReference
	if name := pv.Annotations[deletionSecretName]; name != "" {
		ref = &corev1.SecretReference{Namespace: pv.Annotations[deletionSecretNamespace], Name: name}
	}
	secrets, err := p.secretIfPresent(ref)
	if err != nil {
		return err
	}
	_, err = call(ctx, d, d.controller.DeleteVolume, &csi.DeleteVolumeRequest{VolumeId: v.handle, Secrets: secrets})
	return err
}
