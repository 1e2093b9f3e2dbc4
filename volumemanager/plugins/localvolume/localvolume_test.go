package localvolume_test

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/linux/sys"
	"github.com/trivet-csi/trivet/volumemanager/plugins"
	"github.com/trivet-csi/trivet/volumemanager/plugins/localvolume"
	"github.com/trivet-csi/trivet/volumemanager/plugins/plugintest"
)

func TestMain(m *testing.M) { testenv.Main(m) }

const mib = 1 << 20

var must = plugintest.Must

// machine is the plugin with its host.
type machine struct {
	*localvolume.Plugin
	*plugintest.Host
}

func newMachine(t *testing.T) *machine {
	t.Helper()
	testenv.RequireRoot(t)
	h := plugintest.NewHost(t.TempDir())
	return &machine{localvolume.New(h), h}
}

// volume returns a PersistentVolume with a local.path, and applies changes to it.
func volume(path string, change ...func(*corev1.PersistentVolume)) *plugins.Spec {
	pv := &corev1.PersistentVolume{}
	pv.Name = "pv"
	pv.Spec.Local = &corev1.LocalVolumeSource{Path: path}
	for _, c := range change {
		c(pv)
	}
	return &plugins.Spec{PersistentVolume: pv}
}

// fsType is a change for volume that sets local.fsType.
func fsType(name string) func(*corev1.PersistentVolume) {
	return func(pv *corev1.PersistentVolume) { pv.Spec.Local.FSType = &name }
}

// options is a change for volume that sets mountOptions.
func options(words ...string) func(*corev1.PersistentVolume) {
	return func(pv *corev1.PersistentVolume) { pv.Spec.MountOptions = words }
}

func podOf(uid string) *corev1.Pod {
	p := &corev1.Pod{}
	p.UID = types.UID(uid)
	return p
}

// mountDevice mounts a volume's device until the test ends.
func (m *machine) mountDevice(t *testing.T, spec *plugins.Spec) error {
	t.Helper()
	needs := plugintest.Value(m.NeedsDeviceMount(spec))(t)
	if !needs {
		t.Fatal("NeedsDeviceMount: got false, want true")
	}
	t.Cleanup(func() { must(t, m.UnmountDevice(context.Background(), spec)) })
	return m.MountDevice(t.Context(), spec, nil, plugins.MounterArgs{})
}

// up sets a volume up for a pod until the test ends, and returns its path.
func (m *machine) up(t *testing.T, spec *plugins.Spec, uid string, args plugins.MounterArgs) (string, error) {
	t.Helper()
	mounter := plugintest.Value(m.NewMounter(spec, podOf(uid)))(t)
	t.Cleanup(func() { m.down(t, uid) })
	return mounter.Path(), mounter.SetUp(t.Context(), args)
}

func (m *machine) down(t *testing.T, uid string) {
	t.Helper()
	u := plugintest.Value(m.NewUnmounter("pv", types.UID(uid)))(t)
	must(t, u.TearDown(context.Background()))
	plugintest.WantMissing(t, m.Paths().PodVolume(types.UID(uid), localvolume.Name, "pv"))
}

// TestDirectory: a directory is bind-mounted with its mount options and the pod's group. SetUp does not change
// an existing mount or the files in it.
func TestDirectory(t *testing.T) {
	m := newMachine(t)
	dir := t.TempDir()
	must(t, os.WriteFile(dir+"/file", []byte("text"), 0o600))
	must(t, os.Symlink(dir, m.Root+"/link"))
	spec := volume(m.Root+"/link", options("noexec"))
	if needs, err := m.NeedsDeviceMount(spec); err != nil || needs {
		t.Errorf("NeedsDeviceMount of a directory: got %t, %v; want false", needs, err)
	}
	group := int64(4711)
	at := plugintest.Value(m.up(t, spec, "one", plugins.MounterArgs{FSGroup: &group}))(t)
	plugintest.WantText(t, at+"/file", "text")
	e := plugintest.MountAt(t, at)
	if !strings.Contains(e.Options, "noexec") {
		t.Errorf("got mount options %s, want noexec among them", e.Options)
	}
	info := plugintest.Value(os.Stat(dir + "/file"))(t)
	if st := info.Sys().(*syscall.Stat_t); st.Gid != 4711 || info.Mode() != 0o660 {
		t.Errorf("file: got group %d and mode %v, want 4711 and 0660", st.Gid, info.Mode())
	}

	must(t, os.Chmod(dir+"/file", 0o600)) // as a pod may
	plugintest.Value(m.up(t, spec, "one", plugins.MounterArgs{FSGroup: &group}))(t)
	if after := plugintest.MountAt(t, at); after.ID != e.ID {
		t.Errorf("the volume was mounted again: got %+v, want %+v", after, e)
	}
	if info, err := os.Stat(dir + "/file"); err != nil || info.Mode() != 0o600 {
		t.Errorf("file after the second SetUp: got %v, %v; want mode 0600", info, err)
	}

	spec.ReadOnly = true
	two := plugintest.Value(m.up(t, spec, "two", plugins.MounterArgs{FSGroup: &group}))(t)
	if err := os.WriteFile(two+"/file", nil, 0o600); !errors.Is(err, syscall.EROFS) {
		t.Errorf("write to a read-only volume: got %v, want EROFS", err)
	}
	m.down(t, "two")
	plugintest.WantText(t, at+"/file", "text")
}

// TestDevice: a filesystem is created on a blank device, mounted once, and bind-mounted for two pods. Its
// content is kept when it is mounted again.
func TestDevice(t *testing.T) {
	for name, tc := range map[string]struct {
		change []func(*corev1.PersistentVolume)
		want   string
	}{
		"default": {nil, "ext4"},
		"ext4":    {[]func(*corev1.PersistentVolume){fsType("ext4"), options("noatime", "commit=30")}, "ext4"},
		"xfs":     {[]func(*corev1.PersistentVolume){fsType("xfs")}, "xfs"},
		"btrfs":   {[]func(*corev1.PersistentVolume){fsType("btrfs")}, "btrfs"},
	} {
		t.Run(name, func(t *testing.T) {
			m := newMachine(t)
			disk, _, _ := testenv.Disk(t, 320*mib)
			spec := volume(disk, tc.change...)
			for range 2 {
				must(t, m.mountDevice(t, spec))
			}
			at := plugintest.Value(m.up(t, spec, "one", plugins.MounterArgs{}))(t)
			if e := plugintest.MountAt(t, at); e.FSType != tc.want {
				t.Errorf("got filesystem %s, want %s", e.FSType, tc.want)
			}
			must(t, os.WriteFile(at+"/file", []byte("text"), 0o600))
			other := plugintest.Value(m.up(t, spec, "two", plugins.MounterArgs{}))(t)
			plugintest.WantText(t, other+"/file", "text")

			mounts := plugintest.Value(m.DeviceMounts())(t)
			if len(mounts) != 1 || mounts[0].VolumeName != "pv" {
				t.Fatalf("got device mounts %+v, want that of pv", mounts)
			}
			m.down(t, "one")
			m.down(t, "two")
			must(t, m.UnmountDevice(t.Context(), mounts[0].Spec))
			if mounts, err := m.DeviceMounts(); err != nil || len(mounts) > 0 {
				t.Errorf("after UnmountDevice: got device mounts %v, %v; want none", mounts, err)
			}

			must(t, m.mountDevice(t, spec))
			at = plugintest.Value(m.up(t, spec, "one", plugins.MounterArgs{}))(t)
			plugintest.WantText(t, at+"/file", "text")
		})
	}
}

// TestNotBlank: nothing is written to a device that contains data, or on which the requested filesystem
// cannot be created.
func TestNotBlank(t *testing.T) {
	for name, tc := range map[string]struct {
		fill    func(t *testing.T, disk string)
		spec    func(disk string) *plugins.Spec
		wantErr string
	}{
		"data": {
			func(t *testing.T, disk string) { must(t, os.WriteFile(disk, []byte("data"), 0)) },
			func(disk string) *plugins.Spec { return volume(disk) }, "nothing was changed",
		},
		"filesystem of another type": {
			func(t *testing.T, disk string) { testenv.Run(t, "mkfs.ext4", "-q", disk) },
			func(disk string) *plugins.Spec { return volume(disk, fsType("xfs")) }, "has ext4",
		},
		"swap": {
			func(t *testing.T, disk string) { testenv.Run(t, "mkswap", disk) },
			func(disk string) *plugins.Spec { return volume(disk, fsType("ext4")) }, "nothing was changed",
		},
		"blank, for an unsupported filesystem": {
			func(*testing.T, string) {},
			func(disk string) *plugins.Spec { return volume(disk, fsType("vfat")) }, "by hand",
		},
		"blank, but too small": {
			func(*testing.T, string) {},
			func(disk string) *plugins.Spec { return volume(disk, fsType("xfs")) }, "needs",
		},
	} {
		t.Run(name, func(t *testing.T) {
			m := newMachine(t)
			disk, _, _ := testenv.Disk(t, 64*mib)
			tc.fill(t, disk)
			before := plugintest.Value(os.ReadFile(disk))(t)
			plugintest.WantError(t, m.mountDevice(t, tc.spec(disk)), tc.wantErr)
			if after, err := os.ReadFile(disk); err != nil || string(after) != string(before) {
				t.Errorf("got a device with other content or error %v, want the content unchanged", err)
			}
		})
	}
}

// TestDeviceBusy: a device that is in use is not mounted.
func TestDeviceBusy(t *testing.T) {
	m := newMachine(t)
	disk, _, _ := testenv.Disk(t, 64*mib)
	held := plugintest.Value(os.OpenFile(disk, os.O_RDWR|syscall.O_EXCL, 0))(t)
	defer held.Close()
	plugintest.WantError(t, m.mountDevice(t, volume(disk)), "the device is in use")
}

// TestFormatInterrupted: after mkfs was interrupted, the filesystem is created again, but only on the
// device that the record identifies.
func TestFormatInterrupted(t *testing.T) {
	// writeRecord writes the record of a disk with a boot ID.
	writeRecord := func(t *testing.T, m *machine, disk string, boot string) {
		f := plugintest.Value(os.Open(disk))(t)
		defer f.Close()
		sequence := plugintest.Value(sys.DiskSequence(f))(t)
		at := plugintest.Value(mount.Inspect(disk))(t)
		b := plugintest.Value(json.Marshal(map[string]any{"version": 1, "boot": boot, "device": at.Rdev, "sequence": sequence}))(t)
		dir := m.Paths().Plugin(localvolume.Name) + "/formatting"
		must(t, os.MkdirAll(dir, 0o750))
		must(t, os.WriteFile(dir+"/pv", b, 0o600))
	}
	boot := plugintest.Value(os.ReadFile("/proc/sys/kernel/random/boot_id"))(t)
	thisBoot := strings.TrimSpace(string(boot))
	writeAt := func(text string, offset int64) func(*testing.T, string) {
		return func(t *testing.T, disk string) {
			f := plugintest.Value(os.OpenFile(disk, os.O_WRONLY, 0))(t)
			defer f.Close()
			plugintest.Value(f.WriteAt([]byte(text), offset))(t)
		}
	}
	partial, luks := writeAt("partial filesystem", 4096), writeAt("LUKS\xba\xbe", 0)
	complete := func(t *testing.T, disk string) {
		testenv.Run(t, "mkfs.ext4", "-q", disk)
		dir := t.TempDir()
		testenv.Run(t, "mount", disk, dir)
		must(t, os.WriteFile(dir+"/file", []byte("text"), 0o600))
		testenv.Run(t, "umount", dir)
	}
	for name, tc := range map[string]struct {
		boot    string // boot ID in the record; empty if there is no record
		fill    func(t *testing.T, disk string)
		wantErr string
		text    string // content of the file in the filesystem; empty if there is none
	}{
		"partial filesystem":                      {thisBoot, partial, "", ""},
		"LUKS volume created later":               {thisBoot, luks, "a LUKS volume", ""},
		"blank":                                   {thisBoot, func(*testing.T, string) {}, "", ""},
		"complete filesystem":                     {thisBoot, complete, "", "text"},
		"partial filesystem, record before boot":  {"before", partial, "went down", ""},
		"complete filesystem, record before boot": {"before", complete, "went down", ""},
		"blank, record before boot":               {"before", func(*testing.T, string) {}, "", ""},
		"partial filesystem, no record":           {"", partial, "nothing was changed", ""},
		"complete filesystem, no record":          {"", complete, "", "text"},
	} {
		t.Run(name, func(t *testing.T) {
			m := newMachine(t)
			disk, _, _ := testenv.Disk(t, 64*mib)
			tc.fill(t, disk)
			if tc.boot != "" {
				writeRecord(t, m, disk, tc.boot)
			}
			spec := volume(disk)
			err := m.mountDevice(t, spec)
			if tc.wantErr != "" {
				plugintest.WantError(t, err, tc.wantErr)
				return
			}
			must(t, err)
			at := plugintest.Value(m.DeviceMountPath(spec))(t)
			if tc.text != "" {
				plugintest.WantText(t, at+"/file", tc.text)
			}
			if left, err := filepath.Glob(m.Paths().Plugin(localvolume.Name) + "/formatting/*"); err != nil || len(left) > 0 {
				t.Errorf("got records %v, %v; want none", left, err)
			}
		})
	}
}

// TestBlock: the pod's path links to a raw device, which is also bind-mounted. A link to and a mount of
// another device are replaced. Both are removed with the pod's volume.
func TestBlock(t *testing.T) {
	m := newMachine(t)
	disk, _, _ := testenv.Disk(t, mib)
	block := corev1.PersistentVolumeBlock
	raw := func(pv *corev1.PersistentVolume) { pv.Spec.VolumeMode = &block }
	spec := volume(disk, raw)
	if needs, err := m.NeedsDeviceMount(spec); err != nil || needs {
		t.Errorf("NeedsDeviceMount of a raw device: got %t, %v; want false", needs, err)
	}
	mapper := plugintest.Value(m.NewBlockVolumeMapper(spec, podOf("one")))(t)
	must(t, os.MkdirAll(filepath.Dir(mapper.Path()), 0o750))
	must(t, os.Symlink("/dev/missing", mapper.Path()))
	bound, other := m.Root+"/plugins/kubernetes.io~local-volume/volumeDevices/pv/one", filepath.Join(t.TempDir(), "node")
	must(t, syscall.Mknod(other, syscall.S_IFBLK|0o600, 0x101))
	must(t, os.MkdirAll(filepath.Dir(bound), 0o750))
	must(t, os.WriteFile(bound, nil, 0o600))
	must(t, mount.Bind(other, bound, mount.Options{}))
	for range 2 {
		must(t, mapper.SetUpDevice(t.Context(), nil))
		must(t, mapper.MapPodDevice(t.Context()))
	}
	if to, err := os.Readlink(mapper.Path()); err != nil || to != disk {
		t.Errorf("got a link to %q, %v; want %q", to, err, disk)
	}
	got := plugintest.Value(mount.Inspect(bound))(t)
	want := plugintest.Value(mount.Inspect(disk))(t)
	if at, err := mount.Below(bound); err != nil || len(at) != 1 || !got.IsBlock() || got.Rdev != want.Rdev {
		t.Errorf("%s: got %+v with the mounts %v, %v; want one mount of device %d", bound, got, at, err, want.Rdev)
	}
	unmapper := plugintest.Value(m.NewBlockVolumeUnmapper("pv", "one"))(t)
	for range 2 {
		must(t, unmapper.UnmapPodDevice(t.Context()))
	}
	must(t, m.UnmountDevice(t.Context(), spec))
	plugintest.WantMissing(t, mapper.Path())
	plugintest.WantMissing(t, filepath.Dir(bound))
	must(t, os.WriteFile(mapper.Path(), nil, 0o600))
	plugintest.WantError(t, unmapper.UnmapPodDevice(t.Context()), "is not a symbolic link")
	mapper = plugintest.Value(m.NewBlockVolumeMapper(volume(t.TempDir(), raw), podOf("one")))(t)
	plugintest.WantError(t, mapper.SetUpDevice(t.Context(), nil), "it is a directory")
}

// TestBadInput: the error about an invalid path or mount option names the value.
func TestBadInput(t *testing.T) {
	m := newMachine(t)
	for _, spec := range []*plugins.Spec{volume("relative"), volume("/a/../b"), volume("/a", options("bind"))} {
		_, err := m.NewMounter(spec, podOf("one"))
		plugintest.WantInvalid(t, err)
	}
	for path, wantErr := range map[string]string{m.Root + "/missing": "create the path", "/dev/null": "neither"} {
		_, err := m.NeedsDeviceMount(volume(path))
		plugintest.WantError(t, err, path, wantErr)
	}
	for _, option := range []string{"commit=3", `context="u:object_r:t:s0:c1,c2"`} {
		_, err := m.up(t, volume(t.TempDir(), options(option)), "one", plugins.MounterArgs{})
		plugintest.WantInvalid(t, err, option, "an option of a filesystem")
	}
	disk, _, _ := testenv.Disk(t, 64*mib)
	plugintest.WantInvalid(t, m.mountDevice(t, volume(disk, options("no-such-option"))), "no-such-option")
}

// TestMountOptions: NewMounter accepts only options that are listed for the filesystem, or for any
// filesystem if the type is not specified.
func TestMountOptions(t *testing.T) {
	m := newMachine(t)
	for name, tc := range map[string]struct {
		spec    *plugins.Spec
		wantErr string // in the error; empty if the options are valid
	}{
		"errors=panic":                    {volume("/dev/disk", fsType("ext4"), options("errors=panic")), "errors=continue|remount-ro"},
		"abort":                           {volume("/dev/disk", fsType("ext4"), options("noatime", "abort")), `"abort" is not allowed for ext4`},
		"another superblock":              {volume("/dev/disk", options("sb=8193")), `"sb=8193"`},
		"option of another filesystem":    {volume("/dev/disk", fsType("ext4"), options("logbufs=8")), `"logbufs=8" is not allowed for ext4`},
		"no type, option of xfs":          {volume("/dev/disk", options("logbufs=8")), ""},
		"option of the filesystem":        {volume("/dev/disk", fsType("xfs"), options("logbufs=8")), ""},
		"option of an unknown filesystem": {volume("/dev/disk", fsType("vfat"), options("noatime", "umask=077")), ""},
	} {
		_, err := m.NewMounter(tc.spec, podOf("one"))
		if (err == nil) != (tc.wantErr == "") || err != nil && !strings.Contains(err.Error(), tc.wantErr) {
			t.Errorf("%s: got error %v, want %q", name, err, tc.wantErr)
		}
	}
}
