package csi

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/trivet-csi/trivet/volumemanager/plugins"
)

// mounted tells whether the mount table has a mount at a path. The filesystem there is not
// asked: its server may be gone.
func (s *looks) mounted(path string) (bool, error) {
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

// checkThere is an *UncertainError unless a driver that says so has mounted a filesystem
// at a path, or made a device appear there: a node, or a bind mount of one.
func (s *looks) checkThere(driver, path string, block bool) error {
	ok, err := s.mounted(path)
	what := "nothing is mounted"
	if block && err == nil {
		ok, err = isDevice(path)
		what = "there is no block device"
	}
	if err == nil && !ok {
		err = fmt.Errorf("driver %s reported success but %s at %s: look at the driver's log, and whether its mounts reach this mount namespace (Bidirectional propagation)", driver, what, path)
	}
	if err != nil {
		return &plugins.UncertainError{Err: err}
	}
	return nil
}

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

// checkGone is an error if something is mounted at a path that a driver has undone.
func (s *looks) checkGone(driver, path string) error {
	is, err := s.mounted(path)
	if err == nil && is {
		err = fmt.Errorf("driver %s reported success but %s is still mounted: look at the driver's log", driver, path)
	}
	return err
}

// removeLeft removes what a driver may leave at a path where nothing is mounted: an empty
// directory or an empty file, and never more.
func removeLeft(path string) error {
	info, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if !info.IsDir() && (!info.Mode().IsRegular() || info.Size() > 0) {
		return fmt.Errorf("%s: the driver left %s there (%d bytes): look whose it is, and remove it by hand", path, info.Mode(), info.Size())
	}
	return removeThere(path)
}

// settle is how a call ends that failed after its record was written. It may have been
// done if it says so, or if an earlier one may have been, or if the path is mounted;
// otherwise what was made for it goes.
func (s *looks) settle(failed error, fresh bool, path string, undo func() error) error {
	if !plugins.Uncertain(failed) && fresh {
		if is, err := s.mounted(path); err == nil && !is {
			if err := undo(); err == nil {
				return failed
			}
		}
	}
	return &plugins.UncertainError{Err: failed}
}
