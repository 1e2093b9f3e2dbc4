package volume

import (
	"errors"
	"fmt"
)

// The sentinel errors of the domain. Each is a kind of failure with its own remedy. One table of the driver
// translates them to the gRPC codes of the CSI specification. Wrap them with Errorf, test with errors.Is.
var (
	// ErrInvalid: an argument is malformed or unknown; the same request can
	// never succeed.
	ErrInvalid = errors.New("invalid argument")
	// ErrNotFound: there is no such volume, node or path.
	ErrNotFound = errors.New("not found")
	// ErrIncompatible: the volume exists already, and differs from the request.
	ErrIncompatible = errors.New("exists and is incompatible")
	// ErrOutOfRange: no volume can have the size.
	ErrOutOfRange = errors.New("out of range")
	// ErrExhausted: there is no room now. Later, or in another pool, there may be.
	ErrExhausted = errors.New("resource exhausted")
	// ErrPrecondition: the state of the volume, node or path must change first.
	ErrPrecondition = errors.New("failed precondition")
	// ErrInUse is the ErrPrecondition of a volume that a device or a program of this node uses.
	ErrInUse = fmt.Errorf("%w: in use", ErrPrecondition)
	// ErrPending: another call for the same volume is in progress.
	ErrPending = errors.New("operation pending")
	// ErrStaleToken: a list token was not made by this driver.
	ErrStaleToken = errors.New("invalid list token")
	// ErrUnavailable: the storage cannot be reached now. The same call may succeed later.
	ErrUnavailable = errors.New("unavailable")
	// ErrDamaged: the volume's data is missing, truncated or foreign. Nothing was changed, and an
	// administrator must repair it.
	ErrDamaged = errors.New("damaged")
)

// kindError is a message with its sentinel. The message does not contain the text of the sentinel.
type kindError struct{ kind, cause error }

func (e *kindError) Error() string   { return e.cause.Error() }
func (e *kindError) Unwrap() []error { return []error{e.kind, e.cause} }

// Errorf is fmt.Errorf whose result also matches kind in errors.Is.
func Errorf(kind error, format string, args ...any) error {
	return &kindError{kind: kind, cause: fmt.Errorf(format, args...)}
}

// HasKind reports whether Errorf has made err, or an error that it wraps.
func HasKind(err error) bool { return errors.As(err, new(*kindError)) }
