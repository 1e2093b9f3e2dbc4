package csi

import (
	"context"
	"fmt"
	"os"

	"github.com/container-storage-interface/spec/lib/go/csi"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	domain "github.com/trivet-csi/trivet/volume"
	"github.com/trivet-csi/trivet/volumemanager/plugins"
)

// Expand calls ControllerExpandVolume. A driver without this call may expand volumes on the node alone.
func (p *Plugin) Expand(ctx context.Context, pv *corev1.PersistentVolume, size resource.Quantity) (actual resource.Quantity, nodeExpandRequired bool, err error) {
	v, d, err := p.volumeAndDriver(&plugins.Spec{PersistentVolume: pv})
	if err != nil {
		return actual, false, err
	}
	if !d.controllerCan(csi.ControllerServiceCapability_RPC_EXPAND_VOLUME) {
		if d.nodeCan(csi.NodeServiceCapability_RPC_EXPAND_VOLUME) {
			return size, true, nil
		}
		return actual, false, fmt.Errorf("driver %s cannot expand volumes, because the endpoint %s lacks EXPAND_VOLUME: create a larger volume, and copy the data", d.name, d.endpoint)
	}
	secrets, err := p.secret(v.persistent.ControllerExpandSecretRef)
	if err != nil {
		return actual, false, err
	}
	answer, err := call(ctx, d, d.controller.ControllerExpandVolume, &csi.ControllerExpandVolumeRequest{
		VolumeId:         v.handle,
		CapacityRange:    &csi.CapacityRange{RequiredBytes: size.Value()},
		Secrets:          secrets,
		VolumeCapability: v.capability(d.controllerCan(csi.ControllerServiceCapability_RPC_SINGLE_NODE_MULTI_WRITER), nil),
	})
	if err != nil {
		return actual, false, err
	}
	if bytes := answer.GetCapacityBytes(); bytes < size.Value() {
		return actual, false, fmt.Errorf("driver %s: ControllerExpandVolume: volume %s has %s, less than the requested %s: check the driver's log", d.name, v.handle, domain.ExactSize(bytes), domain.ExactSize(size.Value()))
	}
	return *resource.NewQuantity(answer.GetCapacityBytes(), resource.BinarySI), answer.GetNodeExpansionRequired(), nil
}

// NodeExpand calls NodeExpandVolume if the driver has it.
func (p *Plugin) NodeExpand(ctx context.Context, spec *plugins.Spec, o plugins.NodeExpandOptions) error {
	v, d, err := p.volumeAndDriver(spec)
	if err != nil {
		return err
	}
	if !d.nodeCan(csi.NodeServiceCapability_RPC_EXPAND_VOLUME) {
		return nil
	}
	secrets, err := p.secret(v.persistent.NodeExpandSecretRef)
	if err != nil {
		return err
	}
	path := o.Path
	if v.block { // the pod's path is a link to the target path of NodePublishVolume
		if path, err = os.Readlink(path); err != nil {
			return err
		}
	}
	request := &csi.NodeExpandVolumeRequest{
		VolumeId:         v.handle,
		VolumePath:       path,
		CapacityRange:    &csi.CapacityRange{RequiredBytes: o.Size.Value()},
		VolumeCapability: v.capability(d.nodeCan(csi.NodeServiceCapability_RPC_SINGLE_NODE_MULTI_WRITER), nil),
		Secrets:          secrets,
	}
	if d.nodeCan(csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME) {
		request.StagingTargetPath = o.DeviceMountPath
	}
	_, err = call(ctx, d, d.node.NodeExpandVolume, request)
	return err
}
