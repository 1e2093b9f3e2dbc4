package flexvolume

import (
	"encoding/json"
	"path/filepath"
	"reflect"
	"testing"
	"testing/fstest"

	"github.com/trivet-csi/trivet/test/frozen"
)

// TestFrozenTargets: a volume that an earlier version mounted is unmounted by its record.
func TestFrozenTargets(t *testing.T) {
	frozen.Format[target]{
		Dir: "targets",
		Read: func(b []byte) (target, error) {
			return readTarget(fstest.MapFS{"target.json": {Data: b}}, "target.json")
		},
		Write: func(t target) ([]byte, error) { return json.Marshal(t) },
	}.Test(t, map[string]target{
		"image": {Path: "/var/lib/kubelet/pods/u/volumes/trivet~trivet/v", Volume: "loop:ssd.0a1b2c3d:v", Pool: "ssd"},
		"nfs":   {Path: "/var/lib/kubelet/pods/u/volumes/trivet~trivet/v", Volume: "server.example:/export", SilentSince: 12345},
	})
}

// TestFrozenFiles: the files of the state directory keep their paths, and the options and answers their keys.
func TestFrozenFiles(t *testing.T) {
	frozen.List(t, "files", []string{
		locksDir, uuidsDir, LogFile, recordName("/var/lib/kubelet/pods/u/volumes/trivet~trivet/v"),
		filepath.Join(stagedDir, hash("loop:ssd.0a1b2c3d:v")),
	})
	frozen.List(t, "options", []string{optionVolume, optionSize, optionMountOptions, StateDirVariable})
	frozen.List(t, "answers", frozen.Keys(reflect.TypeFor[Answer](), "json"))
}
