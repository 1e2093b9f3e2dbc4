package blockdev

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
)

// span is a range of bytes of a disk.
type span struct{ start, end int64 }

// edge is the number of bytes that are read at each end of a disk, which is more than most formats need.
// spot is the number of bytes that are read at each place between the ends.
const (
	edge = 1 * mib
	spot = 16 << 10
)

// signaturePlaces returns the places of signatures on a device of size bytes: both ends, and the places
// of copies between them. If all these places contain zeros, no program recognizes a format.
//
// LUKS2 has its second header at up to 4 MiB, VMFS and UDF have a signature at 1 MiB, ext2 to ext4 have
// superblocks in group 1 (at 8 MiB with the smallest blocks) and in the groups that are powers of 3, 5
// and 7 (sparse_super), btrfs at 64 MiB and 256 GiB. Ceph's BlueStore has its label at 1, 10, 100 and
// 1000 GiB.
func signaturePlaces(size int64) []span {
	places := []span{{0, edge}, {size - edge, size}}
	at := func(offset int64) { places = append(places, span{offset, offset + spot}) }
	for _, offset := range []int64{1 * mib, 2 * mib, 4 * mib, 8 * mib, 64 * mib, 256 * gib, gib, 10 * gib, 100 * gib, 1000 * gib} {
		at(offset)
	}
	for _, offset := range backupsOf(size) {
		at(offset)
	}
	return clip(places, size)
}

// clip cuts the places to the device, sorts them and removes overlaps.
func clip(places []span, size int64) []span {
	slices.SortFunc(places, func(a, b span) int { return cmp.Compare(a.start, b.start) })
	var out []span
	end := int64(0)
	for _, p := range places {
		p.start, p.end = max(p.start, end), min(p.end, size)
		if p.start < p.end {
			out, end = append(out, p), p.end
		}
	}
	return out
}

// diskPlaces returns the signature places of a disk and of the partition that a claim would create.
func diskPlaces(size int64, sector int) []span {
	places := signaturePlaces(size)
	start, room := newTable(size, sector).room()
	for _, p := range signaturePlaces(room) {
		places = append(places, span{start + p.start, start + p.end})
	}
	return clip(places, size)
}

// RequireNoSignature returns an error unless the device has zeros in all places by which programs
// recognize a filesystem, a partition table, a RAID and similar formats. A failed read is also an error.
// The device may contain old data between those places.
func RequireNoSignature(device *os.File) error {
	size, err := Size(device)
	if err != nil {
		return err
	}
	return requireZerosIn(device, signaturePlaces(size))
}

// requireZerosIn returns ErrNotBlank unless all bytes in the places are zeros.
func requireZerosIn(device *os.File, places []span) error {
	for _, p := range places {
		if err := requireZeros(device, p.start, p.end); err != nil {
			return err
		}
	}
	return nil
}

// EraseIncomplete erases the incomplete filesystem of an interrupted mkfs. It writes zeros to all places
// that RequireNoSignature reads. The error is ErrNotBlank if the device has the signature of another format, which
// means that another program used it after mkfs.
func EraseIncomplete(device *os.File) error {
	size, err := Size(device)
	if err != nil {
		return err
	}
	for _, s := range knownSignatures {
		if !slices.Contains([]string{anExt, anXFS, aBtrfs}, s.name) && s.isOn(device, size) {
			return fmt.Errorf("%s has %s: %w", device.Name(), s.name, ErrNotBlank)
		}
	}
	return zeroIn(device, signaturePlaces(size))
}

// EraseSignatures durably writes zeros to all places that RequireNoSignature reads, whatever they contain.
func EraseSignatures(device *os.File) error {
	size, err := Size(device)
	if err != nil {
		return err
	}
	return zeroIn(device, signaturePlaces(size))
}

// zeroIn durably writes zeros to the places.
func zeroIn(device *os.File, places []span) error {
	for _, p := range places {
		if err := writeZeros(device, p); err != nil {
			return fmt.Errorf("erasing %s: %w", device.Name(), err)
		}
	}
	return device.Sync()
}

// writeZeros writes zeros to a range.
func writeZeros(to io.WriterAt, s span) error {
	zeros := make([]byte, min(mib, s.end-s.start))
	for at := s.start; at < s.end; at += int64(len(zeros)) {
		if _, err := to.WriteAt(zeros[:min(int64(len(zeros)), s.end-at)], at); err != nil {
			return err
		}
	}
	return nil
}

// signature identifies a format.
type signature struct {
	name  string
	magic string
	// at returns the offsets at which magic can be on a device of size bytes.
	at func(size int64) []int64
}

// fixed returns a function that returns the same offsets for every size.
func fixed(offsets ...int64) func(int64) []int64 { return func(int64) []int64 { return offsets } }

// The names of the signatures of filesystems that Format creates.
const (
	anExt  = "an ext2, ext3 or ext4"
	anXFS  = "an xfs"
	aBtrfs = "a btrfs"
)

// knownSignatures are the formats that error messages name for a disk that is not blank. A disk with any
// other content is not blank either. The values are from libblkid and the documents of the formats.
var knownSignatures = []signature{
	{"a LUKS volume", "LUKS\xba\xbe", fixed(0)},
	{"a LUKS volume (secondary header)", "SKUL\xba\xbe", fixed(16<<10, 32<<10, 64<<10, 128<<10, 256<<10, 512<<10, 1<<20, 2<<20, 4<<20)},
	{"an LVM physical volume", "LABELONE", fixed(0, 512, 1024, 1536)},
	{"a member of an md RAID", "\xfc\x4e\x2b\xa9", func(size int64) []int64 {
		return []int64{0, 4096, size&^65535 - 65536, (size/512 - 16) &^ 7 * 512}
	}},
	{"a member of a ZFS pool", "\x0c\xb1\xba\x00\x00\x00\x00\x00", zfsUberblocks},
	{"a member of a ZFS pool", "\x00\x00\x00\x00\x00\xba\xb1\x0c", zfsUberblocks},
	{"a bcache or bcachefs device", "\xc6\x85\x73\xf6\x4e\x1a\x45\xca\x82\x65\xf5\x7f\x48\xba\x6d\x81", fixed(4096 + 24)},
	{"a Ceph BlueStore", "bluestore block device", fixed(0)},
	{"swap space", "SWAPSPACE2", fixed(4096-10, 16384-10, 65536-10)},
	{anExt, extMagic, fixed(extSuperOffset + extMagicAt)},
	{anXFS, xfsMagic, fixed(0)},
	{aBtrfs, btrfsMagic, fixed(btrfsSuper+btrfsMagicAt, 64*mib+btrfsMagicAt, 256*gib+btrfsMagicAt)},
	{"an F2FS", "\x10\x20\xf5\xf2", fixed(1024)},
	{"an NTFS", "NTFS    ", fixed(3)},
	{"an ISO 9660", "CD001", fixed(32<<10 + 1)},
	{"a GUID partition table", gptSignature, func(size int64) []int64 { return []int64{512, 4096, size - 512, size - 4096} }},
	{"a boot sector or partition table", "\x55\xaa", fixed(510)},
}

// zfsUberblocks returns the offsets of the uberblocks in the four labels.
func zfsUberblocks(size int64) []int64 {
	const label, ring, slots = 256 << 10, 128 << 10, 128
	end := size &^ (label - 1)
	var at []int64
	for _, start := range []int64{0, label, end - 2*label, end - label} {
		for slot := range int64(slots) {
			at = append(at, start+ring+slot*1024)
		}
	}
	return at
}

// filesystemNames are the names of the signatures of filesystems that Format creates, by type.
var filesystemNames = map[string]string{"ext4": anExt, "xfs": anXFS, "btrfs": aBtrfs}

// HasFilesystem reports whether a device has a filesystem of type fsType, and no known signature of another format. found
// names all formats of which the device has a signature; it is empty if there are none.
func HasFilesystem(device *os.File, fsType string) (ok bool, found string, err error) {
	size, err := Size(device)
	if err != nil {
		return false, "", err
	}
	var names []string
	for _, s := range knownSignatures {
		if s.isOn(device, size) && !slices.Contains(names, s.name) {
			names = append(names, s.name)
		}
	}
	_, err = ReadSuperblock(device, fsType)
	if errors.Is(err, ErrNoFS) {
		return false, strings.Join(names, " and "), nil
	}
	return err == nil && slices.Equal(names, []string{filesystemNames[fsType]}), strings.Join(names, " and "), err
}

// contentName returns a name for the content of a disk that is not blank, for error messages.
func contentName(disk *os.File, size int64) string {
	for _, s := range knownSignatures {
		if s.isOn(disk, size) {
			return s.name
		}
	}
	return "data"
}

// isOn reports whether a disk of size bytes has the signature.
func (s *signature) isOn(disk *os.File, size int64) bool {
	magic := make([]byte, len(s.magic))
	for _, at := range s.at(size) {
		if at < 0 || at+int64(len(magic)) > size {
			continue
		}
		if _, err := disk.ReadAt(magic, at); err == nil && string(magic) == s.magic {
			return true
		}
	}
	return false
}
