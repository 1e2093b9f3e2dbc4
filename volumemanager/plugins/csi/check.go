package csi

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/volumemanager/plugins"
)

// mounted reports whether the mount table has a mount at a path. It does not access the mounted
// filesystem, whose server may be unreachable.
func (s *mountTable) mounted(path string) (bool, error) {
	dir, err := filepath.EvalSymlinks(filepath.Dir(path))
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	points, err := s.mountpoints()
	return points[filepath.Join(dir, filepath.Base(path))], err
}

// checkPublished checks the target path after a driver has reported success. It returns an
// *UncertainError unless a filesystem is mounted at the path or, with block, the path is a block device or
// a bind mount of a block device.
func (s *mountTable) checkPublished(driver, path string, block bool) error {
	ok, err := s.mounted(path)
	problem := "nothing is mounted"
	if block && err == nil {
		ok, err = isDevice(path)
		problem = "there is no block device"
	}
	if err == nil && !ok {
		err = fmt.Errorf("driver %s reported success but %s at %s: see the driver's log, and check that its mounts propagate to this mount namespace (Bidirectional)", driver, problem, path)
	}
	if err != nil {
		return &plugins.UncertainError{Err: err}
	}
	return nil
}

// isDevice reports whether a path is a block device. It does not follow links.
func isDevice(path string) (bool, error) {
	info, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	return info.Mode()&(os.ModeDevice|os.ModeCharDevice) == os.ModeDevice, nil
}

// checkUnmounted returns an error if a path is still mounted after a driver reported success.
func (s *mountTable) checkUnmounted(driver, path string) error {
	isMounted, err := s.mounted(path)
	if err == nil && isMounted {
		err = fmt.Errorf("driver %s reported success but %s is still mounted: see the driver's log", driver, path)
	}
	return err
}

// removeLeftover removes the empty directory or empty file that a driver may leave at a path that is
// not mounted.
func removeLeftover(path string) error {
	info, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if !info.IsDir() && (!info.Mode().IsRegular() || info.Size() > 0) {
		return fmt.Errorf("%s: the driver left a file here (mode %s, %d bytes): find its owner, and remove it by hand", path, info.Mode(), info.Size())
	}
	return mount.RemoveTarget(path)
}

// undoOrUncertain handles the error of a call that failed after its record was written. It calls undo
// and returns the error if the failure is certain, the record was written for this call (fresh), and
// the path is not mounted. Otherwise, and if undo fails, it returns an *UncertainError.
func (s *mountTable) undoOrUncertain(callErr error, fresh bool, path string, undo func() error) error {
	if !plugins.Uncertain(callErr) && fresh {
		if isMounted, err := s.mounted(path); err == nil && !isMounted {
			if err := undo(); err == nil {
				return callErr
			}
		}
	}
	return &plugins.UncertainError{Err: callErr}
}
