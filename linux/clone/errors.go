package clone

import (
	"errors"
	"fmt"
)

var (
	// ErrUncopyable means that a copy of a tree would be incomplete.
	ErrUncopyable = errors.New("a copy would be incomplete")
	// ErrNotShared means that the filesystem cannot share blocks between the files.
	ErrNotShared = errors.New("the filesystem cannot share blocks between the files")
	// ErrNotSubvolume means that a directory is not the root of a btrfs subvolume.
	ErrNotSubvolume = errors.New("not a btrfs subvolume")
	// ErrTooSmall means that a device is smaller than the source of the copy.
	ErrTooSmall = errors.New("the device is too small")
)

// uncopyable is ErrUncopyable, but has the text of its cause.
type uncopyable struct{ cause error }

func (u *uncopyable) Error() string { return u.cause.Error() }

func (u *uncopyable) Unwrap() error { return u.cause }

func (u *uncopyable) Is(target error) bool { return target == ErrUncopyable }

// errUncopyable returns an error that is ErrUncopyable, with a text.
func errUncopyable(format string, args ...any) error {
	return &uncopyable{fmt.Errorf(format, args...)}
}
