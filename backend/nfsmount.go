package backend

import (
	"errors"

	"github.com/trivet-csi/trivet/mount"
	"github.com/trivet-csi/trivet/volume"
)

// ExplainNFS makes of an error of mount.MountNFS what a call answers: ErrInvalid for
// a mount option, ErrUnavailable where the server may answer later, ErrPrecondition
// where a person has to do something first.
func ExplainNFS(err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, mount.ErrBadOption):
		return volume.Errorf(volume.ErrInvalid, "%w", err)
	case errors.Is(err, mount.ErrServerSilent), errors.Is(err, mount.ErrServerName):
		return volume.Errorf(volume.ErrUnavailable, "%w", err)
	}
	for _, known := range []error{mount.ErrExportMissing, mount.ErrExportDenied, mount.ErrNFSVersion, mount.ErrNoStatd, mount.ErrNoNFS, mount.ErrMayNotMount} {
		if errors.Is(err, known) {
			return volume.Errorf(volume.ErrPrecondition, "%w", err)
		}
	}
	return err
}
