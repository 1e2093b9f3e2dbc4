package blockdev

import (
	"context"
	"os"

	"github.com/trivet-csi/trivet/internal/crashpoint"
)

// FormatJournal records outside of a device whether a filesystem is being created on it. The record allows a
// later call to erase the content of an interrupted mkfs, but no other data. The functions return when the
// record is durable.
type FormatJournal struct {
	// Interrupted means that Begin was called earlier, but not End.
	Interrupted bool
	// Begin records that the filesystem is being created. It is no error if an earlier call has recorded this.
	Begin func() error
	// End records that the filesystem is complete.
	End func() error
}

// Prepare requires that a device is blank, and then calls Begin. After an interrupted mkfs Prepare erases the
// content of the device instead. The error is ErrNotBlank if the device has other data.
func (j FormatJournal) Prepare(device *os.File, spec FormatSpec) error {
	var err error
	switch {
	case j.Interrupted && spec.Stale:
		err = EraseIncomplete(device)
	case j.Interrupted:
		err = WipeImage(device, spec.KeepAllocated)
	case spec.Stale:
		err = RequireNoSignature(device)
	default:
		err = RequireBlank(device)
	}
	if err == nil {
		err = j.Begin()
	}
	if err == nil {
		crashpoint.Here(crashpoint.StageFormatting)
	}
	return err
}

// FormatPrepared does the same as Format for a device after Prepare. commit makes the filesystem durable, and then
// calls End.
func (f *Formatter) FormatPrepared(ctx context.Context, device *os.File, spec FormatSpec, j FormatJournal) (commit func() error, err error) {
	if err := f.Format(ctx, device, spec); err != nil {
		return nil, err
	}
	crashpoint.Here(crashpoint.StageFormatted)
	return func() error {
		if err := device.Sync(); err != nil {
			return err
		}
		if err := j.End(); err != nil {
			return err
		}
		crashpoint.Here(crashpoint.StageMarked)
		return nil
	}, nil
}
