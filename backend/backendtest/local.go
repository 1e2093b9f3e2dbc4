package backendtest

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/trivet-csi/trivet/driver"
	"github.com/trivet-csi/trivet/internal/testenv"
)

// testDirectoryArguments: CreateVolume refuses arguments that a directory cannot have, names them, and changes
// nothing.
func testDirectoryArguments(t *testing.T, d *Driver, kind Kind) {
	l := newVolume(t, d, kind, multiWriter)
	taken := newVolumeOfClass(t, d, kind, multiWriter, kind.Parameters("subDir", "arguments/taken"))
	must(t, os.Symlink("/", filepath.Join(d.Pool(), "link")))
	must(t, os.WriteFile(filepath.Join(d.Pool(), "file"), nil, 0o600))
	d.awaitTrash(t)
	before, files := d.listing(t), d.paths(t)
	for _, tc := range []struct {
		name  string
		needs Feature
		more  []string              // parameters of the class, as keys and values
		c     *csi.VolumeCapability // nil for a supported one
		r     *csi.CapacityRange
		code  codes.Code
		says  []string
	}{
		{"raw device", 0, nil, Kind{}.Capability(writer), nil, codes.InvalidArgument, []string{"raw device"}},
		{"filesystem", 0, nil, Kind{FSType: "ext4"}.Capability(writer), nil, codes.InvalidArgument, []string{"fs_type", "ext4"}},
		{"filesystem of nfs", NodeLocal, nil, Kind{FSType: "nfs"}.Capability(writer), nil, codes.InvalidArgument, []string{"fs_type", "nfs"}},
		{"many nodes", NodeLocal, nil, kind.Capability(manyWriters), nil, codes.InvalidArgument, []string{"MULTI_NODE_MULTI_WRITER", "supports it"}},
		{"mount flag", 0, nil, kind.Capability(writer, "remount"), nil, codes.InvalidArgument, []string{"mount_flags", "remount"}},
		{"flag of a filesystem", 0, nil, kind.Capability(writer, "data=journal"), nil, codes.InvalidArgument, []string{"mount_flags", "data=journal"}},
		{"allocation", 0, []string{"allocation", "thick"}, nil, nil, codes.InvalidArgument, []string{"allocation", "thick"}},
		{"mkfs options", 0, []string{"mkfsOptions", "-m 1"}, nil, nil, codes.InvalidArgument, []string{"mkfsOptions"}},
		{"filesystem parameter", 0, []string{"csi.storage.k8s.io/fstype", "xfs"}, nil, nil, codes.InvalidArgument, []string{"fstype"}},
		{"parent directory", 0, []string{"subDir", "../x"}, nil, nil, codes.InvalidArgument, []string{"subDir", "../x"}},
		{"claim named ..", 0, []string{"subDir", "${pvc.metadata.name}/x", "csi.storage.k8s.io/pvc/name", ".."}, nil, nil, codes.InvalidArgument, []string{"subDir"}},
		{"absolute path", 0, []string{"subDir", "/etc"}, nil, nil, codes.InvalidArgument, []string{"subDir", "/etc"}},
		{"newline", 0, []string{"subDir", "a\nb"}, nil, nil, codes.InvalidArgument, []string{"subDir", "control"}},
		{"long path", 0, []string{"subDir", strings.Repeat("d/", 2048) + "d"}, nil, nil, codes.InvalidArgument, []string{"subDir", "4097 bytes"}},
		{"reserved by the pool", 0, []string{"subDir", "volumes/x"}, nil, nil, codes.InvalidArgument, []string{"subDir", "volumes"}},
		{"another volume", 0, []string{"subDir", "volumes/" + l.name() + "/data"}, nil, nil, codes.InvalidArgument, []string{"subDir", "volumes"}},
		{"shared by namespaces", 0, []string{"subDir", "shared/${pvc.metadata.name}", "onDelete", "retain", "csi.storage.k8s.io/pvc/name", "claim"}, nil, nil, codes.InvalidArgument, []string{"subDir", "shared", "${pvc.metadata.namespace}"}},
		{"variable without a value", 0, []string{"subDir", "${pvc.metadata.name}"}, nil, nil, codes.InvalidArgument, []string{"--extra-create-metadata"}},
		{"subDir of another volume", 0, []string{"subDir", "arguments/taken"}, nil, nil, codes.FailedPrecondition, []string{"subDir", taken.name()}},
		{"inside the subDir of another volume", 0, []string{"subDir", "arguments/taken/x"}, nil, nil, codes.FailedPrecondition, []string{"subDir", taken.name()}},
		{"path with a link", 0, []string{"subDir", "link/x"}, nil, nil, codes.FailedPrecondition, []string{"subDir", "link/x"}},
		{"path of a file", 0, []string{"subDir", "file"}, nil, nil, codes.FailedPrecondition, []string{"subDir", "file"}},
		{"invalid mode", 0, []string{"mode", "rwx"}, nil, nil, codes.InvalidArgument, []string{"mode", "rwx"}},
		{"invalid owner", 0, []string{"uid", "root"}, nil, nil, codes.InvalidArgument, []string{"uid", "root"}},
		{"unknown onDelete", 0, []string{"onDelete", "shred"}, nil, nil, codes.InvalidArgument, []string{"onDelete", "shred"}},
		{"unknown pool", 0, []string{"pool", "elsewhere"}, nil, nil, codes.InvalidArgument, []string{"pool", "elsewhere"}},
		{"server without share", 0, []string{"server", "nas.lan"}, nil, nil, codes.InvalidArgument, []string{"server"}},
		{"server without share on an export", Shared, []string{"server", "nas.lan"}, nil, nil, codes.InvalidArgument, []string{"server", "share"}},
		{"one byte", NodeLocal, nil, nil, &csi.CapacityRange{RequiredBytes: 1}, codes.OutOfRange, []string{"1 B", "1 MiB"}},
		{"largest number", NodeLocal, nil, nil, &csi.CapacityRange{RequiredBytes: 1<<63 - 1}, codes.OutOfRange, []string{"9223372036854775807"}},
		{"more than the pool has", 0, nil, nil, &csi.CapacityRange{RequiredBytes: 1 << 60}, codes.ResourceExhausted, []string{"room"}},
	} {
		if !kind.Has(tc.needs) {
			continue
		}
		t.Run(tc.name, func(t *testing.T) {
			c := tc.c
			if c == nil {
				c = kind.Capability(writer)
			}
			_, err := d.Control.CreateVolume(t.Context(), &csi.CreateVolumeRequest{
				Name: newName(t), VolumeCapabilities: []*csi.VolumeCapability{c}, Parameters: kind.Parameters(tc.more...), CapacityRange: tc.r,
			})
			wantCode(t, err, tc.code, tc.says...)
		})
	}
	_, err := d.Control.CreateVolume(t.Context(), &csi.CreateVolumeRequest{
		Name: newName(t), VolumeCapabilities: []*csi.VolumeCapability{Kind{FSType: "ext4"}.Capability(writer)},
		Parameters: map[string]string{"pool": kind.target.Pool, "subDir": "x"},
	})
	wantCode(t, err, codes.InvalidArgument, "subDir")
	if after := d.listing(t); after != before {
		t.Errorf("the refused calls changed the list of volumes from\n%s\nto\n%s", before, after)
	}
	await(t, "the files of the refused calls to be removed", func() bool { return slices.Equal(d.paths(t), files) })
}

// paths returns all paths in the pool.
func (d *Driver) paths(t *testing.T) []string {
	t.Helper()
	var paths []string
	_ = filepath.WalkDir(d.Pool(), func(path string, _ os.DirEntry, _ error) error { // files can be removed meanwhile
		paths = append(paths, path)
		return nil
	})
	return paths
}

// testDirectoryGone: a volume whose directory or record was removed or replaced can be unpublished and unstaged. No
// other directory is mistaken for that of the volume.
func testDirectoryGone(t *testing.T, d *Driver, kind Kind) {
	for name, attack := range map[string]func(l *testVolume){
		"directory removed": func(l *testVolume) { must(t, os.RemoveAll(l.directory())) },
		"directory replaced": func(l *testVolume) {
			must(t, os.Rename(l.directory(), l.directory()+".away"))
			must(t, os.Mkdir(l.directory(), 0o777))
		},
		"record removed": func(l *testVolume) { must(t, os.Remove(l.record())) },
		"folder removed": func(l *testVolume) { must(t, os.RemoveAll(filepath.Dir(l.record()))) },
	} {
		t.Run(name, func(t *testing.T) {
			l, other := newVolume(t, d, kind, multiWriter), newVolume(t, d, kind, multiWriter)
			neighbor := newVolumeOfClass(t, d, kind, multiWriter, kind.Parameters("subDir", "gone/"+l.name()))
			l.stageAndPublish(t)
			other.stageAndPublish(t)
			neighbor.stageAndPublish(t)
			attack(l)
			if err := l.publishAt(t.Context(), filepath.Join(t.TempDir(), "second"), false); err == nil {
				t.Error("publish at a second target succeeded, want an error")
			}
			wantCode(t, l.unpublishAt(t.Context(), other.target), codes.FailedPrecondition, "it stays")
			d.Restart(t)
			l.unpublishAndUnstage(t)
			if n := mountsAt(t, l.staging) + mountsAt(t, l.target); n != 0 {
				t.Errorf("got %d mounts after unstage, want none", n)
			}
			must(t, os.RemoveAll(filepath.Dir(l.record()))) // a volume without a record could not be deleted
			other.unpublishAndUnstage(t)
			neighbor.unpublishAndUnstage(t)
		})
	}
}

// testDirectoryGoneAtRoot is testDirectoryGone for a pool that is the root directory of a filesystem.
func testDirectoryGoneAtRoot(t *testing.T, _ *Driver, kind Kind) {
	m := kind.target.Medium(t, Room{Total: "20G"})
	m.Dir = filepath.Dir(m.Dir)
	m.Config.Directory.Path, m.Config.RequireMount = m.Dir, true
	testDirectoryGone(t, kind.target.startOn(t, m, func(*driver.Options) {}), kind)
}

// testHostileTenant: a root user in a pod creates files that are hard to remove. Deleting the volume removes all its
// files, and nothing else.
func testHostileTenant(t *testing.T, d *Driver, kind Kind) {
	victim, outside := newBystanders(t, d, kind)
	before := fingerprint(t, outside, victim.directory())
	archived := 0
	for _, parameters := range [][]string{{"onDelete", "delete"}, {"onDelete", "archive"}, {"onDelete", "delete", "subDir", "tenant/deleted"}, {"onDelete", "archive", "subDir", "tenant/archived"}} {
		t.Run(strings.Join(parameters[1:], " "), func(t *testing.T) {
			l := newVolumeOfClass(t, d, kind, multiWriter, kind.Parameters(append(parameters, owner...)...))
			wantOwner(t, l.dataDirectory(parameters))
			l.stageAndPublish(t)
			plantHostileFiles(t, l.target, outside, victim.directory())
			l.unpublishAndUnstage(t)
			remove(t, d, l.id)
			d.awaitTrash(t)
			if parameters[1] == "archive" {
				archived++
			}
			if found := d.findFiles(t, "planted"); len(found) != archived {
				t.Errorf("got files %q in the pool, want those of %d archived volumes", found, archived)
			}
		})
	}
	t.Run("mount in the directory", func(t *testing.T) { testMountedBelow(t, d, kind, outside) })
	wantSame(t, before, fingerprint(t, outside, victim.directory()))
}

// owner are the parameters of a directory with an owner other than root.
var owner = []string{"uid", "1000", "gid", "1001", "mode", "0750"}

// wantOwner fails the test unless a directory has the owner and mode of owner.
func wantOwner(t *testing.T, dir string) {
	t.Helper()
	if have := testenv.Run(t, "stat", "-c", "%u:%g %a", dir); have != "1000:1001 750" {
		t.Errorf("got owner and mode %s of %s, want 1000:1001 750", have, dir)
	}
}

// newBystanders creates a volume of another tenant, and a directory outside any pool. Each contains a file of a
// third user.
func newBystanders(t *testing.T, d *Driver, kind Kind) (victim *testVolume, outside string) {
	t.Helper()
	victim, outside = newVolume(t, d, kind, multiWriter), t.TempDir()
	for i, dir := range []string{victim.directory(), outside} {
		precious := filepath.Join(dir, "precious")
		write(t, precious, pattern(uint64(40+i)))
		must(t, os.Chmod(precious, 0o640))
		must(t, os.Chown(precious, 2000, 2001))
	}
	return victim, outside
}

// fingerprint returns the attributes and contents of the files in directories that a hostile volume must not change.
// It includes the times of the last change, which show a change that was reverted.
func fingerprint(t *testing.T, dirs ...string) string {
	t.Helper()
	return testenv.Run(t, "find", append(dirs, "-printf", `%p %M %U:%G changed %C@\n`, "-type", "f", "-exec", "sha256sum", "{}", ";")...)
}

// wantSame fails the test unless two results of fingerprint are equal.
func wantSame(t *testing.T, before, after string) {
	t.Helper()
	if before != after {
		t.Errorf("the files that must not change were\n%s\nand are\n%s", before, after)
	}
}

// awaitTrash waits until all deleted volumes are removed.
func (d *Driver) awaitTrash(t *testing.T) {
	t.Helper()
	var left []os.DirEntry
	t.Cleanup(func() {
		for _, e := range left {
			t.Logf("in the trash: %s\n%s", e.Name(), trashLog())
		}
	})
	await(t, "the trash to be emptied", func() (empty bool) {
		var err error
		left, err = os.ReadDir(filepath.Join(d.Pool(), ".trivet/trash"))
		return err == nil && len(left) == 0
	})
}

// plantHostileFiles fills a directory with files that are hard to remove.
func plantHostileFiles(t *testing.T, dir, outside, victim string) {
	t.Helper()
	at := func(name string) string { return filepath.Join(dir, name) }
	write(t, at("planted"), pattern(42))
	for name, to := range map[string]string{"host": outside, "victim": victim, "root": "/", "up": "../../..", "loop": "loop"} {
		must(t, os.Symlink(to, at(name)))
	}
	must(t, os.Link(at("planted"), at("hard link")))
	testenv.Run(t, "mknod", at("null"), "c", "1", "3")
	testenv.Run(t, "mkfifo", at("pipe"))
	deep := dir
	for range 200 {
		deep = filepath.Join(deep, "deep")
		must(t, os.Mkdir(deep, 0o755))
	}
	write(t, filepath.Join(deep, "file"), []byte("x"))
	must(t, os.Mkdir(at("\n.. \x01"), 0))
	must(t, os.MkdirAll(at("fixed/inner"), 0o755))
	write(t, at("fixed/inner/file"), []byte("x"))
	write(t, at("append"), []byte("x"))
	testenv.Run(t, "chattr", "+i", at("fixed/inner/file"))
	testenv.Run(t, "chattr", "+i", at("fixed/inner"))
	testenv.Run(t, "chattr", "+a", at("fixed"))
	testenv.Run(t, "chattr", "+a", at("append"))
	if fsType := testenv.Run(t, "findmnt", "-n", "-o", "FSTYPE", "-T", dir); fsType == "btrfs" {
		testenv.Run(t, "btrfs", "-q", "subvolume", "create", at("nested"))
		testenv.Run(t, "btrfs", "-q", "subvolume", "snapshot", "-r", at("nested"), filepath.Join(deep, "snapshot"))
	}
	testenv.Run(t, "chattr", "+i", dir)
}

// removeSubvolumes removes the subvolumes that plantHostileFiles created, which cannot be copied.
func removeSubvolumes(t *testing.T, dir string) {
	t.Helper()
	testenv.Run(t, "chattr", "-i", dir)
	for _, nested := range []string{"nested", strings.Repeat("deep/", 200) + "snapshot"} {
		testenv.Run(t, "btrfs", "-q", "subvolume", "delete", filepath.Join(dir, nested))
	}
	testenv.Run(t, "chattr", "+i", dir)
}

// testMountedBelow: a deleted volume whose directory contains a mount is not removed until the mount is removed, and the
// mounted files stay unchanged. If the directory is a subvolume, the kernel itself removes the mount.
func testMountedBelow(t *testing.T, d *Driver, kind Kind, outside string) {
	l := newVolume(t, d, kind, multiWriter)
	below := filepath.Join(l.directory(), "below")
	must(t, os.Mkdir(below, 0o755))
	testenv.Run(t, "mount", "--bind", outside, below)
	remove(t, d, l.id)
	if kind.Has(Subvolumes) {
		d.awaitTrash(t)
		return
	}
	mounted := strings.TrimSpace(testenv.Run(t, "sh", "-c", fmt.Sprintf("findmnt -rn -o TARGET | grep '/%s[.].*/below$'", l.name())))
	wantContent(t, filepath.Join(mounted, "precious"), pattern(41))
	testenv.Run(t, "umount", mounted)
	d.Restart(t)
	await(t, "the trash to be emptied", func() bool { return len(d.findFiles(t, "below")) == 0 })
}

// trashLog returns the lines of the log about the trash.
func trashLog() string {
	var out []string
	for line := range strings.Lines(Log()) {
		if strings.Contains(line, "trash") {
			out = append(out, line)
		}
	}
	return strings.Join(out, "")
}
