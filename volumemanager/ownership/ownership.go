// Package ownership sets the group of the files in a volume to a pod's fsGroup
// (PodSecurityContext).
package ownership

import (
	"context"
	"fmt"
	"io/fs"
	"math"
	"os"
	"syscall"

	corev1 "k8s.io/api/core/v1"

	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/linux/tree"
	"github.com/trivet-csi/trivet/volumemanager/plugins"
)

// The mode bits that a kubelet adds. The set-group-ID bit of directories gives the group to files
// created in them.
const (
	ofFiles       fs.FileMode = 0o660
	ofDirectories fs.FileMode = fs.ModeSetgid | 0o770
)

// Set changes the group of all files below dir to args.FSGroup. dir itself is changed last, when
// the rest is durable: FSGroupChangeOnRootMismatch checks dir only, and must repeat an
// interrupted call. Directories get the mode bits 02770, other files except
// symbolic links 0660. Links are not followed, and other mounts below dir are not changed. Set does
// nothing without FSGroup.
func Set(ctx context.Context, dir string, args plugins.MounterArgs) error {
	if args.FSGroup == nil {
		return nil
	}
	if *args.FSGroup < 0 || *args.FSGroup > math.MaxInt32 {
		return plugins.Invalidf("securityContext.fsGroup %d: it must be 0 to %d", *args.FSGroup, math.MaxInt32)
	}
	root, err := os.OpenFile(dir, os.O_RDONLY|syscall.O_DIRECTORY|syscall.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	defer root.Close()
	info, err := root.Stat()
	if err != nil {
		return err
	}
	g := group(*args.FSGroup)
	own := &tree.Entry{Node: root, Info: info}
	if args.FSGroupChangePolicy == corev1.FSGroupChangeOnRootMismatch && g.has(own) {
		return nil
	}
	if err = g.giveContent(ctx, root); err == nil {
		err = g.give(own)
	}
	if err != nil {
		return fmt.Errorf("securityContext.fsGroup %d: %w", g, err)
	}
	return nil
}

// group is the group that gets the volume.
type group int

func (g group) has(e *tree.Entry) bool { return g.owns(e) && modeOf(e) == e.Info.Mode() }

func (g group) owns(e *tree.Entry) bool { return e.Info.Sys().(*syscall.Stat_t).Gid == uint32(g) }

// modeOf returns the new mode of an entry.
func modeOf(e *tree.Entry) fs.FileMode {
	switch mode := e.Info.Mode(); mode.Type() {
	case fs.ModeDir:
		return mode | ofDirectories
	case fs.ModeSymlink:
		return mode
	default:
		return mode | ofFiles
	}
}

// giveContent changes only the entries that differ, so that the others are not written.
func (g group) giveContent(ctx context.Context, root *os.File) error {
	changed := false
	err := tree.Walk(ctx, root, func(e *tree.Entry) error {
		if e.Mounted() || g.has(e) {
			return nil
		}
		changed = true
		return g.give(e)
	})
	if err != nil || !changed {
		return err
	}
	return mount.SyncFilesystem(root)
}

// give sets the group and the mode. chown(2) clears the set-user-ID and set-group-ID bits of
// executables: give restores them.
func (g group) give(e *tree.Entry) error {
	if g.has(e) {
		return nil
	}
	if !g.owns(e) {
		if err := e.Chown(-1, int(g)); err != nil {
			return err
		}
	}
	if e.Info.Mode().Type() == fs.ModeSymlink {
		return nil
	}
	return e.Chmod(modeOf(e))
}
