package volume

import (
	"errors"
	"fmt"
)

// The sentinel errors of the domain. Each names a kind of failure and the
// remedy the caller has; the driver's one table turns them into the gRPC codes
// of the CSI specification. Wrap them with Errorf, test with errors.Is.
var (
	// ErrInvalid: an argument is malformed or unknown; the same request can
	// never succeed.
	ErrInvalid = errors.New("invalid argument")
	// ErrNotFound: there is no such volume, node or path.
	ErrNotFound = errors.New("not found")
	// ErrIncompatible: it exists already, but not as asked for.
	ErrIncompatible = errors.New("exists and is incompatible")
	// ErrOutOfRange: the size can never be had.
	ErrOutOfRange = errors.New("out of range")
	// ErrExhausted: there is no room now; there may be later or elsewhere.
	ErrExhausted = errors.New("resource exhausted")
	// ErrPrecondition: the state of volume, node or path has to change first.
	ErrPrecondition = errors.New("failed precondition")
	// ErrInUse is the ErrPrecondition of a volume that a device or a program of
	// this node has.
	ErrInUse = fmt.Errorf("%w: in use", ErrPrecondition)
	// ErrPending: another call for the same volume is under way.
	ErrPending = errors.New("operation pending")
	// ErrStaleToken: a list token was not made by this driver.
	ErrStaleToken = errors.New("invalid list token")
	// ErrUnavailable: it cannot be reached now; the same call may succeed later.
	ErrUnavailable = errors.New("unavailable")
	// ErrDamaged: the volume's data is missing, cut short or foreign. Nothing
	// was changed, a person has to look.
	ErrDamaged = errors.New("damaged")
)

// kindError is a message together with the sentinel it stands for; the
// sentinel's own text is not repeated in the message.
type kindError struct {
	kind  error
	cause error
}

func (e *kindError) Error() string   { return e.cause.Error() }
func (e *kindError) Unwrap() []error { return []error{e.kind, e.cause} }

// Errorf formats like fmt.Errorf (%w included) and makes the result match kind
// in errors.Is.
func Errorf(kind error, format string, args ...any) error {
	return &kindError{kind: kind, cause: fmt.Errorf(format, args...)}
}

// HasKind reports whether Errorf has made err, or an error that it wraps.
func HasKind(err error) bool { return errors.As(err, new(*kindError)) }
