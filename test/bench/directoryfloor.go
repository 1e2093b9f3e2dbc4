package main

import (
	"context"
	"errors"
	"os"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/linux/sys"
)

// directoryFloor is a floor whose volumes are directories. It never empties its trash.
type directoryFloor struct {
	*floor
	trash *os.File
	// limits makes CreateVolume create subvolumes whose size a qgroup limits.
	limits bool
}

// CreateVolume implements csi.ControllerServer.
func (f *directoryFloor) CreateVolume(_ context.Context, req *csi.CreateVolumeRequest) (*csi.CreateVolumeResponse, error) {
	size := req.GetCapacityRange().GetRequiredBytes()
	if err := f.make(req.GetName(), size); err != nil {
		return nil, err
	}
	if err := unix.Chmod(f.path(req.GetName()), 0o777); err != nil {
		return nil, err
	}
	if f.durable {
		if err := errors.Join(f.record(req.GetName()), f.commit()); err != nil {
			return nil, err
		}
	}
	return &csi.CreateVolumeResponse{Volume: &csi.Volume{VolumeId: req.GetName(), CapacityBytes: size}}, nil
}

// make creates the directory of a volume of a size in bytes.
func (f *directoryFloor) make(name string, size int64) error {
	if f.limits {
		return makeSubvolume(f.volumes, name, size)
	}
	return unix.Mkdir(f.path(name), 0o700)
}

// makeSubvolume creates a subvolume in a directory, and a qgroup that limits the subvolume to a size
// in bytes.
func makeSubvolume(parent *os.File, name string, size int64) error {
	if err := sys.CreateSubvolume(parent, name); err != nil {
		return err
	}
	root, err := os.Open(parent.Name() + "/" + name)
	if err != nil {
		return err
	}
	defer root.Close()
	id, err := sys.SubvolumeID(root)
	if err != nil {
		return err
	}
	group := 1<<48 | id // 1/ID, a qgroup of level 1
	return errors.Join(sys.CreateQgroup(parent, group), sys.AssignQgroup(parent, id, group), sys.LimitQgroup(parent, group, uint64(size)))
}

// commit makes a new directory durable. Qgroups need syncfs(2), because the log that fsync(2) writes
// does not contain them.
func (f *directoryFloor) commit() error {
	if f.limits {
		return unix.Syncfs(int(f.volumes.Fd()))
	}
	return f.volumes.Sync()
}

// DeleteVolume implements csi.ControllerServer.
func (f *directoryFloor) DeleteVolume(_ context.Context, req *csi.DeleteVolumeRequest) (*csi.DeleteVolumeResponse, error) {
	if err := unix.Rename(f.path(req.GetVolumeId()), f.trash.Name()+"/"+req.GetVolumeId()); err != nil {
		return nil, err
	}
	if f.durable {
		if err := errors.Join(f.volumes.Sync(), f.trash.Sync()); err != nil {
			return nil, err
		}
	}
	return &csi.DeleteVolumeResponse{}, nil
}

// NodeStageVolume implements csi.NodeServer.
func (f *directoryFloor) NodeStageVolume(_ context.Context, req *csi.NodeStageVolumeRequest) (*csi.NodeStageVolumeResponse, error) {
	return &csi.NodeStageVolumeResponse{}, bind(f.path(req.GetVolumeId()), req.GetStagingTargetPath())
}

// NodeUnstageVolume implements csi.NodeServer.
func (f *directoryFloor) NodeUnstageVolume(_ context.Context, req *csi.NodeUnstageVolumeRequest) (*csi.NodeUnstageVolumeResponse, error) {
	return &csi.NodeUnstageVolumeResponse{}, unmount(req.GetStagingTargetPath())
}
