package dm

import (
	"bytes"
	"encoding/binary"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

const (
	pvID   = "JsnWpVnQwa543PgdyTKozCzUehG4MeVo"
	vgUUID = "PAbhEu-2yfv-wyTi-Ahuk-6fqy-jzl2-svOdfY"
	text   = "vg0 {\nid = \"" + vgUUID + "\"\nseqno = 1\nphysical_volumes {\npv0 {\nid = \"JsnWpV-nQwa-543P-gdyT-KozC-zUeH-G4MeVo\"\n}\n}\n}\n\x00"
)

// device returns a physical volume with the label in a sector, and the metadata at an offset in the metadata area.
func device(labelSector int, offset uint64, metadata string) []byte {
	const areaStart, areaSize = 4096, 8192
	b := make([]byte, areaStart+areaSize)
	label := b[labelSector*sector:]
	copy(label, labelID)
	binary.LittleEndian.PutUint64(label[8:], uint64(labelSector))
	binary.LittleEndian.PutUint32(label[20:], 32)
	copy(label[24:], labelType)
	header := label[32:]
	copy(header, pvID)
	binary.LittleEndian.PutUint64(header[32:], 1<<30)
	binary.LittleEndian.PutUint64(header[40:], 1<<20) // a data area, then the end of the list
	binary.LittleEndian.PutUint64(header[72:], areaStart)
	binary.LittleEndian.PutUint64(header[80:], areaSize)
	area := b[areaStart:]
	copy(area[4:], metadataMagic)
	binary.LittleEndian.PutUint64(area[40:], offset)
	binary.LittleEndian.PutUint64(area[48:], uint64(len(metadata)))
	n := copy(area[offset:], metadata)
	copy(area[headerSize:], metadata[n:]) // the area is a ring
	return b
}

// TestParseLabel: the label may be in one of four sectors, and the metadata may continue at the start of its area.
func TestParseLabel(t *testing.T) {
	for name, b := range map[string][]byte{
		"second sector": device(1, headerSize, text),
		"first sector":  device(0, 4096, text),
		"last sector":   device(3, headerSize, text),
		"wrapped":       device(1, 8192-10, text),
	} {
		p, err := parseLabel(bytes.NewReader(b))
		if err != nil || p.group != "vg0" || p.groupUUID != vgUUID || p.metadata != text || p.uuid != dashed(pvID) {
			t.Errorf("%s: got %+v, %v", name, p, err)
		}
	}
	ignoredArea := device(1, headerSize, text)
	binary.LittleEndian.PutUint32(ignoredArea[4096+60:], ignored)
	for name, b := range map[string][]byte{
		"ignored":      ignoredArea,
		"no text":      device(1, headerSize, "vg0 {\n"),
		"wrong offset": device(1, 1, text),
		"hostile name": device(1, headerSize, "../x {\nid = \""+vgUUID+"\"\n"),
		"wrong UUID":   device(1, headerSize, "vg0 {\nid = \"x\"\n"),
	} {
		if p, err := parseLabel(bytes.NewReader(b)); err != nil || p.group != "" {
			t.Errorf("%s: got %+v, %v, want a physical volume without a group", name, p, err)
		}
	}
	moved := device(1, headerSize, text)
	binary.LittleEndian.PutUint64(moved[sector+8:], 0)
	for name, b := range map[string][]byte{"zeros": make([]byte, 4096), "label in the fifth sector": device(4, headerSize, text), "label of another sector": moved} {
		if _, err := parseLabel(bytes.NewReader(b)); !errors.Is(err, errNoLabel) {
			t.Errorf("%s: got %v, want errNoLabel", name, err)
		}
	}
	if _, err := parseLabel(bytes.NewReader(nil)); err == nil {
		t.Error("an empty device: got no error")
	}
}

// FuzzParseLabel: no content of a device makes parseLabel panic, or accept an invalid name.
func FuzzParseLabel(f *testing.F) {
	f.Add(device(1, headerSize, text))
	f.Add(device(0, 8192-10, text))
	f.Fuzz(func(t *testing.T, b []byte) {
		p, err := parseLabel(bytes.NewReader(b))
		if err == nil && strings.ContainsAny(p.group+p.groupUUID, "/\x00\n \"") {
			t.Errorf("got group %q, UUID %q", p.group, p.groupUUID)
		}
	})
}

// TestChooseGroup: a group is found with all its physical volumes. Another group with the same name is refused, unless
// the UUID is known.
func TestChooseGroup(t *testing.T) {
	pv := func(path, uuid, group, groupUUID, metadata string) physicalVolume {
		return physicalVolume{path: path, kernelName: strings.TrimPrefix(path, "/dev/"), uuid: uuid, group: group, groupUUID: groupUUID, metadata: metadata}
	}
	own := pv("/dev/a", "pv-a", "vg0", "1", "pv-a pv-b")
	second := pv("/dev/b", "pv-b", "", "", "") // without metadata
	foreign := pv("/dev/c", "pv-c", "vg1", "2", "pv-c")
	twin := pv("/dev/d", "pv-d", "vg0", "3", "pv-d")
	copied := pv("/dev/e", "pv-a", "vg0", "1", "pv-a pv-b")
	for _, tc := range []struct {
		name, uuid string
		found      []physicalVolume
		devices    string
		err        error
	}{
		{"by name", "", []physicalVolume{foreign, second, own}, "/dev/a /dev/b", nil},
		{"missing", "", []physicalVolume{foreign}, "", ErrNoGroup},
		{"two groups", "", []physicalVolume{own, second, twin}, "", ErrAmbiguous},
		{"two groups, known", "1", []physicalVolume{twin, own, second}, "/dev/a /dev/b", nil},
		{"only another group", "1", []physicalVolume{twin}, "", ErrNoGroup},
		{"copy", "1", []physicalVolume{own, second, copied}, "", ErrAmbiguous},
	} {
		g, err := chooseGroup("vg0", tc.uuid, tc.found)
		if !errors.Is(err, tc.err) || strings.Join(g.Devices, " ") != tc.devices {
			t.Errorf("%s: got %v, %v, want %s, %v", tc.name, g.Devices, err, tc.devices, tc.err)
		}
	}
}

// TestNewestMetadata: a physical volume that was missing during a change has older metadata, which is not used.
func TestNewestMetadata(t *testing.T) {
	dir := t.TempDir()
	g := Group{UUID: vgUUID, Devices: []string{filepath.Join(dir, "missing")}}
	for name, number := range map[string]string{"first": "9", "current": "11", "last": "10"} {
		path := filepath.Join(dir, name)
		metadata := strings.Replace(text, "seqno = 1\n", "seqno = "+number+"\n", 1)
		if err := os.WriteFile(path, device(1, headerSize, metadata), 0o600); err != nil {
			t.Fatal(err)
		}
		g.Devices = append(g.Devices, path)
	}
	if got := sequence(g.metadata()); got != 11 {
		t.Errorf("got the metadata with the sequence number %d, want 11", got)
	}
	g.UUID = strings.Replace(vgUUID, "P", "Q", 1)
	if got := g.metadata(); got != "" {
		t.Errorf("got metadata of another group: %q", got)
	}
}
