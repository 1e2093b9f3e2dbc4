package emptydir_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"

	"github.com/trivet-csi/trivet/internal/retry"
	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/linux/quota"
	"github.com/trivet-csi/trivet/volumemanager/plugins"
	"github.com/trivet-csi/trivet/volumemanager/plugins/emptydir"
	"github.com/trivet-csi/trivet/volumemanager/plugins/plugintest"
)

func TestMain(m *testing.M) { testenv.Main(m) }

const (
	mib = 1 << 20
	uid = types.UID("11111111-2222-3333-4444-555555555555")
)

var must = plugintest.Must

// machine is the plugin with its host. Its test fails if a volume or a record remains at the end.
type machine struct {
	*emptydir.Plugin
	*plugintest.Host
}

// newMachine returns a machine whose root directory is root.
func newMachine(t *testing.T, root string) *machine {
	t.Helper()
	testenv.RequireRoot(t)
	m := &machine{Host: plugintest.NewHost(root)}
	m.restart()
	t.Cleanup(func() {
		m.down(t, "data")
		left, err := filepath.Glob(root + "/plugins/kubernetes.io/empty-dir/records/*")
		if err != nil || len(left) > 0 {
			t.Errorf("got records %v, %v at the end of the test; want none", left, err)
		}
		plugintest.WantMissing(t, m.path())
	})
	return m
}

// restart replaces the plugin, as a restart of the manager does.
func (m *machine) restart() { m.Plugin = emptydir.New(m.Host) }

func (m *machine) path() string { return m.Paths().PodVolume(uid, emptydir.Name, "data") }

func spec(source corev1.EmptyDirVolumeSource) *plugins.Spec {
	return &plugins.Spec{Volume: &corev1.Volume{Name: "data", VolumeSource: corev1.VolumeSource{EmptyDir: &source}}}
}

// emptyDir returns an emptyDir with a size limit; 0 is no limit.
func emptyDir(medium corev1.StorageMedium, bytes int64) corev1.EmptyDirVolumeSource {
	source := corev1.EmptyDirVolumeSource{Medium: medium}
	if bytes > 0 {
		source.SizeLimit = resource.NewQuantity(bytes, resource.BinarySI)
	}
	return source
}

// pod returns a pod whose container has these requests.
func pod(requests corev1.ResourceList) *corev1.Pod {
	p := &corev1.Pod{}
	p.UID = uid
	p.Spec.Containers = []corev1.Container{{Name: "main", Resources: corev1.ResourceRequirements{Requests: requests}}}
	return p
}

func (m *machine) mounter(t *testing.T, source corev1.EmptyDirVolumeSource) plugins.Mounter {
	t.Helper()
	return plugintest.Value(m.NewMounter(spec(source), pod(nil)))(t)
}

// up sets a volume up, and returns its warnings.
func (m *machine) up(t *testing.T, source corev1.EmptyDirVolumeSource, args plugins.MounterArgs) []string {
	t.Helper()
	mounter := m.mounter(t, source)
	must(t, mounter.SetUp(t.Context(), args))
	if mounter.Path() != m.path() {
		t.Errorf("got path %s, want %s", mounter.Path(), m.path())
	}
	return mounter.(plugins.Warner).Warnings()
}

// down removes a volume. While its quota ID is busy, it tries again.
func (m *machine) down(t *testing.T, name string) {
	t.Helper()
	u := plugintest.Value(m.NewUnmounter(name, uid))(t)
	must(t, retry.For(context.Background(), 30*time.Second, func() (bool, error) {
		err := u.TearDown(context.Background())
		return errors.Is(err, quota.ErrBusy), err
	}))
}

// wantMode requires the owner root, a group and a mode.
func wantMode(t *testing.T, path string, gid uint32, mode uint32) {
	t.Helper()
	var st syscall.Stat_t
	must(t, syscall.Lstat(path, &st))
	if st.Gid != gid || st.Mode&0o7777 != mode || st.Uid != 0 {
		t.Errorf("%s: got owner %d:%d and mode %o, want 0:%d and %o", path, st.Uid, st.Gid, st.Mode&0o7777, gid, mode)
	}
}

// fill writes up to maxBytes to a file until a write fails, and returns the size of the file. It runs a
// program without capabilities, because ext4 enforces no limits for CAP_SYS_RESOURCE. It writes
// synchronously, because btrfs counts only data on the disk.
func fill(t *testing.T, path string, maxBytes int64) int64 {
	t.Helper()
	f := plugintest.Value(os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_SYNC, 0o600))(t)
	defer f.Close()
	c := exec.Command("dd", "if=/dev/zero", "bs=1M", fmt.Sprintf("count=%d", maxBytes/mib), "status=none")
	c.Stdout = f
	c.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	_ = c.Run()
	info := plugintest.Value(f.Stat())(t)
	return info.Size()
}

// TestDisk: a volume on disk is created with the pod's group. SetUp does not change an existing volume, and
// TearDown removes its content.
func TestDisk(t *testing.T) {
	for _, fsType := range []string{"ext4", "xfs", "btrfs"} {
		t.Run(fsType, func(t *testing.T) {
			m := newMachine(t, testenv.Filesystem(t, fsType, "320M"))
			group := int64(4711)
			m.up(t, emptyDir("", 0), plugins.MounterArgs{FSGroup: &group})
			wantMode(t, m.path(), 4711, 0o2777)
			must(t, os.WriteFile(m.path()+"/file", []byte("text"), 0o600))
			must(t, os.Chmod(m.path(), 0o700)) // as a pod may
			m.restart()
			m.up(t, emptyDir("", 0), plugins.MounterArgs{FSGroup: &group})
			wantMode(t, m.path(), 4711, 0o700)
			wantMode(t, m.path()+"/file", 4711, 0o600)
			m.down(t, "data")
			m.up(t, emptyDir("", 0), plugins.MounterArgs{})
			wantMode(t, m.path(), 0, 0o777)
			plugintest.WantEntries(t, m.path(), 0)
		})
	}
}

// TestSizeLimit: btrfs limits the size of a volume.
func TestSizeLimit(t *testing.T) { testSizeLimit(t, newMachine(t, testenv.SimpleQuotas(t, "512M"))) }

// testSizeLimit fills a volume, raises its limit, fills it again, and removes its limit.
func testSizeLimit(t *testing.T, m *machine) {
	t.Helper()
	if w := m.up(t, emptyDir("", 16*mib), plugins.MounterArgs{}); len(w) > 0 {
		t.Errorf("got warnings %q, want none", w)
	}
	if n := fill(t, m.path()+"/file", 64*mib); n < 8*mib || n > 16*mib {
		t.Errorf("limit 16 MiB: got %d bytes written, want 8 to 16 MiB", n)
	}
	m.restart()
	m.up(t, emptyDir("", 32*mib), plugins.MounterArgs{})
	if n := fill(t, m.path()+"/more", 64*mib); n < 8*mib || n > 24*mib {
		t.Errorf("limit 32 MiB: got %d more bytes written, want 8 to 24 MiB", n)
	}
	m.up(t, emptyDir("", 0), plugins.MounterArgs{})
	if n := fill(t, m.path()+"/unlimited", 64*mib); n != 64*mib {
		t.Errorf("without a limit: got %d bytes written, want 64 MiB", n)
	}
}

// TestSizeLimitNotEnforced: on a filesystem without quotas, SetUp succeeds with a warning that says how to
// enable them.
func TestSizeLimitNotEnforced(t *testing.T) {
	for fsType, want := range map[string]string{"ext4": "prjquota", "btrfs": "quota enable"} {
		m := newMachine(t, testenv.Filesystem(t, fsType, "128M"))
		for range 2 {
			w := m.up(t, emptyDir("", 16*mib), plugins.MounterArgs{})
			if len(w) != 1 || !strings.Contains(w[0], "sizeLimit 16Mi is not enforced") || !strings.Contains(w[0], want) {
				t.Errorf("%s: got warnings %q, want one with %q", fsType, w, want)
			}
		}
	}
}

// TestLimitAdded: a volume that was created without a limit gets none later.
func TestLimitAdded(t *testing.T) {
	m := newMachine(t, testenv.SimpleQuotas(t, "256M"))
	m.up(t, emptyDir("", 0), plugins.MounterArgs{})
	if w := m.up(t, emptyDir("", mib), plugins.MounterArgs{}); len(w) != 1 || !strings.Contains(w[0], "recreate the pod") {
		t.Errorf("got warnings %q, want one that contains the remedy", w)
	}
}

// TestKilled: SetUp completes a call of SetUp or TearDown that was interrupted.
func TestKilled(t *testing.T) {
	record := func(m *machine) string {
		return m.Root + "/plugins/kubernetes.io/empty-dir/records/" + string(uid) + ".data.json"
	}
	for name, interrupt := range map[string]func(t *testing.T, m *machine){
		"in SetUp, before the record is written": func(t *testing.T, m *machine) { must(t, os.Remove(record(m))) },
		"in SetUp, while the record is written":  func(t *testing.T, m *machine) { must(t, os.Rename(record(m), record(m)+".tmp")) },
		"in SetUp, before the mode is set": func(t *testing.T, m *machine) {
			must(t, os.Remove(record(m)))
			must(t, os.Chmod(m.path(), 0o700))
		},
		"in SetUp, before the limit is set": func(t *testing.T, m *machine) {
			must(t, os.Remove(record(m)))
			must(t, os.Remove(m.path()))
			must(t, os.Mkdir(m.path(), 0o700))
		},
		"in TearDown, after the directory is removed": func(t *testing.T, m *machine) { must(t, os.Remove(m.path())) },
	} {
		t.Run(name, func(t *testing.T) {
			m := newMachine(t, testenv.SimpleQuotas(t, "256M"))
			m.up(t, emptyDir("", 16*mib), plugins.MounterArgs{})
			interrupt(t, m)
			m.restart()
			mounter := m.mounter(t, emptyDir("", 16*mib))
			must(t, retry.For(t.Context(), 30*time.Second, func() (bool, error) {
				err := mounter.SetUp(t.Context(), plugins.MounterArgs{})
				return errors.Is(err, quota.ErrBusy), err
			}))
			wantMode(t, m.path(), 0, 0o777)
			if n := fill(t, m.path()+"/file", 64*mib); n > 16*mib {
				t.Errorf("limit 16 MiB: got %d bytes written, want at most 16 MiB", n)
			}
			m.down(t, "data")
			plugintest.WantMissing(t, record(m))
		})
	}
}

// TestKilledWriter: TearDown removes the temporary file of a record whose writer was killed.
func TestKilledWriter(t *testing.T) {
	m := newMachine(t, testenv.Filesystem(t, "ext4", "32M"))
	m.up(t, emptyDir("", 0), plugins.MounterArgs{})
	record := m.Root + "/plugins/kubernetes.io/empty-dir/records/" + string(uid) + ".data.json"
	must(t, os.Rename(record, record+".tmp"))
	m.restart()
	m.down(t, "data")
	plugintest.WantMissing(t, record+".tmp")
}

// TestFullDisk: on a full disk, the error of SetUp contains the remedy, and TearDown still removes the
// volume and releases its quota ID.
func TestFullDisk(t *testing.T) {
	for fsType, root := range map[string]func(*testing.T) string{
		"ext4":  func(t *testing.T) string { t.Helper(); return testenv.Filesystem(t, "ext4", "128M") },
		"xfs":   func(t *testing.T) string { t.Helper(); return testenv.Filesystem(t, "xfs", "320M") },
		"btrfs": func(t *testing.T) string { t.Helper(); return testenv.SimpleQuotas(t, "256M") },
	} {
		t.Run(fsType, func(t *testing.T) {
			m := newMachine(t, root(t))
			must(t, os.MkdirAll(filepath.Dir(m.path()), 0o750))
			ballast := m.Root + "/ballast"
			for range 2 {
				fillUp(t, ballast)
				mounter := m.mounter(t, emptyDir("", 16*mib))
				for range 2 {
					if err := mounter.SetUp(t.Context(), plugins.MounterArgs{}); !errors.Is(err, syscall.ENOSPC) || !strings.Contains(err.Error(), "make room") {
						t.Errorf("SetUp: got %v, want ENOSPC with the remedy", err)
					}
				}
				m.down(t, "data")
				plugintest.WantMissing(t, m.path())
				m.wantNoIDs(t)
				must(t, os.Remove(ballast))
				m.restart()
				must(t, retry.For(t.Context(), 30*time.Second, func() (bool, error) { // btrfs frees space in the background
					err := mounter.SetUp(t.Context(), plugins.MounterArgs{})
					return errors.Is(err, syscall.ENOSPC), err
				}))
				wantMode(t, m.path(), 0, 0o777)
				m.down(t, "data")
			}
		})
	}
}

// fillUp appends to a file until the filesystem has no space left.
func fillUp(t *testing.T, path string) {
	t.Helper()
	for _, size := range []string{"1M", "4K", "1"} {
		out, err := exec.Command("dd", "if=/dev/zero", "of="+path, "bs="+size, "oflag=append", "conv=notrunc,fsync", "status=none").CombinedOutput()
		if err == nil || !strings.Contains(string(out), "No space left") {
			t.Fatalf("dd: got %s, %v; want that no space is left", out, err)
		}
	}
}

// wantNoIDs requires that a btrfs has only the qgroups of subvolumes. It checks no other filesystem.
func (m *machine) wantNoIDs(t *testing.T) {
	t.Helper()
	e := plugintest.MountAt(t, m.Root)
	if e.FSType != "btrfs" {
		return
	}
	left, err := filepath.Glob("/sys/fs/btrfs/" + testenv.Run(t, "blkid", "-s", "UUID", "-o", "value", e.Source) + "/qgroups/1_*")
	if err != nil || len(left) > 0 {
		t.Errorf("got quota IDs %v, %v; want none", left, err)
	}
}

// TestSweep: a call for another volume releases the quota ID of a removed volume.
func TestSweep(t *testing.T) {
	m := newMachine(t, testenv.SimpleQuotas(t, "256M"))
	m.up(t, emptyDir("", 16*mib), plugins.MounterArgs{})
	must(t, os.Remove(m.path())) // the manager was killed before it released the ID
	m.restart()
	must(t, retry.For(t.Context(), 30*time.Second, func() (bool, error) {
		m.down(t, "other")
		left, err := filepath.Glob(m.Root + "/plugins/kubernetes.io/empty-dir/records/*")
		if err == nil && len(left) > 0 {
			return true, fmt.Errorf("got records %v, want none", left)
		}
		return false, err
	}))
}

// TestContentWithoutRecord: a directory that has content and no record is not removed.
func TestContentWithoutRecord(t *testing.T) {
	m := newMachine(t, testenv.Filesystem(t, "ext4", "32M"))
	must(t, os.MkdirAll(m.path(), 0o700))
	must(t, os.WriteFile(m.path()+"/file", nil, 0o600))
	plugintest.WantError(t, m.mounter(t, emptyDir("", 0)).SetUp(t.Context(), plugins.MounterArgs{}), "not empty")
	plugintest.WantText(t, m.path()+"/file", "")
}

// TestMemory: a volume in memory has the pod's group and a size that can be changed. It is created again
// after a reboot.
func TestMemory(t *testing.T) {
	m := newMachine(t, testenv.Filesystem(t, "ext4", "32M"))
	group := int64(4711)
	args := plugins.MounterArgs{FSGroup: &group}
	m.up(t, emptyDir(corev1.StorageMediumMemory, 4*mib), args)
	wantMode(t, m.path(), 4711, 0o3777)
	e := plugintest.MountAt(t, m.path())
	if e == nil || e.FSType != "tmpfs" || strings.Contains(e.Options, "noexec") {
		t.Fatalf("got mount %+v, want a tmpfs without noexec", e)
	}
	if n := fill(t, m.path()+"/file", 64*mib); n != 4*mib {
		t.Errorf("limit 4 MiB: got %d bytes written, want 4 MiB", n)
	}
	m.restart()
	m.up(t, emptyDir(corev1.StorageMediumMemory, 8*mib), args)
	if n := fill(t, m.path()+"/more", 64*mib); n != 4*mib {
		t.Errorf("limit 8 MiB: got %d more bytes written, want 4 MiB", n)
	}
	plugintest.WantError(t, m.mounter(t, emptyDir(corev1.StorageMediumMemory, mib)).SetUp(t.Context(), args), "sizeLimit 1Mi")
	m.up(t, emptyDir(corev1.StorageMediumMemory, 0), args)
	if n := fill(t, m.path()+"/unlimited", 16*mib); n != 16*mib {
		t.Errorf("without a limit: got %d bytes written, want 16 MiB", n)
	}
	if after := plugintest.MountAt(t, m.path()); after.ID != e.ID {
		t.Errorf("the volume was mounted again: got %+v, want %+v", after, e)
	}
	must(t, mount.Unmount(m.path())) // as a reboot does
	m.up(t, emptyDir(corev1.StorageMediumMemory, 4*mib), args)
	wantMode(t, m.path(), 4711, 0o3777)
}

// allocatable returns the memory that a kubelet without reservations allocates to pods: all except
// huge pages and the eviction threshold of 100 MiB.
func allocatable(t *testing.T) int64 {
	t.Helper()
	b := plugintest.Value(os.ReadFile("/proc/meminfo"))(t)
	kib := map[string]int64{}
	for line := range strings.Lines(string(b)) {
		name, value, _ := strings.Cut(line, ":")
		var n int64
		plugintest.Value(fmt.Sscan(value, &n))(t)
		kib[name] = n
	}
	return (kib["MemTotal"]-kib["Hugetlb"])<<10 - 100*mib
}

// TestMemoryRoot: the mode and the number of inodes of a volume in memory are those of a tmpfs that is
// mounted without options.
func TestMemoryRoot(t *testing.T) {
	m := newMachine(t, testenv.Filesystem(t, "ext4", "32M"))
	plain := t.TempDir()
	testenv.Run(t, "mount", "-t", "tmpfs", "plain", plain)
	t.Cleanup(func() { testenv.Run(t, "umount", plain) })
	want := plugintest.Value(mount.Statfs(plain))(t)
	m.up(t, emptyDir(corev1.StorageMediumMemory, 4*mib), plugins.MounterArgs{})
	wantMode(t, m.path(), 0, 0o1777)
	for _, size := range []int64{4 * mib, 8 * mib} {
		m.up(t, emptyDir(corev1.StorageMediumMemory, size), plugins.MounterArgs{})
		got := plugintest.Value(mount.Statfs(m.path()))(t)
		if got.Files != want.Files {
			t.Errorf("sizeLimit %d MiB: got %d inodes, want %d", size/mib, got.Files, want.Files)
		}
	}
}

// TestMemorySize: the size of a volume in memory is the minimum of sizeLimit, the pod's memory limit and the
// machine's memory.
func TestMemorySize(t *testing.T) {
	limits := func(sizes ...int64) (containers []corev1.Container) {
		for _, size := range sizes {
			c := corev1.Container{Name: fmt.Sprint("c", len(containers))}
			if size > 0 {
				c.Resources.Limits = corev1.ResourceList{corev1.ResourceMemory: *resource.NewQuantity(size, resource.BinarySI)}
			}
			containers = append(containers, c)
		}
		return containers
	}
	podLimits := &corev1.ResourceRequirements{Limits: limits(24 * mib)[0].Resources.Limits}
	always := corev1.ContainerRestartPolicyAlways
	sidecar := limits(8 * mib)
	sidecar[0].RestartPolicy = &always
	all := allocatable(t)
	for _, tc := range []struct {
		name      string
		spec      corev1.PodSpec
		sizeLimit int64
		want      int64
	}{
		{"no limit", corev1.PodSpec{Containers: limits(0)}, 0, all},
		{"containers with limits", corev1.PodSpec{Containers: limits(16*mib, 16*mib)}, 0, 32 * mib},
		{"a container without a limit", corev1.PodSpec{Containers: limits(16*mib, 0)}, 0, all},
		{"an init container without a limit", corev1.PodSpec{InitContainers: limits(0), Containers: limits(16 * mib)}, 0, all},
		{"an init container with a larger limit", corev1.PodSpec{InitContainers: limits(64 * mib), Containers: limits(16 * mib)}, 0, 64 * mib},
		{"a sidecar", corev1.PodSpec{InitContainers: sidecar, Containers: limits(16 * mib)}, 0, 24 * mib},
		{"the pod's own limit", corev1.PodSpec{Containers: limits(0), Resources: podLimits}, 0, 24 * mib},
		{"a limit above the machine's memory", corev1.PodSpec{Containers: limits(1 << 50)}, 0, all},
		{"a smaller sizeLimit", corev1.PodSpec{Containers: limits(16 * mib)}, 4 * mib, 4 * mib},
		{"a larger sizeLimit", corev1.PodSpec{Containers: limits(16 * mib)}, 64 * mib, 16 * mib},
		{"a sizeLimit alone", corev1.PodSpec{Containers: limits(0)}, 64 * mib, 64 * mib},
		{"a sizeLimit above the machine's memory", corev1.PodSpec{Containers: limits(0)}, 1 << 50, all},
	} {
		t.Run(tc.name, func(t *testing.T) {
			m := newMachine(t, t.TempDir())
			must(t, os.MkdirAll(m.Paths().Pods(), 0o755))
			p := &corev1.Pod{Spec: tc.spec}
			p.UID = uid
			mounter := plugintest.Value(m.NewMounter(spec(emptyDir(corev1.StorageMediumMemory, tc.sizeLimit)), p))(t)
			must(t, mounter.SetUp(t.Context(), plugins.MounterArgs{}))
			st := plugintest.Value(mount.Statfs(m.path()))(t)
			if got := int64(st.Blocks) * st.Bsize; got != tc.want {
				t.Errorf("got a volume of %d bytes, want %d", got, tc.want)
			}
		})
	}
}

// TestMemoryShrunk: a volume that contains more than the pod's new memory limit keeps its size, with
// a warning, even if its sizeLimit is larger.
func TestMemoryShrunk(t *testing.T) {
	for _, size := range []int64{0, 64 * mib} {
		m := newMachine(t, testenv.Filesystem(t, "ext4", "32M"))
		m.up(t, emptyDir(corev1.StorageMediumMemory, size), plugins.MounterArgs{})
		fill(t, m.path()+"/file", 8*mib)
		p := pod(nil)
		p.Spec.Containers[0].Resources.Limits = corev1.ResourceList{corev1.ResourceMemory: resource.MustParse("4Mi")}
		m.restart()
		mounter := plugintest.Value(m.NewMounter(spec(emptyDir(corev1.StorageMediumMemory, size)), p))(t)
		must(t, mounter.SetUp(t.Context(), plugins.MounterArgs{}))
		if warnings := mounter.(plugins.Warner).Warnings(); len(warnings) != 1 || !strings.Contains(warnings[0], "allow the emptyDir in memory 4 MiB") {
			t.Errorf("sizeLimit of %d bytes: got warnings %q, want one with the limit of 4 MiB", size, warnings)
		}
	}
}

// TestMediumChanged: SetUp refuses another medium for an existing volume, and keeps the content.
func TestMediumChanged(t *testing.T) {
	m := newMachine(t, testenv.Filesystem(t, "ext4", "32M"))
	for _, media := range [][2]corev1.StorageMedium{{"", corev1.StorageMediumMemory}, {corev1.StorageMediumMemory, ""}} {
		m.up(t, emptyDir(media[0], 0), plugins.MounterArgs{})
		must(t, os.WriteFile(m.path()+"/file", nil, 0o600))
		plugintest.WantInvalid(t, m.mounter(t, emptyDir(media[1], 0)).SetUp(t.Context(), plugins.MounterArgs{}), "emptyDir.medium")
		plugintest.WantText(t, m.path()+"/file", "")
		m.down(t, "data")
	}
}

// TestTearDownMounted: TearDown removes nothing while another mount is in the volume or on it.
func TestTearDownMounted(t *testing.T) {
	m := newMachine(t, testenv.Filesystem(t, "ext4", "32M"))
	m.up(t, emptyDir("", 0), plugins.MounterArgs{})
	must(t, os.WriteFile(m.path()+"/file", nil, 0o600))
	for _, at := range []string{"/inner", ""} {
		at = m.path() + at
		must(t, os.MkdirAll(at, 0o700))
		must(t, mount.Bind(t.TempDir(), at, mount.Options{}))
		u := plugintest.Value(m.NewUnmounter("data", uid))(t)
		plugintest.WantError(t, u.TearDown(t.Context()), "unmount it")
		must(t, mount.Unmount(at))
		plugintest.WantText(t, m.path()+"/file", "")
	}
}

// TestInvalid: NewMounter and NewUnmounter refuse invalid values, and the error names the value or field.
func TestInvalid(t *testing.T) {
	p := emptydir.New(plugintest.NewHost(t.TempDir()))
	pages := corev1.ResourceList{"hugepages-2Mi": resource.MustParse("4Mi"), "hugepages-1Gi": resource.MustParse("1Gi")}
	for name, tc := range map[string]struct {
		source corev1.EmptyDirVolumeSource
		pod    *corev1.Pod
		want   string
	}{
		"unknown medium":                  {emptyDir("Floppy", 0), pod(nil), "Floppy"},
		"negative size":                   {corev1.EmptyDirVolumeSource{SizeLimit: resource.NewQuantity(-1, resource.BinarySI)}, pod(nil), "sizeLimit"},
		"no request for pages":            {emptyDir("HugePages", 0), pod(nil), "0 sizes"},
		"requests for pages of two sizes": {emptyDir("HugePages", 0), pod(pages), "2 sizes"},
		"pages of an unrequested size":    {emptyDir("HugePages-4Mi", 0), pod(pages), "hugepages-4Mi"},
		"invalid page size":               {emptyDir("HugePages-many", 0), pod(pages), "HugePages-2Mi"},
		"no UID":                          {emptyDir("", 0), &corev1.Pod{}, "metadata.uid"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := p.NewMounter(spec(tc.source), tc.pod)
			plugintest.WantInvalid(t, err, tc.want)
		})
	}
	_, err := p.NewUnmounter("../x", uid)
	plugintest.WantInvalid(t, err, "../x")
}

// TestHugePages: a volume of huge pages has a size that is a multiple of the page size. Without pages,
// SetUp fails. The test lets the kernel allocate surplus huge pages while it runs.
func TestHugePages(t *testing.T) {
	m := newMachine(t, testenv.Filesystem(t, "ext4", "32M"))
	huge := pod(corev1.ResourceList{"hugepages-2Mi": resource.MustParse("4Mi")})
	const file = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_overcommit_hugepages"
	before := plugintest.Value(os.ReadFile(file))(t)
	mounter := plugintest.Value(m.NewMounter(spec(emptyDir("HugePages", 3*mib)), huge))(t)
	if strings.TrimSpace(string(before)) == "0" {
		plugintest.WantError(t, mounter.SetUp(t.Context(), plugins.MounterArgs{}), "nr_hugepages")
	}
	must(t, os.WriteFile(file, []byte("8"), 0))
	t.Cleanup(func() { must(t, os.WriteFile(file, before, 0)) })
	for range 2 {
		must(t, mounter.SetUp(t.Context(), plugins.MounterArgs{}))
	}
	e := plugintest.MountAt(t, m.path())
	if e == nil || e.FSType != "hugetlbfs" || !strings.Contains(e.VFSOptions, "pagesize=2M") || !strings.Contains(e.VFSOptions, "size=4194304") {
		t.Errorf("got mount %+v, want a hugetlbfs of 4 MiB with pages of 2 MiB", e)
	}
	wantMode(t, m.path(), 0, 0o777)
}
