package lvm

import (
	"context"
	"errors"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/internal/crashpoint"
	"github.com/trivet-csi/trivet/linux/dm"
	"github.com/trivet-csi/trivet/volume"
)

// Checkable implements backend.FilesystemChecker.
func (b *Backend) Checkable(v volume.Volume) error {
	if err := b.Devices.Checkable(v); err != nil {
		return err
	}
	p, err := b.Set.ByID(v.ID)
	if err == nil && storageOf(p).thin == "" {
		err = volume.Errorf(volume.ErrPrecondition, "volume %s is not in a thin pool, so it has no snapshots: check its logical volume with the tools of %s while the volume is not staged", v.ID, v.FSType)
	}
	return err
}

// CheckFilesystem implements backend.FilesystemChecker. It checks a snapshot of the thin volume.
func (b *Backend) CheckFilesystem(ctx context.Context, v volume.Volume) (found string, err error) {
	if err := b.Checkable(v); err != nil {
		return "", err
	}
	p, err := b.Usable(v.ID)
	if err != nil {
		return "", err
	}
	s := storageOf(p)
	t, err := b.takeTemporary(ctx, p, v, backend.CheckPurpose, true)
	if err != nil {
		return "", b.Explain(p, err)
	}
	defer func() { err = errors.Join(err, t.release()) }()
	if !t.formatted {
		return "", backend.NotFormatted(v)
	}
	c, err := s.openCopy(ctx, t.id, dm.Shared)
	if err != nil {
		return "", err
	}
	defer s.closeCopy(t.id) //nolint:contextcheck // the logical volume is also closed after the end of ctx
	crashpoint.Here(crashpoint.CheckAttached)
	return backend.CheckCopy(ctx, c.File, v, p.Background(c.File))
}
