package backend_test

import (
	"cmp"
	"errors"
	"maps"
	"reflect"
	"strings"
	"testing"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/backend/disk"
	"github.com/trivet-csi/trivet/backend/local"
	"github.com/trivet-csi/trivet/backend/loop"
	"github.com/trivet-csi/trivet/backend/nfs"
	"github.com/trivet-csi/trivet/volume"
)

var kinds = backend.Kinds{loop.Kind, nfs.Kind, local.Kind, disk.Kind}

// TestParseParameters: valid parameters are parsed with their defaults. The error for an invalid parameter
// contains its name and value, and the remedy.
func TestParseParameters(t *testing.T) {
	for _, tc := range []struct {
		name string
		in   map[string]string
		want volume.Parameters
		says string // text in the error; empty if the parameters are valid
	}{
		{"no parameters", nil, volume.Parameters{Backend: "loop"}, ""},
		{
			"all parameters of images",
			map[string]string{"backend": "loop", "pool": "fast", "csi.storage.k8s.io/fstype": "xfs", "allocation": "thick", "mkfsOptions": " -i  size=512 "},
			volume.Parameters{Backend: "loop", Pool: "fast"},
			"",
		},
		{
			"keys of the provisioner",
			map[string]string{"csi.storage.k8s.io/pvc/name": "a", "csi.storage.k8s.io/pv/name": "b"},
			volume.Parameters{Backend: "loop"},
			"",
		},
		{"unknown", map[string]string{"polo": "x"}, volume.Parameters{}, `polo="x" is unknown: backend loop takes backend, pool, server, share, export, onNodeLoss, csi.storage.k8s.io/fstype, allocation, mkfsOptions, encryption, copies, protect, iopsRead, iopsWrite, bytesPerSecondRead, bytesPerSecondWrite; did you mean pool?`},
		{"limited", map[string]string{"iopsRead": "100", "bytesPerSecondWrite": "max"}, volume.Parameters{Backend: "loop"}, ""},
		{"limit that is too low", map[string]string{"iopsRead": "1"}, volume.Parameters{}, `iopsRead="1": expected max, or a number from 10 to 4294967294`},
		{"limited directory", map[string]string{"backend": "local", "iopsRead": "100"}, volume.Parameters{}, `iopsRead="100" belongs to backend loop and disk, and the class has backend local`},
		{"protected", map[string]string{"protect": "15m"}, volume.Parameters{Backend: "loop"}, ""},
		{"period of no CronJob", map[string]string{"protect": "7m"}, volume.Parameters{}, `protect="7m": expected 1m, 2m`},
		{"no period", map[string]string{"protect": ""}, volume.Parameters{}, `protect="": expected 1m`},
		{"protected and local", map[string]string{"protect": "1h", "copies": "local"}, volume.Parameters{}, `protect="1h" and copies="local"`},
		{"protected and released", map[string]string{"protect": "1h", "onNodeLoss": "release"}, volume.Parameters{}, `protect="1h" and onNodeLoss="release"`},
		{"protected directory", map[string]string{"backend": "nfs", "protect": "1h"}, volume.Parameters{}, `protect="1h" belongs to backend loop`},
		{"unknown and similar to none", map[string]string{"consistency": "x"}, volume.Parameters{}, `consistency="x" is unknown`},
		{"encrypted image", map[string]string{"encryption": "luks2"}, volume.Parameters{Backend: "loop"}, ""},
		{"unknown encryption", map[string]string{"encryption": "luks"}, volume.Parameters{}, `encryption="luks": expected none or luks2; did you mean luks2?`},
		{"encrypted directory", map[string]string{"backend": "nfs", "encryption": "luks2"}, volume.Parameters{}, `encryption="luks2" belongs to backend loop`},
		{"invalid value of a list", map[string]string{"allocation": "thck"}, volume.Parameters{}, `allocation="thck": expected thin or thick; did you mean thick?`},
		{"server of a node's directory", map[string]string{"backend": "local", "server": "nas", "share": "/t"}, volume.Parameters{}, `server="nas" belongs to backend loop and nfs`},
		{"upper case", map[string]string{"Pool": "x"}, volume.Parameters{}, `Pool="x" is unknown`},
		{"unknown filesystem", map[string]string{"csi.storage.k8s.io/fstype": "ntfs"}, volume.Parameters{}, `"ntfs": expected ext4, xfs or btrfs`},
		{"unknown allocation", map[string]string{"allocation": "fat"}, volume.Parameters{}, `allocation="fat": expected thin or thick`},
		{"invalid pool", map[string]string{"pool": "../x"}, volume.Parameters{}, `pool="../x"`},
		{"unknown backend", map[string]string{"backend": "Loop"}, volume.Parameters{}, `backend="Loop": the backends of this driver are loop, nfs, local, disk; did you mean loop?`},
		{"directory", map[string]string{"backend": "nfs", "pool": "nas"}, volume.Parameters{Backend: "nfs", Pool: "nas"}, ""},
		{"export", map[string]string{"server": "NAS.lan", "share": "/tank/"}, volume.Parameters{Backend: "nfs", Pool: "=nas.lan=/tank"}, ""},
		{"export under its other key", map[string]string{"server": "nas", "export": "/t"}, volume.Parameters{Backend: "nfs", Pool: "=nas=/t"}, ""},
		{"share and export", map[string]string{"server": "nas", "share": "/t", "export": "/u"}, volume.Parameters{}, `share="/t" and export="/u"`},
		{"image on an export", map[string]string{"server": "nas", "share": "/t", "backend": "loop"}, volume.Parameters{Backend: "loop", Pool: "=nas=/t"}, ""},
		{"server alone", map[string]string{"server": "nas"}, volume.Parameters{}, `share="": give both`},
		{"share alone", map[string]string{"share": "/t"}, volume.Parameters{}, `server="", share="/t": give both`},
		{"pool and server", map[string]string{"server": "nas", "share": "/t", "pool": "nas"}, volume.Parameters{}, `pool="nas" and server="nas"`},
		{"server with a path", map[string]string{"server": "nas:/t", "share": "/t"}, volume.Parameters{}, `server="nas:/t"`},
		{"relative share", map[string]string{"server": "nas", "share": "t"}, volume.Parameters{}, `share="t"`},
		{"share with ..", map[string]string{"server": "nas", "share": "/t/../u"}, volume.Parameters{}, `share="/t/../u"`},
		{"parameter of images", map[string]string{"backend": "nfs", "allocation": "thick"}, volume.Parameters{}, `allocation="thick" belongs to backend loop, and the class has backend nfs: remove allocation or change the backend; backend nfs takes backend, pool, server, share, export, subDir`},
		{"filesystem of a directory", map[string]string{"backend": "nfs", "csi.storage.k8s.io/fstype": "ext4"}, volume.Parameters{}, `fstype="ext4" belongs to backend loop and disk`},
		{"mkfs options of a directory", map[string]string{"backend": "nfs", "mkfsOptions": "-m 1"}, volume.Parameters{}, `mkfsOptions="-m 1"`},
		{"parameter of directories", map[string]string{"subDir": "x"}, volume.Parameters{}, `subDir="x" belongs to backend nfs and local`},
		{"mode of an image", map[string]string{"backend": "loop", "mountPermissions": "0777"}, volume.Parameters{}, `mountPermissions="0777"`},
		{"unknown onDelete", map[string]string{"backend": "nfs", "onDelete": "keep"}, volume.Parameters{}, `onDelete="keep": expected delete, archive or retain`},
		{"invalid mode", map[string]string{"backend": "nfs", "mode": "rwx"}, volume.Parameters{}, `mode="rwx"`},
		{"mode with too many bits", map[string]string{"backend": "nfs", "mode": "10000"}, volume.Parameters{}, `mode="10000"`},
		{"wipe", map[string]string{"backend": "disk", "wipe": "zero", "csi.storage.k8s.io/fstype": "xfs"}, volume.Parameters{Backend: "disk"}, ""},
		{"no wipe", map[string]string{"backend": "disk", "wipe": "none"}, volume.Parameters{Backend: "disk"}, ""},
		{"invalid wipe", map[string]string{"backend": "disk", "wipe": "shred"}, volume.Parameters{}, `wipe="shred": expected discard, zero or none`},
		{"wipe of an image", map[string]string{"wipe": "zero"}, volume.Parameters{}, `wipe="zero" belongs to backend disk`},
		{"two modes", map[string]string{"backend": "nfs", "mode": "0700", "mountPermissions": "0777"}, volume.Parameters{}, `mode and mountPermissions differ`},
		{"negative owner", map[string]string{"backend": "nfs", "uid": "-1"}, volume.Parameters{}, `uid="-1"`},
		{"group that chown ignores", map[string]string{"backend": "nfs", "gid": "4294967295"}, volume.Parameters{}, `gid="4294967295"`},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got, err := kinds.Parse(tc.in)
			if tc.says == "" {
				tc.want.Values = maps.Clone(tc.in)
				if tc.want.Values == nil {
					tc.want.Values = map[string]string{}
				}
				if tc.want.Backend == "loop" || tc.want.Backend == "disk" {
					tc.want.Values["encryption"] = cmp.Or(tc.in["encryption"], "none")
					tc.want.Values["copies"] = "anywhere"
				}
				if tc.want.Backend == "loop" && tc.in["allocation"] == "" {
					tc.want.Values["allocation"] = "thin"
				}
			}
			if tc.says == "" && (err != nil || !reflect.DeepEqual(got, tc.want)) {
				t.Fatalf("got %+v, %v; want %+v", got, err, tc.want)
			}
			if tc.says != "" && (!errors.Is(err, volume.ErrInvalid) || !strings.Contains(err.Error(), tc.says)) {
				t.Errorf("got %v, want %q in the error", err, tc.says)
			}
		})
	}
}

// TestFilesystemWithoutDevices: a driver that serves only directories refuses a filesystem for devices.
func TestFilesystemWithoutDevices(t *testing.T) {
	for value, says := range map[string]string{"ext4": `csi.storage.k8s.io/fstype="ext4" is unknown`, "nfs": "", "nfs4": "", "": ""} {
		_, err := backend.Kinds{nfs.Kind}.Parse(map[string]string{"csi.storage.k8s.io/fstype": value})
		if says == "" && err != nil || says != "" && (!errors.Is(err, volume.ErrInvalid) || !strings.Contains(err.Error(), says)) {
			t.Errorf("fstype %q: got %v, want %q in the error", value, err, says)
		}
	}
}

// FuzzParameters: every error is ErrInvalid, and accepted parameters have valid values.
func FuzzParameters(f *testing.F) {
	f.Add("pool", "default")
	f.Add("allocation", "thick")
	f.Add("csi.storage.k8s.io/fstype", "")
	f.Add("mkfsOptions", "-i size=512 ; rm")
	f.Add("nonsense", "\x00")
	f.Fuzz(func(t *testing.T, key, value string) {
		p, err := kinds.Parse(map[string]string{key: value})
		if err != nil {
			if !errors.Is(err, volume.ErrInvalid) {
				t.Errorf("%q=%q: %v is not ErrInvalid", key, value, err)
			}
			return
		}
		fsType := p.Get(volume.ParamFSType)
		if fsType != "" && !volume.ValidFSType(fsType) || p.Pool != "" && !volume.IsDirectPool(p.Pool) && !volume.ValidPoolName(p.Pool) {
			t.Errorf("%q=%q was accepted as %+v", key, value, p)
		}
	})
}
