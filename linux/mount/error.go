package mount

import (
	"errors"
	"fmt"
	"strings"
)

// Error is a mount operation that failed. It unwraps to the errno.
type Error struct {
	Op     string
	Source string
	Target string
	FSType string
	// Log has the messages of the kernel (fsopen(2), the message queue).
	Log string
	Err error
}

func (e *Error) Error() string {
	var b strings.Builder
	b.WriteString(e.Op)
	if e.FSType != "" {
		fmt.Fprintf(&b, " type %s", e.FSType)
	}
	if e.Source != "" {
		fmt.Fprintf(&b, " %s", e.Source)
	}
	if e.Target != "" {
		fmt.Fprintf(&b, " at %s", e.Target)
	}
	fmt.Fprintf(&b, ": %v", e.Err)
	if e.Log != "" {
		fmt.Fprintf(&b, " (kernel: %s)", e.Log)
	}
	return b.String()
}

func (e *Error) Unwrap() error { return e.Err }

// ErrBadOption means: neither mount(8) nor the filesystem knows the mount flag.
var ErrBadOption = errors.New("mount option not accepted")
