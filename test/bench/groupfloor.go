package main

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/uuid"
	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/linux/blockdev"
	"github.com/trivet-csi/trivet/linux/dm"
	"github.com/trivet-csi/trivet/linux/luks"
	"github.com/trivet-csi/trivet/test/measure"
	"github.com/trivet-csi/trivet/volume"
)

// groupFloor is a floor whose volumes are logical volumes with ext4. Each call starts only the commands of lvm(8) that
// it needs, with the configuration of the driver. A volume that is not staged is not active. The tags are those of the
// driver, because the time of each command grows with the metadata of the group. Only a durable floor changes them.
type groupFloor struct {
	*floor
	group     dm.Group
	thinPool  string // empty for thick volumes
	prefix    string // of the names of its logical volumes; other floors use the same group
	encrypted bool
	// programs makes the floor start mount(8), umount(8) and "cryptsetup close" instead of making the system calls.
	programs bool
	// staged contains the IDs of the volumes that were staged.
	staged sync.Map
}

// groupFlags defines the flags of a groupFloor.
func groupFlags(flags *flag.FlagSet, f *floor) *groupFloor {
	g := &groupFloor{floor: f}
	flags.StringVar(&g.group.Name, "group", "", "create logical volumes in this volume `group` instead of images")
	flags.StringVar(&g.thinPool, "thin-pool", "", "create the logical volumes in this thin `pool` of the group")
	flags.StringVar(&g.prefix, "prefix", "", "`start` of the names of the logical volumes")
	flags.BoolVar(&g.encrypted, "encrypted", false, "encrypt logical volumes")
	flags.BoolVar(&g.programs, "programs", false, "start a program to mount, unmount, or close a container")
	return g
}

// find finds the volume group.
func (f *groupFloor) find() (err error) {
	f.group, err = dm.FindGroup(f.group.Name, "", func(string) bool { return false })
	return err
}

// at names the logical volume of a volume as lvm(8) does.
func (f *groupFloor) at(id string) string { return f.group.Name + "/" + f.prefix + id }

func (f *groupFloor) lvm(ctx context.Context, name string, args ...string) error {
	return f.group.Command(name, args...).Run(ctx)
}

// unusedTag is the tag of volumes that were never staged.
const unusedTag = "trivet.unused"

// CreateVolume implements csi.ControllerServer.
func (f *groupFloor) CreateVolume(ctx context.Context, req *csi.CreateVolumeRequest) (*csi.CreateVolumeResponse, error) {
	size := req.GetCapacityRange().GetRequiredBytes()
	args := []string{"--yes", "--activate", "n", "--name", f.prefix + req.GetName()}
	for _, tag := range []string{"trivet.pool." + poolName, "trivet.volume." + req.GetName(), "trivet.guid." + uuid.NewString(), unusedTag} {
		args = append(args, "--addtag", tag)
	}
	stored := size
	if f.encrypted {
		stored += luks.DataOffset
	}
	bytesOf := strconv.FormatInt(stored, 10) + "b"
	switch from := req.GetVolumeContentSource(); {
	case from != nil:
		args = append(args, "--setactivationskip", "y", "--ignoremonitoring", "--snapshot", f.at(cmp.Or(from.GetSnapshot().GetSnapshotId(), from.GetVolume().GetVolumeId())))
	case f.thinPool != "":
		args = append(args, "--setactivationskip", "y", "--ignoremonitoring", "--type", "thin", "--thinpool", f.thinPool, "--virtualsize", bytesOf, f.group.Name)
	default:
		args = append(args, "--zero", "n", "--wipesignatures", "n", "--setautoactivation", "n", "--type", "linear", "--size", bytesOf, f.group.Name)
	}
	if err := f.lvm(ctx, "lvcreate", args...); err != nil {
		return nil, err
	}
	if f.durable {
		if err := f.record(req.GetName()); err != nil {
			return nil, err
		}
	}
	return &csi.CreateVolumeResponse{Volume: &csi.Volume{VolumeId: req.GetName(), CapacityBytes: size}}, nil
}

// CreateSnapshot implements csi.ControllerServer.
func (f *groupFloor) CreateSnapshot(ctx context.Context, req *csi.CreateSnapshotRequest) (*csi.CreateSnapshotResponse, error) {
	_, err := f.CreateVolume(ctx, &csi.CreateVolumeRequest{Name: req.GetName(), VolumeContentSource: contentOfVolume(req.GetSourceVolumeId())})
	return &csi.CreateSnapshotResponse{Snapshot: &csi.Snapshot{SnapshotId: req.GetName()}}, err
}

// DeleteVolume implements csi.ControllerServer.
func (f *groupFloor) DeleteVolume(ctx context.Context, req *csi.DeleteVolumeRequest) (*csi.DeleteVolumeResponse, error) {
	if err := f.lvm(ctx, "lvremove", "--yes", f.at(req.GetVolumeId())); err != nil {
		return nil, err
	}
	if f.durable {
		if err := errors.Join(unix.Unlink(f.records.Name()+"/"+req.GetVolumeId()), f.records.Sync()); err != nil {
			return nil, err
		}
	}
	return &csi.DeleteVolumeResponse{}, nil
}

// DeleteSnapshot implements csi.ControllerServer.
func (f *groupFloor) DeleteSnapshot(ctx context.Context, req *csi.DeleteSnapshotRequest) (*csi.DeleteSnapshotResponse, error) {
	_, err := f.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: req.GetSnapshotId()})
	return &csi.DeleteSnapshotResponse{}, err
}

// NodeStageVolume implements csi.NodeServer.
func (f *groupFloor) NodeStageVolume(ctx context.Context, req *csi.NodeStageVolumeRequest) (*csi.NodeStageVolumeResponse, error) {
	id := req.GetVolumeId()
	if err := f.lvm(ctx, "lvchange", "--activate", "y", "--ignoremonitoring", "--ignoreactivationskip", f.at(id)); err != nil {
		return nil, err
	}
	device := "/dev/" + f.at(id)
	_, again := f.staged.LoadOrStore(id, true)
	if f.encrypted {
		key := []byte(req.GetSecrets()[volume.SecretPassphrase])
		if !again {
			if err := cryptsetup(ctx, key, append(luksFormat, "--key-file", "-", device)...); err != nil {
				return nil, err
			}
		}
		if err := cryptsetup(ctx, key, "open", "--type", "luks2", "--key-file", "-", device, f.prefix+id); err != nil {
			return nil, err
		}
		device = f.containerPath(id)
	}
	if !again {
		if err := formatDevice(ctx, device); err != nil {
			return nil, err
		}
	}
	if !again && f.durable {
		if err := f.lvm(ctx, "lvchange", "--deltag", unusedTag, f.at(id)); err != nil {
			return nil, err
		}
	}
	return &csi.NodeStageVolumeResponse{}, f.mount(ctx, device, req.GetStagingTargetPath())
}

// luksFormat are the arguments of cryptsetup(8) with which the driver creates containers of filesystems.
var luksFormat = []string{
	"luksFormat", "--type", "luks2", "--cipher", luks.Cipher, "--key-size", strconv.Itoa(luks.KeyBits), "--hash", "sha256",
	"--sector-size", "4096", "--offset", strconv.Itoa(luks.DataOffset / 512),
	"--pbkdf", luks.Derivation, "--pbkdf-memory", strconv.Itoa(luks.DerivationMemory),
	"--pbkdf-force-iterations", strconv.Itoa(luks.DerivationTime), "--pbkdf-parallel", "1",
}

// cryptsetup runs cryptsetup(8), which reads the key from a pipe.
func cryptsetup(ctx context.Context, key []byte, args ...string) error {
	c := exec.CommandContext(ctx, luks.Program, append([]string{"--batch-mode", "--disable-locks"}, args...)...)
	c.Stdin = bytes.NewReader(key)
	if out, err := c.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w: %s", strings.Join(c.Args, " "), err, out)
	}
	return nil
}

// containerPath returns the path of the device in the container of a volume.
func (f *groupFloor) containerPath(id string) string { return "/dev/mapper/" + f.prefix + id }

// formatDevice creates an ext4 on a device that may contain old data, with the options of the driver.
func formatDevice(ctx context.Context, path string) error {
	device, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer device.Close()
	return blockdev.NewFormatter().Format(ctx, device, blockdev.FormatSpec{FSType: "ext4", SectorSize: 4096, Stale: true})
}

func (f *groupFloor) mount(ctx context.Context, device, at string) error {
	if f.programs {
		return measure.Command(ctx, "mount", "-t", "ext4", device, at)
	}
	if err := unix.Mount(device, at, "ext4", 0, ""); err != nil {
		return fmt.Errorf("mount of %s: %w", device, err)
	}
	return nil
}

func (f *groupFloor) unmount(ctx context.Context, path string) error {
	if f.programs {
		return measure.Command(ctx, "umount", path)
	}
	return unmount(path)
}

// NodePublishVolume implements csi.NodeServer.
func (f *groupFloor) NodePublishVolume(ctx context.Context, req *csi.NodePublishVolumeRequest) (*csi.NodePublishVolumeResponse, error) {
	if !f.programs {
		return f.floor.NodePublishVolume(ctx, req)
	}
	if err := unix.Mkdir(req.GetTargetPath(), 0o750); err != nil {
		return nil, err
	}
	return &csi.NodePublishVolumeResponse{}, measure.Command(ctx, "mount", "--bind", req.GetStagingTargetPath(), req.GetTargetPath())
}

// NodeUnpublishVolume implements csi.NodeServer.
func (f *groupFloor) NodeUnpublishVolume(ctx context.Context, req *csi.NodeUnpublishVolumeRequest) (*csi.NodeUnpublishVolumeResponse, error) {
	if err := f.unmount(ctx, req.GetTargetPath()); err != nil {
		return nil, err
	}
	return &csi.NodeUnpublishVolumeResponse{}, unix.Rmdir(req.GetTargetPath())
}

// NodeUnstageVolume implements csi.NodeServer.
func (f *groupFloor) NodeUnstageVolume(ctx context.Context, req *csi.NodeUnstageVolumeRequest) (*csi.NodeUnstageVolumeResponse, error) {
	id := req.GetVolumeId()
	if err := f.unmount(ctx, req.GetStagingTargetPath()); err != nil {
		return nil, err
	}
	if f.encrypted {
		if err := f.closeContainer(ctx, id); err != nil {
			return nil, err
		}
	}
	return &csi.NodeUnstageVolumeResponse{}, f.lvm(ctx, "lvchange", "--activate", "n", "--ignoremonitoring", f.at(id))
}

func (f *groupFloor) closeContainer(ctx context.Context, id string) error {
	if f.programs {
		return cryptsetup(ctx, nil, "close", f.prefix+id)
	}
	if err := dm.Remove(f.prefix+id, false); err != nil {
		return err
	}
	return os.Remove(f.containerPath(id))
}
