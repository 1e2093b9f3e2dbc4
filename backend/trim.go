package backend

import (
	"errors"
	"fmt"
	"syscall"

	"github.com/trivet-csi/trivet/linux/background"
	"github.com/trivet-csi/trivet/linux/blockdev"
	"github.com/trivet-csi/trivet/volume"
)

// Trimmer is implemented by backends whose volumes can return the space of deleted files to their pool.
type Trimmer interface {
	// CheckTrim returns an error (ErrPrecondition) if the volume has no space to return to its pool.
	CheckTrim(v volume.Volume) error
	// TrimBudget returns the budget of a trim, on the disks with the space of the volume.
	TrimBudget(v volume.Volume) (*background.Budget, error)
	// TrimStep returns the unused space in a part of the volume's filesystem, beginning at an address. The volume cannot
	// be unstaged, copied or expanded meanwhile. ErrPrecondition if the volume is not mounted writable on this node,
	// ErrPending if another call is changing it: TrimStep does not wait for that, because it runs in a piece of the budget.
	TrimStep(v volume.Volume, from uint64) (blockdev.Trimmed, error)
}

// CheckTrimmable refuses a volume of which no kind can return space (ErrPrecondition).
func (d *Devices) CheckTrimmable(v volume.Volume) error {
	switch {
	case v.Block:
		return volume.Errorf(volume.ErrPrecondition, "volume %s is a raw device: its user discards what it does not need", v.ID)
	case v.Encryption != nil:
		return volume.Errorf(volume.ErrPrecondition, "volume %s is encrypted, and its container does not pass discards on", v.ID)
	case v.Ephemeral != nil:
		return volume.Errorf(volume.ErrPrecondition, "volume %s is an inline volume, which ends with its pod", v.ID)
	case v.ID.Shared():
		return volume.Errorf(volume.ErrPrecondition, "volume %s is on an export: use mountOptions: [discard]", v.ID)
	}
	return nil
}

// TrimStep implements Trimmer.
func (d *Devices) TrimStep(v volume.Volume, from uint64) (blockdev.Trimmed, error) {
	_, v, lock, err := d.TryLock(v.ID)
	if err != nil {
		return blockdev.Trimmed{}, err
	}
	defer lock.Close()
	device, err := d.OpenDevice(v)
	if err != nil {
		return blockdev.Trimmed{}, err
	}
	path := device.Name()
	if err := device.Close(); err != nil { // otherwise the device would stay bound after an unmount
		return blockdev.Trimmed{}, err
	}
	t, err := blockdev.Trim(path, v.FSType, from)
	switch {
	case errors.Is(err, blockdev.ErrNotWritable):
		err = volume.Errorf(volume.ErrPrecondition, "volume %s: %w", v.ID, err)
	case errors.Is(err, syscall.EOPNOTSUPP):
		err = fmt.Errorf("volume %s: its device does not support discards: the filesystem of the pool must support holes in files, and a thin pool must not ignore discards (lvchange --discards passdown): %w", v.ID, err)
	}
	return t, err
}
