package volume_test

import (
	"errors"
	"reflect"
	"strings"
	"testing"

	"github.com/trivet-csi/trivet/volume"
)

func TestParseParameters(t *testing.T) {
	for _, tc := range []struct {
		name string
		in   map[string]string
		want volume.Parameters
		says string // what the error has to name
	}{
		{"none", nil, volume.Parameters{Backend: "loop", Allocation: volume.Thin}, ""},
		{
			"all",
			map[string]string{"backend": "loop", "pool": "fast", "csi.storage.k8s.io/fstype": "xfs", "allocation": "thick", "mkfsOptions": " -i  size=512 "},
			volume.Parameters{Backend: "loop", Pool: "fast", FSType: "xfs", Allocation: volume.Thick, MkfsOptions: []string{"-i", "size=512"}},
			"",
		},
		{
			"the provisioner's own",
			map[string]string{"csi.storage.k8s.io/pvc/name": "a", "csi.storage.k8s.io/pv/name": "b"},
			volume.Parameters{Backend: "loop", Allocation: volume.Thin},
			"",
		},
		{"unknown", map[string]string{"polo": "x"}, volume.Parameters{}, `"polo" is unknown: the known ones are backend, pool`},
		{"case", map[string]string{"Pool": "x"}, volume.Parameters{}, `"Pool"`},
		{"filesystem", map[string]string{"csi.storage.k8s.io/fstype": "ntfs"}, volume.Parameters{}, `"ntfs": want one of ext4, xfs, btrfs`},
		{"allocation", map[string]string{"allocation": "fat"}, volume.Parameters{}, `allocation="fat": want thin or thick`},
		{"pool", map[string]string{"pool": "../x"}, volume.Parameters{}, `pool="../x"`},
		{"backend", map[string]string{"backend": "Loop"}, volume.Parameters{}, `backend="Loop"`},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got, err := volume.ParseParameters(tc.in)
			if tc.says == "" && err != nil || !reflect.DeepEqual(got, tc.want) {
				t.Fatalf("%+v, %v", got, err)
			}
			if tc.says != "" && (!errors.Is(err, volume.ErrInvalid) || !strings.Contains(err.Error(), tc.says)) {
				t.Errorf("error %v does not say %q", err, tc.says)
			}
		})
	}
}

// FuzzParameters: whatever a class has, an error names the key, and what passes
// is of the known values.
func FuzzParameters(f *testing.F) {
	f.Add("pool", "default")
	f.Add("allocation", "thick")
	f.Add("csi.storage.k8s.io/fstype", "")
	f.Add("mkfsOptions", "-i size=512 ; rm")
	f.Add("nonsense", "\x00")
	f.Fuzz(func(t *testing.T, key, value string) {
		p, err := volume.ParseParameters(map[string]string{key: value})
		if err != nil {
			if !errors.Is(err, volume.ErrInvalid) {
				t.Errorf("%q=%q: %v is not ErrInvalid", key, value, err)
			}
			return
		}
		if p.FSType != "" && !volume.ValidFSType(p.FSType) || p.Pool != "" && !volume.ValidPoolName(p.Pool) {
			t.Errorf("%q=%q passed as %+v", key, value, p)
		}
	})
}
