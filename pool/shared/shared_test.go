package shared

import (
	"testing"
)

// FuzzEntry: parseEntry refuses a name, or returns all its parts.
func FuzzEntry(f *testing.F) {
	f.Add("v.0123.4096")
	f.Add("v.0123.4096.grow")
	f.Add("..")
	f.Fuzz(func(t *testing.T, s string) {
		e, ok := parseEntry(s)
		if ok && (e.bytes() < 0 || e.volume+"."+e.owner+"."+e.rest != s) {
			t.Errorf("%q: got %+v with %d bytes, want parts that make up the name and no negative size", s, e, e.bytes())
		}
	})
}
