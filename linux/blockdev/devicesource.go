package blockdev

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/internal/crashpoint"
	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/linux/sys"
)

// DeviceSource is a block device, and the filesystem on it.
type DeviceSource struct {
	// Path is the path of the device node.
	Path string
	// FSType is the type of the filesystem. It is empty for a raw device.
	FSType string
	// Commit makes the earlier writes to the storage of the device durable and records them. It is nil if
	// nothing was written. Mount calls Commit while it mounts the device, and attaches the mount to its path when
	// Commit has succeeded.
	Commit func() error
	// Abort makes the I/O requests fail that wait for the server with the storage of the device. It returns
	// when its context ends or the device is free. It is nil if the storage is not on a server.
	Abort func(context.Context) error
	// Created means that the filesystem was just created, and is as large as the device.
	Created bool
	// Hold keeps the device bound until it is mounted. It is nil for a device that stays bound.
	Hold io.Closer
	// Device is the device at Path, if Hold keeps it open.
	Device *os.File
}

var _ mount.BlockDevice = (*DeviceSource)(nil)

// String implements mount.Source.
func (d *DeviceSource) String() string { return d.Path }

// Node implements mount.BlockDevice.
func (d *DeviceSource) Node() string { return d.Path }

// Close implements mount.Source.
func (d *DeviceSource) Close() error {
	if d.Hold == nil {
		return nil
	}
	return d.Hold.Close()
}

// Mount implements mount.Source. If the device is larger than its filesystem, the filesystem grows before
// the mount is attached to its path.
func (d *DeviceSource) Mount(_ context.Context, target string, o mount.Options) (err error) {
	committed := make(chan error, 1)
	if d.Commit == nil {
		committed <- nil
	} else {
		go func() { committed <- d.Commit() }()
	}
	fs, err := mount.Filesystem(d.Path, d.FSType, o)
	if err != nil {
		return errors.Join(explainMount(err), <-committed)
	}
	defer func() { err = errors.Join(err, fs.Close()) }()
	crashpoint.Here(crashpoint.StageMounted)
	if !d.Created && !o.IsReadOnly() {
		err = d.growDetached(fs)
	}
	if err = errors.Join(err, <-committed); err != nil {
		return err
	}
	return fs.MoveTo(target)
}

// explainMount adds the reason to the error of a mount.
func explainMount(err error) error {
	switch {
	case errors.Is(err, mount.ErrBadOption), errors.Is(err, mount.ErrOtherContext):
		return err
	case errors.Is(err, unix.EUCLEAN), errors.Is(err, unix.EIO), errors.Is(err, unix.EINVAL):
		return fmt.Errorf("%w: %w", mount.ErrDamaged, err)
	case errors.Is(err, unix.ENODEV):
		return fmt.Errorf("%w: %w", mount.ErrNoFilesystem, err)
	}
	return err
}

// growDetached grows the filesystem of a mount without a path.
func (d *DeviceSource) growDetached(fs *mount.Detached) error {
	root, err := fs.OpenRoot()
	if err != nil {
		return err
	}
	defer root.Close()
	return d.grow(root)
}

// grow makes the filesystem with an open root as large as the device.
func (d *DeviceSource) grow(root *os.File) error {
	if d.Device != nil {
		return GrowFilesystem(root, d.Device, d.FSType)
	}
	device, err := sys.OpenFile(d.Path, os.O_RDONLY)
	if err != nil {
		return err
	}
	defer device.Close()
	return GrowFilesystem(root, device, d.FSType)
}

// Attributes implements mount.Source.
func (*DeviceSource) Attributes(o mount.Options) (mount.Options, error) { return o, nil }

// Shows implements mount.Source.
func (d *DeviceSource) Shows(path string) (bool, error) {
	at, err := mount.Inspect(path)
	if err != nil || !at.IsMount {
		return false, err
	}
	node, err := mount.Inspect(d.Path)
	switch {
	case err != nil:
		return false, err
	case at.IsBlock(): // a bind mount of a device node
		return d.FSType == "" && at.Rdev == node.Rdev, nil
	case at.Dev == node.Rdev:
		return true, nil
	}
	st, err := mount.Statfs(path)
	if err != nil || st.Type != unix.BTRFS_SUPER_MAGIC {
		return false, err
	}
	root, err := sys.OpenFile(path, os.O_RDONLY)
	if err != nil {
		return false, err
	}
	defer root.Close()
	return d.contains(root)
}

// contains reports whether an open directory is on the filesystem of the device. For a btrfs it reads the path
// of the device, because st_dev is not the number of the device.
func (d *DeviceSource) contains(dir *os.File) (bool, error) {
	var st, node unix.Stat_t
	if err := errors.Join(unix.Fstat(int(dir.Fd()), &st), unix.Stat(d.Path, &node)); err != nil {
		return false, err
	}
	if st.Dev == node.Rdev {
		return true, nil
	}
	on, _, err := sys.BtrfsDevice(dir)
	if errors.Is(err, unix.ENOTTY) || errors.Is(err, unix.EINVAL) { // not a btrfs
		return false, nil
	}
	if err != nil || on == d.Path {
		return err == nil, err
	}
	// btrfs may return another name of the device, which udev created.
	err = unix.Stat(on, &st)
	return err == nil && st.Rdev == node.Rdev, err
}

// Owns implements mount.Source. It accepts mounts of the filesystem and of the device node, because FSType may
// be unknown.
func (d *DeviceSource) Owns(path string) (bool, error) {
	ok, err := (&DeviceSource{Path: d.Path}).Shows(path)
	if !mount.IsBroken(err) {
		return ok, err
	}
	e, err := mount.OnPath(path)
	return err == nil && e != nil && mount.IsOfDevice(e, d.Path), err
}

// Matcher implements mount.Source.
func (d *DeviceSource) Matcher([]*mount.Entry) (func(*mount.Entry) bool, error) {
	node, err := mount.Inspect(d.Path)
	if err != nil {
		return nil, err
	}
	return func(e *mount.Entry) bool {
		return node.IsBlock() && unix.Mkdev(uint32(e.Major), uint32(e.Minor)) == node.Rdev || mount.IsOfDevice(e, d.Path)
	}, nil
}

// Unmount implements mount.Source. A killed process whose requests wait for an unresponsive server keeps the
// path busy until Abort makes the requests fail.
func (d *DeviceSource) Unmount(ctx context.Context, path string, abandon mount.Abandon) error {
	if d.Abort == nil {
		return mount.UnmountIdle(ctx, path)
	}
	return mount.UnmountBusy(ctx, path, abandon, func(ctx context.Context, _ string) error { return d.Abort(ctx) })
}

// UnmountLast implements mount.Source.
func (d *DeviceSource) UnmountLast(ctx context.Context, path string, abandon mount.Abandon) error {
	if d.Abort == nil {
		return mount.UnmountIdle(ctx, path)
	}
	return mount.UnmountAborting(ctx, path, abandon, d.Abort)
}

// Grow implements mount.Source. It needs a writable mount.
func (d *DeviceSource) Grow() error {
	if d.FSType == "" {
		return nil
	}
	mounts, err := mount.OfDevice(d.Path)
	if err != nil {
		return err
	}
	for _, m := range mounts {
		if !hasOption(m.Options, "ro") && !hasOption(m.VFSOptions, "ro") {
			return d.growAt(m.Mountpoint)
		}
	}
	return fmt.Errorf("%w: the filesystem is mounted read-only on this node: it grows when the volume is staged writable", mount.ErrCannotGrow)
}

// growAt grows the filesystem that is mounted at path.
func (d *DeviceSource) growAt(path string) error {
	root, err := sys.OpenFile(path, os.O_RDONLY)
	if err != nil {
		return err
	}
	defer root.Close()
	// Another mount may cover the path. The filesystem of that mount must not grow.
	ok, err := d.contains(root)
	if err == nil && !ok {
		err = fmt.Errorf("%w: %s does not show the filesystem on %s: unmount what covers it", mount.ErrCannotGrow, path, d.Path)
	}
	if err != nil {
		return err
	}
	return d.grow(root)
}

// hasOption reports whether a list of options, separated by commas, contains an option.
func hasOption(options, option string) bool {
	return slices.Contains(strings.Split(options, ","), option)
}

// Problems implements mount.Source.
func (d *DeviceSource) Problems() ([]mount.Problem, error) {
	if d.FSType == "" {
		return nil, nil
	}
	mounts, err := mount.OfDevice(d.Path)
	if err != nil || len(mounts) == 0 {
		return nil, err
	}
	m := mounts[0]
	var found []mount.Problem
	report := func(kind mount.ProblemKind, format string, a ...any) {
		found = append(found, mount.Problem{Kind: kind, Message: fmt.Sprintf("%s on %s ", m.FSType, d.Path) + fmt.Sprintf(format, a...)})
	}
	if n := recordedErrors(m, d.Path); n > 0 {
		report(mount.RecordedErrors, "has recorded %d errors: ext4 is checked when the volume is staged again; for btrfs see btrfs device stats %s",
			n, m.Mountpoint)
	}
	if madeReadOnly(m) {
		report(mount.MadeReadOnly, "has become read-only after an error: see the kernel's log, then unstage the volume and stage it again")
	}
	if err := mount.CheckReadable(m.Mountpoint); err != nil {
		report(mount.ShutDown, "does not answer: %v: see the kernel's log, then unstage the volume and stage it again", err)
	}
	return found, nil
}

// madeReadOnly reports whether the kernel made the filesystem of a writable mount read-only. Since Linux 6.14
// ext4 shows that with a separate option.
func madeReadOnly(m *mount.Entry) bool {
	return !hasOption(m.Options, "ro") && (hasOption(m.VFSOptions, "ro") || hasOption(m.VFSOptions, "emergency_ro"))
}

// recordedErrors counts the errors that a filesystem has recorded. xfs records no errors, but shuts down.
func recordedErrors(m *mount.Entry, device string) uint64 {
	switch m.FSType {
	case "ext4": // kernel documentation, ABI/testing/sysfs-fs-ext4
		name, err := KernelName(device)
		if err != nil {
			return 0
		}
		n, _ := readNumber("/sys/fs/ext4/" + name + "/errors_count")
		return uint64(n)
	case "btrfs":
		root, err := sys.OpenFile(m.Mountpoint, os.O_RDONLY)
		if err != nil {
			return 0
		}
		defer root.Close()
		n, _ := sys.BtrfsErrors(root)
		return n
	}
	return 0
}
