package ownership

import (
	"context"
	"fmt"
	"io/fs"
	"math"
	"os"
	"syscall"

	corev1 "k8s.io/api/core/v1"

	"github.com/trivet-csi/trivet/internal/tree"
	"github.com/trivet-csi/trivet/mount"
	"github.com/trivet-csi/trivet/volumemanager/plugin"
)

// What is added to the modes, as a kubelet does it: owners get it too, and what is made in
// directories has the group by itself then.
const (
	ofFiles       fs.FileMode = 0o660
	ofDirectories fs.FileMode = fs.ModeSetgid | 0o770
)

// Set gives all that is in the directory dir to args.FSGroup, and dir itself last, when the
// rest is on the disk: FSGroupChangeOnRootMismatch looks at dir alone, and must not take a
// call that was cut off for a complete one. Directories get the mode bits 02770, all else
// but links 0660. Links are not followed, and what is mounted in dir is left alone. Without
// FSGroup it does nothing.
func Set(ctx context.Context, dir string, args plugin.MounterArgs) error {
	if args.FSGroup == nil {
		return nil
	}
	if *args.FSGroup < 0 || *args.FSGroup > math.MaxInt32 {
		return plugin.Invalidf("securityContext.fsGroup %d: want 0 to %d", *args.FSGroup, math.MaxInt32)
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

// group is who gets a volume.
type group int

func (g group) has(e *tree.Entry) bool { return g.owns(e) && modeOf(e) == e.Info.Mode() }

func (g group) owns(e *tree.Entry) bool { return e.Info.Sys().(*syscall.Stat_t).Gid == uint32(g) }

// modeOf is what an entry's mode becomes.
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

// giveContent changes what is not right yet, so that what is right needs no writing.
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

// give sets the group and the mode. chown(2) takes the bits for set-user-ID and
// set-group-ID away from programs: they are put back.
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
