package mount_test

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/linux/mount"
)

func TestMain(m *testing.M) { testenv.Main(m) }

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// TestParseFlags: mount flags are separated into attributes of the mount and options of the filesystem. Flags that
// would mount another source are refused.
func TestParseFlags(t *testing.T) {
	for _, tc := range []struct {
		name string
		in   []string
		attr uint64
		data []string // FilesystemFlags
		ok   bool
	}{
		{"no flags", nil, 0, nil, true},
		{"attributes", []string{"noexec", "nodev,nosuid"}, unix.MOUNT_ATTR_NOEXEC | unix.MOUNT_ATTR_NODEV | unix.MOUNT_ATTR_NOSUID, nil, true},
		{"options of the filesystem", []string{"discard", "data=ordered,commit=5"}, 0, []string{"discard", "data=ordered", "commit=5"}, true},
		{"defaults", []string{"defaults,rw,relatime", "_netdev", "x-systemd.automount", ""}, 0, nil, true},
		{"read-only", []string{"ro"}, unix.MOUNT_ATTR_RDONLY, nil, true},
		{"flags for mount(8)", []string{`x-a="b,c",x-d="e`}, 0, nil, true},
		{"context", []string{`ro,context="u:object_r:t:s0:c1,c2",discard`}, unix.MOUNT_ATTR_RDONLY, []string{"discard", `context="u:object_r:t:s0:c1,c2"`}, true},
		{"context without quotes", []string{"context=u:object_r:t:s0"}, 0, []string{`context="u:object_r:t:s0"`}, true},
		{"context twice", []string{"context=u:object_r:t:s0", `context="u:object_r:t:s0"`}, 0, []string{`context="u:object_r:t:s0"`}, true},
		{"two contexts", []string{"context=u:object_r:t:s0", "context=u:object_r:t:s1"}, 0, nil, false},
		{"context without a value", []string{"context"}, 0, nil, false},
		{"context with one quote", []string{`context="u:object_r:t:s0`}, 0, nil, false},
		{"bind", []string{"noexec,bind"}, 0, nil, false},
		{"remount", []string{"remount"}, 0, nil, false},
		{"loop", []string{"loop=/dev/loop0"}, 0, nil, false},
		{"offset", []string{"offset=4096"}, 0, nil, false},
		{"no key", []string{"=x"}, 0, nil, false},
		{"newline", []string{"a\nb"}, 0, nil, false},
		{"long key", []string{strings.Repeat("a", 256)}, 0, nil, false},
		{"long value", []string{"a=" + strings.Repeat("a", 256)}, 0, nil, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			o, err := mount.ParseFlags(tc.in)
			if (err == nil) != tc.ok || o.Attr != tc.attr || !slices.Equal(o.FilesystemFlags(), tc.data) {
				t.Errorf("got %+v, %v, want attributes %#x, options of the filesystem %q, valid %t", o, err, tc.attr, tc.data, tc.ok)
			}
			if err != nil && !errors.Is(err, mount.ErrBadOption) {
				t.Errorf("got %v, want %v", err, mount.ErrBadOption)
			}
		})
	}
}

// TestInspect: Inspect describes directories, mount points, files, links and missing paths.
func TestInspect(t *testing.T) {
	testenv.RequireRoot(t)
	dir := testenv.Filesystem(t, "ext4", "64M")
	file, link := filepath.Join(dir, "file"), filepath.Join(dir, "link")
	must(t, os.WriteFile(file, nil, 0o600))
	must(t, os.Symlink(dir, link))
	for _, tc := range []struct {
		path                       string
		exists, mounted, directory bool
	}{
		{dir, true, true, true},
		{filepath.Dir(dir), true, false, true},
		{file, true, false, false},
		{link, true, false, false}, // Inspect does not follow the link
		{filepath.Join(dir, "none"), false, false, false},
		{filepath.Join(file, "below"), false, false, false},
	} {
		at, err := mount.Inspect(tc.path)
		if err != nil || at.Exists != tc.exists || at.IsMount != tc.mounted || at.IsDir() != tc.directory {
			t.Errorf("%s: got %+v, %v, want exists %t, mount point %t, directory %t", tc.path, at, err, tc.exists, tc.mounted, tc.directory)
		}
	}
}

// TestBind: a bind mount has the requested attributes and those of the source, MatchAttr recognizes it, and it can be
// unmounted and removed.
func TestBind(t *testing.T) {
	testenv.RequireRoot(t)
	source := testenv.Filesystem(t, "ext4", "64M", "nosuid")
	target := filepath.Join(t.TempDir(), "target")
	must(t, os.Mkdir(target, 0o755))
	o, err := mount.ParseFlags([]string{"ro,noexec,noatime"})
	must(t, err)
	must(t, mount.Bind(source, target, o))
	options := testenv.Run(t, "findmnt", "-n", "-o", "VFS-OPTIONS", target)
	for _, want := range []string{"ro", "noexec", "noatime", "nosuid"} {
		if !slices.Contains(strings.Split(options, ","), want) {
			t.Errorf("got mount options %s, want %s among them", options, want)
		}
	}
	if err := os.WriteFile(filepath.Join(target, "x"), nil, 0o600); !errors.Is(err, unix.EROFS) {
		t.Errorf("writing through a read-only mount: got %v, want EROFS", err)
	}
	must(t, os.WriteFile(filepath.Join(source, "x"), nil, 0o600))
	var from, to unix.Statfs_t
	must(t, unix.Statfs(source, &from))
	must(t, unix.Statfs(target, &to))
	if !o.With(from.Flags).MatchAttr(to.Flags) || o.MatchAttr(from.Flags) || o.MatchAttr(to.Flags) {
		t.Errorf("MatchAttr: want a match only for the target with the attributes of the source; statfs flags: source %x, target %x", from.Flags, to.Flags)
	}
	must(t, mount.Unmount(target))
	must(t, mount.RemoveTarget(target))
	must(t, mount.RemoveTarget(target))
	if err := mount.Unmount(source + "/x"); !errors.Is(err, unix.EINVAL) {
		t.Errorf("unmounting a path that is not a mount point: got %v, want EINVAL", err)
	}
}

// TestDetached: closing a detached mount unmounts it, unless it was moved to a path.
func TestDetached(t *testing.T) {
	device, _, _ := testenv.Disk(t, 64<<20)
	testenv.Run(t, "mkfs.ext4", "-q", device)
	d, err := mount.Filesystem(device, "ext4", mount.Options{})
	must(t, err)
	root, err := d.OpenRoot()
	must(t, err)
	must(t, root.Close())
	must(t, d.Close())
	if entries, err := mount.OfDevice(device); err != nil || len(entries) > 0 {
		t.Errorf("after Close: got mounts %v, %v, want none", entries, err)
	}
	d, err = mount.Filesystem(device, "ext4", mount.Options{Data: []string{"commit=7"}})
	must(t, err)
	target := t.TempDir()
	must(t, d.MoveTo(target))
	must(t, d.Close())
	entries, err := mount.OfDevice(device)
	if err != nil || len(entries) != 1 || entries[0].Mountpoint != target || !strings.Contains(entries[0].VFSOptions, "commit=7") {
		t.Errorf("after MoveTo: got mounts %+v, %v, want one at %s with commit=7", entries, err, target)
	}
	must(t, mount.Unmount(target))
}

// TestMountCopy: an xfs and its copy with the same UUID can be mounted at the same time.
func TestMountCopy(t *testing.T) {
	original, image, _ := testenv.Disk(t, 300<<20)
	testenv.Run(t, "mkfs.xfs", "-q", original)
	testenv.Run(t, "cp", image, image+".copy")
	for _, device := range []string{original, testenv.PlugIn(t, image+".copy")} {
		d, err := mount.Filesystem(device, "xfs", mount.Options{})
		must(t, err)
		t.Cleanup(func() { must(t, d.Close()) })
	}
}

// TestFilesystemErrors: the error of a mount contains the errno, the device and the type, and ErrBadOption if the
// kernel refused an option.
func TestFilesystemErrors(t *testing.T) {
	device, _, _ := testenv.Disk(t, 64<<20)
	for _, tc := range []struct {
		fsType string
		data   []string
		want   error
	}{
		{"ext4", nil, unix.EINVAL},
		{"xfs", nil, unix.EINVAL},
		{"nofs", nil, unix.ENODEV},
		{"ext4", []string{"no-such-option"}, mount.ErrBadOption},
		{"xfs", []string{"logbsize=never"}, mount.ErrBadOption},
	} {
		d, err := mount.Filesystem(device, tc.fsType, mount.Options{Data: tc.data})
		if err == nil {
			must(t, d.Close())
		}
		var e *mount.Error
		if !errors.Is(err, tc.want) || !errors.As(err, &e) || e.Source != device || e.FSType != tc.fsType {
			t.Errorf("%s with options %v: got %v, want %v with the device and the type", tc.fsType, tc.data, err, tc.want)
		}
	}
}

// TestForceUnmountOther: ForceUnmountNFS refuses a mount of another filesystem, and succeeds if nothing is mounted.
func TestForceUnmountOther(t *testing.T) {
	dir := testenv.Filesystem(t, "ext4", "64M")
	if err := mount.ForceUnmountNFS(t.Context(), dir); err == nil {
		t.Error("ForceUnmountNFS of an ext4: got no error, want one")
	}
	must(t, mount.ForceUnmountNFS(t.Context(), filepath.Join(dir, "none", "such")))
}
