package dm

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/linux/blockdev"
	"github.com/trivet-csi/trivet/linux/sys"
)

// controlPath is the device node for the ioctls of the device mapper.
const controlPath = "/dev/mapper/control"

// ErrNoModule means that the kernel does not have a module of the device mapper, and cannot load it.
var ErrNoModule = errors.New("the kernel cannot load a module")

// ErrNoDeviceMapper means that the kernel has no device mapper, or that this process cannot use it.
var ErrNoDeviceMapper = errors.New("the device mapper cannot be used")

// control calls f with the open control node.
func control[T any](f func(*os.File) (T, error)) (d T, ok bool, err error) {
	node, err := os.OpenFile(controlPath, os.O_RDWR, 0)
	if err != nil {
		return d, false, fmt.Errorf("%w: %w", ErrNoDeviceMapper, err)
	}
	defer node.Close()
	d, err = f(node)
	if errors.Is(err, unix.ENXIO) {
		return d, false, nil
	}
	return d, err == nil, err
}

// CheckControl verifies that this process can use the device mapper.
func CheckControl() error {
	_, _, err := control(func(f *os.File) (sys.MappedDevice, error) { return sys.MappedDeviceByUUID(f, "-") })
	return err
}

// Device returns the device of a logical volume. ok is false if the logical volume is not active.
func (v VolumeID) Device() (d sys.MappedDevice, ok bool, err error) {
	return control(func(f *os.File) (sys.MappedDevice, error) { return sys.MappedDeviceByUUID(f, v.kernelUUID()) })
}

// Named returns the device with a name. ok is false if there is none.
func Named(name string) (d sys.MappedDevice, ok bool, err error) {
	return control(func(f *os.File) (sys.MappedDevice, error) { return sys.MappedDeviceByName(f, name) })
}

// NameOf returns the name of the device with a path in /dev; empty if it is not a device of the device mapper.
func NameOf(path string) string {
	b, err := os.ReadFile(filepath.Join("/sys/class/block", filepath.Base(path), "dm/name"))
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

// Remove removes the device with a name. It is no error if there is none. The error is ErrInUse if the device is open. If
// deferred is set, the kernel removes an open device when it is closed.
func Remove(name string, deferred bool) error {
	_, _, err := control(func(f *os.File) (d sys.MappedDevice, err error) {
		return d, sys.RemoveMappedDevice(f, name, deferred)
	})
	if errors.Is(err, unix.EBUSY) {
		err = fmt.Errorf("%w: %w", ErrInUse, err)
	}
	return err
}

// Access is the access with which a device is opened.
type Access int

const (
	// Shared allows other programs to have the device open.
	Shared Access = unix.O_RDWR
	// Exclusive fails with ErrInUse while another program has the device open exclusively, or it is mounted.
	Exclusive Access = unix.O_RDWR | unix.O_EXCL
	// ReadOnly is Exclusive for a device that is only read.
	ReadOnly Access = unix.O_RDONLY | unix.O_EXCL
)

// Open opens the device of an active logical volume. The device node of the result is removed again.
func (v VolumeID) Open(access Access) (*os.File, error) {
	d, ok, err := v.Device()
	if err != nil || !ok {
		return nil, errors.Join(err, fmt.Errorf("opening the logical volume %s, which is not active: %w", v.Volume, ErrMissing))
	}
	node := "opening." + blockdev.NewGUID().String()
	if err := blockdev.MakeNode(node, d.Number); err != nil {
		return nil, err
	}
	f, err := os.OpenFile(blockdev.NodePath(node), int(access), 0)
	if errors.Is(err, unix.EBUSY) {
		err = fmt.Errorf("%w: %w", ErrInUse, err)
	}
	return f, errors.Join(err, blockdev.RemoveNode(node))
}

// VolumeID identifies a logical volume by the UUIDs of its group and its own.
type VolumeID struct{ Group, Volume string }

// kernelUUIDPrefix is the prefix of the kernel's UUID for a device of LVM.
const kernelUUIDPrefix = "LVM-"

// kernelUUID is the kernel's UUID of the device of a logical volume: the two UUIDs without dashes.
func (v VolumeID) kernelUUID() string {
	return kernelUUIDPrefix + strings.ReplaceAll(v.Group, "-", "") + strings.ReplaceAll(v.Volume, "-", "")
}

// parseKernelUUID is the inverse of kernelUUID. ok is false for the device of something else, such as a part of a
// logical volume.
func parseKernelUUID(s string) (v VolumeID, ok bool) {
	const length = 32
	s, ok = strings.CutPrefix(s, kernelUUIDPrefix)
	if !ok || len(s) != 2*length || strings.Contains(s, "-") {
		return v, false
	}
	return VolumeID{dashed(s[:length]), dashed(s[length:])}, true
}

// dashed formats a UUID of LVM in the form in which lvm(8) prints it.
func dashed(s string) string {
	return strings.Join([]string{s[:6], s[6:10], s[10:14], s[14:18], s[18:22], s[22:26], s[26:]}, "-")
}

// IsVolume reports whether a device with a number belongs to an active logical volume, and which one. If it belongs
// to something else, ok is false.
func IsVolume(number uint64) (v VolumeID, ok bool) {
	b, err := os.ReadFile(fmt.Sprintf("/sys/dev/block/%d:%d/dm/uuid", unix.Major(number), unix.Minor(number)))
	if err != nil {
		return v, false
	}
	return parseKernelUUID(strings.TrimSpace(string(b)))
}

// Size returns the size of a device in bytes; 0 if it cannot be read.
func Size(number uint64) int64 {
	b, err := os.ReadFile(fmt.Sprintf("/sys/dev/block/%d:%d/size", unix.Major(number), unix.Minor(number)))
	if err != nil {
		return 0
	}
	sectors, _ := strconv.ParseInt(strings.TrimSpace(string(b)), 10, 64)
	return sectors * sector
}

// deviceName is the kernel's name of the device of a logical volume.
func deviceName(group, volume string) string {
	double := func(s string) string { return strings.ReplaceAll(s, "-", "--") }
	return double(group) + "-" + double(volume)
}
