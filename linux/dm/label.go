package dm

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"os"
	"regexp"
)

// physicalVolume is what the label and the metadata of a physical volume say. The content of a device is untrusted.
type physicalVolume struct {
	path, kernelName string
	uuid             string
	// group and groupUUID are empty if the physical volume has no metadata.
	group, groupUUID string
	// metadata is the text of the group's metadata.
	metadata string
}

// The format of labels and metadata (lib/format_text/layout.h of LVM).
const (
	sector        = 512
	labelSectors  = 4 // the label is in one of the first sectors
	labelID       = "LABELONE"
	labelType     = "LVM2 001"
	metadataMagic = " LVM2 x[5A%r0N*>"
	headerSize    = sector // of a metadata area
	maxAreas      = 16
	// maxMetadata is the size of the largest text that is read. LVM limits it to half of the metadata area.
	maxMetadata = 16 << 20
	ignored     = 1 // RAW_LOCN_IGNORED
)

var errNoLabel = errors.New("no label of a physical volume")

// uuidPattern matches a UUID in the metadata, groupPattern the beginning of the metadata.
const uuidPattern = `([a-zA-Z0-9]{6}(?:-[a-zA-Z0-9]{4}){5}-[a-zA-Z0-9]{6})`

var groupPattern = regexp.MustCompile(`^([a-zA-Z0-9+_.-]{1,127}) \{\nid = "` + uuidPattern + `"\n`)

// volumeIn returns the UUID of the logical volume with a name in the metadata of a group.
func volumeIn(metadata, name string) (uuid string, ok bool) {
	m := idLine.FindStringSubmatch(volumesIn(metadata)[name])
	if m == nil {
		return "", false
	}
	return m[1], true
}

// readLabel reads the label and the metadata on a device. The error is errNoLabel if the device is not a physical
// volume.
func readLabel(path string) (physicalVolume, error) {
	f, err := os.Open(path)
	if err != nil {
		return physicalVolume{}, err
	}
	defer f.Close()
	return parseLabel(f)
}

// area is a range of a device, in bytes.
type area struct{ start, size uint64 }

// parseLabel is readLabel for an open device.
func parseLabel(device io.ReaderAt) (p physicalVolume, err error) {
	head := make([]byte, labelSectors*sector)
	if _, err := device.ReadAt(head, 0); err != nil {
		return p, err
	}
	for i := range labelSectors {
		label := head[i*sector : (i+1)*sector]
		if !bytes.HasPrefix(label, []byte(labelID)) || binary.LittleEndian.Uint64(label[8:]) != uint64(i) || string(label[24:32]) != labelType {
			continue
		}
		content := binary.LittleEndian.Uint32(label[20:])
		if content < 32 || content > sector-40 {
			return p, errNoLabel
		}
		return parseHeader(device, label[content:])
	}
	return p, errNoLabel
}

// parseHeader reads the header of a physical volume, and the first usable metadata to which it refers.
func parseHeader(device io.ReaderAt, header []byte) (p physicalVolume, err error) {
	id := header[:32]
	if bytes.ContainsFunc(id, func(r rune) bool { return r < '!' || r > '~' }) {
		return p, errNoLabel
	}
	p.uuid = dashed(string(id))
	_, rest := areas(header[40:]) // of the data
	metadata, _ := areas(rest)
	for _, a := range metadata {
		text := readMetadata(device, a)
		if m := groupPattern.FindSubmatch(text); m != nil {
			p.group, p.groupUUID, p.metadata = string(m[1]), string(m[2]), string(text)
			break
		}
	}
	return p, nil
}

// areas parses a list of areas, which ends with an area of zeros.
func areas(b []byte) (list []area, rest []byte) {
	for len(b) >= 16 && len(list) < maxAreas {
		a := area{binary.LittleEndian.Uint64(b), binary.LittleEndian.Uint64(b[8:])}
		b = b[16:]
		if a.start == 0 {
			break
		}
		list = append(list, a)
	}
	return list, b
}

// readMetadata reads the current text in a metadata area; nil if there is none. The area is a ring after its header.
func readMetadata(device io.ReaderAt, a area) []byte {
	header := make([]byte, headerSize)
	if a.start > 1<<62 || a.size > 1<<62 || a.size <= headerSize {
		return nil
	}
	if _, err := device.ReadAt(header, int64(a.start)); err != nil || string(header[4:20]) != metadataMagic {
		return nil
	}
	location := header[40:] // the first raw_locn
	offset, size := binary.LittleEndian.Uint64(location), binary.LittleEndian.Uint64(location[8:])
	if binary.LittleEndian.Uint32(location[20:])&ignored != 0 || size == 0 || size > maxMetadata || offset < headerSize || offset >= a.size || size > a.size-headerSize {
		return nil
	}
	text := make([]byte, size)
	first := min(size, a.size-offset)
	if _, err := device.ReadAt(text[:first], int64(a.start+offset)); err != nil {
		return nil
	}
	if first < size {
		if _, err := device.ReadAt(text[first:], int64(a.start+headerSize)); err != nil {
			return nil
		}
	}
	return text
}
