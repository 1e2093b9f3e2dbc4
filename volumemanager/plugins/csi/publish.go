package csi

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"

	"github.com/trivet-csi/trivet/volumemanager/ownership"
	"github.com/trivet-csi/trivet/volumemanager/plugins"
)

// mounter publishes a filesystem to a pod.
type mounter struct {
	*Plugin
	v   *volume
	pod *corev1.Pod
}

// Path returns the target path of NodePublishVolume.
func (m *mounter) Path() string { return filepath.Join(m.dir(), podMount) }

func (m *mounter) dir() string { return m.podDir(m.pod.UID, m.v.name) }

// SetUp calls NodePublishVolume, and then applies the pod's fsGroup.
func (m *mounter) SetUp(ctx context.Context, args plugins.MounterArgs) error {
	d, err := m.driver(m.v.driver)
	if err != nil {
		return err
	}
	request, err := m.publishRequest(d, m.v, m.pod, m.Path(), args)
	if err != nil {
		return err
	}
	before, err := m.checkUnchanged()
	if err != nil {
		return err
	}
	r := m.podRecord(m.v)
	if before.FSGroup == groupName(args.FSGroup) {
		r.FSGroup = before.FSGroup
	}
	fresh, err := m.writeRecord(m.dir(), r)
	if err != nil {
		return err
	}
	if _, err := call(ctx, d, d.node.NodePublishVolume, request); err != nil {
		return m.undoOrUncertain(err, fresh, m.Path(), func() error { return m.removePublished(m.dir()) })
	}
	if err := m.checkPublished(d.name, m.Path(), false); err != nil {
		return err
	}
	if !m.appliesGroup(d, args) {
		return nil
	}
	if err := m.giveToGroup(ctx, r, args); err != nil {
		return &plugins.UncertainError{Err: err}
	}
	return nil
}

// giveToGroup applies the fsGroup to the whole volume once, and records the group. Later calls check
// only the root directory, because the pod may have changed other files.
func (m *mounter) giveToGroup(ctx context.Context, r record, args plugins.MounterArgs) error {
	if r.FSGroup != "" {
		args.FSGroupChangePolicy = corev1.FSGroupChangeOnRootMismatch
	}
	if err := ownership.Set(ctx, m.Path(), args); err != nil || r.FSGroup != "" {
		return err
	}
	r.FSGroup = groupName(args.FSGroup)
	_, err := m.writeRecord(m.dir(), r)
	return err
}

// checkUnchanged returns the existing record. It returns an error if another volume may be published at
// the path, because without its record that volume could not be unpublished.
func (m *mounter) checkUnchanged() (record, error) {
	r, err := readRecord(m.dir())
	if err == nil && (r.Driver != m.v.driver || r.Handle != m.v.handle) {
		return r, plugins.Invalidf("volume %s: the pod has volume %s of driver %s under this name: give the new volume another name", m.v.name, r.Handle, r.Driver)
	}
	// The driver would return success without a change, because a volume is published at the path.
	if err == nil && m.v.ephemeral && r.Source != "" && r.Source != m.v.source() {
		return r, plugins.Invalidf("volume %s: the csi source was changed, but the pod has the earlier volume: undo the change, or give the new volume another name", m.v.name)
	}
	return r, nil
}

// appliesGroup reports whether the manager applies the fsGroup, according to the fsGroupPolicy of the
// CSIDriver object.
func (m *mounter) appliesGroup(d *driver, args plugins.MounterArgs) bool {
	if args.FSGroup == nil || m.v.readOnly || d.nodeCan(csi.NodeServiceCapability_RPC_VOLUME_MOUNT_GROUP) {
		return false
	}
	policy := storagev1.ReadWriteOnceWithFSTypeFSGroupPolicy
	if p := m.object(m.v.driver).FSGroupPolicy; p != nil {
		policy = *p
	}
	switch policy {
	case storagev1.NoneFSGroupPolicy:
		return false
	case storagev1.FileFSGroupPolicy:
		return true
	default:
		return m.v.fsType != "" && m.v.singleNodeWriter()
	}
}

// podRecord returns a record with all keys that a kubelet writes for a pod's volume.
func (p *Plugin) podRecord(v *volume) record {
	r := record{
		Name: v.name, Handle: v.handle, Driver: v.driver, Node: p.host.NodeName(),
		Attachment: attachmentName(v.handle, v.driver, p.host.NodeName()),
		Lifecycle:  v.lifecycle(),
	}
	if v.ephemeral {
		r.Attachment, r.Source = "", v.source()
	}
	return r
}

// source returns a hash of an inline volume's fields in the manifest.
func (v *volume) source() string {
	b, _ := json.Marshal([]any{v.fsType, v.readOnly, v.attributes}) //nolint:errchkjson // strings and a bool
	return fmt.Sprintf("%x", sha256.Sum256(b))
}

// lifecycle returns the lifecycle mode: Ephemeral for an inline volume, otherwise Persistent.
func (v *volume) lifecycle() storagev1.VolumeLifecycleMode {
	if v.ephemeral {
		return storagev1.VolumeLifecycleEphemeral
	}
	return storagev1.VolumeLifecyclePersistent
}

// publishRequest returns the request of NodePublishVolume.
func (p *Plugin) publishRequest(d *driver, v *volume, pod *corev1.Pod, target string, args plugins.MounterArgs) (*csi.NodePublishVolumeRequest, error) {
	object := p.object(v.driver)
	if err := checkLifecycle(object, v); err != nil {
		return nil, err
	}
	secrets, err := p.secret(v.publishSecret)
	if err != nil {
		return nil, err
	}
	tokens, err := p.tokens(object, pod)
	if err != nil {
		return nil, err
	}
	attributes := merged(v.attributes, podInfo(object, pod, v.ephemeral))
	if object.ServiceAccountTokenInSecrets != nil && *object.ServiceAccountTokenInSecrets {
		secrets = merged(secrets, tokens)
	} else {
		attributes = merged(attributes, tokens)
	}
	request := &csi.NodePublishVolumeRequest{
		VolumeId:         v.handle,
		TargetPath:       target,
		VolumeCapability: v.capability(d.nodeCan(csi.NodeServiceCapability_RPC_SINGLE_NODE_MULTI_WRITER), d.groupFor(args)),
		Readonly:         v.readOnly,
		Secrets:          secrets,
		VolumeContext:    attributes,
	}
	if v.ephemeral {
		return request, nil
	}
	attachment, err := p.attachment(v)
	if err == nil {
		request.PublishContext = attachment.Status.AttachmentMetadata
	} else if !errors.Is(err, fs.ErrNotExist) { // ErrNotExist means that the volume is not attached
		return nil, err
	}
	if d.nodeCan(csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME) {
		request.StagingTargetPath, _ = p.stagingPaths(v)
	}
	return request, nil
}

// checkLifecycle refuses a volume whose lifecycle mode is not in the CSIDriver object. If the object has no
// modes, only Persistent is allowed.
func checkLifecycle(object storagev1.CSIDriverSpec, v *volume) error {
	modes := object.VolumeLifecycleModes
	if len(modes) == 0 {
		modes = []storagev1.VolumeLifecycleMode{storagev1.VolumeLifecyclePersistent}
	}
	if slices.Contains(modes, v.lifecycle()) {
		return nil
	}
	return plugins.Invalidf("volume %s: driver %s does not support %s volumes, because its CSIDriver object has volumeLifecycleModes %v: correct the object, or use another driver", v.name, v.driver, v.lifecycle(), modes)
}
