package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/backend/backendtest/targets"
	"github.com/trivet-csi/trivet/test/measure"
)

// vol is a volume of one server with the values that an orchestrator stores for its calls.
type vol struct {
	name            string
	class           class
	staging, target string
	// source is the ID of the volume of which CreateSnapshot makes a snapshot.
	source string
	// content is the volume_content_source of CreateVolume.
	content *csi.VolumeContentSource
	// snapshot and restored are the snapshot of the volume and the volume that was created from it, if there are any.
	snapshot, restored *vol
	id                 string
	volumeContext      map[string]string
	publishContext     map[string]string
}

// class is the size, the parameters and the capability of requested volumes.
type class struct {
	size       int64 // in bytes
	parameters map[string]string
	capability *csi.VolumeCapability
	secrets    map[string]string // of NodeStageVolume
}

// classOf returns the class of a kind of volume. The access mode is the one that Kubernetes requests
// for ReadWriteMany if the kind is a directory on an export, otherwise the one for ReadWriteOnce.
func classOf(k backendtest.Kind, size int64) class {
	mode := csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER
	if k.Has(backendtest.Shared | backendtest.Directory) {
		mode = csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER
	}
	return class{size: size, parameters: k.Parameters("pool", poolName), capability: k.Capability(mode)}
}

// ext4Of returns the class of images with ext4.
func ext4Of(size int64) class { return classOf(targets.Volume("images-xfs", "ext4"), size) }

// newVolumes returns n volumes that do not exist yet, and creates their staging directories, as a
// kubelet does.
func newVolumes(dir, prefix string, n int, of class) []*vol {
	vols := make([]*vol, n)
	for i := range vols {
		name := prefix + "-" + strconv.Itoa(i)
		at := filepath.Join(dir, name)
		vols[i] = &vol{name: name, class: of, staging: at + "/staging", target: at + "/target"}
		measure.Must(os.MkdirAll(vols[i].staging, 0o750))
	}
	return vols
}

// removeStaging removes the directories that newVolumes created. It fails if a mount is left.
func removeStaging(vols []*vol) {
	for _, v := range vols {
		measure.Must(os.Remove(v.staging))
		measure.Must(os.Remove(filepath.Dir(v.staging)))
	}
}

// call is one CSI call in a volume's life.
type call struct {
	name string
	do   func(context.Context, *client, *vol) error
}

var (
	create              = call{"create", createVolume}
	controllerPublish   = call{"controller-publish", controllerPublishVolume}
	stage               = call{"stage", stageVolume}
	publish             = call{"publish", publishVolume}
	stats               = call{"stats", volumeStats}
	unpublish           = call{"unpublish", unpublishVolume}
	unstage             = call{"unstage", unstageVolume}
	controllerUnpublish = call{"controller-unpublish", controllerUnpublishVolume}
	remove              = call{"delete", deleteVolume}

	// life contains all calls in order.
	life = []call{create, controllerPublish, stage, publish, stats, unpublish, unstage, controllerUnpublish, remove}
)

func createVolume(ctx context.Context, c *client, v *vol) error {
	resp, err := c.CreateVolume(ctx, &csi.CreateVolumeRequest{
		Name: v.name, CapacityRange: &csi.CapacityRange{RequiredBytes: v.class.size},
		VolumeCapabilities: []*csi.VolumeCapability{v.class.capability}, Parameters: v.class.parameters, VolumeContentSource: v.content,
	})
	v.id, v.volumeContext = resp.GetVolume().GetVolumeId(), resp.GetVolume().GetVolumeContext()
	return err
}

func controllerPublishVolume(ctx context.Context, c *client, v *vol) error {
	resp, err := c.ControllerPublishVolume(ctx, &csi.ControllerPublishVolumeRequest{
		VolumeId: v.id, NodeId: nodeID, VolumeCapability: v.class.capability, VolumeContext: v.volumeContext,
	})
	v.publishContext = resp.GetPublishContext()
	return err
}

func stageVolume(ctx context.Context, c *client, v *vol) error {
	_, err := c.NodeStageVolume(ctx, &csi.NodeStageVolumeRequest{
		VolumeId: v.id, StagingTargetPath: v.staging, VolumeCapability: v.class.capability,
		VolumeContext: v.volumeContext, PublishContext: v.publishContext, Secrets: v.class.secrets,
	})
	return err
}

func publishVolume(ctx context.Context, c *client, v *vol) error {
	_, err := c.NodePublishVolume(ctx, &csi.NodePublishVolumeRequest{
		VolumeId: v.id, StagingTargetPath: v.staging, TargetPath: v.target, VolumeCapability: v.class.capability,
		VolumeContext: v.volumeContext, PublishContext: v.publishContext,
	})
	return err
}

func volumeStats(ctx context.Context, c *client, v *vol) error {
	_, err := c.NodeGetVolumeStats(ctx, &csi.NodeGetVolumeStatsRequest{VolumeId: v.id, VolumePath: v.target, StagingTargetPath: v.staging})
	return err
}

func unpublishVolume(ctx context.Context, c *client, v *vol) error {
	_, err := c.NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{VolumeId: v.id, TargetPath: v.target})
	return err
}

func unstageVolume(ctx context.Context, c *client, v *vol) error {
	_, err := c.NodeUnstageVolume(ctx, &csi.NodeUnstageVolumeRequest{VolumeId: v.id, StagingTargetPath: v.staging})
	return err
}

func controllerUnpublishVolume(ctx context.Context, c *client, v *vol) error {
	_, err := c.ControllerUnpublishVolume(ctx, &csi.ControllerUnpublishVolumeRequest{VolumeId: v.id, NodeId: nodeID})
	return err
}

func deleteVolume(ctx context.Context, c *client, v *vol) error {
	_, err := c.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: v.id})
	return err
}

// forAll makes one call for each volume, with the volumes divided among the callers, and
// returns the duration of each call.
func forAll(ctx context.Context, callers []*client, c call, vols []*vol) measure.Durations {
	return measure.ForAll(ctx, len(callers), vols, func(ctx context.Context, caller int, v *vol) error {
		if err := c.do(ctx, callers[caller], v); err != nil {
			return fmt.Errorf("%s of %s: %w", c.name, v.name, err)
		}
		return nil
	})
}

// callAll makes the first call for all volumes, then the second call for all volumes, and so on.
func callAll(ctx context.Context, clients []*client, vols []*vol, calls ...call) {
	for _, one := range calls {
		forAll(ctx, clients, one, vols)
	}
}

// sleep waits for a duration. It returns an error if ctx ends before.
func sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}
