package blockdev_test

import (
	"bytes"
	"errors"
	"os"
	"testing"

	"github.com/trivet-csi/trivet/linux/blockdev"
)

// newMarkedImage creates the image of a claimed disk.
func newMarkedImage(tb testing.TB, size int64, sector int) (*os.File, blockdev.Mark) {
	tb.Helper()
	f := newImage(tb, size)
	m, err := blockdev.WriteMark(f, blockdev.Mark{GUID: blockdev.NewGUID(), Name: "pvc-ä"}, size, sector)
	must(tb, err)
	return f, m
}

// torn is the content of a disk after a power failure, when only some of the sectors were written.
type torn struct{ b []byte }

func (d torn) ReadAt(b []byte, at int64) (int, error) { return bytes.NewReader(d.b).ReadAt(b, at) }

// TestMarkTorn: after a power failure during WriteMark, a disk with the sector of the entry is claimed, whichever of
// the later sectors were written. A disk on which no sector was written is not claimed.
func TestMarkTorn(t *testing.T) {
	const size, sector = 8 * mib, 512
	f, m := newMarkedImage(t, size, sector)
	full := make([]byte, size)
	_, err := f.ReadAt(full, 0)
	must(t, err)
	entry := make([]byte, size)
	copy(entry[2*sector:3*sector], full[2*sector:])
	for at := int64(0); at < size; at += sector {
		if bytes.Equal(full[at:at+sector], make([]byte, sector)) {
			continue
		}
		one := bytes.Clone(entry) // only the entry and one other sector were written
		copy(one[at:at+sector], full[at:])
		all := bytes.Clone(full) // all sectors were written except one, which is not that of the entry
		if at != 2*sector {
			clear(all[at : at+sector])
		}
		for _, disk := range [][]byte{one, all} {
			got, err := blockdev.ReadMark(torn{disk}, size, sector)
			if err != nil || got.GUID != m.GUID {
				t.Errorf("sector %d: got mark %+v, %v, want GUID %s", at/sector, got, err, m.GUID)
			}
		}
	}
	if _, err := blockdev.ReadMark(torn{make([]byte, size)}, size, sector); !errors.Is(err, blockdev.ErrNoMark) {
		t.Errorf("a blank disk: got %v, want %v", err, blockdev.ErrNoMark)
	}
}

// TestUseTorn: after a power failure at any write of UseMark, the disk is claimed with the same GUID. After
// all writes, its mark is Used.
func TestUseTorn(t *testing.T) {
	const size, sector = 8 * mib, 512
	f, _ := newMarkedImage(t, size, sector)
	before, after := make([]byte, size), make([]byte, size)
	_, err := f.ReadAt(before, 0)
	must(t, err)
	m, err := blockdev.ReadMark(f, size, sector)
	must(t, err)
	must(t, blockdev.UseMark(f, m, size, sector))
	_, err = f.ReadAt(after, 0)
	must(t, err)
	disk := bytes.Clone(before)
	for _, part := range []struct{ from, to int64 }{{size / 2, size}, {0, size / 2}} { // UseMark writes the second table first
		for at := part.from; at < part.to; at += sector {
			copy(disk[at:at+sector], after[at:])
			got, err := blockdev.ReadMark(torn{disk}, size, sector)
			if err != nil || got.GUID != m.GUID || !got.Complete || got.Size != m.Size {
				t.Errorf("sector %d: got mark %+v, %v, want %+v", at/sector, got, err, m)
			}
		}
	}
	if got, err := blockdev.ReadMark(torn{disk}, size, sector); err != nil || !got.Used || got.Damaged {
		t.Errorf("after all writes: got mark %+v, %v, want a used, undamaged mark", got, err)
	}
}

// FuzzReadMark: for any content, the partition of a mark is within the disk.
func FuzzReadMark(f *testing.F) {
	const size = 4 * mib
	for _, sector := range []int{512, 4096} {
		disk, _ := newMarkedImage(f, size, sector)
		head, tail := make([]byte, 64<<10), make([]byte, 64<<10)
		_, err := disk.ReadAt(head, 0)
		must(f, err)
		_, err = disk.ReadAt(tail, size-int64(len(tail)))
		must(f, err)
		f.Add(head, tail, sector == 4096)
	}
	f.Fuzz(func(t *testing.T, head, tail []byte, large bool) {
		sector := map[bool]int{false: 512, true: 4096}[large]
		disk := make([]byte, size)
		copy(disk, head)
		copy(disk[max(0, int(size)-len(tail)):], tail)
		m, err := blockdev.ReadMark(torn{disk}, size, sector)
		if err == nil && m.Complete && (m.Start <= 0 || m.Size <= 0 || m.Start+m.Size > size) {
			t.Errorf("got mark %+v, want a partition within %d bytes", m, size)
		}
	})
}
