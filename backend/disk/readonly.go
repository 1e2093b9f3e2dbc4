package disk

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"path/filepath"
	"strings"

	"github.com/trivet-csi/trivet/linux/blockdev"
	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/volume"
)

// readOnlyTag is the tag of the read-only loop device on a volume's disk.
func readOnlyTag(id volume.ID) string {
	sum := sha256.Sum256([]byte(id.String()))
	return "trivet-disk:" + hex.EncodeToString(sum[:20])
}

// findReadOnly finds the read-only device on a volume's disk.
func findReadOnly(v volume.Volume) (number int, ok bool, err error) {
	numbers, err := blockdev.BoundLoops(func(file string) bool {
		return filepath.Base(strings.TrimSuffix(file, " (deleted)")) == node(v.ID)
	})
	if err != nil {
		return 0, false, err
	}
	for _, number := range numbers {
		if tag, err := blockdev.LoopTag(number); err != nil || tag == readOnlyTag(v.ID) {
			return number, err == nil, err
		}
	}
	return 0, false, nil
}

// ReadOnlyDevice implements backend.BlockProvider: a loop device on the disk's
// partition. BLKROSET would make the partition read-only for all users.
func (b *Backend) ReadOnlyDevice(ctx context.Context, v volume.Volume) (mount.BlockDevice, error) {
	number, ok, err := findReadOnly(v)
	if err == nil && ok {
		// Another process may have set autoclear.
		ok, err = blockdev.RecoverLoop(number, readOnlyTag(v.ID), false)
	}
	if err != nil || ok {
		return &blockdev.DeviceSource{Path: blockdev.LoopPath(number)}, err
	}
	below, err := blockdev.OpenPartition(node(v.ID))
	if err != nil {
		return nil, volume.Errorf(volume.ErrPrecondition, "volume %s has no device on this node: %w: stage it first", v.ID, err)
	}
	defer below.Close()
	l, err := blockdev.AttachLoop(ctx, below, blockdev.LoopConfig{SectorSize: v.SectorSize, Tag: readOnlyTag(v.ID), ReadOnly: true})
	if err != nil {
		return nil, err
	}
	return &blockdev.DeviceSource{Path: blockdev.LoopPath(l.Number)}, l.Close()
}

// PresentReadOnly implements backend.BlockProvider.
func (b *Backend) PresentReadOnly(_ context.Context, v volume.Volume) (mount.BlockDevice, bool, error) {
	number, ok, err := findReadOnly(v)
	return &blockdev.DeviceSource{Path: blockdev.LoopPath(number)}, ok, err
}

// ReleaseReadOnly implements backend.BlockProvider. The device stays while it is published.
func (b *Backend) ReleaseReadOnly(ctx context.Context, v volume.Volume) error {
	number, ok, err := findReadOnly(v)
	if err != nil || !ok {
		return err
	}
	mounts, err := mount.OfDevice(blockdev.LoopPath(number))
	if err != nil || len(mounts) > 0 {
		return err
	}
	return detachReadOnly(ctx, v, number)
}

// freeReadOnly frees the device, which must not be in use.
func freeReadOnly(ctx context.Context, v volume.Volume) error {
	number, ok, err := findReadOnly(v)
	if err != nil || !ok {
		return err
	}
	device := blockdev.LoopPath(number)
	mounts, err := mount.OfDevice(device)
	if err != nil {
		return err
	}
	if len(mounts) > 0 {
		return volume.Errorf(volume.ErrInUse, "volume %s: %s is still mounted at %s: unpublish it there first", v.ID, device, mounts[0].Mountpoint)
	}
	return detachReadOnly(ctx, v, number)
}

func detachReadOnly(ctx context.Context, v volume.Volume, number int) error {
	err := blockdev.DetachLoop(ctx, number, readOnlyTag(v.ID))
	if errors.Is(err, blockdev.ErrDeviceBusy) {
		return volume.Errorf(volume.ErrInUse, "volume %s: %w: some process has it open or mounted in a namespace of its own (grep %s /proc/*/mountinfo)", v.ID, err, blockdev.LoopPath(number))
	}
	return err
}

// followReadOnly sets the size of the device to the size of the partition.
func followReadOnly(v volume.Volume) error {
	number, ok, err := findReadOnly(v)
	if err != nil || !ok {
		return err
	}
	l, err := blockdev.OpenLoop(number)
	if err != nil {
		return err
	}
	defer l.Close()
	return l.Follow()
}
