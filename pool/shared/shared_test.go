package shared

import (
	"testing"
)

// FuzzEntry: any name in tmp is parsed completely, or refused.
func FuzzEntry(f *testing.F) {
	f.Add("v.0123.4096")
	f.Add("v.0123.4096.grow")
	f.Add("..")
	f.Fuzz(func(t *testing.T, s string) {
		e, ok := parseEntry(s)
		if ok && (e.bytes() < 0 || e.volume+"."+e.owner+"."+e.rest != s) {
			t.Errorf("%q is %+v of %d bytes", s, e, e.bytes())
		}
	})
}
