package mount

import (
	"context"
	"errors"
	"slices"
)

// Source is storage that can be mounted on this node: a block device
// (blockdev.DeviceSource), a directory of this node (DirectorySource) or a directory of
// an NFS server (NFSSource).
type Source interface {
	// String names the source in errors and logs.
	String() string
	// Mount mounts the source at target. The target never shows it without o, nor
	// anything other than the source. After an error nothing is mounted. Errors are
	// *Error, with one of the sentinel errors of this package where that is the reason.
	Mount(ctx context.Context, target string, o Options) error
	// Close releases what keeps the source available until it is mounted.
	Close() error
	// Attributes adds to o the attributes that every mount of the source has.
	Attributes(o Options) (Options, error)

	// Shows reports whether the mount at path shows the source as it is now.
	Shows(path string) (bool, error)
	// Owns reports whether the mount at path is one of the source, even if the source was
	// replaced or removed since, or the mounted filesystem is broken.
	Owns(path string) (bool, error)
	// Matcher returns a function that tells which entries of a mount table are mounts of
	// the source.
	Matcher(table []*Entry) (func(*Entry) bool, error)
	// Problems reports what is wrong with the mounted source.
	Problems() ([]Problem, error)
	// Grow makes a mounted filesystem as large as its device. ErrCannotGrow where no
	// mount of it allows that. A directory has nothing to grow.
	Grow() error

	// Unmount removes the mount at path; other mounts of the source may remain. EBUSY if
	// a process uses it.
	Unmount(ctx context.Context, path string, abandon Abandon) error
	// UnmountLast removes the last mount of the source. The storage has all that was
	// written when it returns, unless abandon said that this is given up. ErrMountedElsewhere
	// if a directory of a server has other mounts.
	UnmountLast(ctx context.Context, path string, abandon Abandon) error
}

// Abandon reports whether a server that does not answer is given up, and with it what was
// not written there yet. An error means that nothing may be unmounted now. A nil Abandon
// gives up no server.
type Abandon func() (bool, error)

func (a Abandon) decide() (bool, error) {
	if a == nil {
		return false, nil
	}
	return a()
}

// BlockDevice is a Source that has a device node.
type BlockDevice interface {
	Source
	// Node is the path of the device node.
	Node() string
}

// Problem is something that is wrong with a mounted source.
type Problem struct {
	Kind    ProblemKind
	Message string
}

// ProblemKind classifies problems.
type ProblemKind int

const (
	// RecordedErrors means: the filesystem has recorded errors of itself.
	RecordedErrors ProblemKind = iota
	// MadeReadOnly means: the filesystem accepts no writes any more.
	MadeReadOnly
	// ShutDown means: the filesystem of a device does not answer.
	ShutDown
	// Unreachable means: the directory does not answer.
	Unreachable
)

var (
	// ErrCannotGrow means: no mount allows the filesystem to grow.
	ErrCannotGrow = errors.New("the filesystem cannot grow now")
	// ErrDamaged means: the kernel cannot mount what is on the device.
	ErrDamaged = errors.New("the filesystem is damaged or is none")
	// ErrNoFilesystem means: the kernel lacks the filesystem.
	ErrNoFilesystem = errors.New("this kernel does not have the filesystem")
	// ErrOtherDirectory means: another directory than the source was mounted.
	ErrOtherDirectory = errors.New("the server mounts another directory")
	// ErrMountedElsewhere means: the source has other mounts.
	ErrMountedElsewhere = errors.New("it is still mounted")
	// ErrNotWritten means: the server does not have everything that was written.
	ErrNotWritten = errors.New("what was written is not on the server yet")
	// ErrUnmounting means: the unmount continues when the call ends, and another call joins it.
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

// HasAttributes reports whether the mount of a source at path has the attributes that Mount
// gives it with o.
func HasAttributes(s Source, path string, o Options) (bool, error) {
	wanted, err := s.Attributes(o)
	if err != nil {
		return false, err
	}
	st, err := Statfs(path)
	return err == nil && wanted.MatchAttr(st.Flags), err
}
