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
	// Orphan: the image behind it was removed.
	Orphan bool
}

// Devices lists the loop devices of volumes, whoever bound them.
func Devices() ([]Device, error) {
	var orphans []bool // by the index of numbers: what is wanted is listed as it is asked
	numbers, err := blockdev.BoundLoops(func(file string) bool {
		wanted := mayBeOurs(file)
		if wanted {
			orphans = append(orphans, strings.HasSuffix(file, " (deleted)"))
		}
		return wanted
	})
	if err != nil {
		return nil, err
	}
	var devices []Device
	for i, number := range numbers {
		t, err := blockdev.LoopTag(number)
		if err != nil && !errors.Is(err, syscall.ENOENT) { // freed meanwhile
			return nil, err
		}
		if strings.HasPrefix(t, tagPrefix) {
			devices = append(devices, Device{blockdev.LoopPath(number), t, orphans[i]})
		}
	}
	return devices, nil
}
