package nfsvolume

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"

	corev1 "k8s.io/api/core/v1"

	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/linux/tree"
	"github.com/trivet-csi/trivet/volumemanager/plugins"
)

// Recycle removes the content of the server's directory through a separate mount. It removes
// symbolic links and does not follow them. It keeps a filesystem that the server has mounted in the
// directory, and returns an error.
func (p *Plugin) Recycle(ctx context.Context, pv *corev1.PersistentVolume) error {
	if err := plugins.CheckPart("metadata.name", pv.Name); err != nil {
		return err
	}
	export, err := exportOf(&plugins.Spec{PersistentVolume: pv})
	if err != nil {
		return err
	}
	at := filepath.Join(p.recycling(), pv.Name)
	release, ok := p.acquire(at)
	if !ok {
		return fmt.Errorf("recycling: another call is using the mount at %s: the manager retries", at)
	}
	defer release()
	// An interrupted call may have left a mount.
	if err := p.unmount(ctx, at); err != nil {
		return err
	}
	if err := os.MkdirAll(at, 0o750); err != nil {
		return err
	}
	if err := mountExport(ctx, export, at, mount.Options{}); err != nil {
		return errors.Join(err, mount.RemoveTarget(at))
	}
	if err := scrub(ctx, at); err != nil {
		return err
	}
	return p.unmount(ctx, at)
}

// scrub empties a mount. If ctx ends while it waits for the server, it aborts the mount to end the
// wait. The next call removes the rest.
func scrub(ctx context.Context, at string) error {
	done := make(chan error, 1)
	go func() { done <- empty(ctx, at) }()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
	}
	ended := func() bool { return len(done) > 0 }
	if err := mount.AbortNFS(context.WithoutCancel(ctx), at, ended); err != nil {
		return errors.Join(ctx.Err(), err)
	}
	return fmt.Errorf("removing the volume's content: %w", ctx.Err())
}

func empty(ctx context.Context, at string) error {
	dir, err := os.OpenFile(at, os.O_RDONLY|syscall.O_DIRECTORY|syscall.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	defer dir.Close()
	return tree.Empty(ctx, dir)
}
