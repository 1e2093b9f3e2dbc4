package btrfs

import (
	"testing"
	"unsafe"
)

// Each structure has the size that the number of its ioctl says. What the calls do is
// tested where they are made.
func TestSizes(t *testing.T) {
	for request, size := range map[uint]uintptr{
		iocSubvolCreate:  unsafe.Sizeof(volArgs{}),
		iocSnapDestroy:   unsafe.Sizeof(volArgs{}),
		iocSubvolRootRef: unsafe.Sizeof(rootRefs{}),
	} {
		if want := uintptr(request >> 16 & 0x3fff); size != want {
			t.Errorf("ioctl %#x: %d bytes, want %d", request, size, want)
		}
	}
}
