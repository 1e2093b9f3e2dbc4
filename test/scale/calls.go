package main

import (
	"context"
	"fmt"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/trivet-csi/trivet/internal/translate"
	"github.com/trivet-csi/trivet/test/measure"
)

// volumeSize is the size of each volume in bytes. Images are sparse.
const volumeSize = 1 << 20

// vol is a volume on a node, or one for which the driver chooses the node.
type vol struct {
	name string
	node *node
	id   string
}

// newVolumes returns n volumes that do not exist yet, distributed over the nodes. Their names begin
// with prefix.
func newVolumes(nodes []*node, prefix string, n int) []*vol {
	vols := make([]*vol, n)
	for i := range vols {
		vols[i] = &vol{name: fmt.Sprintf("%s-%05d", prefix, i), node: nodes[i%len(nodes)]}
	}
	return vols
}

// capability returns the capability of all volumes.
func capability() *csi.VolumeCapability {
	return &csi.VolumeCapability{
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER},
		AccessType: &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}},
	}
}

// call is a CSI call in a volume's life.
type call struct {
	name string
	do   func(context.Context, csi.ControllerClient, *vol) error
	// forwarded is the call that the controller's driver makes to the node, if it differs from do.
	forwarded func(context.Context, csi.ControllerClient, *vol) error
}

// life contains all calls in their order.
var life = []call{
	{name: "CreateVolume", do: createVolume},
	{name: "GetCapacity", do: getCapacity},
	{name: "ControllerPublish", do: publishVolume, forwarded: validateVolume},
	{name: "ControllerGetVolume", do: getVolume},
	{name: "ControllerUnpublish", do: unpublishVolume},
	{name: "DeleteVolume", do: deleteVolume},
}

func createVolume(ctx context.Context, c csi.ControllerClient, v *vol) error {
	onNode := []*csi.Topology{translate.Topology(v.node.name)}
	return create(ctx, c, v, &csi.TopologyRequirement{Requisite: onNode, Preferred: onNode})
}

// createAnywhere creates a volume without a topology, so that the controller's driver calls all
// nodes.
func createAnywhere(ctx context.Context, c csi.ControllerClient, v *vol) error {
	return create(ctx, c, v, nil)
}

// create creates a volume; where is nil if the driver chooses the node.
func create(ctx context.Context, c csi.ControllerClient, v *vol, where *csi.TopologyRequirement) error {
	resp, err := c.CreateVolume(ctx, &csi.CreateVolumeRequest{
		Name: v.name, CapacityRange: &csi.CapacityRange{RequiredBytes: volumeSize},
		VolumeCapabilities: []*csi.VolumeCapability{capability()}, AccessibilityRequirements: where,
	})
	v.id = resp.GetVolume().GetVolumeId()
	return err
}

func getCapacity(ctx context.Context, c csi.ControllerClient, v *vol) error {
	_, err := c.GetCapacity(ctx, &csi.GetCapacityRequest{AccessibleTopology: translate.Topology(v.node.name)})
	return err
}

func publishVolume(ctx context.Context, c csi.ControllerClient, v *vol) error {
	_, err := c.ControllerPublishVolume(ctx, &csi.ControllerPublishVolumeRequest{
		VolumeId: v.id, NodeId: v.node.name, VolumeCapability: capability(),
	})
	return err
}

func validateVolume(ctx context.Context, c csi.ControllerClient, v *vol) error {
	_, err := c.ValidateVolumeCapabilities(ctx, &csi.ValidateVolumeCapabilitiesRequest{
		VolumeId: v.id, VolumeCapabilities: []*csi.VolumeCapability{capability()},
	})
	return err
}

func getVolume(ctx context.Context, c csi.ControllerClient, v *vol) error {
	_, err := c.ControllerGetVolume(ctx, &csi.ControllerGetVolumeRequest{VolumeId: v.id})
	return err
}

func unpublishVolume(ctx context.Context, c csi.ControllerClient, v *vol) error {
	_, err := c.ControllerUnpublishVolume(ctx, &csi.ControllerUnpublishVolumeRequest{VolumeId: v.id, NodeId: v.node.name})
	return err
}

func deleteVolume(ctx context.Context, c csi.ControllerClient, v *vol) error {
	_, err := c.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: v.id})
	return err
}

// callTimeout is the timeout of each call.
const callTimeout = time.Minute

// forAll calls do once for each volume, with the volumes divided among concurrent callers, and
// returns the duration of each call.
func forAll(ctx context.Context, callers int, vols []*vol, do func(context.Context, *vol) error) measure.Durations {
	return measure.ForAll(ctx, callers, vols, func(ctx context.Context, _ int, v *vol) error {
		ctx, cancel := context.WithTimeout(ctx, callTimeout)
		defer cancel()
		if err := do(ctx, v); err != nil {
			return fmt.Errorf("volume %s: %w", v.name, err)
		}
		return nil
	})
}
