package blockdev

import (
	"os"
	"unsafe"
)

// blkGetDiskSeq is _IOR(0x12, 128, __u64) (uapi/linux/fs.h).
const blkGetDiskSeq = 0x80081280

// Sequence is the number that the kernel gives a disk whenever one appears or its medium
// changes, and to no other until the machine is booted anew (Linux 5.15). A partition has
// its disk's.
func Sequence(device *os.File) (uint64, error) {
	var n uint64
	err := ioctl(int(device.Fd()), blkGetDiskSeq, unsafe.Pointer(&n))
	return n, os.NewSyscallError("BLKGETDISKSEQ", err)
}
