package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"sync"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/trivet-csi/trivet/linux/blockdev"
	"github.com/trivet-csi/trivet/linux/sys"
)

// floor is a gRPC server that only makes the system calls that a CSI call needs. Its volumes are
// images, and a volume's ID is its name.
type floor struct {
	ready
	volumes, records *os.File // directories
	// formatter copies the filesystem of a volume from a template, when the volume is created.
	formatter *blockdev.Formatter
	// late makes the floor copy it when the volume is staged, and mkfs makes it start mkfs.ext4 then.
	late, mkfs bool
	// devices contains the name of the loop device of each staged volume, by the volume's ID.
	devices sync.Map
	// durable makes the floor write records, and make all changes durable before it answers.
	durable bool
}

// ready is an embedded server whose Probe reports that it is ready.
type ready struct {
	csi.UnimplementedIdentityServer
	csi.UnimplementedControllerServer
	csi.UnimplementedNodeServer
}

// Probe implements csi.IdentityServer.
func (ready) Probe(ctx context.Context, _ *csi.ProbeRequest) (*csi.ProbeResponse, error) {
	return &csi.ProbeResponse{Ready: wrapperspb.Bool(true)}, ctx.Err()
}

// serveFloor runs a floor until ctx ends.
func serveFloor(ctx context.Context, args []string) error {
	f := &directoryFloor{floor: &floor{formatter: blockdev.NewFormatter()}}
	flags := flag.NewFlagSet("bench floor", flag.ContinueOnError)
	socket := flags.String("socket", "", "`path` of the socket")
	dir := flags.String("dir", "", "`directory` of the volumes")
	flags.BoolVar(&f.mkfs, "mkfs", false, "start mkfs.ext4 for each volume when it is staged")
	flags.BoolVar(&f.late, "late", false, "copy the filesystem of a volume from a template when it is staged")
	flags.BoolVar(&f.durable, "durable", false, "write records, and make changes durable before the answer")
	directories := flags.Bool("directories", false, "create directories instead of images")
	flags.BoolVar(&f.limits, "limits", false, "limit directories with btrfs simple quotas")
	group := groupFlags(flags, f.floor)
	if err := flags.Parse(args); err != nil {
		return err
	}
	var err error
	if f.volumes, err = openDirectory(*dir, "volumes"); err != nil {
		return err
	}
	if f.records, err = openDirectory(*dir, "records"); err != nil {
		return err
	}
	var server csiServer = f.floor
	switch {
	case *directories:
		if f.trash, err = openDirectory(*dir, "trash"); err != nil {
			return err
		}
		server = f
	case group.group.Name != "":
		if err := group.find(); err != nil {
			return err
		}
		server = group
	}
	return serve(ctx, *socket, server)
}

// csiServer implements all CSI services that a benchmark calls.
type csiServer interface {
	csi.IdentityServer
	csi.ControllerServer
	csi.NodeServer
}

// serve listens on a socket until ctx ends.
func serve(ctx context.Context, socket string, d csiServer) error {
	l, err := (&net.ListenConfig{}).Listen(ctx, "unix", socket)
	if err != nil {
		return err
	}
	s := grpc.NewServer()
	csi.RegisterIdentityServer(s, d)
	csi.RegisterControllerServer(s, d)
	csi.RegisterNodeServer(s, d)
	defer context.AfterFunc(ctx, s.GracefulStop)()
	return s.Serve(l)
}

// openDirectory opens a directory in dir. It creates the directory if necessary.
func openDirectory(dir, name string) (*os.File, error) {
	path := filepath.Join(dir, name)
	if err := os.MkdirAll(path, 0o755); err != nil {
		return nil, err
	}
	return os.Open(path)
}

func (f *floor) path(id string) string { return f.volumes.Name() + "/" + id }

// CreateVolume implements csi.ControllerServer.
func (f *floor) CreateVolume(ctx context.Context, req *csi.CreateVolumeRequest) (*csi.CreateVolumeResponse, error) {
	size := req.GetCapacityRange().GetRequiredBytes()
	image, err := os.OpenFile(f.path(req.GetName()), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return nil, err
	}
	defer image.Close()
	if from := req.GetVolumeContentSource(); from != nil {
		err = f.share(image, cmp.Or(from.GetSnapshot().GetSnapshotId(), from.GetVolume().GetVolumeId()))
	} else {
		err = f.fill(ctx, image, size, req.GetVolumeCapabilities()[0].GetMount())
	}
	if err != nil {
		return nil, err
	}
	if f.durable {
		if err := errors.Join(image.Sync(), f.record(req.GetName()), f.volumes.Sync()); err != nil {
			return nil, err
		}
	}
	return &csi.CreateVolumeResponse{Volume: &csi.Volume{VolumeId: req.GetName(), CapacityBytes: size}}, nil
}

// fill makes a new image as large as size, and creates the filesystem of a mounted volume.
func (f *floor) fill(ctx context.Context, image *os.File, size int64, mounted *csi.VolumeCapability_MountVolume) error {
	if err := image.Truncate(size); err != nil || mounted == nil || f.mkfs || f.late {
		return err
	}
	return f.copyTemplate(ctx, image, mounted.GetFsType())
}

// copyTemplate copies a filesystem from a template.
func (f *floor) copyTemplate(ctx context.Context, image *os.File, fsType string) error {
	formatted, err := f.formatter.FormatNew(ctx, image, blockdev.FormatSpec{FSType: fsType, SectorSize: 4096})
	if err == nil && !formatted {
		err = fmt.Errorf("there is no template of %s", fsType)
	}
	return err
}

// share makes the image share the blocks of the volume or snapshot with the ID of.
func (f *floor) share(image *os.File, of string) error {
	from, err := os.Open(f.path(of))
	if err != nil {
		return err
	}
	defer from.Close()
	return sys.ShareBlocks(image, from, 0)
}

// CreateSnapshot implements csi.ControllerServer. A snapshot is a volume that is never
// attached.
func (f *floor) CreateSnapshot(ctx context.Context, req *csi.CreateSnapshotRequest) (*csi.CreateSnapshotResponse, error) {
	_, err := f.CreateVolume(ctx, &csi.CreateVolumeRequest{Name: req.GetName(), VolumeContentSource: contentOfVolume(req.GetSourceVolumeId())})
	return &csi.CreateSnapshotResponse{Snapshot: &csi.Snapshot{SnapshotId: req.GetName()}}, err
}

// DeleteSnapshot implements csi.ControllerServer.
func (f *floor) DeleteSnapshot(ctx context.Context, req *csi.DeleteSnapshotRequest) (*csi.DeleteSnapshotResponse, error) {
	_, err := f.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: req.GetSnapshotId()})
	return &csi.DeleteSnapshotResponse{}, err
}

// record writes a file of 300 bytes, which stands for the driver's record, and makes it durable.
func (f *floor) record(name string) error {
	r, err := os.OpenFile(f.records.Name()+"/"+name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = r.Write(make([]byte, 300))
	return errors.Join(err, r.Sync(), r.Close(), f.records.Sync())
}

// DeleteVolume implements csi.ControllerServer.
func (f *floor) DeleteVolume(_ context.Context, req *csi.DeleteVolumeRequest) (*csi.DeleteVolumeResponse, error) {
	if err := unix.Unlink(f.path(req.GetVolumeId())); err != nil {
		return nil, err
	}
	if f.durable {
		if err := errors.Join(unix.Unlink(f.records.Name()+"/"+req.GetVolumeId()), f.records.Sync(), f.volumes.Sync()); err != nil {
			return nil, err
		}
	}
	return &csi.DeleteVolumeResponse{}, nil
}

// ControllerPublishVolume implements csi.ControllerServer.
func (f *floor) ControllerPublishVolume(_ context.Context, req *csi.ControllerPublishVolumeRequest) (*csi.ControllerPublishVolumeResponse, error) {
	if f.durable {
		if err := f.record(req.GetVolumeId() + ".attached"); err != nil {
			return nil, err
		}
	}
	return &csi.ControllerPublishVolumeResponse{}, nil
}

// ControllerUnpublishVolume implements csi.ControllerServer.
func (f *floor) ControllerUnpublishVolume(_ context.Context, req *csi.ControllerUnpublishVolumeRequest) (*csi.ControllerUnpublishVolumeResponse, error) {
	if f.durable {
		if err := errors.Join(unix.Unlink(f.records.Name()+"/"+req.GetVolumeId()+".attached"), f.records.Sync()); err != nil {
			return nil, err
		}
	}
	return &csi.ControllerUnpublishVolumeResponse{}, nil
}

// NodeStageVolume implements csi.NodeServer.
func (f *floor) NodeStageVolume(ctx context.Context, req *csi.NodeStageVolumeRequest) (*csi.NodeStageVolumeResponse, error) {
	image, err := os.OpenFile(f.path(req.GetVolumeId()), os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	defer image.Close()
	fsType := req.GetVolumeCapability().GetMount().GetFsType()
	switch {
	case f.mkfs:
		err = mkfs(ctx, image.Name())
	case f.late:
		err = f.copyTemplate(ctx, image, fsType)
	}
	if err != nil {
		return nil, err
	}
	loop, err := attach(ctx, image)
	if err != nil {
		return nil, err
	}
	defer loop.Close()
	f.devices.Store(req.GetVolumeId(), filepath.Base(loop.Name()))
	if err := unix.Mount(loop.Name(), req.GetStagingTargetPath(), fsType, 0, ""); err != nil {
		return nil, fmt.Errorf("mount: %w", err)
	}
	return &csi.NodeStageVolumeResponse{}, nil
}

// mkfs creates an ext4 with options that leave the kernel nothing to write in the background.
func mkfs(ctx context.Context, path string) error {
	return exec.CommandContext(ctx, "mkfs.ext4", "-q", "-F", "-b", "4096", "-m", "0",
		"-E", "nodiscard,lazy_itable_init=1,lazy_journal_init=1,assume_storage_prezeroed=1", path).Run()
}

// NodePublishVolume implements csi.NodeServer.
func (f *floor) NodePublishVolume(_ context.Context, req *csi.NodePublishVolumeRequest) (*csi.NodePublishVolumeResponse, error) {
	if err := unix.Mkdir(req.GetTargetPath(), 0o750); err != nil {
		return nil, err
	}
	return &csi.NodePublishVolumeResponse{}, bind(req.GetStagingTargetPath(), req.GetTargetPath())
}

// bind makes the directory from also visible at to, like mount --bind (mount(8)).
func bind(from, to string) error {
	fd, err := unix.OpenTree(unix.AT_FDCWD, from, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return fmt.Errorf("open_tree: %w", err)
	}
	defer unix.Close(fd)
	if err := unix.MoveMount(fd, "", unix.AT_FDCWD, to, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return fmt.Errorf("move_mount: %w", err)
	}
	return nil
}

func unmount(path string) error {
	if err := unix.Unmount(path, 0); err != nil {
		return fmt.Errorf("umount2 of %s: %w", path, err)
	}
	return nil
}

// NodeGetVolumeStats implements csi.NodeServer.
func (f *floor) NodeGetVolumeStats(_ context.Context, req *csi.NodeGetVolumeStatsRequest) (*csi.NodeGetVolumeStatsResponse, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(req.GetVolumePath(), &st); err != nil {
		return nil, err
	}
	return &csi.NodeGetVolumeStatsResponse{Usage: []*csi.VolumeUsage{
		{Unit: csi.VolumeUsage_BYTES, Total: int64(st.Blocks) * st.Frsize, Available: int64(st.Bavail) * st.Frsize, Used: int64(st.Blocks-st.Bfree) * st.Frsize},
		{Unit: csi.VolumeUsage_INODES, Total: int64(st.Files), Available: int64(st.Ffree), Used: int64(st.Files - st.Ffree)},
	}}, nil
}

// NodeUnpublishVolume implements csi.NodeServer.
func (f *floor) NodeUnpublishVolume(_ context.Context, req *csi.NodeUnpublishVolumeRequest) (*csi.NodeUnpublishVolumeResponse, error) {
	if err := unmount(req.GetTargetPath()); err != nil {
		return nil, err
	}
	return &csi.NodeUnpublishVolumeResponse{}, unix.Rmdir(req.GetTargetPath())
}

// NodeUnstageVolume implements csi.NodeServer.
func (f *floor) NodeUnstageVolume(ctx context.Context, req *csi.NodeUnstageVolumeRequest) (*csi.NodeUnstageVolumeResponse, error) {
	if err := unmount(req.GetStagingTargetPath()); err != nil {
		return nil, err
	}
	device, ok := f.devices.LoadAndDelete(req.GetVolumeId())
	if !ok {
		return nil, fmt.Errorf("volume %s is not staged", req.GetVolumeId())
	}
	return &csi.NodeUnstageVolumeResponse{}, awaitUnbound(ctx, device.(string), f.path(req.GetVolumeId()))
}
