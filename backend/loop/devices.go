package loop

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"syscall"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/linux/blockdev"
	"github.com/trivet-csi/trivet/linux/sys"
)

// Device is a loop device that carries a tag of this driver.
type Device struct {
	Path string
	Tag  string
	// Orphan means that the image was removed.
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
		if err != nil && !errors.Is(err, syscall.ENOENT) { // with ENOENT the device was freed meanwhile
			return nil, err
		}
		if strings.HasPrefix(tag, tagPrefix) {
			devices = append(devices, Device{blockdev.LoopPath(l.Number), tag, l.Deleted})
		}
	}
	return devices, nil
}

// examine reports whether this node can create loop devices, and which devices have a removed image.
func examine() []backend.Finding {
	control := backend.Finding{Name: "loop control", Found: "/dev/loop-control can be used"}
	f, err := sys.OpenFile("/dev/loop-control", os.O_RDWR)
	if err == nil {
		err = f.Close()
	}
	if err != nil {
		control.Found, control.Unusable = err.Error(), true
		control.Advice = "load the loop module (modprobe loop), and give the container the host's /dev"
	}
	return []backend.Finding{control, examineDevices(), backend.ExamineEncryption()}
}

// examineDevices counts the loop devices, and reports those that are bound to a removed image.
func examineDevices() backend.Finding {
	found := backend.Finding{Name: "loop devices"}
	all, err := blockdev.BoundLoops(func(string) bool { return true })
	if err != nil {
		found.Found, found.Advice = err.Error(), "run the doctor where /sys is mounted"
		return found
	}
	own, err := Devices()
	if err != nil {
		found.Found, found.Advice = err.Error(), "run the doctor as root, with the host's /dev"
		return found
	}
	found.Found = fmt.Sprintf("%d in use, %d of volumes", len(all), len(own))
	var orphans []string
	for _, d := range own {
		if d.Orphan {
			orphans = append(orphans, d.Path)
		}
	}
	if len(orphans) > 0 {
		found.Found += "; bound to a removed image: " + strings.Join(orphans, ", ")
		found.Advice = "find the processes that use them (grep DEVICE /proc/*/mountinfo; fuser DEVICE), end them, and free the devices: losetup -d DEVICE"
	}
	return found
}
