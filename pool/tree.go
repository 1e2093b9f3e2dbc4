package pool

import (
	"context"
	"errors"
	"os"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/linux/quota"
	"github.com/trivet-csi/trivet/linux/tree"
	"github.com/trivet-csi/trivet/volume"
)

// removeTree removes an entry of an open directory with its content, also a read-only btrfs
// subvolume.
func (t *Trash) removeTree(ctx context.Context, dir *os.File, name string) error {
	err := tree.Remover{Destroy: t.destroy}.Remove(ctx, dir, name)
	if errors.Is(err, tree.ErrMounted) {
		return volume.Errorf(volume.ErrPrecondition, "%w", err)
	}
	return err
}

// removeFolder is removeTree for a folder that is probably empty. It tries rmdir(2) first, which
// saves requests to a server.
func (t *Trash) removeFolder(ctx context.Context, dir *os.File, name string) error {
	if err := unix.Unlinkat(int(dir.Fd()), name, unix.AT_REMOVEDIR); err == nil {
		return nil
	}
	return t.removeTree(ctx, dir, name)
}

// destroy removes a subvolume of btrfs in one step. done is false for any other directory, and after
// an error.
func (t *Trash) destroy(dir *os.File, name string) (done bool) {
	err := t.quotas.withQuota(func(fs *quota.FS) (err error) {
		done, err = fs.RemoveDir(dir, name)
		return err
	})
	return err == nil && done
}
