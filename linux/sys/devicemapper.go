package sys

import (
	"bytes"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// dmIoctl is struct dm_ioctl (uapi/linux/dm-ioctl.h).
type dmIoctl struct {
	version     [3]uint32
	dataSize    uint32
	dataStart   uint32
	targetCount uint32
	openCount   int32
	flags       uint32
	eventNumber uint32
	_           uint32
	dev         uint64
	name        [128]byte
	uuid        [129]byte
	_           [7]byte
}

const (
	dmDevStatus   = 0xc138fd07 // DM_DEV_STATUS, _IOWR(0xfd, 7, struct dm_ioctl)
	dmSuspendFlag = 1 << 1     // DM_SUSPEND_FLAG
)

// MappedDevice is a device of the device mapper.
type MappedDevice struct {
	// Number is the device number. UUID is the UUID that the program gave that created the device.
	Number uint64
	UUID   string
	// Opens is the number of open descriptors and mounts.
	Opens int
	// Suspended means that I/O requests wait until the device is resumed.
	Suspended bool
}

// MappedDeviceByUUID returns the device with a UUID. The error is ENXIO if there is none. control is /dev/mapper/control.
func MappedDeviceByUUID(control *os.File, uuid string) (MappedDevice, error) {
	request := newDMIoctl()
	copy(request.uuid[:len(request.uuid)-1], uuid)
	return mappedDevice(control, request)
}

// MappedDeviceByName returns the device with a name. The error is ENXIO if there is none.
func MappedDeviceByName(control *os.File, name string) (MappedDevice, error) {
	request := newDMIoctl()
	copy(request.name[:len(request.name)-1], name)
	return mappedDevice(control, request)
}

// newDMIoctl returns a request with the version of the interface that every kernel supports.
func newDMIoctl() *dmIoctl {
	return &dmIoctl{version: [3]uint32{4, 0, 0}, dataSize: uint32(unsafe.Sizeof(dmIoctl{}))}
}

func mappedDevice(control *os.File, request *dmIoctl) (MappedDevice, error) {
	if err := ioctl(control, "DM_DEV_STATUS", dmDevStatus, unsafe.Pointer(request)); err != nil {
		return MappedDevice{}, err
	}
	uuid, _, _ := bytes.Cut(request.uuid[:], []byte{0})
	// The kernel encodes the number in the same way as new_encode_dev (linux/kdev_t.h).
	major, minor := uint32(request.dev>>8&0xfff), uint32(request.dev&0xff|request.dev>>12&0xfff00)
	return MappedDevice{
		Number: unix.Mkdev(major, minor), UUID: string(uuid), Opens: int(request.openCount), Suspended: request.flags&dmSuspendFlag != 0,
	}, nil
}
