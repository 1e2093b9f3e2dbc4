package blockdev_test

import (
	"encoding/hex"
	"testing"

	"github.com/trivet-csi/trivet/linux/blockdev"
	"github.com/trivet-csi/trivet/test/frozen"
)

// TestFrozenMark: the partition entry by which a claimed disk is recognized does not change.
func TestFrozenMark(t *testing.T) {
	const size = 8 * mib
	guid := blockdev.GUID{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16}
	for sector, name := range map[int]string{512: "mark-512.txt", 4096: "mark-4096.txt"} {
		f := newImage(t, size)
		want, err := blockdev.WriteMark(f, blockdev.Mark{GUID: guid, Name: "pvc-ä", Used: true}, size, sector)
		must(t, err)
		entry := make([]byte, 128)
		_, err = f.ReadAt(entry, int64(2*sector))
		must(t, err)
		frozen.Bytes(t, name, []byte(hex.Dump(entry)))
		got, err := blockdev.ReadMark(f, size, sector)
		if err != nil || got.GUID != guid || got.Name != want.Name || got.Start != mib || got.Size != want.Size || !got.Used {
			t.Errorf("sector %d: got mark %+v, %v; want %+v", sector, got, err, want)
		}
	}
}
