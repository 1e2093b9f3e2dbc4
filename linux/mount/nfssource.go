package mount

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/trivet-csi/trivet/internal/crashpoint"
)

// NFSSource is a directory of a server.
type NFSSource struct {
	NFS
	// AnyPath: the path is not known. Mounts of every directory below NFS are the source's.
	AnyPath bool
	// Verify checks the root directory of a mount before the mount is shown; nil if nothing
	// is known of the directory.
	Verify func(root *os.File) error
}

var _ Source = (*NFSSource)(nil)

// NFSAt returns the directory of a server that is mounted at path; nil if there is none.
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

// Mount implements Source. The mount table tells afterwards which path the kernel found,
// if it followed a symbolic link: a user who can write above the directory may have created one,
// and nfs(5) has no option to follow none. With version 3 the server follows links unseen.
func (n *NFSSource) Mount(ctx context.Context, target string, o Options) error {
	if err := n.mountUnchecked(ctx, target, o); err != nil {
		return err
	}
	e, err := OnPath(target)
	if err != nil || e == nil || n.owns(e) {
		return err
	}
	err = fmt.Errorf("%w: a part of this path is a symbolic link, and the server has %s there: use that path if it is meant", ErrOtherDirectory, e.Source)
	return errors.Join(&Error{Op: "mount", Source: n.String(), Target: target, FSType: "nfs", Err: err}, Unmount(target))
}

func (n *NFSSource) mountUnchecked(ctx context.Context, target string, o Options) (err error) {
	fs, _, err := MountNFS(ctx, n.With(o.Data), o.Attr)
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

// Shows implements Source. The path itself is not touched: its server may not answer.
func (n *NFSSource) Shows(path string) (bool, error) {
	e, err := OnPath(path)
	return err == nil && e != nil && n.owns(e), err
}

// Owns implements Source.
func (n *NFSSource) Owns(path string) (bool, error) { return n.Shows(path) }

// Matcher implements Source.
func (n *NFSSource) Matcher([]*Entry) (func(*Entry) bool, error) { return n.owns, nil }

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

// Unmount implements Source. A process that was killed and waits for a silent server
// keeps the path busy. If the server is given up and the only other mount is the last one,
// the calls that wait are aborted through that one.
func (n *NFSSource) Unmount(ctx context.Context, path string, abandon Abandon) error {
	return UnmountBusy(ctx, path, abandon, func(ctx context.Context, beside string) error {
		return AbortNFS(context.WithoutCancel(ctx), beside, func() bool { return ctx.Err() != nil })
	})
}

// UnmountLast implements Source. What is dirty is written while the mount still exists: an
// unmount that waits for the server could not be repeated.
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
		return &Error{Op: "umount2", Source: e.Source, Target: path, FSType: e.FSType, Err: fmt.Errorf("%w at %s", ErrMountedElsewhere, beside[0])}
	}
	if force {
		return ForceUnmountNFS(ctx, path)
	}
	if err := flush(ctx, path); err != nil {
		return err
	}
	return UnmountIdle(ctx, path)
}

// abandonMount decides for one mount. A server may have several addresses, and one that
// answers at the address of the mount is not given up: it still receives what was written.
func abandonMount(ctx context.Context, e *Entry, abandon Abandon) (bool, error) {
	force, err := abandon.decide()
	if (force || err != nil) && IsNFS(e) && Answers(ctx, e) {
		return false, nil
	}
	return force, err
}
