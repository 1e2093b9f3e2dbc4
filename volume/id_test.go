package volume_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/trivet-csi/trivet/volume"
)

// TestParseID: only IDs that the driver creates are accepted.
func TestParseID(t *testing.T) {
	for _, tc := range []struct {
		name, in string
		want     volume.ID
		ok       bool
	}{
		{"node-local", "loop:default.0a1b2c3d:pvc-1", volume.ID{Backend: "loop", Pool: "default", PoolUUID: "0a1b2c3d", Name: "pvc-1"}, true},
		{"shared", "nfs:nas:pvc-1", volume.ID{Backend: "nfs", Pool: "nas", Name: "pvc-1"}, true},
		{"empty", "", volume.ID{}, false},
		{"one part", "pvc-1", volume.ID{}, false},
		{"four parts", "loop:a:b:c", volume.ID{}, false},
		{"path", "loop:default.0a1b2c3d:../../etc", volume.ID{}, false},
		{"dot", "loop:default.0a1b2c3d:.", volume.ID{}, false},
		{"slash in pool", "loop:a/b:c", volume.ID{}, false},
		{"uuid too short", "loop:default.0a1b:pvc", volume.ID{}, false},
		{"uuid empty", "loop:default.:pvc", volume.ID{}, false},
		{"upper case", "loop:default:PVC", volume.ID{}, false},
		{"newline", "loop:default:pvc\n", volume.ID{}, false},
		{"direct", "nfs:=nas.lan=/tank/volumes:pvc-1", volume.ID{Backend: "nfs", Pool: "=nas.lan=/tank/volumes", Name: "pvc-1"}, true},
		{"direct, IPv6", "nfs:=fd00%3a%3a1=/t:v", volume.ID{Backend: "nfs", Pool: "=fd00%3a%3a1=/t", Name: "v"}, true},
		{"direct, upper case", "nfs:=NAS=/t:v", volume.ID{}, false},
		{"direct, needless escape", "nfs:=nas=/%74:v", volume.ID{}, false},
		{"direct, parent directory", "nfs:=nas=/t/../u:v", volume.ID{}, false},
		{"direct, no share", "nfs:=nas:v", volume.ID{}, false},
		{"direct, trailing slash", "nfs:=nas=/t/:v", volume.ID{}, false},
		{"direct, share with a dot", "nfs:=nas=/t.0a1b2c3d:v", volume.ID{Backend: "nfs", Pool: "=nas=/t.0a1b2c3d", Name: "v"}, true},
		{"too long", "loop:default:" + strings.Repeat("a", 128), volume.ID{}, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got, err := volume.ParseID(tc.in)
			if got != tc.want || (err == nil) != tc.ok {
				t.Errorf("ParseID(%q) = %+v, %v; want %+v", tc.in, got, err, tc.want)
			}
			if err != nil && !errors.Is(err, volume.ErrNotFound) {
				t.Errorf("ParseID(%q): %v is not ErrNotFound", tc.in, err)
			}
		})
	}
}

// TestNameFor: a name that cannot be in an ID is replaced by a hash.
func TestNameFor(t *testing.T) {
	if got := volume.NameFor("pvc-0d1e"); got != "pvc-0d1e" {
		t.Errorf("NameFor(\"pvc-0d1e\") = %q, want the same name", got)
	}
	for _, hard := range []string{"", "UPPER", "a/b", "../x", "ünïcode", strings.Repeat("a", 64), "a b", "a\x00b"} {
		got := volume.NameFor(hard)
		if got != volume.NameFor(got) || len(got) != 62 {
			t.Errorf("NameFor(%q) = %q, want 62 bytes that NameFor does not change", hard, got)
		}
	}
	if volume.NameFor("A") == volume.NameFor("B") {
		t.Error("NameFor returns the same hash for A and B")
	}
}

// TestLongestID: an ID whose parts have their maximum lengths is not longer than CSI allows.
func TestLongestID(t *testing.T) {
	id := volume.ID{Backend: "local", Pool: strings.Repeat("p", 40), PoolUUID: "01234567", Name: strings.Repeat("n", 63)}
	if n := len(id.String()); n > volume.MaxIDLength {
		t.Errorf("the longest ID has %d bytes, want at most %d", n, volume.MaxIDLength)
	}
	if got, err := volume.ParseID(id.String()); err != nil || got != id {
		t.Errorf("ParseID(%q) = %+v, %v; want %+v", id, got, err, id)
	}
}

// FuzzID: an ID that can be parsed is formatted to the same text, and its name can be the name of a
// folder.
func FuzzID(f *testing.F) {
	for _, s := range []string{"loop:default.0a1b2c3d:pvc-1", "nfs:nas:x", "", "::", "a:b.c:d", "loop:default.0a1b2c3d:../x", "nfs:=nas=/t:v", "nfs:=fd00%3a%3a1=/a%20b:v"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		id, err := volume.ParseID(s)
		if err != nil {
			return
		}
		if id.String() != s {
			t.Errorf("ParseID(%q).String() = %q, want the same text", s, id.String())
		}
		pool := id.Pool
		if _, _, direct := volume.ParseDirectPool(pool); direct {
			pool = ""
		}
		if strings.ContainsAny(id.Name+pool+id.PoolUUID+id.Backend, "/.\x00\n") || id.Name == "" || strings.ContainsAny(id.Pool, "\x00\n:") {
			t.Errorf("ParseID(%q) = %+v, which contains invalid names", s, id)
		}
		if id.Shared() != (id.PoolUUID == "") {
			t.Errorf("ParseID(%q).Shared() = %t with UUID %q, want true only without a UUID", s, id.Shared(), id.PoolUUID)
		}
		if volume.NameFor(id.Name) != id.Name {
			t.Errorf("%q: NameFor changes the name %q", s, id.Name)
		}
	})
}

// FuzzNameFor: every name of an orchestrator results in a valid name of a folder.
func FuzzNameFor(f *testing.F) {
	for _, s := range []string{"pvc-1", "A", "../..", "\xff\xfe", ""} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		id := volume.ID{Backend: "loop", Pool: "p", PoolUUID: "01234567", Name: volume.NameFor(s)}
		if got, err := volume.ParseID(id.String()); err != nil || got != id {
			t.Errorf("NameFor(%q) = %q, which is not valid in an ID: %v", s, id.Name, err)
		}
	})
}
