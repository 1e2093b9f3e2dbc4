package loop

import (
	"errors"
	"slices"
	"strings"
	"syscall"

	"github.com/trivet-csi/trivet/blockdev"
	"github.com/trivet-csi/trivet/volume"
)

// Device is a loop device that carries a tag of this driver.
type Device struct {
	Path string
	Tag  string
	// Orphan: the image behind it was removed.
	Orphan bool
}

// Tag is what the device of a volume carries.
func Tag(id volume.ID) string { return tag(id) }

// Devices lists the loop devices of volumes, by number, whoever bound them.
func Devices() ([]Device, error) {
	isOrphan := func(file string) bool { return mayBeOurs(file) && strings.HasSuffix(file, " (deleted)") }
	orphans, err := blockdev.BoundLoops(isOrphan)
	if err != nil {
		return nil, err
	}
	numbers, err := blockdev.BoundLoops(mayBeOurs)
	if err != nil {
		return nil, err
	}
	slices.Sort(numbers)
	var devices []Device
	for _, number := range numbers {
		t, err := blockdev.LoopTag(number)
		if err != nil && !errors.Is(err, syscall.ENOENT) { // freed meanwhile
			return nil, err
		}
		if strings.HasPrefix(t, tagPrefix) {
			devices = append(devices, Device{blockdev.LoopPath(number), t, slices.Contains(orphans, number)})
		}
	}
	return devices, nil
}
