package main

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
)

// directoryFloor is a floor whose volumes are directories. Deleted volumes stay in its trash.
type directoryFloor struct {
	*floor
	trash *os.File
	// limits: directories are subvolumes with a qgroup.
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

func (f *directoryFloor) make(name string, size int64) error {
	if f.limits {
		return makeSubvolume(f.volumes, name, size)
	}
	return unix.Mkdir(f.path(name), 0o700)
}

// commit makes a new directory durable: no log that fsync(2) writes has the qgroups.
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
	if err := unix.Unmount(req.GetStagingTargetPath(), 0); err != nil {
		return nil, fmt.Errorf("umount2: %w", err)
	}
	return &csi.NodeUnstageVolumeResponse{}, nil
}
