package mount

import (
	"io"
	"os"
	"slices"
	"strings"
)

// Source is what a backend hands to the node service to mount.
type Source struct {
	// Device is the path of a block device; empty for a directory.
	Device string
	// NFS is a directory of a server, and Directory one of this node; nil for all else.
	NFS       *NFS
	Directory *Directory
	// Below: any directory below that of NFS, or the Directory's base, is meant. The
	// volume's own is not known while its record cannot be read. On a filesystem of this
	// node, where others' are mounted from as well, only Shows goes by that.
	Below bool
	// Verify makes sure, by its root directory, that what was mounted is what was
	// meant, before anybody sees it; nil where nothing else can be.
	Verify func(root *os.File) error
	// Settle returns once what the backend wrote to the device's storage is
	// durable; nil if it wrote nothing. It may run while the device is being
	// mounted, and must have returned before the volume is handed out.
	Settle func() error
	// Hold keeps the device bound, or the directory open, until it is mounted; closing
	// it lets go. Nil for a raw device that was bound before, which stays by itself, and
	// for a directory of a server.
	Hold io.Closer
}

// Shows tells whether a mount is one of the source. A mount that is nil is none.
func (s Source) Shows(e *Entry) (bool, error) {
	if e == nil {
		return false, nil
	}
	if s.Directory == nil {
		return s.is(e), nil
	}
	table, err := wholeTable()
	if err != nil {
		return false, err
	}
	shows, err := s.Directory.matcher(table, s.Below)
	return err == nil && shows(e), err
}

// matcher makes Shows for the mounts of a table. Of a Directory, only its own are meant.
func (s Source) matcher(table []*Entry) (func(*Entry) bool, error) {
	if s.Directory != nil {
		return s.Directory.matcher(table, false)
	}
	return s.is, nil
}

// is tells whether a mount is of the source's device, or of its server's directory.
func (s Source) is(e *Entry) bool {
	switch {
	case s.NFS == nil:
		return isOf(e, s.Device)
	case !IsNFS(e):
		return false
	case s.Below:
		return strings.HasPrefix(e.Source, strings.TrimSuffix(s.NFS.Source(), "/")+"/")
	}
	return e.Source == s.NFS.Source()
}

// Of returns the mounts of a source.
func Of(s Source) ([]*Entry, error) {
	table, err := wholeTable()
	if err != nil {
		return nil, err
	}
	shows, err := s.matcher(table)
	if err != nil {
		return nil, err
	}
	return slices.DeleteFunc(table, func(e *Entry) bool { return !shows(e) }), nil
}
