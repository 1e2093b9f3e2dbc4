package blockdev_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/linux/blockdev"
	"github.com/trivet-csi/trivet/linux/mount"
)

// TestDeviceSource: a source distinguishes mounts of its filesystem, bind mounts of its device node, and other
// mounts.
func TestDeviceSource(t *testing.T) {
	at := testenv.Filesystem(t, "btrfs", "128M")
	e, err := mount.OnPath(at)
	must(t, err)
	dir := t.TempDir()
	node, foreign := filepath.Join(dir, "node"), filepath.Join(dir, "foreign")
	must(t, os.WriteFile(node, nil, 0o600))
	must(t, os.Mkdir(foreign, 0o700))
	for path, from := range map[string]string{node: e.Source, foreign: t.TempDir()} {
		must(t, mount.Bind(from, path, mount.Options{}))
		t.Cleanup(func() { must(t, mount.Unmount(path)) })
	}
	filesystem, raw := &blockdev.DeviceSource{Path: e.Source, FSType: "btrfs"}, &blockdev.DeviceSource{Path: e.Source}
	for _, tc := range []struct {
		path            string
		filesystem, raw bool // the expected results of Shows of both sources
		owned           bool // the expected result of Owns of filesystem
	}{
		{path: at, filesystem: true, raw: true, owned: true},
		{path: node, raw: true, owned: true},
		{path: foreign},
		{path: dir}, // not mounted
		{path: filepath.Join(dir, "missing")},
	} {
		shows, err := filesystem.Shows(tc.path)
		must(t, err)
		rawShows, err := raw.Shows(tc.path)
		must(t, err)
		owns, err := filesystem.Owns(tc.path)
		must(t, err)
		if shows != tc.filesystem || rawShows != tc.raw || owns != tc.owned {
			t.Errorf("%s: got shown by the filesystem %t, by the raw device %t, owned %t, want %+v", tc.path, shows, rawShows, owns, tc)
		}
	}
	if mounts, err := mount.Of(filesystem); err != nil || len(mounts) != 2 {
		t.Errorf("got mounts %v, %v, want two", mounts, err)
	}
	must(t, filesystem.Grow())
	if problems, err := filesystem.Problems(); err != nil || len(problems) > 0 {
		t.Errorf("got problems %v, %v, want none", problems, err)
	}
}
