package local

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"path/filepath"
	"strings"

	"github.com/trivet-csi/trivet/blockdev"
	"github.com/trivet-csi/trivet/mount"
	"github.com/trivet-csi/trivet/volume"
)

// readOnlyTag is what the kernel keeps with the read-only device on a volume's disk.
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
// partition. A partition that is read-only itself (BLKROSET) would be so for all.
func (b *Backend) ReadOnlyDevice(ctx context.Context, v volume.Volume) (string, error) {
	number, ok, err := findReadOnly(v)
	if err == nil && ok {
		// Somebody may have marked it to go when it is closed.
		ok, err = blockdev.RecoverLoop(number, readOnlyTag(v.ID), false)
	}
	if err != nil || ok {
		return blockdev.LoopPath(number), err
	}
	below, err := blockdev.OpenPartition(node(v.ID))
	if err != nil {
		return "", volume.Errorf(volume.ErrPrecondition, "volume %s has no device on this node: %w: stage it first", v.ID, err)
	}
	defer below.Close()
	l, err := blockdev.AttachLoop(ctx, below, blockdev.LoopConfig{SectorSize: v.SectorSize, Tag: readOnlyTag(v.ID), ReadOnly: true})
	if err != nil {
		return "", err
	}
	return blockdev.LoopPath(l.Number), l.Close()
}

// PresentReadOnly implements backend.BlockProvider.
func (b *Backend) PresentReadOnly(_ context.Context, v volume.Volume) (string, bool, error) {
	number, ok, err := findReadOnly(v)
	return blockdev.LoopPath(number), ok, err
}

// ReleaseReadOnly implements backend.BlockProvider. The device stays while it is
// published somewhere.
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

// freeReadOnly frees the device, which nothing may have any more.
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

// followReadOnly makes the device as large as the disk's partition has become.
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
