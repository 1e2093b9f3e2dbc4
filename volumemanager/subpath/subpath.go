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

	"github.com/trivet-csi/trivet/mount"
	"github.com/trivet-csi/trivet/volumemanager/plugin"
)

// Bind shows at target what the volume at volumePath has at subPath. Directories that are
// missing are made, with the mode of the volume's own. A part of subPath may be a symbolic
// link that stays within the volume; one that leads out is an error, also if a pod makes
// it while this is going on. What is mounted at target already stays, so that a running
// container keeps what it has. A subPath that is absolute or has a part .. is an
// *plugin.InvalidError.
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
		return plugin.Invalidf("subPath %q: want a path within the volume: relative, and without ..", subPath)
	}
	return nil
}

func explain(subPath string, err error) error {
	switch {
	case errors.Is(err, mount.ErrLeadsOut):
		return fmt.Errorf("subPath %q: %w: remove the link, or have what it leads to in a volume of its own", subPath, err)
	case errors.Is(err, syscall.ENOTDIR), errors.Is(err, syscall.ELOOP):
		return fmt.Errorf("subPath %q: %w: remove the file or link that is in the way in the volume", subPath, err)
	}
	return fmt.Errorf("subPath %q: %w", subPath, err)
}

// open opens a part of a volume, and makes it if it is missing.
func open(volume *os.File, path string) (*os.File, error) {
	part, err := mount.OpenBeneath(volume, path)
	if errors.Is(err, fs.ErrNotExist) {
		return makeAll(volume, path)
	}
	return part, err
}

// makeAll makes the directories on a path that are missing, and opens the last.
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

// bind makes the target, of the part's kind, and shows the part there.
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

func makeTarget(target string, isDir bool) error {
	if err := os.MkdirAll(filepath.Dir(target), 0o750); err != nil {
		return err
	}
	if have, err := os.Lstat(target); err == nil && have.IsDir() != isDir {
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

// Unbind takes away what Bind has done. What is in the volume stays. It is no error if
// there is nothing.
func Unbind(target string) error { return mount.Clear(target) }
