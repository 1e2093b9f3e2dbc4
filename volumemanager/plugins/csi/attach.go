package csi

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"

	"github.com/trivet-csi/trivet/internal/atomicfile"
	"github.com/trivet-csi/trivet/volumemanager/plugins"
)

// nodeIDAnnotation contains the node ID of an attachment, as in external-attacher.
const nodeIDAnnotation = "csi.alpha.kubernetes.io/node-id"

// attachmentName returns the kubelet's name for a VolumeAttachment.
func attachmentName(handle, driver, node string) string { return "csi-" + hash(handle+driver+node) }

// attachmentsDir returns the directory of the attachment files. An attachment file is the record of an
// attached volume.
func (p *Plugin) attachmentsDir() string {
	return filepath.Join(p.host.Paths().Root, "volume-manager", "attachments")
}

// attachmentFile returns the name of a volume's file in attachmentsDir.
func (p *Plugin) attachmentFile(v *volume) string {
	return attachmentName(v.handle, v.driver, p.host.NodeName()) + ".json"
}

// NeedsAttach reports whether the driver's CSIDriver object (attachRequired, true by default) and
// its capability PUBLISH_UNPUBLISH_VOLUME require attaching.
func (p *Plugin) NeedsAttach(spec *plugins.Spec) (bool, error) {
	if required := p.object(driverOf(spec)).AttachRequired; spec.PersistentVolume == nil || required != nil && !*required {
		return false, nil
	}
	d, err := p.driver(driverOf(spec))
	if err != nil {
		return false, err
	}
	return d.controllerCan(csi.ControllerServiceCapability_RPC_PUBLISH_UNPUBLISH_VOLUME), nil
}

// Attach calls ControllerPublishVolume. It does so even for a volume with an attachment file, because
// the driver may have lost the attachment.
func (p *Plugin) Attach(ctx context.Context, spec *plugins.Spec) (plugins.Attachment, error) {
	v, d, err := p.volumeAndDriver(spec)
	if err != nil {
		return nil, err
	}
	old, err := p.attachment(v)
	fresh := errors.Is(err, fs.ErrNotExist)
	if err == nil && old.Annotations[nodeIDAnnotation] != d.info().nodeID {
		if err := p.checkUnused(v); err != nil {
			return nil, fmt.Errorf("driver %s has another node ID than when it attached the volume: restore the node ID, or free the volume so that it can be detached: %w", v.driver, err)
		}
		if err := p.Detach(ctx, spec); err != nil {
			return nil, err
		}
		fresh = true
	}
	request, err := p.attachRequest(d, v)
	if err != nil {
		return nil, err
	}
	return p.attach(ctx, d, v, request, fresh)
}

// attach calls ControllerPublishVolume. fresh is true if the volume has no attachment file.
func (p *Plugin) attach(ctx context.Context, d *driver, v *volume, request *csi.ControllerPublishVolumeRequest, fresh bool) (plugins.Attachment, error) {
	a := p.newAttachment(v, request.GetNodeId())
	dir, file := p.attachmentsDir(), p.attachmentFile(v)
	if err := makeDirs(dir); err != nil {
		return nil, err
	}
	if fresh {
		if err := atomicfile.WriteJSON(dir, file, a); err != nil {
			return nil, err
		}
	}
	answer, err := call(ctx, d, d.controller.ControllerPublishVolume, request)
	if err != nil {
		if fresh && !plugins.Uncertain(err) && removeFile(dir, file) == nil {
			return nil, err
		}
		return nil, &plugins.UncertainError{Err: err}
	}
	a.Status.Attached, a.Status.AttachmentMetadata = true, answer.GetPublishContext()
	if err := atomicfile.WriteJSON(dir, file, a); err != nil {
		return nil, &plugins.UncertainError{Err: err}
	}
	return answer.GetPublishContext(), nil
}

// attachRequest returns the request of ControllerPublishVolume.
func (p *Plugin) attachRequest(d *driver, v *volume) (*csi.ControllerPublishVolumeRequest, error) {
	secrets, err := p.secret(v.persistent.ControllerPublishSecretRef)
	if err != nil {
		return nil, err
	}
	return &csi.ControllerPublishVolumeRequest{
		VolumeId:         v.handle,
		NodeId:           d.info().nodeID,
		VolumeCapability: v.capability(d.controllerCan(csi.ControllerServiceCapability_RPC_SINGLE_NODE_MULTI_WRITER), nil),
		Readonly:         v.persistent.ReadOnly && d.controllerCan(csi.ControllerServiceCapability_RPC_PUBLISH_READONLY),
		Secrets:          secrets,
		VolumeContext:    v.attributes,
	}, nil
}

// newAttachment returns the content of an attachment file for a volume that is not attached yet.
func (p *Plugin) newAttachment(v *volume, nodeID string) *storagev1.VolumeAttachment {
	a := plugins.NewAttachment(p.host, attachmentName(v.handle, v.driver, p.host.NodeName()), v.driver, corev1.PersistentVolumeSource{
		CSI: &corev1.CSIPersistentVolumeSource{Driver: v.driver, VolumeHandle: v.handle, ControllerPublishSecretRef: v.persistent.ControllerPublishSecretRef},
	})
	a.Annotations, a.Spec.Source.PersistentVolumeName = map[string]string{nodeIDAnnotation: nodeID}, &v.name
	return a
}

// Detach calls ControllerUnpublishVolume with the node ID of the attachment. It refuses while the
// volume is staged or published on this node.
func (p *Plugin) Detach(ctx context.Context, spec *plugins.Spec) error {
	if path, ok := tornRecord(spec); ok {
		if _, err := os.Lstat(path); errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		return fmt.Errorf("%s is torn: the attached volume is unknown: detach it by hand, and remove the file", path)
	}
	v, err := newVolume(spec, nil)
	if err != nil {
		return err
	}
	a, torn := p.attachment(v)
	if errors.Is(torn, fs.ErrNotExist) {
		return nil
	}
	if err := p.checkUnused(v); err != nil {
		return err
	}
	d, err := p.driver(v.driver)
	if err != nil {
		return err
	}
	if torn != nil {
		a = p.newAttachment(v, d.info().nodeID)
	}
	secrets, err := p.secretIfPresent(a.Spec.Source.InlineVolumeSpec.CSI.ControllerPublishSecretRef)
	if err != nil {
		return err
	}
	request := &csi.ControllerUnpublishVolumeRequest{VolumeId: v.handle, NodeId: a.Annotations[nodeIDAnnotation], Secrets: secrets}
	if _, err := call(ctx, d, d.controller.ControllerUnpublishVolume, request); err != nil {
		return err
	}
	return removeFile(p.attachmentsDir(), p.attachmentFile(v))
}

// Attachments returns the volumes with an attachment file. The VolumeName of a torn file is its path.
func (p *Plugin) Attachments() ([]plugins.DeviceMount, error) {
	files, err := p.attachments()
	var all []plugins.DeviceMount
	for path, a := range files {
		r, ok := attachedRecord(a)
		if !ok {
			all = append(all, plugins.DeviceMount{VolumeName: path, Spec: tornSpec(path)})
			continue
		}
		spec := r.spec(false)
		spec.PersistentVolume.Spec.CSI = a.Spec.Source.InlineVolumeSpec.CSI
		all = append(all, plugins.DeviceMount{VolumeName: volumeName(r.Driver, r.Handle), Spec: spec})
	}
	return all, err
}

// attachments returns the attachment files by path; nil for a file that cannot be read.
func (p *Plugin) attachments() (map[string]*storagev1.VolumeAttachment, error) {
	entries, err := plugins.Entries(p.attachmentsDir())
	all := map[string]*storagev1.VolumeAttachment{}
	for _, e := range entries {
		path := filepath.Join(p.attachmentsDir(), e.Name())
		if strings.HasSuffix(path, ".json") {
			all[path], _ = readAttachment(path)
		}
	}
	return all, err
}

// attachedRecord returns the record of an attachment's volume; false if a is nil.
func attachedRecord(a *storagev1.VolumeAttachment) (record, bool) {
	if a == nil {
		return record{}, false
	}
	source := a.Spec.Source.InlineVolumeSpec.CSI
	return record{Name: *a.Spec.Source.PersistentVolumeName, Driver: source.Driver, Handle: source.VolumeHandle}, true
}

// attachment reads the attachment file of a volume. It returns fs.ErrNotExist if there is none.
func (p *Plugin) attachment(v *volume) (*storagev1.VolumeAttachment, error) {
	return readAttachment(filepath.Join(p.attachmentsDir(), p.attachmentFile(v)))
}

// readAttachment refuses a file that lacks what newAttachment writes.
func readAttachment(path string) (*storagev1.VolumeAttachment, error) {
	a := &storagev1.VolumeAttachment{}
	if err := plugins.ReadJSON(path, a); err != nil {
		return nil, err
	}
	source := a.Spec.Source
	if source.PersistentVolumeName == nil || source.InlineVolumeSpec == nil || source.InlineVolumeSpec.CSI == nil || source.InlineVolumeSpec.CSI.VolumeHandle == "" {
		return nil, fmt.Errorf("%s: the name of the volume is missing", path)
	}
	return a, nil
}
