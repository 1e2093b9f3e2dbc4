package mount

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"
)

// Handle is what the filesystem of an open file knows the file by, and no other of
// its server: the same through every mount (name_to_handle_at(2)). Empty where the
// filesystem has no handles.
func Handle(f *os.File) (string, error) {
	h, _, err := unix.NameToHandleAt(int(f.Fd()), "", unix.AT_EMPTY_PATH)
	if errors.Is(err, unix.EOPNOTSUPP) {
		return "", nil
	}
	if err != nil {
		return "", &Error{Op: "name_to_handle_at", Target: f.Name(), Err: err}
	}
	return string(h.Bytes()), nil
}
