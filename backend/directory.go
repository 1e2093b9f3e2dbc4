package backend

import (
	"cmp"
	"context"
	"errors"
	"os"
	"syscall"

	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// defaultMode allows every pod to write, because pods without fsGroup can run as any user.
const defaultMode = 0o777

// DirectoryParameters are the parameters of kinds whose volumes are directories.
// CheckDirectory checks them.
var DirectoryParameters = []Parameter{
	{
		Key: volume.ParamSubDir, Valid: anything,
		Want: "a relative path, which may contain `${pvc.metadata.name}`, `${pvc.metadata.namespace}` and `${pv.metadata.name}`",
		Doc:  "The path of the directory in the pool or export. An existing directory is used with its content. With `onDelete: retain` the path needs the component `${pvc.metadata.namespace}` or `${pv.metadata.name}`. Default: a new directory.",
	},
	{
		Key: volume.ParamOnDelete, Values: []string{string(volume.OnDeleteDelete), string(volume.OnDeleteArchive), string(volume.OnDeleteRetain)},
		Doc: "[What happens to the directory](../kinds/nfs.md#delete-archive-retain) when the volume is deleted. Default: `delete`.",
	},
	{
		Key: volume.ParamMode, Valid: anything, Want: "permission bits in octal",
		Doc: "The permissions of a new directory. Default: `0777`.",
	},
	{
		Key: volume.ParamMountPermissions, Valid: anything, Want: "permission bits in octal",
		Doc: "Another name of `mode`, as in csi-driver-nfs. `0`: the default.",
	},
	{
		Key: volume.ParamUID, Valid: anything, Want: "a number from 0 to 4294967294",
		Doc: "The owner of a new directory. Default: root. `fsGroup` of a pod is applied afterwards.",
	},
	{
		Key: volume.ParamGID, Valid: anything, Want: "a number from 0 to 4294967294",
		Doc: "The group of a new directory. Default: root.",
	},
}

// CheckDirectory refuses invalid parameters of directories (ErrInvalid).
func CheckDirectory(p volume.Parameters) error {
	_, err := p.Directory()
	return err
}

// Directories implements the parts of a backend that do not depend on the medium of its
// directories. A backend embeds it.
type Directories struct {
	Pools
	Bounds volume.Bounds
	// Source returns the location of a volume.
	Source func(volume.Volume) (mount.Source, error)
	// Prepare sets the mode and owner of a volume's directory: PrepareDirectory, or a function that
	// calls PrepareDirectory.
	Prepare func(dir *os.File, empty bool, requested volume.DirectoryParameters, record *volume.Directory) error
	// Copy opens c.Origin, and calls c.Create with its content.
	Copy func(ctx context.Context, c *DirectoryCopy) error
}

// DirectoryCopy describes the creation of a volume as a copy of its origin.
type DirectoryCopy struct {
	Pool   *pool.Pool
	Job    *pool.Job
	Origin *Origin
	// Volume is the record of the new volume.
	Volume volume.Volume
	// Create creates the volume with the given content.
	Create func(context.Context, *pool.Content) error
}

// Create implements Backend.
func (d *Directories) Create(ctx context.Context, spec volume.Spec) (volume.Volume, error) {
	requested, err := RequestedDirectory(spec)
	if err != nil {
		return volume.Volume{}, err
	}
	return d.FindOrCreate(spec, func(p *pool.Pool) (volume.Volume, error) {
		v := d.NewDirectory(p, spec, requested)
		create := func(ctx context.Context, content *pool.Content) error {
			return p.CreateDirectory(ctx, v, content, func(dir *os.File, empty bool) error {
				return d.Prepare(dir, empty, requested, v.Directory)
			})
		}
		if spec.Source == nil {
			v.Capacity, err = spec.Capacity.Choose(d.Bounds)
			if err == nil {
				err = create(ctx, nil)
			}
			return v, err
		}
		o, err := d.Origin(p, spec)
		if err == nil {
			v.Capacity, err = o.Choose(spec, d.Bounds)
		}
		if err != nil {
			return volume.Volume{}, err
		}
		return d.CopyAsJob(ctx, p, spec, func(ctx context.Context, j *pool.Job) error {
			return d.Copy(ctx, &DirectoryCopy{Pool: p, Job: j, Origin: o, Volume: v, Create: create})
		})
	})
}

// RequestedDirectory returns the parameters of a new directory, with its final subDir.
func RequestedDirectory(spec volume.Spec) (volume.DirectoryParameters, error) {
	requested, err := spec.Parameters.Directory()
	if err == nil {
		requested.SubDir, err = requested.ExpandSubDir()
	}
	return requested, err
}

// NewDirectory returns the record of a new directory volume. PrepareDirectory sets the mode and owner in
// it.
func (ps *Pools) NewDirectory(p *pool.Pool, spec volume.Spec, requested volume.DirectoryParameters) volume.Volume {
	v := ps.NewVolume(p, spec)
	v.Directory = &volume.Directory{
		SubDir: requested.SubDir, OnDelete: cmp.Or(requested.OnDelete, volume.OnDeleteDelete), Mode: defaultMode,
	}
	return v
}

// Delete implements Backend. The record says whether the directory is retained.
func (d *Directories) Delete(ctx context.Context, id volume.ID) error {
	return d.DeleteUnpublished(id, func(p *pool.Pool, v volume.Volume) error {
		if err := d.CheckUnused(v); err != nil {
			return err
		}
		return p.Remove(ctx, v)
	})
}

// CheckUnused returns ErrInUse if a volume is mounted on this node. It does not check a directory
// that is retained, because the directory is not removed, and another volume may have mounted it.
func (d *Directories) CheckUnused(v volume.Volume) error {
	if v.Directory != nil && v.Directory.SubDir != "" && v.Directory.OnDelete == volume.OnDeleteRetain {
		return nil
	}
	source, err := d.Source(v)
	if err != nil {
		return err
	}
	return CheckUnmounted(v, source)
}

// Detach implements Backend. It only checks that the volume is not mounted.
func (d *Directories) Detach(_ context.Context, v volume.Volume) error { return d.CheckUnused(v) }

// Present implements Backend: a directory is always present.
func (d *Directories) Present(_ context.Context, v volume.Volume) (mount.Source, bool, error) {
	source, err := d.Source(v)
	return source, err == nil, err
}

// Capacity implements Backend.
func (d *Directories) Capacity(_ context.Context, q CapacityQuery) (Capacity, error) {
	return d.Room(q.Parameters, d.Bounds)
}

// Expand implements Expander. It reserves more space, and raises the limit of the directory if it
// has one.
func (d *Directories) Expand(ctx context.Context, v volume.Volume, r volume.Range) (volume.Volume, error) {
	return d.Grow(ctx, v, r, func(p *pool.Pool, v volume.Volume) (int64, error) {
		size, err := r.Choose(d.Bounds)
		if err != nil {
			return 0, err
		}
		return size, p.GrowDirectory(ctx, v, size)
	})
}

// ResizeDevice implements Expander: a directory has no device.
func (d *Directories) ResizeDevice(context.Context, volume.Volume, volume.Secrets) error { return nil }

// NodeDirectory returns the location of a directory in a pool of this node. If the record cannot
// be read or the pool is not open, the source can only identify the volume's mounts.
func (ps *Pools) NodeDirectory(v volume.Volume) (*mount.DirectorySource, error) {
	source := &mount.DirectorySource{Path: pool.FolderPath(v.ID.Name), AnyPath: v.Directory == nil}
	if v.Directory != nil && v.Directory.SubDir != "" {
		source.Path = v.Directory.SubDir
	}
	p, err := ps.Set.ByID(v.ID)
	if errors.Is(err, volume.ErrUnavailable) {
		return source, nil
	}
	if err != nil {
		return source, err
	}
	source.Base = p.Dir()
	if source.AnyPath {
		return source, nil
	}
	dir, err := p.OpenDirectory(v)
	if errors.Is(err, volume.ErrDamaged) || errors.Is(err, volume.ErrUnavailable) {
		return source, nil
	}
	if err != nil {
		return source, err
	}
	defer dir.Close()
	var st syscall.Stat_t
	if err := syscall.Fstat(int(dir.Fd()), &st); err != nil {
		return source, &os.PathError{Op: "fstat", Path: dir.Name(), Err: err}
	}
	source.Dev, source.Ino = st.Dev, st.Ino
	return source, nil
}

// AttachNodeDirectory opens a directory in a pool of this node. The volume is locked until the
// source is closed, so that no copy of it begins before it is mounted.
func (ps *Pools) AttachNodeDirectory(ctx context.Context, p *pool.Pool, v volume.Volume) (mount.Source, error) {
	lock, err := p.LockVolume(ctx, v.ID.Name)
	if err != nil {
		return nil, err
	}
	dir, err := p.OpenDirectory(v)
	if err != nil {
		return nil, errors.Join(err, lock.Close())
	}
	hold := Closers{dir, lock}
	source, err := ps.NodeDirectory(v)
	if err != nil {
		return nil, errors.Join(err, hold.Close())
	}
	source.Dir, source.Hold = dir, hold
	return source, nil
}

// PrepareDirectory sets the requested mode and owner of a volume's directory, and writes the result to
// record. A new directory (empty is true) gets the default mode if the request specifies none. A copy or
// an adopted directory keeps a mode and owner that the request does not specify. If the owner cannot be
// changed, the error is a *os.PathError with Op "fchown".
func PrepareDirectory(dir *os.File, empty bool, requested volume.DirectoryParameters, record *volume.Directory) error {
	if err := chown(dir, requested); err != nil {
		return err
	}
	mode := uint32(defaultMode)
	if requested.Mode != nil {
		mode = *requested.Mode
	}
	if empty || requested.Mode != nil { // after chown(2), which clears the set-ID bits
		if err := syscall.Fchmod(int(dir.Fd()), mode); err != nil {
			return &os.PathError{Op: "fchmod", Path: dir.Name(), Err: err}
		}
	}
	after, uid, gid, err := pool.Status(dir)
	if err == nil {
		record.Mode, record.UID, record.GID = volume.Mode(after&0o7777), uid, gid
	}
	return err
}

// chown changes the owner only if it differs from the requested one, because an NFS server that maps all
// users to one refuses chown(2) even if nothing changes.
func chown(dir *os.File, requested volume.DirectoryParameters) error {
	_, uid, gid, err := pool.Status(dir)
	if err != nil {
		return err
	}
	toUID, toGID := uid, gid
	if requested.UID != nil {
		toUID = *requested.UID
	}
	if requested.GID != nil {
		toGID = *requested.GID
	}
	if toUID == uid && toGID == gid {
		return nil
	}
	if err := syscall.Fchown(int(dir.Fd()), int(toUID), int(toGID)); err != nil {
		return &os.PathError{Op: "fchown", Path: dir.Name(), Err: err}
	}
	return nil
}

// DirectoryHealth is a Check that reports a directory that is missing or cannot be opened.
func DirectoryHealth(p *pool.Pool, v volume.Volume) *Condition {
	dir, err := p.OpenDirectory(v)
	switch {
	case errors.Is(err, volume.ErrDamaged):
		return &Condition{Severity: DataLoss, Reason: ReasonDirectoryMissing, Message: err.Error()}
	case err != nil:
		return &Condition{Severity: Inaccessible, Reason: ReasonDirectoryUnreachable, Message: err.Error()}
	}
	dir.Close()
	return nil
}
