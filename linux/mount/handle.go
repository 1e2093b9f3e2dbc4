package mount

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"
)

// Handle returns the handle of an open file (name_to_handle_at(2)), which identifies the file on its
// server and is the same in every mount. It is empty if the filesystem has no handles.
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
