package nodeserver

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/linux/blockdev"
	"github.com/trivet-csi/trivet/linux/cgroup"
	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/volume"
)

func TestMain(m *testing.M) { testenv.Main(m) }

var (
	limitedID = volume.ID{Backend: "loop", Pool: "default", PoolUUID: "00000000", Name: "limited"}
	otherID   = volume.ID{Backend: "loop", Pool: "default", PoolUUID: "00000000", Name: "other"}
)

// limitedVolumes is a backend whose volumes have limits. No volume is mounted.
type limitedVolumes struct {
	backend.Backend
	present func(volume.ID) (device string, ok bool)
	detach  func()
}

func (limitedVolumes) Name() string { return "loop" }

func (limitedVolumes) Get(_ context.Context, id volume.ID) (volume.Volume, error) {
	return volume.Volume{ID: id, Version: 1, FSType: "ext4", IOLimits: &volume.IOLimits{ReadBytes: 1 << 20}}, nil
}

func (l limitedVolumes) Present(_ context.Context, v volume.Volume) (mount.Source, bool, error) {
	device, ok := l.present(v.ID)
	return &blockdev.DeviceSource{Path: device, FSType: v.FSType}, ok, nil
}

func (l limitedVolumes) Detach(context.Context, volume.Volume) error {
	l.detach()
	return nil
}

func (limitedVolumes) IOLimited() ([]volume.ID, error) { return []volume.ID{limitedID, otherID}, nil }

func (limitedVolumes) ChangeIOLimits(context.Context, volume.ID, func(volume.IOLimits) (volume.IOLimits, error)) error {
	return errors.New("not used")
}

// limitedPod returns a hierarchy with a pod that has a limit for a device, and a function that returns the pod's io.max.
func limitedPod(t *testing.T, device string) (root cgroup.Hierarchy, ioMax func() string) {
	t.Helper()
	dir := t.TempDir()
	number, err := blockdev.WholeNumber(device)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "kubepods/pod1/io.max")
	err = errors.Join(
		os.MkdirAll(filepath.Dir(path), 0o755),
		os.WriteFile(filepath.Join(dir, "cgroup.controllers"), []byte("io memory\n"), 0o644),
		os.WriteFile(path, fmt.Appendf(nil, "%d:%d rbps=65536 wbps=max riops=max wiops=max\n", unix.Major(number), unix.Minor(number)), 0o644),
	)
	if err != nil {
		t.Fatal(err)
	}
	return cgroup.Hierarchy(dir), func() string {
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
}

// TestLimitsOfReusedDevice: nothing is written for a device that was detached meanwhile: it may be that of another volume.
func TestLimitsOfReusedDevice(t *testing.T) {
	device, _, _ := testenv.Disk(t, 1<<20)
	attached := true
	s := New(registry(limitedVolumes{present: func(volume.ID) (string, bool) {
		defer func() { attached = false }()
		return device, attached
	}}), "node", 1)
	root, ioMax := limitedPod(t, device)
	s.Cgroups = root
	if err := s.ApplyIOLimits(t.Context(), limitedID); err != nil {
		t.Fatal(err)
	}
	if attached || !strings.Contains(ioMax(), "rbps=65536") {
		t.Errorf("io.max of the pod with another volume contains %q, want the limit of that volume", ioMax())
	}
}

// TestLimitsAtDetach: before a device is detached, the limits are removed that a pod still has for its number, and until it is
// detached no limits are written.
func TestLimitsAtDetach(t *testing.T) {
	device, _, _ := testenv.Disk(t, 1<<20)
	staging := filepath.Join(t.TempDir(), "staging")
	for name, call := range map[string]func(*Server) error{
		"unstage": func(s *Server) error {
			_, err := s.NodeUnstageVolume(t.Context(), &csi.NodeUnstageVolumeRequest{VolumeId: limitedID.String(), StagingTargetPath: staging})
			return err
		},
		"release": func(s *Server) error {
			_, err := s.Release(t.Context(), limitedID, staging)
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			root, ioMax := limitedPod(t, device)
			var s *Server
			detached := ""
			s = New(registry(limitedVolumes{
				present: func(volume.ID) (string, bool) { return device, true },
				detach: func() {
					detached = ioMax()
					if release, ok := s.limiting.tryAcquire(limitedID); ok {
						release()
						t.Error("limits can be written while the device is detached")
					}
				},
			}), "node", 1)
			s.Cgroups = root
			if err := call(s); err != nil {
				t.Fatal(err)
			}
			if !strings.Contains(detached, "rbps=max") {
				t.Errorf("when the device is detached, io.max of a pod contains %q, want no limit", detached)
			}
		})
	}
}

// readOnlyVolumes is limitedVolumes with a read-only device, on which detach is called when it is freed.
type readOnlyVolumes struct {
	limitedVolumes
	device string
}

func (r readOnlyVolumes) ReadOnlyDevice(context.Context, volume.Volume) (mount.BlockDevice, error) {
	return &blockdev.DeviceSource{Path: r.device}, nil
}

func (r readOnlyVolumes) PresentReadOnly(context.Context, volume.Volume) (mount.BlockDevice, bool, error) {
	return &blockdev.DeviceSource{Path: r.device}, true, nil
}

func (r readOnlyVolumes) ReleaseReadOnly(context.Context, volume.Volume) error {
	r.detach()
	return nil
}

// TestLimitsAtFailedPublish: if a raw volume cannot be published, no limits are written while its read-only device is freed, and no
// pod has limits for its number.
func TestLimitsAtFailedPublish(t *testing.T) {
	device, _, _ := testenv.Disk(t, 1<<20)
	root, ioMax := limitedPod(t, device)
	var s *Server
	detached := ""
	b := readOnlyVolumes{device: device, limitedVolumes: limitedVolumes{
		present: func(volume.ID) (string, bool) { return device, true },
		detach: func() {
			detached = ioMax()
			if release, ok := s.limiting.tryAcquire(limitedID); ok {
				release()
				t.Error("limits can be written while the device is freed")
			}
		},
	}}
	s = New(registry(b), "node", 1)
	s.Cgroups = root
	v := volume.Volume{ID: limitedID, Version: 1, Block: true, IOLimits: &volume.IOLimits{ReadBytes: 1 << 20}}
	r := request{id: limitedID.String(), target: filepath.Join(t.TempDir(), "missing", "target"), readOnly: true}
	err := s.publishBlock(t.Context(), b, v, r, &blockdev.DeviceSource{Path: device})
	if !errors.Is(err, volume.ErrPrecondition) || !strings.Contains(detached, "rbps=max") {
		t.Errorf("got error %v, and io.max %q when the device is freed, want that the target cannot be created, and no limit", err, detached)
	}
}

// TestLimitsBesideStalledDisk: while the disk of one volume does not answer, the limits of other volumes are set, and calls for the
// stalled volume end at their deadline.
func TestLimitsBesideStalledDisk(t *testing.T) {
	device, _, _ := testenv.Disk(t, 1<<20)
	stalled, answer := make(chan struct{}, 2), make(chan struct{})
	s := New(registry(limitedVolumes{present: func(id volume.ID) (string, bool) {
		if id == limitedID {
			stalled <- struct{}{}
			<-answer
		}
		return device, true
	}}), "node", 1)
	root, ioMax := limitedPod(t, device)
	s.Cgroups = root
	applied := make(chan error, 1)
	go func() { applied <- s.ApplyIOLimits(context.Background(), limitedID) }()
	<-stalled
	if err := s.RestoreIOLimits(t.Context()); err != nil || !strings.Contains(ioMax(), "rbps=max") {
		t.Errorf("restoring the limits of the other volume: got error %v and io.max %q, want no limit", err, ioMax())
	}
	if err := s.ApplyIOLimits(t.Context(), otherID); err != nil {
		t.Errorf("the limits of the other volume: %v", err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if err := s.ApplyIOLimits(ctx, limitedID); !errors.Is(err, volume.ErrPending) {
		t.Errorf("the limits of the stalled volume: got error %v, want ErrPending", err)
	}
	close(answer)
	if err := <-applied; err != nil {
		t.Error(err)
	}
	if len(s.limiting.locks) != 0 {
		t.Errorf("%d locks remain, want none", len(s.limiting.locks))
	}
}

// TestRemoveLimitsWithoutController: limits can be removed while a pod that has no io.max uses the volume.
func TestRemoveLimitsWithoutController(t *testing.T) {
	pods := map[string]cgroup.Pod{"uid": cgroup.Pod(t.TempDir())} // without io.max
	for name, tc := range map[string]struct {
		limits volume.IOLimits
		failed error
	}{
		"limits":  {volume.IOLimits{ReadIOPS: 100}, volume.ErrPrecondition},
		"removed": {volume.IOLimits{}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			done := limitedPods{map[string]bool{}, map[string]error{}}
			done.limitDevice(1, volume.Volume{ID: limitedID, IOLimits: &tc.limits}, pods, map[string]bool{"uid": true})
			if err := done.err(); !errors.Is(err, tc.failed) {
				t.Errorf("got error %v, want %v", err, tc.failed)
			}
		})
	}
}

// TestCheckIOLimits: only a node that cannot limit I/O refuses limits for good.
func TestCheckIOLimits(t *testing.T) {
	s := New(registry(limitedVolumes{}), "node", 1)
	s.Cgroups = cgroup.Hierarchy(t.TempDir())
	if err := s.CheckIOLimits(); !errors.Is(err, volume.ErrInvalid) {
		t.Errorf("without cgroup v2: got error %v, want ErrInvalid", err)
	}
	if err := os.Mkdir(filepath.Join(string(s.Cgroups), "cgroup.controllers"), 0o755); err != nil { // reading it fails
		t.Fatal(err)
	}
	if err := s.CheckIOLimits(); !errors.Is(err, volume.ErrUnavailable) {
		t.Errorf("with an error of the hierarchy: got error %v, want ErrUnavailable", err)
	}
}
