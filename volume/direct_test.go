package volume_test

import (
	"testing"

	"github.com/trivet-csi/trivet/volume"
)

// TestAttribute: the case of a key does not matter, but a key in the exact case takes precedence.
func TestAttribute(t *testing.T) {
	for _, tc := range []struct {
		context map[string]string
		want    string
	}{
		{nil, ""},
		{map[string]string{"share": "/a"}, ""},
		{map[string]string{"subDir": "a"}, "a"},
		{map[string]string{"subdir": "a"}, "a"},
		{map[string]string{"subdir": "a", "subDir": "b", "SUBDIR": "c"}, "b"},
		{map[string]string{"subdir": "a", "subDir": ""}, ""},
	} {
		if got := volume.Attribute(tc.context, volume.ParamSubDir); got != tc.want {
			t.Errorf("Attribute(%v, subDir) = %q, want %q", tc.context, got, tc.want)
		}
	}
}
