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

// machine has the plugin on a filesystem. A test fails if it leaves a volume or a record.
type machine struct {
	*emptydir.Plugin
	*plugintest.Host
}

func newMachine(t *testing.T, root string) *machine {
	t.Helper()
	testenv.RequireRoot(t)
	m := &machine{Host: plugintest.NewHost(root)}
	m.restart()
	t.Cleanup(func() {
		m.down(t, "data")
		left, err := filepath.Glob(root + "/plugins/kubernetes.io/empty-dir/records/*")
		if err != nil || len(left) > 0 {
			t.Errorf("records: %v, %v", left, err)
		}
		plugintest.WantMissing(t, m.path())
	})
	return m
}

func (m *machine) restart() { m.Plugin = emptydir.New(m.Host) }

func (m *machine) path() string { return m.Paths().PodVolume(uid, emptydir.Name, "data") }

func spec(source corev1.EmptyDirVolumeSource) *plugins.Spec {
	return &plugins.Spec{Volume: &corev1.Volume{Name: "data", VolumeSource: corev1.VolumeSource{EmptyDir: &source}}}
}

func limited(medium corev1.StorageMedium, bytes int64) corev1.EmptyDirVolumeSource {
	source := corev1.EmptyDirVolumeSource{Medium: medium}
	if bytes > 0 {
		source.SizeLimit = resource.NewQuantity(bytes, resource.BinarySI)
	}
	return source
}

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
		t.Errorf("the path is %s", mounter.Path())
	}
	return mounter.(plugins.Warner).Warnings()
}

func (m *machine) down(t *testing.T, name string) {
	t.Helper()
	u := plugintest.Value(m.NewUnmounter(name, uid))(t)
	must(t, retry.For(context.Background(), 30*time.Second, func() (bool, error) {
		err := u.TearDown(context.Background())
		return errors.Is(err, quota.ErrBusy), err
	}))
}

func wantMode(t *testing.T, path string, gid uint32, mode uint32) {
	t.Helper()
	var st syscall.Stat_t
	must(t, syscall.Lstat(path, &st))
	if st.Gid != gid || st.Mode&0o7777 != mode || st.Uid != 0 {
		t.Errorf("%s has owner %d:%d and mode %o", path, st.Uid, st.Gid, st.Mode&0o7777)
	}
}

// fill writes to a file until the filesystem is full, and returns the size of the file. It runs a
// program without capabilities, because ext4 exempts CAP_SYS_RESOURCE. btrfs counts only data on the
// disk.
func fill(t *testing.T, path string, most int64) int64 {
	t.Helper()
	f := plugintest.Value(os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_SYNC, 0o600))(t)
	defer f.Close()
	c := exec.Command("dd", "if=/dev/zero", "bs=1M", fmt.Sprintf("count=%d", most/mib), "status=none")
	c.Stdout = f
	c.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	_ = c.Run()
	info := plugintest.Value(f.Stat())(t)
	return info.Size()
}

func TestDisk(t *testing.T) {
	for _, fsType := range []string{"ext4", "xfs", "btrfs"} {
		t.Run(fsType, func(t *testing.T) {
			m := newMachine(t, testenv.Filesystem(t, fsType, "320M"))
			group := int64(4711)
			m.up(t, limited("", 0), plugins.MounterArgs{FSGroup: &group})
			wantMode(t, m.path(), 4711, 0o2777)
			must(t, os.WriteFile(m.path()+"/file", []byte("text"), 0o600))
			must(t, os.Chmod(m.path(), 0o700)) // as a pod may
			m.restart()
			m.up(t, limited("", 0), plugins.MounterArgs{FSGroup: &group})
			wantMode(t, m.path(), 4711, 0o700)
			wantMode(t, m.path()+"/file", 4711, 0o600)
			m.down(t, "data")
			m.up(t, limited("", 0), plugins.MounterArgs{})
			wantMode(t, m.path(), 0, 0o777)
			plugintest.WantEntries(t, m.path(), 0)
		})
	}
}

func TestSizeLimit(t *testing.T) { testSizeLimit(t, newMachine(t, testenv.SimpleQuotas(t, "512M"))) }

// testSizeLimit changes the limit of a volume while it is filled.
func testSizeLimit(t *testing.T, m *machine) {
	t.Helper()
	if w := m.up(t, limited("", 16*mib), plugins.MounterArgs{}); len(w) > 0 {
		t.Errorf("warnings: %v", w)
	}
	if n := fill(t, m.path()+"/file", 64*mib); n < 8*mib || n > 16*mib {
		t.Errorf("%d bytes were written of 16 MiB", n)
	}
	m.restart()
	m.up(t, limited("", 32*mib), plugins.MounterArgs{})
	if n := fill(t, m.path()+"/more", 64*mib); n < 8*mib || n > 24*mib {
		t.Errorf("%d bytes more were written of 32 MiB", n)
	}
	m.up(t, limited("", 0), plugins.MounterArgs{})
	if n := fill(t, m.path()+"/unlimited", 64*mib); n != 64*mib {
		t.Errorf("%d bytes were written without a limit", n)
	}
}

func TestSizeLimitNotEnforced(t *testing.T) {
	for fsType, says := range map[string]string{"ext4": "prjquota", "btrfs": "quota enable"} {
		m := newMachine(t, testenv.Filesystem(t, fsType, "128M"))
		for range 2 {
			w := m.up(t, limited("", 16*mib), plugins.MounterArgs{})
			if len(w) != 1 || !strings.Contains(w[0], "sizeLimit 16Mi is not enforced") || !strings.Contains(w[0], says) {
				t.Errorf("%s: warnings: %q", fsType, w)
			}
		}
	}
}

// TestLimitAdded: a volume that was created without a limit stays without a limit.
func TestLimitAdded(t *testing.T) {
	m := newMachine(t, testenv.SimpleQuotas(t, "256M"))
	m.up(t, limited("", 0), plugins.MounterArgs{})
	if w := m.up(t, limited("", mib), plugins.MounterArgs{}); len(w) != 1 || !strings.Contains(w[0], "recreate the pod") {
		t.Errorf("warnings: %q", w)
	}
}

// TestKilled: a call after an interrupted one completes.
func TestKilled(t *testing.T) {
	record := func(m *machine) string {
		return m.Root + "/plugins/kubernetes.io/empty-dir/records/" + string(uid) + ".data.json"
	}
	for name, cut := range map[string]func(t *testing.T, m *machine){
		"before the record": func(t *testing.T, m *machine) { must(t, os.Remove(record(m))) },
		"before the mode": func(t *testing.T, m *machine) {
			must(t, os.Remove(record(m)))
			must(t, os.Chmod(m.path(), 0o700))
		},
		"before the limit": func(t *testing.T, m *machine) {
			must(t, os.Remove(record(m)))
			must(t, os.Remove(m.path()))
			must(t, os.Mkdir(m.path(), 0o700))
		},
		"during TearDown": func(t *testing.T, m *machine) { must(t, os.Remove(m.path())) },
	} {
		t.Run(name, func(t *testing.T) {
			m := newMachine(t, testenv.SimpleQuotas(t, "256M"))
			m.up(t, limited("", 16*mib), plugins.MounterArgs{})
			cut(t, m)
			m.restart()
			mounter := m.mounter(t, limited("", 16*mib))
			must(t, retry.For(t.Context(), 30*time.Second, func() (bool, error) {
				err := mounter.SetUp(t.Context(), plugins.MounterArgs{})
				return errors.Is(err, quota.ErrBusy), err
			}))
			wantMode(t, m.path(), 0, 0o777)
			if n := fill(t, m.path()+"/file", 64*mib); n > 16*mib {
				t.Errorf("%d bytes were written of 16 MiB", n)
			}
			m.down(t, "data")
			plugintest.WantMissing(t, record(m))
		})
	}
}

// TestFullDisk: on a full disk, SetUp fails with the remedy. The volume can be removed, with its ID.
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
				mounter := m.mounter(t, limited("", 16*mib))
				for range 2 {
					if err := mounter.SetUp(t.Context(), plugins.MounterArgs{}); !errors.Is(err, syscall.ENOSPC) || !strings.Contains(err.Error(), "make room") {
						t.Errorf("SetUp: %v", err)
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

// fillUp fills a disk.
func fillUp(t *testing.T, path string) {
	t.Helper()
	for _, size := range []string{"1M", "4K", "1"} {
		out, err := exec.Command("dd", "if=/dev/zero", "of="+path, "bs="+size, "oflag=append", "conv=notrunc,fsync", "status=none").CombinedOutput()
		if err == nil || !strings.Contains(string(out), "No space left") {
			t.Fatalf("dd: %s, %v", out, err)
		}
	}
}

// wantNoIDs fails if a btrfs has qgroups other than those of subvolumes.
func (m *machine) wantNoIDs(t *testing.T) {
	t.Helper()
	e := plugintest.MountAt(t, m.Root)
	if e.FSType != "btrfs" {
		return
	}
	left, err := filepath.Glob("/sys/fs/btrfs/" + testenv.Run(t, "blkid", "-s", "UUID", "-o", "value", e.Source) + "/qgroups/1_*")
	if err != nil || len(left) > 0 {
		t.Errorf("unreleased IDs: %v, %v", left, err)
	}
}

// TestSweep: a call for another volume releases the ID of a removed volume.
func TestSweep(t *testing.T) {
	m := newMachine(t, testenv.SimpleQuotas(t, "256M"))
	m.up(t, limited("", 16*mib), plugins.MounterArgs{})
	must(t, os.Remove(m.path())) // the manager was killed before it released the ID
	m.restart()
	must(t, retry.For(t.Context(), 30*time.Second, func() (bool, error) {
		m.down(t, "other")
		left, err := filepath.Glob(m.Root + "/plugins/kubernetes.io/empty-dir/records/*")
		if err == nil && len(left) > 0 {
			return true, fmt.Errorf("records: %v", left)
		}
		return false, err
	}))
}

// TestContentWithoutRecord: a directory that is not a volume's is not removed.
func TestContentWithoutRecord(t *testing.T) {
	m := newMachine(t, testenv.Filesystem(t, "ext4", "32M"))
	must(t, os.MkdirAll(m.path(), 0o700))
	must(t, os.WriteFile(m.path()+"/file", nil, 0o600))
	plugintest.WantError(t, m.mounter(t, limited("", 0)).SetUp(t.Context(), plugins.MounterArgs{}), "not empty")
	plugintest.WantText(t, m.path()+"/file", "")
}

func TestMemory(t *testing.T) {
	m := newMachine(t, testenv.Filesystem(t, "ext4", "32M"))
	group := int64(4711)
	args := plugins.MounterArgs{FSGroup: &group}
	m.up(t, limited(corev1.StorageMediumMemory, 4*mib), args)
	wantMode(t, m.path(), 4711, 0o3777)
	e := plugintest.MountAt(t, m.path())
	if e == nil || e.FSType != "tmpfs" || strings.Contains(e.Options, "noexec") {
		t.Fatalf("the mount is %+v", e)
	}
	if n := fill(t, m.path()+"/file", 64*mib); n != 4*mib {
		t.Errorf("%d bytes were written of 4 MiB", n)
	}
	m.restart()
	m.up(t, limited(corev1.StorageMediumMemory, 8*mib), args)
	if n := fill(t, m.path()+"/more", 64*mib); n != 4*mib {
		t.Errorf("%d bytes more were written of 8 MiB", n)
	}
	plugintest.WantError(t, m.mounter(t, limited(corev1.StorageMediumMemory, mib)).SetUp(t.Context(), args), "sizeLimit 1Mi")
	m.up(t, limited(corev1.StorageMediumMemory, 0), args)
	if n := fill(t, m.path()+"/unlimited", 16*mib); n != 16*mib {
		t.Errorf("%d bytes were written without a limit", n)
	}
	if again := plugintest.MountAt(t, m.path()); again.ID != e.ID {
		t.Errorf("the volume was mounted again: %v", again)
	}
	must(t, mount.Unmount(m.path())) // as a reboot does
	m.up(t, limited(corev1.StorageMediumMemory, 4*mib), args)
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

// TestMemoryRoot: the mode and the number of inodes are the kernel's defaults of a tmpfs.
func TestMemoryRoot(t *testing.T) {
	m := newMachine(t, testenv.Filesystem(t, "ext4", "32M"))
	plain := t.TempDir()
	testenv.Run(t, "mount", "-t", "tmpfs", "plain", plain)
	t.Cleanup(func() { testenv.Run(t, "umount", plain) })
	want := plugintest.Value(mount.Statfs(plain))(t)
	m.up(t, limited(corev1.StorageMediumMemory, 4*mib), plugins.MounterArgs{})
	wantMode(t, m.path(), 0, 0o1777)
	for _, size := range []int64{4 * mib, 8 * mib} {
		m.up(t, limited(corev1.StorageMediumMemory, size), plugins.MounterArgs{})
		have := plugintest.Value(mount.Statfs(m.path()))(t)
		if have.Files != want.Files {
			t.Errorf("%d MiB have %d inodes, a tmpfs has %d", size/mib, have.Files, want.Files)
		}
	}
}

// TestMemorySize: the size is the minimum of sizeLimit, the pod's memory limit and the machine's memory.
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
	whole := &corev1.ResourceRequirements{Limits: limits(24 * mib)[0].Resources.Limits}
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
		{"all containers' limits", corev1.PodSpec{Containers: limits(16*mib, 16*mib)}, 0, 32 * mib},
		{"one has no limit", corev1.PodSpec{Containers: limits(16*mib, 0)}, 0, all},
		{"an init container has no limit", corev1.PodSpec{InitContainers: limits(0), Containers: limits(16 * mib)}, 0, all},
		{"an init container has more", corev1.PodSpec{InitContainers: limits(64 * mib), Containers: limits(16 * mib)}, 0, 64 * mib},
		{"a sidecar", corev1.PodSpec{InitContainers: sidecar, Containers: limits(16 * mib)}, 0, 24 * mib},
		{"the pod's own limit", corev1.PodSpec{Containers: limits(0), Resources: whole}, 0, 24 * mib},
		{"more than the machine has", corev1.PodSpec{Containers: limits(1 << 50)}, 0, all},
		{"a smaller sizeLimit", corev1.PodSpec{Containers: limits(16 * mib)}, 4 * mib, 4 * mib},
		{"a larger sizeLimit", corev1.PodSpec{Containers: limits(16 * mib)}, 64 * mib, 16 * mib},
		{"a sizeLimit alone", corev1.PodSpec{Containers: limits(0)}, 64 * mib, 64 * mib},
		{"a sizeLimit of more than the machine has", corev1.PodSpec{Containers: limits(0)}, 1 << 50, all},
	} {
		t.Run(tc.name, func(t *testing.T) {
			m := newMachine(t, t.TempDir())
			must(t, os.MkdirAll(m.Paths().Pods(), 0o755))
			p := &corev1.Pod{Spec: tc.spec}
			p.UID = uid
			mounter := plugintest.Value(m.NewMounter(spec(limited(corev1.StorageMediumMemory, tc.sizeLimit)), p))(t)
			must(t, mounter.SetUp(t.Context(), plugins.MounterArgs{}))
			have := plugintest.Value(mount.Statfs(m.path()))(t)
			if size := int64(have.Blocks) * have.Bsize; size != tc.want {
				t.Errorf("the volume has %d bytes, want %d", size, tc.want)
			}
		})
	}
}

// TestMemoryShrunk: a volume that contains more than the pod's new memory limit keeps its size, with
// a warning, also if its sizeLimit is larger.
func TestMemoryShrunk(t *testing.T) {
	for _, size := range []int64{0, 64 * mib} {
		m := newMachine(t, testenv.Filesystem(t, "ext4", "32M"))
		m.up(t, limited(corev1.StorageMediumMemory, size), plugins.MounterArgs{})
		fill(t, m.path()+"/file", 8*mib)
		p := pod(nil)
		p.Spec.Containers[0].Resources.Limits = corev1.ResourceList{corev1.ResourceMemory: resource.MustParse("4Mi")}
		m.restart()
		mounter := plugintest.Value(m.NewMounter(spec(limited(corev1.StorageMediumMemory, size)), p))(t)
		must(t, mounter.SetUp(t.Context(), plugins.MounterArgs{}))
		if warnings := mounter.(plugins.Warner).Warnings(); len(warnings) != 1 || !strings.Contains(warnings[0], "4194304 bytes") {
			t.Errorf("sizeLimit %d: the warnings are %q", size, warnings)
		}
	}
}

func TestMediumChanged(t *testing.T) {
	m := newMachine(t, testenv.Filesystem(t, "ext4", "32M"))
	for _, media := range [][2]corev1.StorageMedium{{"", corev1.StorageMediumMemory}, {corev1.StorageMediumMemory, ""}} {
		m.up(t, limited(media[0], 0), plugins.MounterArgs{})
		must(t, os.WriteFile(m.path()+"/file", nil, 0o600))
		plugintest.WantInvalid(t, m.mounter(t, limited(media[1], 0)).SetUp(t.Context(), plugins.MounterArgs{}), "emptyDir.medium")
		plugintest.WantText(t, m.path()+"/file", "")
		m.down(t, "data")
	}
}

// TestTearDownMounted: nothing is removed while the volume contains another mount.
func TestTearDownMounted(t *testing.T) {
	m := newMachine(t, testenv.Filesystem(t, "ext4", "32M"))
	m.up(t, limited("", 0), plugins.MounterArgs{})
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

func TestInvalid(t *testing.T) {
	p := emptydir.New(plugintest.NewHost(t.TempDir()))
	pages := corev1.ResourceList{"hugepages-2Mi": resource.MustParse("4Mi"), "hugepages-1Gi": resource.MustParse("1Gi")}
	for _, tc := range map[string]struct {
		source corev1.EmptyDirVolumeSource
		pod    *corev1.Pod
		says   string
	}{
		"medium":        {limited("Floppy", 0), pod(nil), "Floppy"},
		"size":          {corev1.EmptyDirVolumeSource{SizeLimit: resource.NewQuantity(-1, resource.BinarySI)}, pod(nil), "sizeLimit"},
		"no pages":      {limited("HugePages", 0), pod(nil), "0 sizes"},
		"several pages": {limited("HugePages", 0), pod(pages), "2 sizes"},
		"other pages":   {limited("HugePages-4Mi", 0), pod(pages), "hugepages-4Mi"},
		"bad pages":     {limited("HugePages-many", 0), pod(pages), "HugePages-2Mi"},
		"uid":           {limited("", 0), &corev1.Pod{}, "metadata.uid"},
	} {
		_, err := p.NewMounter(spec(tc.source), tc.pod)
		plugintest.WantInvalid(t, err, tc.says)
	}
	_, err := p.NewUnmounter("../x", uid)
	plugintest.WantInvalid(t, err, "../x")
}

// TestHugePages permits surplus huge pages while it runs.
func TestHugePages(t *testing.T) {
	m := newMachine(t, testenv.Filesystem(t, "ext4", "32M"))
	huge := pod(corev1.ResourceList{"hugepages-2Mi": resource.MustParse("4Mi")})
	const file = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_overcommit_hugepages"
	before := plugintest.Value(os.ReadFile(file))(t)
	mounter := plugintest.Value(m.NewMounter(spec(limited("HugePages", 3*mib)), huge))(t)
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
		t.Errorf("the mount is %+v", e)
	}
	wantMode(t, m.path(), 0, 0o777)
}
