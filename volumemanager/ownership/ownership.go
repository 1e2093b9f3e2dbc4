// Package ownership sets the group of the files in a volume to a pod's fsGroup (PodSecurityContext).
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
	fileBits      fs.FileMode = 0o660
	directoryBits fs.FileMode = fs.ModeSetgid | 0o770
)

// Set changes the group of all files below dir to args.FSGroup. Directories get the mode bits 02770,
// other files except symbolic links 0660. Links are not followed, and other mounts below dir are not
// changed. Without FSGroup, Set does nothing.
//
// dir itself is changed last, after the other changes are durable, because
// FSGroupChangeOnRootMismatch checks only dir and must repeat an interrupted call.
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
	rootEntry := &tree.Entry{Node: root, Info: info}
	if args.FSGroupChangePolicy == corev1.FSGroupChangeOnRootMismatch && g.isSet(rootEntry) {
		return nil
	}
	if err = g.setContent(ctx, root); err == nil {
		err = g.set(rootEntry)
	}
	if err != nil {
		return fmt.Errorf("securityContext.fsGroup %d: %w", g, err)
	}
	return nil
}

// group is the new group of the files.
type group int

// isSet reports whether an entry already has the group and the mode bits.
func (g group) isSet(e *tree.Entry) bool { return g.owns(e) && newMode(e) == e.Info.Mode() }

func (g group) owns(e *tree.Entry) bool { return e.Info.Sys().(*syscall.Stat_t).Gid == uint32(g) }

// newMode returns the mode of an entry with the bits that Set adds.
func newMode(e *tree.Entry) fs.FileMode {
	switch mode := e.Info.Mode(); mode.Type() {
	case fs.ModeDir:
		return mode | directoryBits
	case fs.ModeSymlink:
		return mode
	default:
		return mode | fileBits
	}
}

// setContent sets the group and the mode of all entries below root, and makes the changes durable.
func (g group) setContent(ctx context.Context, root *os.File) error {
	changed := false
	err := tree.Walk(ctx, root, func(e *tree.Entry) error {
		if e.Mounted() || g.isSet(e) {
			return nil
		}
		changed = true
		return g.set(e)
	})
	if err != nil || !changed {
		return err
	}
	return mount.SyncFilesystem(root)
}

// set sets the group and the mode. The mode is set even if it does not change, because chown(2) clears
// the set-user-ID and set-group-ID bits of executables.
func (g group) set(e *tree.Entry) error {
	if g.isSet(e) {
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
	return e.Chmod(newMode(e))
}
