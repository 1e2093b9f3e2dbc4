package mount

import (
	"errors"
	"fmt"
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
	text := e.Op
	for _, part := range [][2]string{{" type ", e.FSType}, {" ", e.Source}, {" at ", e.Target}} {
		if part[1] != "" {
			text += part[0] + part[1]
		}
	}
	text += fmt.Sprintf(": %v", e.Err)
	if e.Log != "" {
		text += " (kernel: " + e.Log + ")"
	}
	return text
}

func (e *Error) Unwrap() error { return e.Err }

var (
	// ErrBadOption means that this package or the filesystem does not accept a mount flag.
	ErrBadOption = errors.New("mount option not accepted")
	// ErrBadContext is an ErrBadOption: the filesystem cannot have the SELinux context of the mount flags.
	ErrBadContext = fmt.Errorf("%w: context", ErrBadOption)
)
