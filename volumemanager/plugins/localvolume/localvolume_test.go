package localvolume_test

import (
	"context"
	"encoding/json"
	"errors"
	"io/fs"
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
)

func TestMain(m *testing.M) { testenv.Main(m) }

const mib = 1 << 20

type host struct {
	plugins.Host
	root string
}

func (h host) Paths() plugins.Paths { return plugins.Paths{Root: h.root} }

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

type machine struct {
	*localvolume.Plugin
	host
}

func newMachine(t *testing.T) *machine {
	t.Helper()
	testenv.RequireRoot(t)
	h := host{root: t.TempDir()}
	return &machine{localvolume.New(h), h}
}

// volume is a PersistentVolume of a path, changed as the caller wants it.
func volume(path string, change ...func(*corev1.PersistentVolume)) *plugins.Spec {
	pv := &corev1.PersistentVolume{}
	pv.Name = "pv"
	pv.Spec.Local = &corev1.LocalVolumeSource{Path: path}
	for _, c := range change {
		c(pv)
	}
	return &plugins.Spec{PersistentVolume: pv}
}

func fsType(name string) func(*corev1.PersistentVolume) {
	return func(pv *corev1.PersistentVolume) { pv.Spec.Local.FSType = &name }
}

func options(words ...string) func(*corev1.PersistentVolume) {
	return func(pv *corev1.PersistentVolume) { pv.Spec.MountOptions = words }
}

func podOf(uid string) *corev1.Pod {
	p := &corev1.Pod{}
	p.UID = types.UID(uid)
	return p
}

// device mounts a volume's device, which is unmounted when the test ends.
func (m *machine) device(t *testing.T, spec *plugins.Spec) error {
	t.Helper()
	needs, err := m.NeedsDeviceMount(spec)
	must(t, err)
	if !needs {
		t.Fatal("the device is not to be mounted")
	}
	t.Cleanup(func() { must(t, m.UnmountDevice(context.Background(), spec)) })
	return m.MountDevice(t.Context(), spec, nil, plugins.MounterArgs{})
}

// up sets a volume up for a pod, and takes it down when the test ends.
func (m *machine) up(t *testing.T, spec *plugins.Spec, uid string, args plugins.MounterArgs) (string, error) {
	t.Helper()
	mounter, err := m.NewMounter(spec, podOf(uid))
	must(t, err)
	t.Cleanup(func() { m.down(t, uid) })
	return mounter.Path(), mounter.SetUp(t.Context(), args)
}

func (m *machine) down(t *testing.T, uid string) {
	t.Helper()
	u, err := m.NewUnmounter("pv", types.UID(uid))
	must(t, err)
	must(t, u.TearDown(context.Background()))
	if _, err := os.Lstat(m.Paths().PodVolume(types.UID(uid), localvolume.Name, "pv")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the pod's directory is still there: %v", err)
	}
}

func wantText(t *testing.T, path, want string) {
	t.Helper()
	if b, err := os.ReadFile(path); err != nil || string(b) != want {
		t.Errorf("%s has %q, %v; want %q", path, b, err, want)
	}
}

func TestDirectory(t *testing.T) {
	m := newMachine(t)
	dir := t.TempDir()
	must(t, os.WriteFile(dir+"/file", []byte("text"), 0o600))
	must(t, os.Symlink(dir, m.root+"/link"))
	spec := volume(m.root+"/link", options("noexec"))
	if needs, err := m.NeedsDeviceMount(spec); err != nil || needs {
		t.Errorf("a directory is to be mounted for all: %t, %v", needs, err)
	}
	group := int64(4711)
	at, err := m.up(t, spec, "one", plugins.MounterArgs{FSGroup: &group})
	must(t, err)
	wantText(t, at+"/file", "text")
	e, err := mount.OnPath(at)
	must(t, err)
	if !strings.Contains(e.Options, "noexec") {
		t.Errorf("the mount has %s", e.Options)
	}
	info, err := os.Stat(dir + "/file")
	must(t, err)
	if st := info.Sys().(*syscall.Stat_t); st.Gid != 4711 || info.Mode() != 0o660 {
		t.Errorf("the file has group %d and %v", st.Gid, info.Mode())
	}

	must(t, os.Chmod(dir+"/file", 0o600)) // a pod's own business
	_, err = m.up(t, spec, "one", plugins.MounterArgs{FSGroup: &group})
	must(t, err)
	if again, err := mount.OnPath(at); err != nil || again.ID != e.ID {
		t.Errorf("it was mounted anew: %v", err)
	}
	if info, err := os.Stat(dir + "/file"); err != nil || info.Mode() != 0o600 {
		t.Errorf("the file is %v, %v", info, err)
	}

	spec.ReadOnly = true
	two, err := m.up(t, spec, "two", plugins.MounterArgs{FSGroup: &group})
	must(t, err)
	if err := os.WriteFile(two+"/file", nil, 0o600); !errors.Is(err, syscall.EROFS) {
		t.Errorf("writing read-only: %v", err)
	}
	m.down(t, "two")
	wantText(t, at+"/file", "text")
}

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
				must(t, m.device(t, spec))
			}
			at, err := m.up(t, spec, "one", plugins.MounterArgs{})
			must(t, err)
			e, err := mount.OnPath(at)
			must(t, err)
			if e.FSType != tc.want {
				t.Errorf("the filesystem is %s", e.FSType)
			}
			must(t, os.WriteFile(at+"/file", []byte("text"), 0o600))
			other, err := m.up(t, spec, "two", plugins.MounterArgs{})
			must(t, err)
			wantText(t, other+"/file", "text")

			mounts, err := m.DeviceMounts()
			must(t, err)
			if len(mounts) != 1 || mounts[0].VolumeName != "pv" {
				t.Fatalf("the disk has %+v", mounts)
			}
			m.down(t, "one")
			m.down(t, "two")
			must(t, m.UnmountDevice(t.Context(), mounts[0].Spec))
			if mounts, err := m.DeviceMounts(); err != nil || len(mounts) > 0 {
				t.Errorf("there still is %v, %v", mounts, err)
			}

			must(t, m.device(t, spec))
			at, err = m.up(t, spec, "one", plugins.MounterArgs{})
			must(t, err)
			wantText(t, at+"/file", "text")
		})
	}
}

// TestNotBlank: nothing is written to a device that has anything on it.
func TestNotBlank(t *testing.T) {
	for name, tc := range map[string]struct {
		fill func(t *testing.T, disk string)
		spec func(disk string) *plugins.Spec
		says string
	}{
		"data": {
			func(t *testing.T, disk string) { must(t, os.WriteFile(disk, []byte("data"), 0)) },
			func(disk string) *plugins.Spec { return volume(disk) }, "nothing was changed",
		},
		"another filesystem": {
			func(t *testing.T, disk string) { testenv.Run(t, "mkfs.ext4", "-q", disk) },
			func(disk string) *plugins.Spec { return volume(disk, fsType("xfs")) }, "has ext4",
		},
		"swap": {
			func(t *testing.T, disk string) { testenv.Run(t, "mkswap", disk) },
			func(disk string) *plugins.Spec { return volume(disk, fsType("ext4")) }, "nothing was changed",
		},
		"what cannot be made": {
			func(*testing.T, string) {},
			func(disk string) *plugins.Spec { return volume(disk, fsType("vfat")) }, "by hand",
		},
		"too small": {
			func(*testing.T, string) {},
			func(disk string) *plugins.Spec { return volume(disk, fsType("xfs")) }, "needs",
		},
	} {
		t.Run(name, func(t *testing.T) {
			m := newMachine(t)
			disk, _, _ := testenv.Disk(t, 64*mib)
			tc.fill(t, disk)
			before, err := os.ReadFile(disk)
			must(t, err)
			if err := m.device(t, tc.spec(disk)); err == nil || !strings.Contains(err.Error(), tc.says) {
				t.Errorf("mounting says %v", err)
			}
			if after, err := os.ReadFile(disk); err != nil || string(after) != string(before) {
				t.Errorf("the device was changed: %v", err)
			}
		})
	}
}

func TestDeviceBusy(t *testing.T) {
	m := newMachine(t)
	disk, _, _ := testenv.Disk(t, 64*mib)
	held, err := os.OpenFile(disk, os.O_RDWR|syscall.O_EXCL, 0)
	must(t, err)
	defer held.Close()
	if err := m.device(t, volume(disk)); err == nil || !strings.Contains(err.Error(), "the device is in use") {
		t.Errorf("mounting says %v", err)
	}
}

// TestCutOff: what a call has begun that was killed is made anew on the same device, and
// nowhere else.
func TestCutOff(t *testing.T) {
	begun := func(t *testing.T, m *machine, disk string, boot string) {
		f, err := os.Open(disk)
		must(t, err)
		defer f.Close()
		sequence, err := sys.DiskSequence(f)
		must(t, err)
		at, err := mount.Inspect(disk)
		must(t, err)
		b, err := json.Marshal(map[string]any{"boot": boot, "device": at.Rdev, "sequence": sequence})
		must(t, err)
		dir := m.Paths().Plugin(localvolume.Name) + "/formatting"
		must(t, os.MkdirAll(dir, 0o750))
		must(t, os.WriteFile(dir+"/pv", b, 0o600))
	}
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	must(t, err)
	thisBoot := strings.TrimSpace(string(boot))
	halfMade := func(t *testing.T, disk string) {
		f, err := os.OpenFile(disk, os.O_WRONLY, 0)
		must(t, err)
		defer f.Close()
		_, err = f.WriteAt([]byte("half made"), 4096)
		must(t, err)
	}
	luks := func(t *testing.T, disk string) {
		f, err := os.OpenFile(disk, os.O_WRONLY, 0)
		must(t, err)
		defer f.Close()
		_, err = f.WriteAt([]byte("LUKS\xba\xbe"), 0)
		must(t, err)
	}
	whole := func(t *testing.T, disk string) {
		testenv.Run(t, "mkfs.ext4", "-q", disk)
		dir := t.TempDir()
		testenv.Run(t, "mount", disk, dir)
		must(t, os.WriteFile(dir+"/file", []byte("text"), 0o600))
		testenv.Run(t, "umount", dir)
	}
	for name, tc := range map[string]struct {
		boot string
		fill func(t *testing.T, disk string)
		says string
		text string
	}{
		"half made":             {thisBoot, halfMade, "", ""},
		"another's since":       {thisBoot, luks, "a LUKS volume", ""},
		"blank":                 {thisBoot, func(*testing.T, string) {}, "", ""},
		"whole":                 {thisBoot, whole, "", "text"},
		"before the boot":       {"before", halfMade, "went down", ""},
		"whole, before":         {"before", whole, "went down", ""},
		"blank, before":         {"before", func(*testing.T, string) {}, "", ""},
		"never begun":           {"", halfMade, "nothing was changed", ""},
		"whole and never begun": {"", whole, "", "text"},
	} {
		t.Run(name, func(t *testing.T) {
			m := newMachine(t)
			disk, _, _ := testenv.Disk(t, 64*mib)
			tc.fill(t, disk)
			if tc.boot != "" {
				begun(t, m, disk, tc.boot)
			}
			spec := volume(disk)
			err := m.device(t, spec)
			if tc.says != "" {
				if err == nil || !strings.Contains(err.Error(), tc.says) {
					t.Errorf("mounting says %v", err)
				}
				return
			}
			must(t, err)
			at, err := m.DeviceMountPath(spec)
			must(t, err)
			if tc.text != "" {
				wantText(t, at+"/file", tc.text)
			}
			if left, err := filepath.Glob(m.Paths().Plugin(localvolume.Name) + "/formatting/*"); err != nil || len(left) > 0 {
				t.Errorf("the mark is still there: %v, %v", left, err)
			}
		})
	}
}

func TestBlock(t *testing.T) {
	m := newMachine(t)
	disk, _, _ := testenv.Disk(t, mib)
	block := corev1.PersistentVolumeBlock
	raw := func(pv *corev1.PersistentVolume) { pv.Spec.VolumeMode = &block }
	spec := volume(disk, raw)
	if needs, err := m.NeedsDeviceMount(spec); err != nil || needs {
		t.Errorf("a raw device is to be mounted: %t, %v", needs, err)
	}
	mapper, err := m.NewBlockVolumeMapper(spec, podOf("one"))
	must(t, err)
	must(t, os.MkdirAll(filepath.Dir(mapper.Path()), 0o750))
	must(t, os.Symlink("/dev/gone", mapper.Path()))
	shown, other := m.root+"/plugins/kubernetes.io~local-volume/volumeDevices/pv/one", filepath.Join(t.TempDir(), "node")
	must(t, syscall.Mknod(other, syscall.S_IFBLK|0o600, 0x101))
	must(t, os.MkdirAll(filepath.Dir(shown), 0o750))
	must(t, os.WriteFile(shown, nil, 0o600))
	must(t, mount.Bind(other, shown, mount.Options{}))
	for range 2 {
		must(t, mapper.SetUpDevice(t.Context(), nil))
		must(t, mapper.MapPodDevice(t.Context()))
	}
	if to, err := os.Readlink(mapper.Path()); err != nil || to != disk {
		t.Errorf("the link leads to %q, %v", to, err)
	}
	have, err := mount.Inspect(shown)
	must(t, err)
	want, err := mount.Inspect(disk)
	must(t, err)
	if at, err := mount.Below(shown); err != nil || len(at) != 1 || !have.IsBlock() || have.Rdev != want.Rdev {
		t.Errorf("shown is %+v, mounted %v, %v; want device %d", have, at, err, want.Rdev)
	}
	unmapper, err := m.NewBlockVolumeUnmapper("pv", "one")
	must(t, err)
	for range 2 {
		must(t, unmapper.UnmapPodDevice(t.Context()))
	}
	must(t, m.UnmountDevice(t.Context(), spec))
	if _, err := os.Lstat(mapper.Path()); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the link is still there: %v", err)
	}
	if _, err := os.Lstat(filepath.Dir(shown)); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the device is still shown: %v", err)
	}
	must(t, os.WriteFile(mapper.Path(), nil, 0o600))
	if err := unmapper.UnmapPodDevice(t.Context()); err == nil {
		t.Error("a file was removed")
	}
	mapper, err = m.NewBlockVolumeMapper(volume(t.TempDir(), raw), podOf("one"))
	must(t, err)
	if err := mapper.SetUpDevice(t.Context(), nil); err == nil {
		t.Error("a directory was taken for a device")
	}
}

func TestBadInput(t *testing.T) {
	m := newMachine(t)
	for _, spec := range []*plugins.Spec{volume("relative"), volume("/a/../b"), volume("/a", options("bind"))} {
		var invalid *plugins.InvalidError
		if _, err := m.NewMounter(spec, podOf("one")); !errors.As(err, &invalid) {
			t.Errorf("%+v: %v", spec.PersistentVolume.Spec, err)
		}
	}
	for path, says := range map[string]string{m.root + "/missing": "create it", "/dev/null": "neither"} {
		if _, err := m.NeedsDeviceMount(volume(path)); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v", path, err)
		}
	}
	var invalid *plugins.InvalidError
	if _, err := m.up(t, volume(t.TempDir(), options("commit=3")), "one", plugins.MounterArgs{}); !errors.As(err, &invalid) {
		t.Errorf("an option of a filesystem for a directory: %v", err)
	}
	disk, _, _ := testenv.Disk(t, 64*mib)
	if err := m.device(t, volume(disk, options("no-such-option"))); !errors.As(err, &invalid) {
		t.Errorf("an option that there is not: %v", err)
	}
}

// TestMountOptions: options are those of the closed list of the filesystem, and of any one
// if none is named; they are checked before anything is done.
func TestMountOptions(t *testing.T) {
	m := newMachine(t)
	for name, tc := range map[string]struct {
		spec *plugins.Spec
		says string // empty: allowed
	}{
		"panic":                {volume("/dev/disk", fsType("ext4"), options("errors=panic")), "errors=continue|remount-ro"},
		"abort":                {volume("/dev/disk", fsType("ext4"), options("noatime", "abort")), `"abort" is not allowed for ext4`},
		"other superblock":     {volume("/dev/disk", options("sb=8193")), `"sb=8193"`},
		"of another":           {volume("/dev/disk", fsType("ext4"), options("logbufs=8")), `"logbufs=8" is not allowed for ext4`},
		"of any":               {volume("/dev/disk", options("logbufs=8")), ""},
		"of its own":           {volume("/dev/disk", fsType("xfs"), options("logbufs=8")), ""},
		"unknown to this list": {volume("/dev/disk", fsType("vfat"), options("noatime", "umask=077")), ""},
	} {
		_, err := m.NewMounter(tc.spec, podOf("one"))
		if (err == nil) != (tc.says == "") || err != nil && !strings.Contains(err.Error(), tc.says) {
			t.Errorf("%s: %v, want %q", name, err, tc.says)
		}
	}
}
