package flexvolume

import (
	"encoding/json"
	"errors"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/trivet-csi/trivet/test/frozen"
	"github.com/trivet-csi/trivet/volume"
)

// TestFrozenTargets: a volume that another version mounted is unmounted by its record.
func TestFrozenTargets(t *testing.T) {
	frozen.Format[target]{
		Dir: "targets",
		Read: func(b []byte) (target, error) {
			return readTarget(fstest.MapFS{"target.json": {Data: b}}, "target.json")
		},
		Write: func(t target) ([]byte, error) { return json.Marshal(t) },
	}.Test(t, map[string]target{
		"image": {Version: targetVersion, Path: "/var/lib/kubelet/pods/u/volumes/trivet~trivet/v", Volume: "loop:ssd.0a1b2c3d:v", Pool: "ssd"},
		"nfs":   {Version: targetVersion, Path: "/var/lib/kubelet/pods/u/volumes/trivet~trivet/v", Volume: "server.example:/export", SilentSince: 12345},
	})
}

// TestOtherVersions: a record of another version or with unknown fields is not read and does not count as damaged,
// because a damaged record may be replaced.
func TestOtherVersions(t *testing.T) {
	for content, want := range map[string]string{
		`{"version":2,"paths":["/p"]}`:                           "version 2, this driver reads version 1: run a driver that reads version 2",
		`{"version":1,"path":"/p","volume":"v","surprise":true}`: "run the driver that wrote it",
	} {
		_, err := readTarget(fstest.MapFS{"target.json": {Data: []byte(content)}}, "target.json")
		if !errors.Is(err, volume.ErrPrecondition) || !strings.Contains(err.Error(), want) {
			t.Errorf("record %s: got %v, want ErrPrecondition with %q", content, err, want)
		}
	}
	for _, content := range []string{"", "letter", `{"path":"/p","volume":"v"}`, `{"version":1,"path":"/p"}`} {
		if _, err := readTarget(fstest.MapFS{"target.json": {Data: []byte(content)}}, "target.json"); !errors.Is(err, volume.ErrDamaged) {
			t.Errorf("record %s: got %v, want ErrDamaged", content, err)
		}
	}
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
