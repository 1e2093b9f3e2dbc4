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

// tmpfs is a plugin that mounts a tmpfs for each volume of a pod.
type tmpfs struct{ plain }

func (f tmpfs) NewMounter(spec *plugins.Spec, pod *corev1.Pod) (plugins.Mounter, error) {
	return tmpfsMounter(f.paths.PodVolume(pod.UID, f.Name(), spec.Name())), nil
}

func (f tmpfs) NewUnmounter(name string, pod types.UID) (plugins.Unmounter, error) {
	return tmpfsMounter(f.paths.PodVolume(pod, f.Name(), name)), nil
}

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

// withSubPaths returns a pod with a container for each subPath.
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
func wantMounts(t *testing.T, g *ground, want ...string) {
	t.Helper()
	dir := g.paths.Pod("uid-a") + "/"
	table, err := mount.Table(func(e *mount.Entry) bool { return strings.HasPrefix(e.Mountpoint, dir) })
	must(t, err)
	var got []string
	for _, e := range table {
		got = append(got, strings.TrimPrefix(e.Mountpoint, dir))
	}
	if slices.Sort(got); !slices.Equal(got, want) {
		t.Errorf("mounts: %q, want %q", got, want)
	}
}

func TestRealMounts(t *testing.T) {
	testenv.RequireRoot(t)
	const volume, first, second = "volumes/test~plain/e", "volume-subpaths/e/c0/0", "volume-subpaths/e/c1/0"
	bubble(t, func(t *testing.T, g *ground) {
		dir := g.paths.Pod("uid-a")
		registry := tmpfs{plain{ground: g}}
		m := start(t, g, newClaims(), registry)
		m.apply(withSubPaths("one", "two/three"))
		m.wantReady(t, "a")
		wantMounts(t, g, first, second, volume)
		must(t, os.WriteFile(filepath.Join(dir, first, "file"), []byte("kept"), 0o644))
		if err := os.WriteFile(filepath.Join(dir, second, "file"), nil, 0o644); err == nil {
			t.Error("a read-only subPath was written")
		}
		if s := m.wantPhase(t, "a", "e", state.Mounted); s.SubPaths[1].Path != filepath.Join(dir, second) {
			t.Errorf("status: %+v", s)
		}

		// A subPath that another program unmounts is mounted again and reported.
		must(t, syscall.Unmount(filepath.Join(dir, second), 0))
		time.Sleep(2 * time.Minute)
		synctest.Wait()
		wantMounts(t, g, first, second, volume)
		if all := m.events.List(); len(all) != 1 || all[0].Reason != "Unmounted" {
			t.Errorf("events: %+v", all)
		}

		// Only changed subPaths are bound again.
		m.apply(withSubPaths("one", "other"))
		m.wantReady(t, "a")
		if _, err := os.Stat(filepath.Join(dir, volume, "other")); err != nil {
			t.Error(err)
		}
		m.apply(withSubPaths("one"))
		wantMounts(t, g, first, volume)

		// The next manager keeps the mounts, and unmounts volumes of removed pods.
		m.stop()
		m = start(t, g, newClaims(), registry)
		m.apply(withSubPaths("one"))
		m.wantReady(t, "a")
		if b, err := os.ReadFile(filepath.Join(dir, first, "file")); err != nil || string(b) != "kept" {
			t.Errorf("after a restart: %q, %v", b, err)
		}
		m.stop()
		m = start(t, g, newClaims(), registry)
		m.wantRemoved(t, g)
	})
}

// TestReboot: after a reboot, files exist and mounts do not.
func TestReboot(t *testing.T) {
	testenv.RequireRoot(t)
	bubble(t, func(t *testing.T, g *ground) {
		registry := tmpfs{plain{ground: g}}
		m := start(t, g, newClaims(), registry)
		m.apply(withSubPaths("one"))
		m.stop()
		dir := g.paths.Pod("uid-a")
		must(t, syscall.Unmount(filepath.Join(dir, "volume-subpaths/e/c0/0"), 0))
		must(t, syscall.Unmount(filepath.Join(dir, "volumes/test~plain/e"), 0))
		m = start(t, g, newClaims(), registry)
		m.apply(withSubPaths("one"))
		m.wantReady(t, "a")
		wantMounts(t, g, "volume-subpaths/e/c0/0", "volumes/test~plain/e")
		m.wantRemoved(t, g)
	})
}

// second is another plugin with mounts.
type second struct{ tmpfs }

func (second) Name() string { return "test/second" }
func (second) CanSupport(spec *plugins.Spec) bool {
	return spec.Volume != nil && spec.Volume.HostPath != nil
}

func (f second) NewMounter(spec *plugins.Spec, pod *corev1.Pod) (plugins.Mounter, error) {
	return tmpfsMounter(f.paths.PodVolume(pod.UID, f.Name(), spec.Name())), nil
}

func (f second) NewUnmounter(name string, pod types.UID) (plugins.Unmounter, error) {
	return tmpfsMounter(f.paths.PodVolume(pod, f.Name(), name)), nil
}

// TestOtherPlugin: after a volume was replaced with one of another plugin, a container's subPath is
// of the new volume.
func TestOtherPlugin(t *testing.T) {
	testenv.RequireRoot(t)
	bubble(t, func(t *testing.T, g *ground) {
		first := tmpfs{plain{ground: g}}
		m := start(t, g, newClaims(), first, second{first})
		m.apply(withSubPaths("one"))
		part := filepath.Join(g.paths.Pod("uid-a"), "volume-subpaths/e/c0/0")
		must(t, os.WriteFile(filepath.Join(part, "file"), nil, 0o644))
		changed := withSubPaths("one")
		changed.Spec.Volumes[0].VolumeSource = corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: "/"}}
		m.apply(changed)
		m.wantReady(t, "a")
		wantMounts(t, g, "volume-subpaths/e/c0/0", "volumes/test~second/e")
		if _, err := os.Stat(filepath.Join(part, "file")); err == nil {
			t.Error("the subPath is of the earlier volume")
		}
		m.wantRemoved(t, g)
	})
}

// TestStrayDirectory: a directory with the volume's name below another plugin's directory is removed
// without the subPaths of the volume, and the pod does not wait for that.
func TestStrayDirectory(t *testing.T) {
	testenv.RequireRoot(t)
	bubble(t, func(t *testing.T, g *ground) {
		first := tmpfs{plain{ground: g}}
		registry := []plugins.VolumePlugin{first, second{first}}
		part := filepath.Join(g.paths.Pod("uid-a"), "volume-subpaths/e/c0/0")
		stray := g.paths.PodVolume("uid-a", "test/second", "e")
		m := start(t, g, newClaims(), registry...)
		m.apply(withSubPaths("one"))
		before, err := mount.OnPath(part)
		must(t, err)
		check := func() {
			t.Helper()
			m.wantReady(t, "a")
			if at, err := mount.OnPath(part); err != nil || at == nil || at.ID != before.ID {
				t.Errorf("mount of the subPath: %+v, %v", at, err)
			}
		}
		must(t, os.MkdirAll(filepath.Join(stray, "in the way"), 0o755))
		time.Sleep(2 * time.Minute)
		synctest.Wait()
		check()
		m.stop()
		m = start(t, g, newClaims(), registry...)
		m.apply(withSubPaths("one"))
		check()
		must(t, os.Remove(filepath.Join(stray, "in the way")))
		time.Sleep(2 * time.Minute)
		synctest.Wait()
		check()
		if _, err := os.Lstat(stray); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("the stray directory: %v", err)
		}
		m.wantRemoved(t, g)
	})
}

// staged is full with a real device mount.
type staged struct{ full }

func (s staged) DeviceMountPath(spec *plugins.Spec) (string, error) {
	return filepath.Join(s.paths.Plugin(s.Name()), "staged", handle(spec)), nil
}

func (s staged) MountDevice(ctx context.Context, spec *plugins.Spec, a plugins.Attachment, args plugins.MounterArgs) error {
	path, _ := s.DeviceMountPath(spec)
	return errors.Join(s.full.MountDevice(ctx, spec, a, args), tmpfsMounter(path).SetUp(ctx, args))
}

func (s staged) UnmountDevice(ctx context.Context, spec *plugins.Spec) error {
	path, _ := s.DeviceMountPath(spec)
	return errors.Join(s.full.UnmountDevice(ctx, spec), tmpfsMounter(path).TearDown(ctx))
}

// TestUnmountedDevice: a device that another program unmounts is mounted again. The mounts of pods
// stay.
func TestUnmountedDevice(t *testing.T) {
	testenv.RequireRoot(t)
	bubble(t, func(t *testing.T, g *ground) {
		m := start(t, g, newClaims("fs"), staged{full{g}})
		m.apply(pod("a", "fs"))
		m.wantReady(t, "a")
		g.calls()
		path := filepath.Join(g.paths.Plugin("test/full"), "staged", "h-fs")
		must(t, syscall.Unmount(path, 0))
		time.Sleep(2 * time.Minute)
		m.wantReady(t, "a")
		wantCalls(t, g, "MountDevice h-fs")
		if at, err := mount.OnPath(path); err != nil || at == nil {
			t.Errorf("mount of the device: %v, %v", at, err)
		}
		m.wantRemoved(t, g)
	})
}

// TestSubPathOutside: a subPath that leads out of the volume is refused.
func TestSubPathOutside(t *testing.T) {
	testenv.RequireRoot(t)
	bubble(t, func(t *testing.T, g *ground) {
		m := start(t, g, newClaims(), tmpfs{plain{ground: g}})
		m.apply(withSubPaths())
		must(t, os.Symlink("/etc", filepath.Join(g.paths.Pod("uid-a"), "volumes/test~plain/e/out")))
		m.apply(withSubPaths("out"))
		m.wantPhase(t, "a", "e", state.Failed, `subPath "out"`, `container "c0"`)
		m.wantRemoved(t, g)
	})
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
