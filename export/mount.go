package export

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// baseOptions are added to the configured options of the mount through which a pool's records are read. Writes
// of other nodes must be visible at once, and no file may be executed.
var baseOptions = []string{"lookupcache=none", "actimeo=0", "nosharecache", "hard", "nosuid", "nodev", "noexec"}

// mountExport mounts the export of a pool, at no path, and returns the mount and its NFS version.
func mountExport(ctx context.Context, c pool.Config) (*mount.Detached, string, error) {
	n := mount.NFS{Server: strings.Trim(c.NFS.Server, "[]"), Path: c.NFS.Export, Options: append(slices.Clone(c.NFS.MountOptions), baseOptions...)}
	fs, version, err := mount.MountNFS(ctx, n, 0)
	if err != nil {
		return nil, "", fmt.Errorf("pool %q: %w", c.Name, explain(err))
	}
	return fs, version, nil
}

// Mount mounts an export, at no path, to read the pool's records. The mount ends with the process, or when
// root is closed. If the server does not answer, the process hangs until it is killed. Errors wrap those of
// mount.MountNFS, and an error kind of package volume.
func Mount(ctx context.Context, c pool.Config) (root *os.File, version string, err error) {
	fs, version, err := mountExport(ctx, c)
	if err != nil {
		return nil, "", err
	}
	defer func() { err = errors.Join(err, fs.Close()) }()
	root, err = fs.OpenRoot()
	return root, version, err
}

// explain is backend.ExplainMount, with another error for invalid options: they come from the configuration,
// which a caller cannot change.
func explain(err error) error {
	if errors.Is(err, mount.ErrBadOption) || errors.Is(err, mount.ErrUnknownContext) {
		return volume.Errorf(volume.ErrPrecondition, "nfs.mountOptions: %w", err)
	}
	return backend.ExplainMount(err)
}
