package mount

import (
	"io"
	"os"
	"strings"
)

// Source is what a backend hands to the node service to mount.
type Source struct {
	// Device is the path of a block device; empty for a directory of a server.
	Device string
	// NFS is a directory of a server; nil for a device.
	NFS *NFS
	// Below: any directory below that of NFS is meant. The volume's own is not
	// known while its record cannot be read.
	Below bool
	// Verify makes sure, by its root directory, that what was mounted is what was
	// meant, before anybody sees it; nil where nothing else can be.
	Verify func(root *os.File) error
	// Settle returns once what the backend wrote to the device's storage is
	// durable; nil if it wrote nothing. It may run while the device is being
	// mounted, and must have returned before the volume is handed out.
	Settle func() error
	// Hold keeps the device bound until it is mounted; closing it lets go. Nil for
	// a raw device that was bound before, which stays by itself, and for a directory.
	Hold io.Closer
}

// Shows tells whether a mount is one of the source.
func (s Source) Shows(e *Entry) bool {
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
func Of(s Source) ([]*Entry, error) { return Table(s.Shows) }
