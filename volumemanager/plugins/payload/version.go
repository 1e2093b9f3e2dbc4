package payload

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/trivet-csi/trivet/linux/mount"
	dirtree "github.com/trivet-csi/trivet/linux/tree"
)

// The layout is that of a kubelet, because programs that watch for changes depend on it. Each version
// of the content has its own directory, dataLink points to the current version, and the names that
// users see are links through dataLink.
//
//	..2026_01_31_12_00_00.123/key
//	..data -> ..2026_01_31_12_00_00.123
//	key    -> ..data/key
const (
	// hidden is the prefix of names that users do not see.
	hidden   = ".."
	dataLink = "..data"
	// newLink is renamed to dataLink.
	newLink = "..data_tmp"
)

// replace replaces the content of the volume with want by one rename. It writes nothing if the volume
// has that content. A call that fails or is killed at any point leaves the old version or the new one. The
// next call removes leftovers.
func (v *volume) replace(ctx context.Context, root *os.Root, want tree) error {
	if err := v.setRootAttributes(root, want[""]); err != nil {
		return err
	}
	current, content, err := currentVersion(root)
	if err != nil {
		return err
	}
	if !maps.Equal(content, want) {
		// Leftovers of killed calls may occupy the space that this version needs.
		if err := sweep(ctx, root, current); err != nil {
			return err
		}
		if current, err = addVersion(root, want); err != nil {
			return err
		}
	}
	if err := updateLinks(root, want.topNames()); err != nil {
		return err
	}
	return sweep(ctx, root, current)
}

// setRootAttributes gives the volume's root the owner and group of a version's root and the mode of an
// emptyDir, because a kubelet keeps the versions in an emptyDir.
func (v *volume) setRootAttributes(root *os.Root, want node) error {
	want.mode |= 0o777
	if !v.onDisk {
		want.mode |= fs.ModeSticky
	}
	current, err := readNode(root, ".")
	if err != nil || current == want {
		return err
	}
	return want.setAttributes(root, ".")
}

// currentVersion returns the name and the content of the current version. The name is empty if dataLink
// does not point to a version.
func currentVersion(root *os.Root) (name string, content tree, err error) {
	name, err = root.Readlink(dataLink)
	if err != nil || !isVersion(name) {
		return "", nil, ignoreMissing(err)
	}
	content, err = readTree(root, name)
	return name, content, ignoreMissing(err)
}

func ignoreMissing(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// isVersion reports whether a name can be that of a version.
func isVersion(name string) bool {
	return strings.HasPrefix(name, hidden) && filepath.IsLocal(name) && filepath.Base(name) == name && name != dataLink && name != newLink
}

// addVersion writes a version, and makes it the current one once it is complete.
func addVersion(root *os.Root, content tree) (name string, err error) {
	name = fmt.Sprintf("%s%s.%d", hidden, time.Now().UTC().Format("2006_01_02_15_04_05"), rand.Uint32())
	if err := content.write(root, name); err != nil {
		return "", err
	}
	if err := root.Symlink(name, newLink); err != nil {
		return "", err
	}
	return name, root.Rename(newLink, dataLink)
}

// updateLinks creates a link for each name, and removes other links that users see. As in a kubelet, it
// keeps all else, such as directories that were created for the subPath of a container. It modifies names.
func updateLinks(root *os.Root, names map[string]bool) error {
	entries, err := fs.ReadDir(root.FS(), ".")
	if err != nil {
		return err
	}
	for _, e := range entries {
		target, err := root.Readlink(e.Name())
		switch {
		case strings.HasPrefix(e.Name(), hidden):
		case err != nil:
			delete(names, e.Name())
		case names[e.Name()] && target == filepath.Join(dataLink, e.Name()):
			delete(names, e.Name())
		default:
			if err := root.Remove(e.Name()); err != nil {
				return err
			}
		}
	}
	for name := range names {
		if err := root.Symlink(filepath.Join(dataLink, name), name); err != nil {
			return err
		}
	}
	return nil
}

// sweep removes all versions except the current one, and an unused newLink.
func sweep(ctx context.Context, root *os.Root, current string) error {
	entries, err := fs.ReadDir(root.FS(), ".")
	if err != nil {
		return err
	}
	for _, e := range entries {
		if !strings.HasPrefix(e.Name(), hidden) || e.Name() == dataLink || e.Name() == current {
			continue
		}
		if err := removeAll(ctx, root, e.Name()); err != nil {
			return err
		}
	}
	return nil
}

// removeAll removes a file or directory tree unless it contains a mount. It does not remove a mount
// that appears meanwhile.
func removeAll(ctx context.Context, root *os.Root, name string) error {
	mounts, err := mount.Below(filepath.Join(root.Name(), name))
	if err != nil {
		return err
	}
	if len(mounts) > 0 {
		return fmt.Errorf("%s: the mount of %s does not belong to the volume: unmount it", mounts[0].Mountpoint, mounts[0].Source)
	}
	dir, err := root.Open(".")
	if err != nil {
		return err
	}
	defer dir.Close()
	return dirtree.Remove(ctx, dir, name)
}
