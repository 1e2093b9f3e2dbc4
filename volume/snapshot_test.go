package volume_test

import (
	"errors"
	"maps"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/trivet-csi/trivet/volume"
)

func snapshotID(backend, name string) volume.ID {
	return volume.ID{Backend: backend, Pool: "default", PoolUUID: "0a1b2c3d", Name: name}
}

// snapshotSet is a group of two images.
func snapshotSet() volume.SnapshotSet {
	s := volume.SnapshotSet{
		Version: volume.RecordVersion, ID: snapshotID("loop", volume.GroupName("snap-1")), CoName: "snap-1",
		Created: time.Date(2026, 1, 2, 3, 4, 5, 6, time.UTC),
	}
	for i, source := range []string{"pvc-1", "pvc-2"} {
		s.Snapshots = append(s.Snapshots, volume.Snapshot{
			ID: snapshotID("loop", volume.MemberName(s.ID.Name, i)), Source: snapshotID("loop", source),
			Size: 1 << 30, Bytes: 1 << 20, Shared: true, FSType: "ext4", SectorSize: 4096, Formatted: true,
		})
	}
	return s
}

// directorySet is a snapshot of a directory.
func directorySet() volume.SnapshotSet {
	id := snapshotID("local", "snap-1")
	return volume.SnapshotSet{
		Version: volume.RecordVersion, ID: id, CoName: "snap-1", Created: time.Unix(1, 0).UTC(),
		Snapshots: []volume.Snapshot{{ID: id, Source: snapshotID("local", "pvc-1"), Size: 1, Directory: true}},
	}
}

// TestParseSnapshotSet: a record is parsed to the same set, and a record that no driver wrote is
// refused.
func TestParseSnapshotSet(t *testing.T) {
	for name, tc := range map[string]struct {
		set    func() volume.SnapshotSet
		change func(*volume.SnapshotSet)
		ok     bool
	}{
		"group":              {snapshotSet, func(*volume.SnapshotSet) {}, true},
		"directory":          {directorySet, func(*volume.SnapshotSet) {}, true},
		"raw":                {snapshotSet, func(s *volume.SnapshotSet) { s.Snapshots[0].Block, s.Snapshots[0].FSType = true, "" }, true},
		"unknown version":    {snapshotSet, func(s *volume.SnapshotSet) { s.Version++ }, false},
		"no snapshots":       {snapshotSet, func(s *volume.SnapshotSet) { s.Snapshots = nil }, false},
		"too many":           {snapshotSet, func(s *volume.SnapshotSet) { s.Snapshots = make([]volume.Snapshot, volume.MaxGroup+1) }, false},
		"two, no group":      {directorySet, func(s *volume.SnapshotSet) { s.Snapshots = append(s.Snapshots, s.Snapshots[0]) }, false},
		"wrong order":        {snapshotSet, func(s *volume.SnapshotSet) { s.Snapshots[0], s.Snapshots[1] = s.Snapshots[1], s.Snapshots[0] }, false},
		"ID of a member":     {snapshotSet, func(s *volume.SnapshotSet) { s.ID.Name = "snap-1.000" }, false},
		"other pool":         {snapshotSet, func(s *volume.SnapshotSet) { s.Snapshots[0].Source.Pool = "other" }, false},
		"snapshot source":    {directorySet, func(s *volume.SnapshotSet) { s.Snapshots[0].Source.Name = "snap-0.001" }, false},
		"no size":            {directorySet, func(s *volume.SnapshotSet) { s.Snapshots[0].Size = 0 }, false},
		"negative bytes":     {directorySet, func(s *volume.SnapshotSet) { s.Snapshots[0].Bytes = -1 }, false},
		"field of an image":  {directorySet, func(s *volume.SnapshotSet) { s.Snapshots[0].FSType = "ext4" }, false},
		"image as directory": {snapshotSet, func(s *volume.SnapshotSet) { s.Snapshots[0].Directory = true }, false},
		"no filesystem":      {snapshotSet, func(s *volume.SnapshotSet) { s.Snapshots[0].FSType = "" }, false},
		"unknown filesystem": {snapshotSet, func(s *volume.SnapshotSet) { s.Snapshots[0].FSType = "ntfs" }, false},
		"no sector size":     {snapshotSet, func(s *volume.SnapshotSet) { s.Snapshots[0].SectorSize = 0 }, false},
	} {
		t.Run(name, func(t *testing.T) {
			s := tc.set()
			tc.change(&s)
			b, err := s.Marshal()
			must(t, err)
			got, err := forms.ParseSnapshotSet(b)
			if (err == nil) != tc.ok || err != nil && !errors.Is(err, volume.ErrDamaged) || err == nil && !reflect.DeepEqual(got, s) {
				t.Errorf("got %+v, %v; want success: %t", got, err, tc.ok)
			}
		})
	}
}

// TestSnapshotNames: the name of a member determines the name of its set, and is not itself the name of a
// set.
func TestSnapshotNames(t *testing.T) {
	group := volume.GroupName("snap-1")
	for i := range volume.MaxGroup {
		member := volume.MemberName(group, i)
		if volume.SetOf(member) != group || volume.IsGroup(member) {
			t.Errorf("SetOf(%q) = %q, want %q, and IsGroup = %t, want false", member, volume.SetOf(member), group, volume.IsGroup(member))
		}
	}
	alone := volume.SnapshotSpec{CoName: "snap-1"}.Name()
	if volume.SetOf(alone) != alone || !volume.ValidSetName(alone) || !volume.ValidSetName(group) || volume.ValidSetName(volume.MemberName(group, 0)) {
		t.Errorf("want valid set names %q and %q, SetOf(%[1]q) = %[1]q, and that the name of a member of %[2]q is no valid set name", alone, group)
	}
	longest := snapshotID("local", volume.MemberName(volume.GroupName(strings.Repeat("n", 63)), 0))
	longest.Pool = strings.Repeat("p", 40)
	if n := len(longest.String()); n > volume.MaxIDLength {
		t.Errorf("the longest ID of a snapshot has %d bytes, want at most %d", n, volume.MaxIDLength)
	}
}

// FuzzSnapshotID: an ID that can be parsed is formatted to the same text, is that of a snapshot or
// of a group but not both, and the name of its set can be the name of a folder.
func FuzzSnapshotID(f *testing.F) {
	for _, s := range []string{"loop:default.0a1b2c3d:snap-1", "nfs:nas:s.001", "nfs:nas:s.group", "loop:a:s.1000", "loop:a:../s.000", "loop:a:.000", "loop:a:s.000.000", ""} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		id, err := volume.ParseSnapshotID(s)
		group, gerr := volume.ParseGroupID(s)
		for _, err := range []error{err, gerr} {
			if err != nil && !errors.Is(err, volume.ErrNotFound) {
				t.Errorf("%q: %v is not ErrNotFound", s, err)
			}
		}
		if err == nil && gerr == nil {
			t.Errorf("%q is the ID of a snapshot and of a group", s)
		}
		if gerr == nil && group.String() != s || err == nil && id.String() != s {
			t.Errorf("%q was parsed and formatted to %q (snapshot) or %q (group), want the same text", s, id, group)
		}
		if set := volume.SetOf(id.Name); err == nil && (!volume.ValidSetName(set) || strings.ContainsAny(set, "/\x00\n")) {
			t.Errorf("snapshot %q: SetOf returns %q, which is not a valid name", s, set)
		}
	})
}

// FuzzSnapshotSet: any record is refused as damaged, or is parsed to a set whose members all belong
// to it.
func FuzzSnapshotSet(f *testing.F) {
	for _, s := range []volume.SnapshotSet{snapshotSet(), directorySet(), {}} {
		b, err := s.Marshal()
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Add([]byte(`{"version":1,"id":"loop:a:s.group","snapshots":[{"id":"loop:a:s.000","source":"loop:a:=x:y"}]}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		s, err := forms.ParseSnapshotSet(b)
		if err != nil {
			if !errors.Is(err, volume.ErrDamaged) {
				t.Errorf("%q: %v is not ErrDamaged", b, err)
			}
			return
		}
		again, err := s.Marshal()
		must(t, err)
		if w, err := forms.ParseSnapshotSet(again); err != nil || !reflect.DeepEqual(w.Snapshots, s.Snapshots) || w.ID != s.ID {
			t.Errorf("%q was parsed and formatted to %q: %v", b, again, err)
		}
		for _, one := range s.Members() {
			id, err := volume.ParseSnapshotID(one.ID.String())
			if err != nil || volume.SetOf(id.Name) != s.ID.Name || (one.Group == s.ID) != s.IsGroup() {
				t.Errorf("%q: snapshot %s with group %s does not belong to set %s: %v", b, one.ID, one.Group, s.ID, err)
			}
			if _, err := volume.ParseID(one.Source.String()); err != nil {
				t.Errorf("%q: the source %s is not a valid volume ID: %v", b, one.Source, err)
			}
		}
	})
}

// FuzzSnapshotParameters: an error names the key, and accepted values are known.
func FuzzSnapshotParameters(f *testing.F) {
	f.Add("consistency", "frozen")
	f.Add("consistency", "Crash")
	f.Add("csi.storage.k8s.io/volumesnapshot/name", "x")
	f.Add("", "\x00")
	f.Fuzz(func(t *testing.T, key, value string) {
		in := map[string]string{key: value}
		p, err := volume.ParseSnapshotParameters(maps.Clone(in))
		if err != nil {
			if !errors.Is(err, volume.ErrInvalid) || key != "" && !strings.Contains(err.Error(), "parameter") {
				t.Errorf("%v: got %v, want ErrInvalid that names the parameter", in, err)
			}
			return
		}
		if p.Consistency != volume.ConsistencyCrash && p.Consistency != volume.ConsistencyFrozen {
			t.Errorf("%v: got %+v, want a known consistency", in, p)
		}
	})
}
