package sys

import (
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Requests of uapi/linux/fs.h and uapi/linux/blkpg.h that x/sys lacks.
const (
	blkGetDiskSeq = 0x80081280 // BLKGETDISKSEQ, _IOR(0x12, 128, __u64)
	blkpg         = 0x1269     // BLKPG, _IO(0x12, 105)

	blkpgAddPartition    = 1
	blkpgDeletePartition = 2
	blkpgResizePartition = 3
)

// blkpgPartition is struct blkpg_partition.
type blkpgPartition struct {
	start, length int64
	number        int32
	_             [128]byte
	_             int32
}

// blkpgArg is struct blkpg_ioctl_arg.
type blkpgArg struct {
	op, flags, length int32
	data              *blkpgPartition
}

// ZeroOut writes zeros to a range of a device. Start and length are in bytes. The range stays allocated
// (BLKZEROOUT, block/ioctl.c).
func ZeroOut(device *os.File, start, length int64) error {
	return ioctl(device, "BLKZEROOUT", unix.BLKZEROOUT, unsafe.Pointer(&[2]uint64{uint64(start), uint64(length)}))
}

// Discard discards a range of a device. Start and length are in bytes. What the range then reads as depends on the device
// (BLKDISCARD).
func Discard(device *os.File, start, length int64) error {
	return ioctl(device, "BLKDISCARD", unix.BLKDISCARD, unsafe.Pointer(&[2]uint64{uint64(start), uint64(length)}))
}

// SectorSize returns the logical block size of a device in bytes (BLKSSZGET).
func SectorSize(device *os.File) (int, error) {
	size, err := unix.IoctlGetInt(int(device.Fd()), unix.BLKSSZGET)
	return size, wrap("BLKSSZGET", device, err)
}

// FlushBuffers writes the cached pages of a device and drops them from the page cache (BLKFLSBUF).
func FlushBuffers(device *os.File) error { return ioctl(device, "BLKFLSBUF", unix.BLKFLSBUF, nil) }

// DiskSequence returns the number that the kernel assigns when a disk appears or its medium changes
// (BLKGETDISKSEQ, Linux 5.15). The kernel assigns each number only once until the next boot. A partition has
// the number of its disk.
func DiskSequence(device *os.File) (n uint64, err error) {
	err = ioctl(device, "BLKGETDISKSEQ", blkGetDiskSeq, unsafe.Pointer(&n))
	return n, err
}

// AddPartition registers a partition of a disk with the kernel (BLKPG_ADD_PARTITION). Start and length are in
// bytes. The partition table on the disk does not change.
func AddPartition(disk *os.File, number int32, start, length int64) error {
	return changePartition(disk, "BLKPG_ADD_PARTITION", blkpgAddPartition, blkpgPartition{start: start, length: length, number: number})
}

// ResizePartition changes the length of a registered partition (BLKPG_RESIZE_PARTITION). The error is EINVAL if the
// partition has another start.
func ResizePartition(disk *os.File, number int32, start, length int64) error {
	return changePartition(disk, "BLKPG_RESIZE_PARTITION", blkpgResizePartition, blkpgPartition{start: start, length: length, number: number})
}

// DeletePartition removes a registered partition (BLKPG_DEL_PARTITION). The error is EBUSY while the partition is in
// use, and ENXIO if the partition does not exist.
func DeletePartition(disk *os.File, number int32) error {
	return changePartition(disk, "BLKPG_DEL_PARTITION", blkpgDeletePartition, blkpgPartition{number: number})
}

// changePartition calls BLKPG with an operation. name is the name of the operation in errors.
func changePartition(disk *os.File, name string, op int32, p blkpgPartition) error {
	arg := blkpgArg{op: op, length: int32(unsafe.Sizeof(p)), data: &p}
	return ioctl(disk, name, blkpg, unsafe.Pointer(&arg))
}
