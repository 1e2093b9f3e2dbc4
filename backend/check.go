package backend

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/trivet-csi/trivet/linux/background"
	"github.com/trivet-csi/trivet/linux/blockdev"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// FilesystemChecker is implemented by backends that can check the filesystem of a volume while it is in use.
type FilesystemChecker interface {
	// Checkable returns an error (ErrPrecondition) if a volume like this one cannot be checked.
	Checkable(v volume.Volume) error
	// CheckFilesystem checks a copy of the volume that exists only for the check. found describes the errors of the
	// filesystem, and is empty if it has none. ErrPrecondition if the volume cannot be checked, ErrExhausted if its pool has
	// no room for the copy.
	CheckFilesystem(ctx context.Context, v volume.Volume) (found string, err error)
}

// CheckPurpose begins the names of the temporary snapshots of checks.
const CheckPurpose = "check"

// Checkable refuses a volume whose filesystem no kind can check (ErrPrecondition).
func (d *Devices) Checkable(v volume.Volume) error {
	switch {
	case v.Block:
		return volume.Errorf(volume.ErrPrecondition, "volume %s is a raw device: only its user knows what it contains", v.ID)
	case v.Encryption != nil:
		return volume.Errorf(volume.ErrPrecondition, "volume %s is encrypted, and the driver keeps no passphrase to open a copy of it", v.ID)
	case v.Ephemeral != nil:
		return volume.Errorf(volume.ErrPrecondition, "volume %s is an inline volume, which ends with its pod", v.ID)
	case v.ID.Shared():
		return volume.Errorf(volume.ErrPrecondition, "volume %s is on an export: copy its image on the server, and check the copy there", v.ID)
	}
	return nil
}

// NotFormatted is the error for a volume that has no filesystem yet.
func NotFormatted(v volume.Volume) error {
	return volume.Errorf(volume.ErrPrecondition, "volume %s has no filesystem yet: the driver creates it when the volume is staged for the first time", v.ID)
}

// CheckCopy checks the filesystem on a copy of a volume (see blockdev.CheckCopy). The error is ErrPrecondition if the copy cannot be
// mounted together with the volume.
func CheckCopy(ctx context.Context, device *os.File, v volume.Volume, budget *background.Budget) (found string, err error) {
	found, err = blockdev.CheckCopy(ctx, device, v.FSType, budget)
	if errors.Is(err, blockdev.ErrForeign) {
		err = volume.Errorf(volume.ErrPrecondition, "volume %s: %w: check it with the tools of %s while the volume is not staged", v.ID, err, v.FSType)
	}
	return found, err
}

// FilesystemCondition is a Check that reports the errors which the last check of a volume has found, or that
// they cannot be read.
func FilesystemCondition(p *pool.Pool, v volume.Volume) *Condition {
	c, ok, err := p.Checked(v)
	if err != nil {
		unavailable := PoolUnavailable(err)
		return &unavailable
	}
	if !ok || !c.Damaged {
		return nil
	}
	return &Condition{
		Severity: Degraded, Reason: ReasonFilesystemDamaged,
		Message: fmt.Sprintf("a check of the %s at %s has found errors: save its data, repair it, and check it again", v.FSType, c.At.Format(time.RFC3339)),
	}
}
