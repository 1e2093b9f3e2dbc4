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
	dmDevRemove   = 0xc138fd04 // DM_DEV_REMOVE, _IOWR(0xfd, 4, struct dm_ioctl)
	dmDevSuspend  = 0xc138fd06 // DM_DEV_SUSPEND
	dmDevStatus   = 0xc138fd07 // DM_DEV_STATUS
	dmTableStatus = 0xc138fd0c // DM_TABLE_STATUS
	dmTargetMsg   = 0xc138fd0e // DM_TARGET_MSG
	dmGetVersion  = 0xc138fd11 // DM_GET_TARGET_VERSION

	dmSuspendFlag     = 1 << 1  // DM_SUSPEND_FLAG
	dmStatusTableFlag = 1 << 4  // DM_STATUS_TABLE_FLAG
	dmBufferFullFlag  = 1 << 8  // DM_BUFFER_FULL_FLAG
	dmNoFlushFlag     = 1 << 11 // DM_NOFLUSH_FLAG
	dmDeferredRemove  = 1 << 17 // DM_DEFERRED_REMOVE
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

// RemoveMappedDevice removes the device with a name. The error is ENXIO if there is none, and EBUSY if the device is open.
// If deferred is set, the kernel removes an open device when it is closed.
func RemoveMappedDevice(control *os.File, name string, deferred bool) error {
	request := newDMIoctl()
	copy(request.name[:len(request.name)-1], name)
	if deferred {
		request.flags = dmDeferredRemove
	}
	return ioctl(control, "DM_DEV_REMOVE", dmDevRemove, unsafe.Pointer(request))
}

// SuspendMapped suspends the device with a UUID: it freezes the filesystem on it, if it is mounted, waits for the
// requests under way, and lets new requests wait until ResumeMapped.
func SuspendMapped(control *os.File, uuid string) error {
	return suspendMapped(control, uuid, dmSuspendFlag)
}

// ResumeMapped resumes the device with a UUID.
func ResumeMapped(control *os.File, uuid string) error { return suspendMapped(control, uuid, 0) }

func suspendMapped(control *os.File, uuid string, flags uint32) error {
	request := newDMIoctl()
	request.flags = flags
	copy(request.uuid[:len(request.uuid)-1], uuid)
	return ioctl(control, "DM_DEV_SUSPEND", dmDevSuspend, unsafe.Pointer(request))
}

// MappedTarget is the only target in the table of a device: its type, its parameters and its status.
type MappedTarget struct{ Type, Parameters, Status string }

// TargetOf returns the target of the device with a UUID. The error is ENXIO if there is no such device.
func TargetOf(control *os.File, uuid string) (t MappedTarget, err error) {
	if t.Type, t.Parameters, err = tableStatus(control, uuid, dmStatusTableFlag); err == nil {
		_, t.Status, err = tableStatus(control, uuid, dmNoFlushFlag)
	}
	return t, err
}

// SendToTarget sends a message to the only target of the device with a UUID.
func SendToTarget(control *os.File, uuid, message string) error {
	var request struct {
		dmIoctl
		sector uint64 // struct dm_target_msg
		text   [64]byte
	}
	if len(message) >= len(request.text) {
		return wrap("DM_TARGET_MSG", control, unix.ENAMETOOLONG)
	}
	request.dmIoctl = *newDMIoctl()
	request.dataSize, request.dataStart = uint32(unsafe.Sizeof(request)), uint32(unsafe.Sizeof(dmIoctl{}))
	copy(request.uuid[:len(request.uuid)-1], uuid)
	copy(request.text[:], message)
	return ioctl(control, "DM_TARGET_MSG", dmTargetMsg, unsafe.Pointer(&request))
}

// LoadTarget ensures that the kernel has a type of targets: it loads the module if necessary, for which this process needs no
// capability for modules. The error is EINVAL if there is no module.
func LoadTarget(control *os.File, target string) error {
	request := newDMIoctl()
	copy(request.name[:len(request.name)-1], target)
	return ioctl(control, "DM_GET_TARGET_VERSION", dmGetVersion, unsafe.Pointer(request))
}

// dmTargetSpec is struct dm_target_spec. A text follows it.
type dmTargetSpec struct {
	_, _   uint64
	_      int32
	_      uint32
	target [16]byte
}

// tableStatus returns the type and the text of the only target of a device.
func tableStatus(control *os.File, uuid string, flags uint32) (target, text string, err error) {
	var request struct {
		dmIoctl
		spec dmTargetSpec
		text [4096]byte
	}
	request.dmIoctl = *newDMIoctl()
	request.dataSize, request.dataStart, request.flags = uint32(unsafe.Sizeof(request)), uint32(unsafe.Sizeof(dmIoctl{})), flags
	copy(request.uuid[:len(request.uuid)-1], uuid)
	if err := ioctl(control, "DM_TABLE_STATUS", dmTableStatus, unsafe.Pointer(&request)); err != nil {
		return "", "", err
	}
	if request.targetCount == 0 { // the device is being created
		return "", "", wrap("DM_TABLE_STATUS", control, unix.ENXIO)
	}
	if request.targetCount > 1 || request.flags&dmBufferFullFlag != 0 {
		return "", "", wrap("DM_TABLE_STATUS", control, unix.ERANGE)
	}
	return untilZero(request.spec.target[:]), untilZero(request.text[:]), nil
}

// untilZero returns the text before the first zero byte.
func untilZero(b []byte) string {
	text, _, _ := bytes.Cut(b, []byte{0})
	return string(text)
}

// newDMIoctl returns a request with the version of the interface that every kernel supports.
func newDMIoctl() *dmIoctl {
	return &dmIoctl{version: [3]uint32{4, 0, 0}, dataSize: uint32(unsafe.Sizeof(dmIoctl{}))}
}

func mappedDevice(control *os.File, request *dmIoctl) (MappedDevice, error) {
	if err := ioctl(control, "DM_DEV_STATUS", dmDevStatus, unsafe.Pointer(request)); err != nil {
		return MappedDevice{}, err
	}
	// The kernel encodes the number in the same way as new_encode_dev (linux/kdev_t.h).
	major, minor := uint32(request.dev>>8&0xfff), uint32(request.dev&0xff|request.dev>>12&0xfff00)
	return MappedDevice{
		Number: unix.Mkdev(major, minor), UUID: untilZero(request.uuid[:]), Opens: int(request.openCount), Suspended: request.flags&dmSuspendFlag != 0,
	}, nil
}
