// Package subpath bind-mounts a part of a volume for a container (VolumeMount, subPath).
package subpath

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/volumemanager/plugins"
)

// Bind mounts subPath of the volume at volumePath on target. Missing directories are created with
// the mode of the volume's root. A part of subPath may be a symbolic link within the volume. A link
// that leads out of the volume is an error, even if a pod creates the link during the call. An
// existing mount on target stays, so that a running container keeps its mount. If subPath is empty or
// absolute, or contains .. or a zero byte, the error is a *plugins.InvalidError.
func Bind(ctx context.Context, volumePath, subPath, target string, readOnly bool) error {
	if err := check(subPath); err != nil {
		return err
	}
	mounted, err := mount.OnPath(target)
	if err != nil || mounted != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	volume, err := os.OpenFile(volumePath, os.O_RDONLY|syscall.O_DIRECTORY, 0)
	if err != nil {
		return err
	}
	defer volume.Close()
	part, err := open(volume, filepath.Clean(subPath))
	if err != nil {
		return explain(subPath, err)
	}
	defer part.Close()
	return bind(part, target, readOnly)
}

func check(subPath string) error {
	up := slices.Contains(strings.Split(subPath, "/"), "..")
	if up || !filepath.IsLocal(subPath) || strings.ContainsRune(subPath, 0) {
		return plugins.Invalidf("subPath %q: it must be a relative path without ..", subPath)
	}
	return nil
}

// explain adds the subPath, and what the user can do, to an error.
func explain(subPath string, err error) error {
	switch {
	case errors.Is(err, mount.ErrLeadsOut):
		return fmt.Errorf("subPath %q: %w: remove the link, or mount its target as a volume", subPath, err)
	case errors.Is(err, syscall.ENOTDIR), errors.Is(err, syscall.ELOOP):
		return fmt.Errorf("subPath %q: %w: remove the file or link of that name from the volume", subPath, err)
	}
	return fmt.Errorf("subPath %q: %w", subPath, err)
}

// open opens a part of a volume. A missing part is created as a directory.
func open(volume *os.File, path string) (*os.File, error) {
	part, err := mount.OpenBeneath(volume, path)
	if errors.Is(err, fs.ErrNotExist) {
		return makeAll(volume, path)
	}
	return part, err
}

// makeAll creates the missing directories of a path and opens the last directory.
func makeAll(volume *os.File, path string) (*os.File, error) {
	root, err := volume.Stat()
	if err != nil {
		return nil, err
	}
	dir, err := mount.OpenBeneath(volume, ".")
	names := strings.Split(path, "/")
	for i, name := range names {
		if err != nil {
			break
		}
		above := dir
		dir, err = mount.OpenBeneath(volume, strings.Join(names[:i+1], "/"))
		if errors.Is(err, fs.ErrNotExist) {
			dir, err = mount.MakeBeneath(above, name, root.Mode())
		}
		above.Close()
	}
	return dir, err
}

// bind creates the target, a directory or a file like the part, and mounts the part on it.
func bind(part *os.File, target string, readOnly bool) error {
	info, err := part.Stat()
	if err != nil {
		return err
	}
	if err := makeTarget(target, info.IsDir()); err != nil {
		return err
	}
	var o mount.Options
	if readOnly {
		o = o.ReadOnly()
	}
	return mount.BindOpen(part, target, o)
}

// makeTarget creates an empty target. It replaces a directory with a file, or a file with a directory, if
// the part of the volume is now of the other type.
func makeTarget(target string, isDir bool) error {
	if err := os.MkdirAll(filepath.Dir(target), 0o750); err != nil {
		return err
	}
	if existing, err := os.Lstat(target); err == nil && existing.IsDir() != isDir {
		if err := mount.RemoveTarget(target); err != nil {
			return err
		}
	}
	if isDir {
		return os.MkdirAll(target, 0o750)
	}
	f, err := os.OpenFile(target, os.O_RDONLY|os.O_CREATE|syscall.O_NOFOLLOW, 0o640)
	if err != nil {
		return err
	}
	return f.Close()
}

// Unbind reverts Bind. The content of the volume stays. If nothing is mounted, it returns nil.
func Unbind(target string) error { return mount.Clear(target) }
