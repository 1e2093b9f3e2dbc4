package mount

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/trivet-csi/trivet/internal/crashpoint"
)

// NFSSource is a directory of an NFS server.
type NFSSource struct {
	NFS
	// AnyPath means that the directory may be any directory below NFS.Path. The mounts of all of them then
	// belong to the source.
	AnyPath bool
	// Verify checks the root directory of a mount before Mount attaches the mount to its target. It may be
	// nil.
	Verify func(root *os.File) error
}

var _ Source = (*NFSSource)(nil)

// NFSAt returns the directory of an NFS server that is mounted at path, or nil if the path is not an NFS
// mount.
func NFSAt(path string) (*NFSSource, error) {
	e, err := OnPath(path)
	if err != nil || e == nil || !IsNFS(e) {
		return nil, err
	}
	server, directory, ok := ParseNFSSource(e.Source)
	if !ok {
		return nil, nil
	}
	return &NFSSource{NFS: NFS{Server: server, Path: directory}}, nil
}

// Close implements Source.
func (*NFSSource) Close() error { return nil }

// Mount implements Source. It fails if the kernel mounted another directory, because a user with write
// permission above the directory may have created a symbolic link, and nfs(5) has no option that prevents
// following a link. Mount detects a link by the resolved path in the mount table. With NFS version 3 Mount detects no
// link, because the server follows links, and the mount table does not show the resolved path.
func (n *NFSSource) Mount(ctx context.Context, target string, o Options) error {
	if err := n.mountUnchecked(ctx, target, o); err != nil {
		return err
	}
	e, err := OnPath(target)
	if err != nil || e == nil || n.owns(e) {
		return err
	}
	err = fmt.Errorf("%w: a part of the path is a symbolic link, and the resolved path is %s: use the resolved path if that directory is intended",
		ErrOtherDirectory, e.Source)
	return errors.Join(&Error{Op: "mount", Source: n.String(), Target: target, FSType: "nfs", Err: err}, Unmount(target))
}

// mountUnchecked mounts the directory at target, but does not check whether the path contains a link.
func (n *NFSSource) mountUnchecked(ctx context.Context, target string, o Options) (err error) {
	fs, _, err := MountNFS(ctx, n.With(o.FilesystemFlags()), o.Attr)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, fs.Close()) }()
	if err := n.verify(fs); err != nil {
		return err
	}
	crashpoint.Here(crashpoint.StageMounted)
	return fs.MoveTo(target)
}

// verify calls n.Verify with the root of a mount that is not attached yet.
func (n *NFSSource) verify(fs *Detached) error {
	if n.Verify == nil {
		return nil
	}
	root, err := fs.OpenRoot()
	if err != nil {
		return err
	}
	defer root.Close()
	return n.Verify(root)
}

// Attributes implements Source.
func (n *NFSSource) Attributes(o Options) (Options, error) {
	own, err := ParseFlags(n.Options)
	o.Attr |= own.Attr
	return o, err
}

// Shows implements Source. It does not access the path, because its server may not respond.
func (n *NFSSource) Shows(path string) (bool, error) {
	e, err := OnPath(path)
	return err == nil && e != nil && n.owns(e), err
}

// Owns implements Source.
func (n *NFSSource) Owns(path string) (bool, error) { return n.Shows(path) }

// Matcher implements Source.
func (n *NFSSource) Matcher([]*Entry) (func(*Entry) bool, error) { return n.owns, nil }

// owns reports whether an entry of the mount table is a mount of the source.
func (n *NFSSource) owns(e *Entry) bool {
	switch {
	case !IsNFS(e):
		return false
	case n.AnyPath:
		return strings.HasPrefix(e.Source, strings.TrimSuffix(n.String(), "/")+"/")
	}
	return e.Source == n.String()
}

// Problems implements Source.
func (n *NFSSource) Problems() ([]Problem, error) { return unreachable(n) }

// Grow implements Source.
func (*NFSSource) Grow() error { return nil }

// Unmount implements Source. A killed process that waits for an unresponsive server keeps the path busy. If
// abandon returns true and the filesystem has only one other mount, the waiting calls are aborted through that
// mount.
func (n *NFSSource) Unmount(ctx context.Context, path string, abandon Abandon) error {
	return UnmountBusy(ctx, path, abandon, func(ctx context.Context, beside string) error {
		return AbortNFS(context.WithoutCancel(ctx), beside, func() bool { return ctx.Err() != nil })
	})
}

// UnmountLast implements Source. It writes dirty pages before it unmounts, because an unmount that waits for
// the server cannot be retried.
func (n *NFSSource) UnmountLast(ctx context.Context, path string, abandon Abandon) error {
	e, err := OnPath(path)
	if err != nil || e == nil {
		return err
	}
	force, err := abandonMount(ctx, e, abandon)
	if err != nil {
		return err
	}
	beside, err := Beside(e)
	if err != nil {
		return err
	}
	if len(beside) > 0 {
		err := fmt.Errorf("%w at %s", ErrMountedElsewhere, beside[0])
		return &Error{Op: "umount2", Source: e.Source, Target: path, FSType: e.FSType, Err: err}
	}
	if force {
		return ForceUnmountNFS(ctx, path)
	}
	if err := flush(ctx, path); err != nil {
		return err
	}
	return UnmountIdle(ctx, path)
}

// abandonMount reports whether to abandon the server of a mount. It does not abandon a server that responds at
// the address of the mount, even if abandon returns true because another address of the server does not
// respond.
func abandonMount(ctx context.Context, e *Entry, abandon Abandon) (bool, error) {
	if abandon == nil {
		return false, nil
	}
	force, err := abandon()
	if (force || err != nil) && IsNFS(e) && Answers(ctx, e) {
		return false, nil
	}
	return force, err
}
