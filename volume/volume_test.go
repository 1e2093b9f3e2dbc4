package volume_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/trivet-csi/trivet/volume"
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// parse reads a record as it is on the disk.
func parse(t *testing.T, v volume.Volume) (volume.Volume, error) {
	t.Helper()
	b, err := v.MarshalRecord()
	must(t, err)
	return forms.ParseVolume(b)
}

// section is the Section of the kind loop in these tests.
type section struct {
	Allocation string `json:"allocation"`
}

func (s *section) Check() error {
	if s.Allocation == "" {
		return volume.Errorf(volume.ErrDamaged, "no allocation")
	}
	return nil
}

func (s *section) Parameters() map[string]string {
	return map[string]string{"allocation": s.Allocation}
}

// otherSection is a section with a field that section does not have.
type otherSection struct {
	section
	Surprise bool `json:"surprise"`
}

// forms are those of two kinds with a device, the first with a section, and of two kinds of directories.
var forms = volume.Forms{
	{Name: "loop", OnNodes: true, OnExports: true, Section: func() volume.Section { return new(section) }},
	{Name: "disk"},
	{Name: "nfs", OnExports: true, Directory: true},
	{Name: "local", OnNodes: true, Directory: true},
}

// TestGuess: Guess returns the first kind that matches.
func TestGuess(t *testing.T) {
	for _, tc := range []struct {
		onExport, directory bool
		want                string
	}{{false, false, "loop"}, {false, true, "local"}, {true, false, "loop"}, {true, true, "nfs"}} {
		if got := forms.Guess(tc.onExport, tc.directory); got != tc.want {
			t.Errorf("Guess(%t, %t) = %q, want %q", tc.onExport, tc.directory, got, tc.want)
		}
	}
}

// record returns a valid record of an image.
func record() volume.Volume {
	return volume.Volume{
		Version: volume.RecordVersion, ID: volume.ID{Backend: "loop", Pool: "p", PoolUUID: "01234567", Name: "v"},
		CoName: "v", Capacity: 1 << 30, FSType: "ext4", SectorSize: 4096, Section: &section{"thin"},
		Created: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC),
	}
}

// TestRecordRoundTrip: a record is formatted and parsed to an equal record.
func TestRecordRoundTrip(t *testing.T) {
	for _, want := range []volume.Volume{record(), directoryRecord(), inlineRecord()} {
		if got, err := parse(t, want); err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("got %+v, %v; want %+v", got, err, want)
		}
	}
}

// wantDamaged checks that a record is ErrDamaged after each of the changes.
func wantDamaged(t *testing.T, record func() volume.Volume, changes map[string]func(*volume.Volume)) {
	t.Helper()
	for name, change := range changes {
		t.Run(name, func(t *testing.T) {
			v := record()
			change(&v)
			if got, err := parse(t, v); !errors.Is(err, volume.ErrDamaged) {
				t.Errorf("got %+v, %v; want ErrDamaged", got, err)
			}
		})
	}
}

// TestParseRecordRefuses: a record that this driver did not write is refused as damaged.
func TestParseRecordRefuses(t *testing.T) {
	wantDamaged(t, record, map[string]func(*volume.Volume){
		"another version":        func(v *volume.Volume) { v.Version = 2 },
		"no version":             func(v *volume.Volume) { v.Version = 0 },
		"no ID":                  func(v *volume.Volume) { v.ID = volume.ID{} },
		"no capacity":            func(v *volume.Volume) { v.Capacity = 0 },
		"negative capacity":      func(v *volume.Volume) { v.Capacity = -1 },
		"no filesystem":          func(v *volume.Volume) { v.FSType = "" },
		"unknown filesystem":     func(v *volume.Volume) { v.FSType = "ntfs" },
		"block and a filesystem": func(v *volume.Volume) { v.Block = true },
		"a directory's backend":  func(v *volume.Volume) { v.ID.Backend = "nfs" },
		"invalid sector size":    func(v *volume.Volume) { v.SectorSize = 1000 },
		"empty section":          func(v *volume.Volume) { v.Section = &section{} },
		"unknown section field":  func(v *volume.Volume) { v.Section = &otherSection{Surprise: true} },
		"no section":             func(v *volume.Volume) { v.Section = nil },
		"section of other kind":  func(v *volume.Volume) { v.ID.Backend = "disk" },
		"unknown backend":        func(v *volume.Volume) { v.ID.Backend = "tape" },
		"device and directory":   func(v *volume.Volume) { v.Directory = &volume.Directory{OnDelete: volume.OnDeleteDelete} },
	})
	const versions = "has version %d, this driver reads version 1"
	for text, want := range map[string]string{
		"": "end of JSON", "{": "end of JSON", "\x00\x00": "invalid character", "null": fmt.Sprintf(versions, 0),
		`{"version":1,"surprise":true}`:                                       "version 1, which this driver reads, but another format",
		`{"version":1,"id":"loop:p.01234567:v","sizeBytes":1,"section":null}`: "field section is present: false, want true",
		`{"version":2,"surprise":true}`:                                       fmt.Sprintf(versions, 2),
		`{"version":3,"id":"tape:p:v","sizeBytes":"1Gi"}`:                     fmt.Sprintf(versions, 3),
	} {
		got, err := forms.ParseVolume([]byte(text))
		if !errors.Is(err, volume.ErrDamaged) || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: got %+v, %v; want %q in the error", text, got, err, want)
		}
	}
}

// TestEditedRecord: the order of the fields of a record, and the spaces between them, do not matter.
func TestEditedRecord(t *testing.T) {
	b, err := record().MarshalRecord()
	must(t, err)
	var fields map[string]json.RawMessage
	must(t, json.Unmarshal(b, &fields))
	for _, before := range []string{"", `"source": {"id": "nfs:nas:v"}, `} {
		text := fmt.Sprintf(`{"section":%s, %s"id":%s, "version":1, "name":"v", "sizeBytes":1, "fsType":"xfs", "sectorSize":512, "created":%s}`,
			fields["section"], before, fields["id"], fields["created"])
		if v, err := forms.ParseVolume([]byte(text)); err != nil || !reflect.DeepEqual(v.Section, record().Section) {
			t.Errorf("%s: got %+v, %v; want section %+v", text, v, err, record().Section)
		}
	}
}

// TestSatisfies: a volume satisfies a request only if the name, the size and all parameters match.
func TestSatisfies(t *testing.T) {
	spec := func(change func(*volume.Spec)) volume.Spec {
		s := volume.Spec{
			CoName: "v", Capacity: volume.Range{Required: 1 << 30},
			Capabilities: []volume.Capability{{Mode: volume.SingleNodeWriter}},
			Parameters:   volume.Parameters{Backend: "loop", Values: map[string]string{"allocation": "thin"}},
		}
		change(&s)
		return s
	}
	for _, tc := range []struct {
		name   string
		change func(*volume.Spec)
		ok     bool
	}{
		{"the same", func(*volume.Spec) {}, true},
		{"smaller required size", func(s *volume.Spec) { s.Capacity.Required = 1 }, true},
		{"no required size", func(s *volume.Spec) { s.Capacity.Required = 0 }, true},
		{"another name", func(s *volume.Spec) { s.CoName = "w" }, false},
		{"larger required size", func(s *volume.Spec) { s.Capacity.Required++ }, false},
		{"limit below the size", func(s *volume.Spec) { s.Capacity = volume.Range{Limit: 1 << 20} }, false},
		{"block", func(s *volume.Spec) { s.Capabilities[0].Block = true }, false},
		{"filesystem", func(s *volume.Spec) { s.Capabilities[0].FSType = "xfs" }, false},
		{"filesystem by parameter", func(s *volume.Spec) { s.Parameters.Values[volume.ParamFSType] = "xfs" }, false},
		{"allocation", func(s *volume.Spec) { s.Parameters.Values["allocation"] = "thick" }, false},
		{"mkfs options", func(s *volume.Spec) { s.Parameters.Values[volume.ParamMkfsOptions] = "-m 1" }, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			err := record().Satisfies(spec(tc.change))
			if (err == nil) != tc.ok || (err != nil && !errors.Is(err, volume.ErrIncompatible)) {
				t.Errorf("got %v, want success: %t", err, tc.ok)
			}
		})
	}
}

// TestTopologyValue: the value is the node's name if possible, and always a valid label value.
func TestTopologyValue(t *testing.T) {
	for in, want := range map[string]string{
		"node-1.example.com":    "node-1.example.com",
		strings.Repeat("a", 63): strings.Repeat("a", 63),
		strings.Repeat("a", 64): strings.Repeat("a", 46) + "-ffe054fe7ae0cb6d",
	} {
		if got := volume.TopologyValue(in); got != want {
			t.Errorf("TopologyValue(%q) = %q, want %q", in, got, want)
		}
	}
	for _, hard := range []string{"", "-", "ünïcode", "a_", strings.Repeat("x.", 126) + "y", "a/b"} {
		got := volume.TopologyValue(hard)
		if got != volume.TopologyValue(got) || len(got) > 63 {
			t.Errorf("TopologyValue(%q) = %q, which is not a valid label value", hard, got)
		}
	}
}

// TestErrorfWrapsBoth: errors.Is finds both the sentinel and the wrapped error, and the text omits the sentinel's.
func TestErrorfWrapsBoth(t *testing.T) {
	cause := errors.New("disk on fire")
	err := volume.Errorf(volume.ErrUnavailable, "pool %q: %w", "p", cause)
	if !errors.Is(err, volume.ErrUnavailable) || !errors.Is(err, cause) || err.Error() != `pool "p": disk on fire` {
		t.Errorf("got %v, want an error that wraps the sentinel and the cause", err)
	}
}

// FuzzRecord: a record is refused as damaged, or is parsed and formatted to an equal record.
func FuzzRecord(f *testing.F) {
	for _, v := range []volume.Volume{record(), directoryRecord(), inlineRecord()} {
		b, err := v.MarshalRecord()
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Add([]byte(`{"version":1}`))
	f.Add([]byte(`{"version":1,"id":"loop:a:../b","sizeBytes":-1}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		v, err := forms.ParseVolume(b)
		if err != nil {
			if !errors.Is(err, volume.ErrDamaged) {
				t.Errorf("%q: %v is not ErrDamaged", b, err)
			}
			return
		}
		if d := v.Directory; d != nil && d.SubDir != "" && volume.CheckSubDir(d.SubDir) != nil {
			t.Errorf("%q was accepted with the invalid subDir %q", b, d.SubDir)
		}
		again, err := v.MarshalRecord()
		must(t, err)
		if w, err := forms.ParseVolume(again); err != nil || w.ID != v.ID || w.Capacity != v.Capacity {
			t.Errorf("%q was parsed and formatted to %q: %v", b, again, err)
		}
	})
}
