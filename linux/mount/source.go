package mount

import (
	"context"
	"errors"
	"slices"
)

// Source is storage that can be mounted on this node: a block device (blockdev.DeviceSource), a
// directory of this node (DirectorySource), a directory of an NFS server (NFSSource) or memory
// (MemorySource).
type Source interface {
	// String names the source in errors and logs.
	String() string
	// Mount mounts the source at target. At no moment does the target show the source without the options o,
	// or another source. After an error nothing is mounted. Errors are *Error, and wrap a sentinel error of
	// this package if one describes the reason.
	Mount(ctx context.Context, target string, o Options) error
	// Close releases the resources that keep the source available until it is mounted.
	Close() error
	// Attributes returns o with the attributes that every mount of the source has.
	Attributes(o Options) (Options, error)

	// Shows reports whether the mount at path shows the source in its current state.
	Shows(path string) (bool, error)
	// Owns reports whether the mount at path is a mount of the source, even if the source was replaced or
	// removed after the mount, or the mounted filesystem is broken.
	Owns(path string) (bool, error)
	// Matcher returns a function that reports whether an entry of a mount table is a mount of
	// the source. The entries may have no options.
	Matcher(table []*Entry) (func(*Entry) bool, error)
	// Problems returns the problems of the mounted source.
	Problems() ([]Problem, error)
	// Grow makes a mounted filesystem as large as its device. The error is ErrCannotGrow if no mount of the
	// filesystem allows growth. Grow does nothing for a source without a device.
	Grow() error

	// Unmount removes the mount at path. Other mounts of the source may remain. The error is EBUSY if a process uses
	// the mount.
	Unmount(ctx context.Context, path string, abandon Abandon) error
	// UnmountLast removes the last mount of the source. When it returns, the storage has all writes, unless abandon
	// returned true. The error is ErrMountedElsewhere if the source is a directory of an NFS server and has other
	// mounts.
	UnmountLast(ctx context.Context, path string, abandon Abandon) error
}

// Abandon reports whether to abandon a server that does not respond. Abandoning a server discards the writes
// that it has not received. An error means that nothing may be unmounted now. A nil Abandon abandons no
// server.
type Abandon func() (bool, error)

// BlockDevice is a Source that has a device node.
type BlockDevice interface {
	Source
	// Node returns the path of the device node.
	Node() string
}

// Problem is a problem of a mounted source.
type Problem struct {
	Kind    ProblemKind
	Message string
}

// ProblemKind classifies problems.
type ProblemKind int

const (
	// RecordedErrors means that the filesystem has recorded errors.
	RecordedErrors ProblemKind = iota
	// MadeReadOnly means that the filesystem became read-only.
	MadeReadOnly
	// ShutDown means that the filesystem of a device does not respond.
	ShutDown
	// Unreachable means that the directory does not respond.
	Unreachable
)

var (
	// ErrCannotGrow means that no mount allows the filesystem to grow.
	ErrCannotGrow = errors.New("the filesystem cannot grow now")
	// ErrDamaged means that the kernel cannot mount the content of the device.
	ErrDamaged = errors.New("the filesystem is damaged or missing")
	// ErrNoFilesystem means that the kernel does not support the filesystem type.
	ErrNoFilesystem = errors.New("this kernel does not support the filesystem")
	// ErrOtherDirectory means that the kernel mounted another directory of the server than the source.
	ErrOtherDirectory = errors.New("another directory of the server was mounted")
	// ErrMountedElsewhere means that the source has other mounts.
	ErrMountedElsewhere = errors.New("the source is still mounted")
	// ErrNotWritten means that the server does not have all writes.
	ErrNotWritten = errors.New("the server does not have all writes yet")
	// ErrUnmounting means that the unmount continues after the call has returned. Another call joins the unmount.
	ErrUnmounting = errors.New("the mount is still being unmounted by force, because its server does not answer: try again")
)

// Of returns the mounts of a source.
func Of(s Source) ([]*Entry, error) {
	table, err := wholeTable()
	if err != nil {
		return nil, err
	}
	matches, err := s.Matcher(table)
	if err != nil {
		return nil, err
	}
	return slices.DeleteFunc(table, func(e *Entry) bool { return !matches(e) }), nil
}

// HasAttributes reports whether the mount of a source at path has the attributes that Mount sets with
// o.
func HasAttributes(s Source, path string, o Options) (bool, error) {
	want, err := s.Attributes(o)
	if err != nil {
		return false, err
	}
	st, err := Statfs(path)
	return err == nil && want.MatchAttr(st.Flags), err
}
