package reconciler_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/volumemanager/plugins"
	"github.com/trivet-csi/trivet/volumemanager/state"
)

// tmpfsPlugin is a plugin that mounts a tmpfs for each volume of a pod.
type tmpfsPlugin struct{ plainPlugin }

func (f tmpfsPlugin) NewMounter(spec *plugins.Spec, pod *corev1.Pod) (plugins.Mounter, error) {
	return tmpfsMounter(f.paths.PodVolume(pod.UID, f.Name(), spec.Name())), nil
}

func (f tmpfsPlugin) NewUnmounter(name string, pod types.UID) (plugins.Unmounter, error) {
	return tmpfsMounter(f.paths.PodVolume(pod, f.Name(), name)), nil
}

// tmpfsMounter is the path at which a tmpfs is mounted.
type tmpfsMounter string

func (m tmpfsMounter) Path() string { return string(m) }

func (m tmpfsMounter) SetUp(context.Context, plugins.MounterArgs) error {
	if at, err := mount.OnPath(string(m)); err != nil || at != nil {
		return err
	}
	if err := os.MkdirAll(string(m), 0o755); err != nil {
		return err
	}
	return syscall.Mount("tmpfs", string(m), "tmpfs", 0, "")
}

func (m tmpfsMounter) TearDown(context.Context) error {
	if at, err := mount.OnPath(string(m)); err != nil || at == nil {
		return errors.Join(err, mount.RemoveTarget(string(m)))
	}
	if err := syscall.Unmount(string(m), 0); err != nil {
		return err
	}
	return mount.RemoveTarget(string(m))
}

// withSubPaths returns pod a with volume e, and a container for each subPath of e. The second container
// mounts its subPath read-only.
func withSubPaths(subPaths ...string) *corev1.Pod {
	p := pod("a", "e")
	for i, s := range subPaths {
		p.Spec.Containers = append(p.Spec.Containers, corev1.Container{
			Name:         "c" + string(rune('0'+i)),
			VolumeMounts: []corev1.VolumeMount{{Name: "e", MountPath: "/x", SubPath: s, ReadOnly: i == 1}},
		})
	}
	return p
}

// wantMounts fails the test unless pod a has these mounts below its directory.
func wantMounts(t *testing.T, host *fakeHost, want ...string) {
	t.Helper()
	dir := host.paths.Pod("uid-a") + "/"
	table, err := mount.Table(func(e *mount.Entry) bool { return strings.HasPrefix(e.Mountpoint, dir) })
	must(t, err)
	var got []string
	for _, e := range table {
		got = append(got, strings.TrimPrefix(e.Mountpoint, dir))
	}
	if slices.Sort(got); !slices.Equal(got, want) {
		t.Errorf("got mounts %q, want %q", got, want)
	}
}

// TestRealMounts: volumes and subPaths are really mounted and unmounted, also after changes, restarts and an
// unmount by another program.
func TestRealMounts(t *testing.T) {
	testenv.RequireRoot(t)
	const volume, first, second = "volumes/test~plain/e", "volume-subpaths/e/c0/0", "volume-subpaths/e/c1/0"
	withFakeClock(t, func(t *testing.T, host *fakeHost) {
		dir := host.paths.Pod("uid-a")
		registry := tmpfsPlugin{plainPlugin{fakeHost: host}}
		m := start(t, host, newClaims(), registry)
		m.apply(withSubPaths("one", "two/three"))
		m.wantReady(t, "a")
		wantMounts(t, host, first, second, volume)
		must(t, os.WriteFile(filepath.Join(dir, first, "file"), []byte("kept"), 0o644))
		if err := os.WriteFile(filepath.Join(dir, second, "file"), nil, 0o644); err == nil {
			t.Error("write to a read-only subPath: got no error")
		}
		if s := m.wantPhase(t, "a", "e", state.Mounted); s.SubPaths[1].Path != filepath.Join(dir, second) {
			t.Errorf("path of the second subPath: got %s, want %s", s.SubPaths[1].Path, filepath.Join(dir, second))
		}

		// A subPath that another program unmounts is mounted again and reported.
		must(t, syscall.Unmount(filepath.Join(dir, second), 0))
		time.Sleep(2 * time.Minute)
		synctest.Wait()
		wantMounts(t, host, first, second, volume)
		if all := m.events.List(); len(all) != 1 || all[0].Reason != "Unmounted" {
			t.Errorf("got events %+v, want one with reason Unmounted", all)
		}

		// Only changed subPaths are bound again.
		m.apply(withSubPaths("one", "other"))
		m.wantReady(t, "a")
		if _, err := os.Stat(filepath.Join(dir, volume, "other")); err != nil {
			t.Error(err)
		}
		m.apply(withSubPaths("one"))
		wantMounts(t, host, first, volume)

		// A restarted manager keeps the mounts, and unmounts volumes of pods that were removed.
		m.stop()
		m = start(t, host, newClaims(), registry)
		m.apply(withSubPaths("one"))
		m.wantReady(t, "a")
		if b, err := os.ReadFile(filepath.Join(dir, first, "file")); err != nil || string(b) != "kept" {
			t.Errorf("content of a file after a restart: got %q, error %v; want kept", b, err)
		}
		m.stop()
		m = start(t, host, newClaims(), registry)
		m.wantRemoved(t, host)
	})
}

// TestReboot: after a reboot, when the files on disk exist and the mounts do not, all volumes are
// mounted again.
func TestReboot(t *testing.T) {
	testenv.RequireRoot(t)
	withFakeClock(t, func(t *testing.T, host *fakeHost) {
		registry := tmpfsPlugin{plainPlugin{fakeHost: host}}
		m := start(t, host, newClaims(), registry)
		m.apply(withSubPaths("one"))
		m.stop()
		dir := host.paths.Pod("uid-a")
		must(t, syscall.Unmount(filepath.Join(dir, "volume-subpaths/e/c0/0"), 0))
		must(t, syscall.Unmount(filepath.Join(dir, "volumes/test~plain/e"), 0))
		m = start(t, host, newClaims(), registry)
		m.apply(withSubPaths("one"))
		m.wantReady(t, "a")
		wantMounts(t, host, "volume-subpaths/e/c0/0", "volumes/test~plain/e")
		m.wantRemoved(t, host)
	})
}

// secondPlugin is another plugin that mounts a tmpfs, for hostPath volumes.
type secondPlugin struct{ tmpfsPlugin }

func (secondPlugin) Name() string { return "test/second" }
func (secondPlugin) CanSupport(spec *plugins.Spec) bool {
	return spec.Volume != nil && spec.Volume.HostPath != nil
}

func (f secondPlugin) NewMounter(spec *plugins.Spec, pod *corev1.Pod) (plugins.Mounter, error) {
	return tmpfsMounter(f.paths.PodVolume(pod.UID, f.Name(), spec.Name())), nil
}

func (f secondPlugin) NewUnmounter(name string, pod types.UID) (plugins.Unmounter, error) {
	return tmpfsMounter(f.paths.PodVolume(pod, f.Name(), name)), nil
}

// TestOtherPlugin: if a volume is replaced with one of the same name and another plugin, the subPaths
// of containers are mounted from the new volume.
func TestOtherPlugin(t *testing.T) {
	testenv.RequireRoot(t)
	withFakeClock(t, func(t *testing.T, host *fakeHost) {
		first := tmpfsPlugin{plainPlugin{fakeHost: host}}
		m := start(t, host, newClaims(), first, secondPlugin{first})
		m.apply(withSubPaths("one"))
		part := filepath.Join(host.paths.Pod("uid-a"), "volume-subpaths/e/c0/0")
		must(t, os.WriteFile(filepath.Join(part, "file"), nil, 0o644))
		changed := withSubPaths("one")
		changed.Spec.Volumes[0].VolumeSource = corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: "/"}}
		m.apply(changed)
		m.wantReady(t, "a")
		wantMounts(t, host, "volume-subpaths/e/c0/0", "volumes/test~second/e")
		if _, err := os.Stat(filepath.Join(part, "file")); err == nil {
			t.Error("the subPath is still mounted from the earlier volume")
		}
		m.wantRemoved(t, host)
	})
}

// TestStrayDirectory: a directory with the name of a volume below the directory of another plugin is
// removed, while the volume's subPaths stay mounted and the pod stays ready.
func TestStrayDirectory(t *testing.T) {
	testenv.RequireRoot(t)
	withFakeClock(t, func(t *testing.T, host *fakeHost) {
		first := tmpfsPlugin{plainPlugin{fakeHost: host}}
		registry := []plugins.VolumePlugin{first, secondPlugin{first}}
		part := filepath.Join(host.paths.Pod("uid-a"), "volume-subpaths/e/c0/0")
		stray := host.paths.PodVolume("uid-a", "test/second", "e")
		m := start(t, host, newClaims(), registry...)
		m.apply(withSubPaths("one"))
		before, err := mount.OnPath(part)
		must(t, err)
		check := func() {
			t.Helper()
			m.wantReady(t, "a")
			if at, err := mount.OnPath(part); err != nil || at == nil || at.ID != before.ID {
				t.Errorf("mount of the subPath: got %+v, error %v; want ID %d as before", at, err, before.ID)
			}
		}
		must(t, os.MkdirAll(filepath.Join(stray, "in the way"), 0o755))
		time.Sleep(2 * time.Minute)
		synctest.Wait()
		check()
		m.stop()
		m = start(t, host, newClaims(), registry...)
		m.apply(withSubPaths("one"))
		check()
		must(t, os.Remove(filepath.Join(stray, "in the way")))
		time.Sleep(2 * time.Minute)
		synctest.Wait()
		check()
		if _, err := os.Lstat(stray); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("the stray directory was not removed: Lstat returned %v", err)
		}
		m.wantRemoved(t, host)
	})
}

// withDeviceMount is fullPlugin with a real device mount.
type withDeviceMount struct{ fullPlugin }

func (s withDeviceMount) DeviceMountPath(spec *plugins.Spec) (string, error) {
	return filepath.Join(s.paths.Plugin(s.Name()), "staged", handle(spec)), nil
}

func (s withDeviceMount) MountDevice(ctx context.Context, spec *plugins.Spec, a plugins.Attachment, args plugins.MounterArgs) error {
	path, _ := s.DeviceMountPath(spec)
	return errors.Join(s.fullPlugin.MountDevice(ctx, spec, a, args), tmpfsMounter(path).SetUp(ctx, args))
}

func (s withDeviceMount) UnmountDevice(ctx context.Context, spec *plugins.Spec) error {
	path, _ := s.DeviceMountPath(spec)
	return errors.Join(s.fullPlugin.UnmountDevice(ctx, spec), tmpfsMounter(path).TearDown(ctx))
}

// TestUnmountedDevice: if another program unmounts a device, the device is mounted again, and the mounts
// of pods stay.
func TestUnmountedDevice(t *testing.T) {
	testenv.RequireRoot(t)
	withFakeClock(t, func(t *testing.T, host *fakeHost) {
		m := start(t, host, newClaims("fs"), withDeviceMount{fullPlugin{host}})
		m.apply(pod("a", "fs"))
		m.wantReady(t, "a")
		host.calls()
		path := filepath.Join(host.paths.Plugin("test/full"), "staged", "h-fs")
		must(t, syscall.Unmount(path, 0))
		time.Sleep(2 * time.Minute)
		m.wantReady(t, "a")
		wantCalls(t, host, "MountDevice h-fs")
		if at, err := mount.OnPath(path); err != nil || at == nil {
			t.Errorf("mount of the device: got %v, error %v; want a mount", at, err)
		}
		m.wantRemoved(t, host)
	})
}

// TestSubPathOutside: a subPath that leads out of the volume is refused.
func TestSubPathOutside(t *testing.T) {
	testenv.RequireRoot(t)
	withFakeClock(t, func(t *testing.T, host *fakeHost) {
		m := start(t, host, newClaims(), tmpfsPlugin{plainPlugin{fakeHost: host}})
		m.apply(withSubPaths())
		must(t, os.Symlink("/etc", filepath.Join(host.paths.Pod("uid-a"), "volumes/test~plain/e/out")))
		m.apply(withSubPaths("out"))
		m.wantPhase(t, "a", "e", state.Failed, `subPath "out"`, `container "c0"`)
		m.wantRemoved(t, host)
	})
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
