package backend

import (
	"errors"
	"io/fs"
	"os"
	"strconv"
	"time"

	"github.com/trivet-csi/trivet/internal/atomicfile"
	"github.com/trivet-csi/trivet/internal/crashpoint"
)

// Kinds with storage of their own record the progress of a pool.Storage's work in the folder of a volume.

// WipingFile is the name of the file with the offset in bytes up to which the storage of a deleted volume is zeroed.
const WipingFile = "wiping"

// WipedOffset returns the recorded offset up to which the storage of a volume is zeroed; 0 if no valid offset is
// recorded, because to wipe it from the beginning is safe.
func WipedOffset(folder fs.FS) int64 {
	b, err := fs.ReadFile(folder, WipingFile)
	if err != nil {
		return 0
	}
	upTo, _ := strconv.ParseInt(string(b), 10, 64)
	return max(upTo, 0)
}

// saveInterval is the interval between two records of the progress of a wipe.
const saveInterval = 30 * time.Second

// WipeProgress returns a function for blockdev.ZeroRange that records the offset, at most once per saveInterval.
func WipeProgress(folder *os.Root) func(upTo int64) error {
	var saved time.Time
	return func(upTo int64) error {
		if time.Since(saved) < saveInterval {
			return nil
		}
		saved = time.Now()
		err := atomicfile.Write(folder, WipingFile, strconv.AppendInt(nil, upTo, 10))
		crashpoint.Here(crashpoint.ReapZeroed)
		return err
	}
}

// CreateFlag durably creates an empty file in a volume's folder.
func CreateFlag(folder *os.Root, name string) error {
	if err := folder.WriteFile(name, nil, 0o600); err != nil {
		return err
	}
	return atomicfile.Sync(folder, ".")
}

// HasFlag reports whether CreateFlag has created the file.
func HasFlag(folder *os.Root, name string) (bool, error) {
	_, err := folder.Lstat(name)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return err == nil, err
}
