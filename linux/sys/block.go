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

// ZeroOut has the device write zeros, or the kernel where the device cannot. The range stays
// allocated (BLKZEROOUT, block/ioctl.c).
func ZeroOut(device *os.File, start, length int64) error {
	arg := [2]uint64{uint64(start), uint64(length)}
	return ioctl(device, "BLKZEROOUT", unix.BLKZEROOUT, unsafe.Pointer(&arg))
}

// SectorSize is the logical block size of a device in bytes (BLKSSZGET).
func SectorSize(device *os.File) (int, error) {
	size, err := unix.IoctlGetInt(int(device.Fd()), unix.BLKSSZGET)
	return size, wrap("BLKSSZGET", device, err)
}

// FlushBuffers writes and drops what the page cache holds of a device (BLKFLSBUF).
func FlushBuffers(device *os.File) error { return ioctl(device, "BLKFLSBUF", unix.BLKFLSBUF, nil) }

// DiskSequence is the number that the kernel gives a disk when it appears or its medium
// changes, and gives to no other disk until the next boot (BLKGETDISKSEQ, Linux 5.15). A
// partition has the number of its disk.
func DiskSequence(device *os.File) (n uint64, err error) {
	err = ioctl(device, "BLKGETDISKSEQ", blkGetDiskSeq, unsafe.Pointer(&n))
	return n, err
}

// AddPartition adds a partition to what the kernel knows of a disk, in bytes
// (BLKPG_ADD_PARTITION). The table on the disk is not changed.
func AddPartition(disk *os.File, number int32, start, length int64) error {
	return changePartition(disk, "BLKPG_ADD_PARTITION", blkpgAddPartition, blkpgPartition{start: start, length: length, number: number})
}

// ResizePartition changes the size that the kernel knows of a partition
// (BLKPG_RESIZE_PARTITION).
func ResizePartition(disk *os.File, number int32, start, length int64) error {
	return changePartition(disk, "BLKPG_RESIZE_PARTITION", blkpgResizePartition, blkpgPartition{start: start, length: length, number: number})
}

// DeletePartition removes a partition from what the kernel knows of a disk
// (BLKPG_DEL_PARTITION). EBUSY while it is in use, ENXIO if there is none.
func DeletePartition(disk *os.File, number int32) error {
	return changePartition(disk, "BLKPG_DEL_PARTITION", blkpgDeletePartition, blkpgPartition{number: number})
}

func changePartition(disk *os.File, name string, op int32, p blkpgPartition) error {
	arg := blkpgArg{op: op, length: int32(unsafe.Sizeof(p)), data: &p}
	return ioctl(disk, name, blkpg, unsafe.Pointer(&arg))
}
