package csi

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"path/filepath"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"

	"github.com/trivet-csi/trivet/volumemanager/ownership"
	"github.com/trivet-csi/trivet/volumemanager/plugins"
)

type mounter struct {
	*Plugin
	v   *volume
	pod *corev1.Pod
}

// Path is the target path of NodePublishVolume.
func (m *mounter) Path() string { return filepath.Join(m.dir(), podMount) }

func (m *mounter) dir() string { return m.podDir(m.pod.UID, m.v.name) }

// SetUp is NodePublishVolume, and the pod's group after it.
func (m *mounter) SetUp(ctx context.Context, args plugins.MounterArgs) error {
	d, err := m.driver(m.v.driver)
	if err != nil {
		return err
	}
	request, err := m.publishRequest(d, m.v, m.pod, m.Path(), args)
	if err != nil {
		return err
	}
	before, err := m.checkSame()
	if err != nil {
		return err
	}
	r := m.podRecord(m.v)
	if before.FSGroup == groupName(args.FSGroup) {
		r.FSGroup = before.FSGroup
	}
	fresh, err := m.remember(m.dir(), r)
	if err != nil {
		return err
	}
	if _, err := call(ctx, d, d.node.NodePublishVolume, request); err != nil {
		return m.settle(err, fresh, m.Path(), func() error { return m.unpublished(m.dir()) })
	}
	if err := m.checkThere(d.name, m.Path(), false); err != nil {
		return err
	}
	if !m.ownsGroup(d, args) {
		return nil
	}
	if err := m.giveToGroup(ctx, r, args); err != nil {
		return &plugins.UncertainError{Err: err}
	}
	return nil
}

// giveToGroup records that all of the volume has the pod's group once it has. From then on
// its root alone is looked at: the pod may have changed the rest.
func (m *mounter) giveToGroup(ctx context.Context, r record, args plugins.MounterArgs) error {
	if r.FSGroup != "" {
		args.FSGroupChangePolicy = corev1.FSGroupChangeOnRootMismatch
	}
	if err := ownership.Set(ctx, m.Path(), args); err != nil || r.FSGroup != "" {
		return err
	}
	r.FSGroup = groupName(args.FSGroup)
	_, err := m.remember(m.dir(), r)
	return err
}

// checkSame returns the record that there is. It refuses to forget a volume that is
// published at the path, or may be: that its driver is to take it away would be lost.
func (m *mounter) checkSame() (record, error) {
	r, err := readRecord(m.dir())
	if err == nil && (r.Driver != m.v.driver || r.Handle != m.v.handle) {
		return r, plugins.Invalidf("volume %s: the pod has volume %s of driver %s by this name: give the new one another name", m.v.name, r.Handle, r.Driver)
	}
	if err == nil && m.v.ephemeral && r.Source != "" && r.Source != m.v.source() { // drivers say that they have published it
		return r, plugins.Invalidf("volume %s: csi: it was changed, and the pod has it as it was: set it back, or give the new one another name", m.v.name)
	}
	return r, nil
}

// ownsGroup tells whether the fsGroup is to be set here, as the policy in the CSIDriver
// object has it.
func (m *mounter) ownsGroup(d *driver, args plugins.MounterArgs) bool {
	if args.FSGroup == nil || m.v.readOnly || d.nodeCan(csi.NodeServiceCapability_RPC_VOLUME_MOUNT_GROUP) {
		return false
	}
	policy := storagev1.ReadWriteOnceWithFSTypeFSGroupPolicy
	if given := m.object(m.v.driver).FSGroupPolicy; given != nil {
		policy = *given
	}
	switch policy {
	case storagev1.NoneFSGroupPolicy:
		return false
	case storagev1.FileFSGroupPolicy:
		return true
	default:
		return m.v.fsType != "" && m.v.writtenByOne()
	}
}

// podRecord has all the keys of the kubelet's.
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

// source tells what is said of an inline volume from anything else that could be.
func (v *volume) source() string {
	b, err := json.Marshal([]any{v.fsType, v.readOnly, v.attributes}) // maps by their keys
	if err != nil {
		return ""
	}
	return fmt.Sprintf("%x", sha256.Sum256(b))
}

func (v *volume) lifecycle() storagev1.VolumeLifecycleMode {
	if v.ephemeral {
		return storagev1.VolumeLifecycleEphemeral
	}
	return storagev1.VolumeLifecyclePersistent
}

// publishRequest puts together what is known of a volume and its pod.
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
	request.PublishContext, err = p.publishContext(v)
	if d.nodeCan(csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME) {
		request.StagingTargetPath, _ = p.place(v)
	}
	return request, err
}

// checkLifecycle refuses a kind of volume that the CSIDriver object does not list:
// Persistent alone if it lists none.
func checkLifecycle(object storagev1.CSIDriverSpec, v *volume) error {
	modes := object.VolumeLifecycleModes
	if len(modes) == 0 {
		modes = []storagev1.VolumeLifecycleMode{storagev1.VolumeLifecyclePersistent}
	}
	if slices.Contains(modes, v.lifecycle()) {
		return nil
	}
	return plugins.Invalidf("volume %s: driver %s has no %s volumes: its CSIDriver object has volumeLifecycleModes %v", v.name, v.driver, v.lifecycle(), modes)
}
