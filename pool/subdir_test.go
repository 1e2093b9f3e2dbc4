package pool_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/volume"
)

// TestSubDirInSubvolume: the directory at a subDir in a subvolume cannot be moved into the pool's folders. It can be
// retained. The error of another deletion contains the remedy, and the data is kept.
func TestSubDirInSubvolume(t *testing.T) {
	e := newExport(t)
	e.dir = testenv.Filesystem(t, "btrfs", "256M")
	p := e.open(t)
	there, elsewhere := filepath.Join(e.dir, "team/there"), filepath.Join(e.dir, "team/elsewhere")
	testenv.Run(t, "btrfs", "subvolume", "create", filepath.Join(e.dir, "team"))
	e.mkdir(t, "team/there")
	e.write(t, "team/there/file")
	must(t, p.Remove(t.Context(), addDirectory(t, p, "retained", "team/there", volume.OnDeleteRetain)))
	for _, onDelete := range []volume.OnDelete{volume.OnDeleteDelete, volume.OnDeleteArchive} {
		v := addDirectory(t, p, string(onDelete), "team/there", onDelete)
		wantError(t, p.Remove(t.Context(), v), volume.ErrPrecondition, `subDir "team/there"`, "subvolume", "move the directory elsewhere")
		if !e.has("team/there/file") {
			t.Errorf("onDelete %s: the refused deletion removed the data", onDelete)
		}
		must(t, os.Rename(there, elsewhere))
		must(t, p.Remove(t.Context(), v))
		must(t, os.Rename(elsewhere, there))
	}
}

// TestSubDirInProject: no subDir is created below a directory that passes its quota project on. The error contains the
// remedy, which works.
func TestSubDirInProject(t *testing.T) {
	e := newExport(t)
	e.dir = testenv.Filesystem(t, "xfs", "320M")
	p := e.open(t)
	e.mkdir(t, "team")
	testenv.Run(t, "xfs_io", "-c", "chproj 42", "-c", "chattr +P", filepath.Join(e.dir, "team"))
	v := directory(p, "new", "team/new", volume.OnDeleteRetain)
	err := p.CreateDirectory(t.Context(), v, nil, open777)
	wantError(t, err, volume.ErrPrecondition, `subDir "team/new"`, "quota project", "create the directory there and use onDelete: retain")
	e.mkdir(t, "team/new")
	must(t, p.CreateDirectory(t.Context(), v, nil, open777))
	must(t, p.Remove(t.Context(), v))
	if !e.has("team/new") {
		t.Error("the retained directory was removed")
	}
}

// TestSubDirOnAnotherFilesystem: a subDir on another filesystem than the pool is refused with a remedy.
func TestSubDirOnAnotherFilesystem(t *testing.T) {
	e := newExport(t)
	p := e.open(t)
	e.mkdir(t, "data")
	at := filepath.Join(e.dir, "data")
	testenv.Run(t, "mount", "-t", "tmpfs", "data", at)
	t.Cleanup(func() { testenv.Run(t, "umount", at) })
	e.mkdir(t, "data/there")
	for _, subDir := range []string{"data", "data/there", "data/new"} {
		err := p.CreateDirectory(t.Context(), directory(p, "v", subDir, volume.OnDeleteRetain), nil, open777)
		wantError(t, err, volume.ErrPrecondition, "subDir", subDir, "another filesystem", "static volume")
	}
}
