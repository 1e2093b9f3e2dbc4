package mount

import "io"

// Source is what a backend hands to the node service to mount.
type Source struct {
	// Device is the path of a block device.
	Device string
	// Settle returns once what the backend wrote to the device's storage is
	// durable; nil if it wrote nothing. It may run while the device is being
	// mounted, and must have returned before the volume is handed out.
	Settle func() error
	// Hold keeps the device bound until it is mounted; closing it lets go. Nil for
	// a raw device that was bound before: that stays by itself.
	Hold io.Closer
}
