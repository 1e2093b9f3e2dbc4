package loop

import (
	"errors"
	"strings"
	"syscall"

	"github.com/trivet-csi/trivet/linux/blockdev"
)

// Device is a loop device that carries a tag of this driver.
type Device struct {
	Path string
	Tag  string
	// Orphan: its image was removed.
	Orphan bool
}

// Devices lists the loop devices of volumes, whichever process bound them.
func Devices() ([]Device, error) {
	bound, err := blockdev.BoundLoops(isImage)
	if err != nil {
		return nil, err
	}
	var devices []Device
	for _, l := range bound {
		tag, err := blockdev.LoopTag(l.Number)
		if err != nil && !errors.Is(err, syscall.ENOENT) { // freed meanwhile
			return nil, err
		}
		if strings.HasPrefix(tag, tagPrefix) {
			devices = append(devices, Device{blockdev.LoopPath(l.Number), tag, l.Deleted})
		}
	}
	return devices, nil
}
