package volume

import (
	"errors"
	"fmt"
)

// The sentinel errors of the domain. Each is a kind of failure with its own remedy. One table in the driver
// translates them to the gRPC codes of the CSI specification. Errorf wraps an error in a sentinel error, and
// errors.Is tests for it.
var (
	// ErrInvalid means that an argument is malformed or unknown. The same request can never succeed.
	ErrInvalid = errors.New("invalid argument")
	// ErrUnauthenticated means that the secrets of the request are not those of the volume.
	ErrUnauthenticated = errors.New("unauthenticated")
	// ErrNotFound means that the volume, snapshot, node or path does not exist.
	ErrNotFound = errors.New("not found")
	// ErrIncompatible means that the volume exists already, and differs from the request.
	ErrIncompatible = errors.New("exists and is incompatible")
	// ErrOutOfRange means that a requested size or offset is not possible.
	ErrOutOfRange = errors.New("out of range")
	// ErrExhausted means that the pool or node has no room now. A later call, or another pool, may succeed.
	ErrExhausted = errors.New("resource exhausted")
	// ErrPrecondition means that the state of the volume, node or path must change first.
	ErrPrecondition = errors.New("failed precondition")
	// ErrInUse is an ErrPrecondition: a device or a program of this node uses the volume.
	ErrInUse = fmt.Errorf("%w: in use", ErrPrecondition)
	// ErrPending means that another call for the same volume is in progress.
	ErrPending = errors.New("operation pending")
	// ErrStaleToken means that a list token is not from this driver, or that its pool no longer exists.
	ErrStaleToken = errors.New("invalid list token")
	// ErrUnavailable means that the storage cannot be reached now. The same call may succeed later.
	ErrUnavailable = errors.New("unavailable")
	// ErrDamaged means that the record or data of a volume or snapshot is missing, invalid or from another program.
	// Nothing was changed, and an administrator must repair it.
	ErrDamaged = errors.New("damaged")
)

// kindError is an error with its sentinel. The message does not contain the text of the sentinel.
type kindError struct{ kind, cause error }

func (e *kindError) Error() string   { return e.cause.Error() }
func (e *kindError) Unwrap() []error { return []error{e.kind, e.cause} }

// Errorf returns an error as fmt.Errorf does, which also matches kind in errors.Is.
func Errorf(kind error, format string, args ...any) error {
	return &kindError{kind: kind, cause: fmt.Errorf(format, args...)}
}

// HasKind reports whether Errorf created err, or an error that err wraps.
func HasKind(err error) bool { return errors.As(err, new(*kindError)) }
