package emptydir_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
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
)

func TestMain(m *testing.M) { testenv.Main(m) }

const (
	mib = 1 << 20
	uid = types.UID("11111111-2222-3333-4444-555555555555")
)

// host has its root directory, and nothing else.
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

// machine has the plugin on a filesystem. Nothing of a pod may be left when a test ends.
type machine struct {
	*emptydir.Plugin
	host
}

func newMachine(t *testing.T, root string) *machine {
	t.Helper()
	testenv.RequireRoot(t)
	m := &machine{host: host{root: root}}
	m.restart()
	t.Cleanup(func() {
		m.down(t, "data")
		left, err := filepath.Glob(root + "/plugins/kubernetes.io/empty-dir/records/*")
		if err != nil || len(left) > 0 {
			t.Errorf("there are still records %v, %v", left, err)
		}
		if _, err := os.Lstat(m.path()); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("there still is a directory: %v", err)
		}
	})
	return m
}

func (m *machine) restart() { m.Plugin = emptydir.New(m.host) }

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

// up sets a volume up, and returns what it warns of.
func (m *machine) up(t *testing.T, source corev1.EmptyDirVolumeSource, args plugins.MounterArgs) []string {
	t.Helper()
	mounter, err := m.NewMounter(spec(source), pod(nil))
	must(t, err)
	must(t, mounter.SetUp(t.Context(), args))
	if mounter.Path() != m.path() {
		t.Errorf("the path is %s", mounter.Path())
	}
	return mounter.(plugins.Warner).Warnings()
}

func (m *machine) down(t *testing.T, name string) {
	t.Helper()
	u, err := m.NewUnmounter(name, uid)
	must(t, err)
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

// fill writes until there is no room, and returns how much that was. It is a program
// without capabilities: ext4 exempts CAP_SYS_RESOURCE. Of btrfs counts what is on the disk.
func fill(t *testing.T, path string, most int64) int64 {
	t.Helper()
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_SYNC, 0o600)
	must(t, err)
	defer f.Close()
	c := exec.Command("dd", "if=/dev/zero", "bs=1M", fmt.Sprintf("count=%d", most/mib), "status=none")
	c.Stdout = f
	c.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	_ = c.Run()
	info, err := f.Stat()
	must(t, err)
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
			if entries, err := os.ReadDir(m.path()); err != nil || len(entries) > 0 {
				t.Errorf("a new volume has %v, %v", entries, err)
			}
		})
	}
}

func TestSizeLimit(t *testing.T) { testSizeLimit(t, newMachine(t, testenv.SimpleQuotas(t, "512M"))) }

// testSizeLimit changes the limit of a volume while it is filled.
func testSizeLimit(t *testing.T, m *machine) {
	t.Helper()
	if w := m.up(t, limited("", 16*mib), plugins.MounterArgs{}); len(w) > 0 {
		t.Errorf("it warns: %v", w)
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
				t.Errorf("%s: it warns: %q", fsType, w)
			}
		}
	}
}

// TestLimitComesLate: a volume that was made without a limit does not get one.
func TestLimitComesLate(t *testing.T) {
	m := newMachine(t, testenv.SimpleQuotas(t, "256M"))
	m.up(t, limited("", 0), plugins.MounterArgs{})
	if w := m.up(t, limited("", mib), plugins.MounterArgs{}); len(w) != 1 || !strings.Contains(w[0], "recreate the pod") {
		t.Errorf("it warns: %q", w)
	}
}

// TestKilled: wherever a call was cut off, the next one goes on.
func TestKilled(t *testing.T) {
	record := func(m *machine) string {
		return m.root + "/plugins/kubernetes.io/empty-dir/records/" + string(uid) + ".data.json"
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
		"in taking down": func(t *testing.T, m *machine) { must(t, os.Remove(m.path())) },
	} {
		t.Run(name, func(t *testing.T) {
			m := newMachine(t, testenv.SimpleQuotas(t, "256M"))
			m.up(t, limited("", 16*mib), plugins.MounterArgs{})
			cut(t, m)
			m.restart()
			mounter, err := m.NewMounter(spec(limited("", 16*mib)), pod(nil))
			must(t, err)
			must(t, retry.For(t.Context(), 30*time.Second, func() (bool, error) {
				err := mounter.SetUp(t.Context(), plugins.MounterArgs{})
				return errors.Is(err, quota.ErrBusy), err
			}))
			wantMode(t, m.path(), 0, 0o777)
			if n := fill(t, m.path()+"/file", 64*mib); n > 16*mib {
				t.Errorf("%d bytes were written of 16 MiB", n)
			}
			cut2 := record(m)
			m.down(t, "data")
			if _, err := os.Stat(cut2); err == nil {
				t.Error("the record is still there")
			}
		})
	}
}

// TestFullDisk: a volume for which there is no room says what to do, and does not keep its
// pod from going; nothing of it is left, nor an ID.
func TestFullDisk(t *testing.T) {
	for fsType, root := range map[string]func(*testing.T) string{
		"ext4":  func(t *testing.T) string { t.Helper(); return testenv.Filesystem(t, "ext4", "128M") },
		"xfs":   func(t *testing.T) string { t.Helper(); return testenv.Filesystem(t, "xfs", "320M") },
		"btrfs": func(t *testing.T) string { t.Helper(); return testenv.SimpleQuotas(t, "256M") },
	} {
		t.Run(fsType, func(t *testing.T) {
			m := newMachine(t, root(t))
			must(t, os.MkdirAll(filepath.Dir(m.path()), 0o750))
			ballast := m.root + "/ballast"
			for range 2 {
				fillUp(t, ballast)
				mounter, err := m.NewMounter(spec(limited("", 16*mib)), pod(nil))
				must(t, err)
				for range 2 {
					if err := mounter.SetUp(t.Context(), plugins.MounterArgs{}); !errors.Is(err, syscall.ENOSPC) || !strings.Contains(err.Error(), "make room") {
						t.Errorf("setting up says %v", err)
					}
				}
				m.down(t, "data")
				if _, err := os.Lstat(m.path()); !errors.Is(err, fs.ErrNotExist) {
					t.Errorf("there still is a directory: %v", err)
				}
				m.wantNoIDs(t)
				must(t, os.Remove(ballast))
				m.restart()
				must(t, retry.For(t.Context(), 30*time.Second, func() (bool, error) { // btrfs frees it in the background
					err := mounter.SetUp(t.Context(), plugins.MounterArgs{})
					return errors.Is(err, syscall.ENOSPC), err
				}))
				wantMode(t, m.path(), 0, 0o777)
				m.down(t, "data")
			}
		})
	}
}

// fillUp leaves no room on a disk.
func fillUp(t *testing.T, path string) {
	t.Helper()
	for _, size := range []string{"1M", "4K", "1"} {
		out, err := exec.Command("dd", "if=/dev/zero", "of="+path, "bs="+size, "oflag=append", "conv=notrunc,fsync", "status=none").CombinedOutput()
		if err == nil || !strings.Contains(string(out), "No space left") {
			t.Fatalf("dd: %s, %v", out, err)
		}
	}
}

// wantNoIDs fails if a btrfs has qgroups that are not the subvolumes' own.
func (m *machine) wantNoIDs(t *testing.T) {
	t.Helper()
	e, err := mount.OnPath(m.root)
	must(t, err)
	if e.FSType != "btrfs" {
		return
	}
	left, err := filepath.Glob("/sys/fs/btrfs/" + testenv.Run(t, "blkid", "-s", "UUID", "-o", "value", e.Source) + "/qgroups/1_*")
	if err != nil || len(left) > 0 {
		t.Errorf("IDs that are left: %v, %v", left, err)
	}
}

// TestSweep: the ID of a volume that is gone is given back by any other volume's call.
func TestSweep(t *testing.T) {
	m := newMachine(t, testenv.SimpleQuotas(t, "256M"))
	m.up(t, limited("", 16*mib), plugins.MounterArgs{})
	must(t, os.Remove(m.path())) // the manager died before it could give the ID back
	m.restart()
	must(t, retry.For(t.Context(), 30*time.Second, func() (bool, error) {
		m.down(t, "other")
		left, err := filepath.Glob(m.root + "/plugins/kubernetes.io/empty-dir/records/*")
		if err == nil && len(left) > 0 {
			return true, fmt.Errorf("there still is %v", left)
		}
		return false, err
	}))
}

// TestContentWithoutRecord: what nobody knows is not removed to make room for a volume.
func TestContentWithoutRecord(t *testing.T) {
	m := newMachine(t, testenv.Filesystem(t, "ext4", "32M"))
	must(t, os.MkdirAll(m.path(), 0o700))
	must(t, os.WriteFile(m.path()+"/file", nil, 0o600))
	mounter, err := m.NewMounter(spec(limited("", 0)), pod(nil))
	must(t, err)
	if err := mounter.SetUp(t.Context(), plugins.MounterArgs{}); err == nil || !strings.Contains(err.Error(), "not empty") {
		t.Errorf("setting up says %v", err)
	}
	if _, err := os.Stat(m.path() + "/file"); err != nil {
		t.Error(err)
	}
}

func TestMemory(t *testing.T) {
	m := newMachine(t, testenv.Filesystem(t, "ext4", "32M"))
	group := int64(4711)
	args := plugins.MounterArgs{FSGroup: &group}
	m.up(t, limited(corev1.StorageMediumMemory, 4*mib), args)
	wantMode(t, m.path(), 4711, 0o3777)
	e, err := mount.OnPath(m.path())
	must(t, err)
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
	mounter, err := m.NewMounter(spec(limited(corev1.StorageMediumMemory, mib)), pod(nil))
	must(t, err)
	if err := mounter.SetUp(t.Context(), args); err == nil || !strings.Contains(err.Error(), "sizeLimit 1Mi") {
		t.Errorf("less than is in it: %v", err)
	}
	m.up(t, limited(corev1.StorageMediumMemory, 0), args)
	if n := fill(t, m.path()+"/unlimited", 16*mib); n != 16*mib {
		t.Errorf("%d bytes were written without a limit", n)
	}
	if again, err := mount.OnPath(m.path()); err != nil || again.ID != e.ID {
		t.Errorf("it was mounted anew: %v, %v", again, err)
	}
	must(t, mount.Unmount(m.path())) // as a reboot does
	m.up(t, limited(corev1.StorageMediumMemory, 4*mib), args)
	wantMode(t, m.path(), 4711, 0o3777)
}

// allocatable is what a kubelet gives to pods of the machine's memory, without reservations
// of its own: all but huge pages, and 100 MiB before it evicts.
func allocatable(t *testing.T) int64 {
	t.Helper()
	b, err := os.ReadFile("/proc/meminfo")
	must(t, err)
	kib := map[string]int64{}
	for line := range strings.Lines(string(b)) {
		name, value, _ := strings.Cut(line, ":")
		var n int64
		_, err := fmt.Sscan(value, &n)
		must(t, err)
		kib[name] = n
	}
	return (kib["MemTotal"]-kib["Hugetlb"])<<10 - 100*mib
}

// TestMemoryRoot: as the kernel makes a tmpfs: everybody may write, and remove what is his.
func TestMemoryRoot(t *testing.T) {
	m := newMachine(t, testenv.Filesystem(t, "ext4", "32M"))
	plain := t.TempDir()
	testenv.Run(t, "mount", "-t", "tmpfs", "plain", plain)
	t.Cleanup(func() { testenv.Run(t, "umount", plain) })
	want, err := mount.Statfs(plain)
	must(t, err)
	m.up(t, limited(corev1.StorageMediumMemory, 4*mib), plugins.MounterArgs{})
	wantMode(t, m.path(), 0, 0o1777)
	for _, size := range []int64{4 * mib, 8 * mib} {
		m.up(t, limited(corev1.StorageMediumMemory, size), plugins.MounterArgs{})
		have, err := mount.Statfs(m.path())
		must(t, err)
		if have.Files != want.Files {
			t.Errorf("%d MiB have %d inodes, a tmpfs has %d", size/mib, have.Files, want.Files)
		}
	}
}

// TestMemorySize: the least of sizeLimit, the pod's memory limit and the machine's memory.
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
			mounter, err := m.NewMounter(spec(limited(corev1.StorageMediumMemory, tc.sizeLimit)), p)
			must(t, err)
			must(t, mounter.SetUp(t.Context(), plugins.MounterArgs{}))
			have, err := mount.Statfs(m.path())
			must(t, err)
			if size := int64(have.Blocks) * have.Bsize; size != tc.want {
				t.Errorf("it has %d bytes, want %d", size, tc.want)
			}
		})
	}
}

// TestMemoryShrunk: a volume in use that has more than the pod may have now stays as it is,
// also if its sizeLimit is larger.
func TestMemoryShrunk(t *testing.T) {
	for _, size := range []int64{0, 64 * mib} {
		m := newMachine(t, testenv.Filesystem(t, "ext4", "32M"))
		m.up(t, limited(corev1.StorageMediumMemory, size), plugins.MounterArgs{})
		fill(t, m.path()+"/file", 8*mib)
		p := pod(nil)
		p.Spec.Containers[0].Resources.Limits = corev1.ResourceList{corev1.ResourceMemory: resource.MustParse("4Mi")}
		m.restart()
		mounter, err := m.NewMounter(spec(limited(corev1.StorageMediumMemory, size)), p)
		must(t, err)
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
		mounter, err := m.NewMounter(spec(limited(media[1], 0)), pod(nil))
		must(t, err)
		var invalid *plugins.InvalidError
		if err := mounter.SetUp(t.Context(), plugins.MounterArgs{}); !errors.As(err, &invalid) {
			t.Errorf("from %q to %q: %v", media[0], media[1], err)
		}
		if _, err := os.Stat(m.path() + "/file"); err != nil {
			t.Error(err)
		}
		m.down(t, "data")
	}
}

// TestTearDownMounted: nothing is removed while something is mounted in the volume.
func TestTearDownMounted(t *testing.T) {
	m := newMachine(t, testenv.Filesystem(t, "ext4", "32M"))
	m.up(t, limited("", 0), plugins.MounterArgs{})
	must(t, os.WriteFile(m.path()+"/file", nil, 0o600))
	for _, at := range []string{"/inner", ""} {
		at = m.path() + at
		must(t, os.MkdirAll(at, 0o700))
		must(t, mount.Bind(t.TempDir(), at, mount.Options{}))
		u, err := m.NewUnmounter("data", uid)
		must(t, err)
		if err := u.TearDown(t.Context()); err == nil || !strings.Contains(err.Error(), "unmount it") {
			t.Errorf("with a mount at %s: %v", at, err)
		}
		must(t, mount.Unmount(at))
		if _, err := os.Stat(m.path() + "/file"); err != nil {
			t.Error(err)
		}
	}
}

func TestInvalid(t *testing.T) {
	p := emptydir.New(host{root: t.TempDir()})
	pages := corev1.ResourceList{"hugepages-2Mi": resource.MustParse("4Mi"), "hugepages-1Gi": resource.MustParse("1Gi")}
	for name, tc := range map[string]struct {
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
		var invalid *plugins.InvalidError
		if _, err := p.NewMounter(spec(tc.source), tc.pod); !errors.As(err, &invalid) || !strings.Contains(err.Error(), tc.says) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := p.NewUnmounter("../x", uid); err == nil {
		t.Error("a name that leads out was taken")
	}
}

// TestHugePages lets the kernel make some while it runs.
func TestHugePages(t *testing.T) {
	m := newMachine(t, testenv.Filesystem(t, "ext4", "32M"))
	huge := pod(corev1.ResourceList{"hugepages-2Mi": resource.MustParse("4Mi")})
	const file = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_overcommit_hugepages"
	before, err := os.ReadFile(file)
	must(t, err)
	mounter, err := m.NewMounter(spec(limited("HugePages", 3*mib)), huge)
	must(t, err)
	if strings.TrimSpace(string(before)) == "0" {
		if err := mounter.SetUp(t.Context(), plugins.MounterArgs{}); err == nil || !strings.Contains(err.Error(), "nr_hugepages") {
			t.Errorf("without pages: %v", err)
		}
	}
	must(t, os.WriteFile(file, []byte("8"), 0))
	t.Cleanup(func() { must(t, os.WriteFile(file, before, 0)) })
	for range 2 {
		must(t, mounter.SetUp(t.Context(), plugins.MounterArgs{}))
	}
	e, err := mount.OnPath(m.path())
	must(t, err)
	if e == nil || e.FSType != "hugetlbfs" || !strings.Contains(e.VFSOptions, "pagesize=2M") || !strings.Contains(e.VFSOptions, "size=4194304") {
		t.Errorf("the mount is %+v", e)
	}
	wantMode(t, m.path(), 0, 0o777)
}
