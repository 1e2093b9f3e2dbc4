package backend

import (
	"errors"

	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// DirectoryHealth reports a directory volume whose directory is missing or cannot be opened; nil if
// it is good.
func DirectoryHealth(p *pool.Pool, v volume.Volume) *Condition {
	dir, err := p.OpenDirectory(v)
	switch {
	case errors.Is(err, volume.ErrDamaged):
		return &Condition{Severity: DataLoss, Reason: ReasonDirectoryMissing, Message: err.Error()}
	case err != nil:
		return &Condition{Severity: Inaccessible, Reason: ReasonDirectoryUnreachable, Message: err.Error()}
	}
	dir.Close()
	return nil
}
