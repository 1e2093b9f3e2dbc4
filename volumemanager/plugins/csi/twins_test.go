package csi_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"syscall"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/textlogger"

	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/volumemanager/event"
	"github.com/trivet-csi/trivet/volumemanager/manifest"
	"github.com/trivet-csi/trivet/volumemanager/operation"
	"github.com/trivet-csi/trivet/volumemanager/plugins"
	"github.com/trivet-csi/trivet/volumemanager/reconciler"
)

// TestTwoVolumesOfOneHandle: two PersistentVolumes are one volume of the driver. After a restart it
// stays staged while a pod has it under either name.
func TestTwoVolumesOfOneHandle(t *testing.T) {
	testenv.RequireRoot(t)
	h, f := registeredFake(t)
	unstageUnused(t, h, f)
	c := &twins{}
	m := h.reconcile(t, c)
	m.Update(manifests("one", "two"))
	m.awaitMounts(t, 3)
	m.stop()

	h.start(t)
	h.status(t, "fake-reg.sock", registered)
	c.setAway(true) // the manager finds the other pod's volume on disk only
	m = h.reconcile(t, c)
	m.Update(manifests("two"))
	waitFor(t, func() error { // until the device was checked, too
		if _, err := os.Lstat(h.Paths().Pod("uid-one")); !os.IsNotExist(err) {
			return fmt.Errorf("the directory of the first pod exists: %w", err)
		}
		return nil
	})
	m.awaitMounts(t, 2)
	if n := f.count("NodeUnstageVolume") + f.count("ControllerUnpublishVolume"); n > 0 {
		t.Error("unstaged or detached")
	}
	m.Update(manifests())
	waitFor(t, func() error {
		if _, down := m.StateDiff(); down > 0 {
			return fmt.Errorf("%d volumes to unmount", down)
		}
		return nil
	})
	m.stop()
	nothingLeft(t, h.Root)
}

// unstageUnused fails the test if a published volume is unstaged.
func unstageUnused(t *testing.T, h *host, f *fake) {
	t.Helper()
	f.on("NodeUnstageVolume", func(_ context.Context, r any) error {
		if at := mounts(t, h.Root+"/pods"); len(at) > 0 {
			t.Errorf("unstaged while published at %v", at)
		}
		return syscall.Unmount(r.(*csi.NodeUnstageVolumeRequest).GetStagingTargetPath(), 0)
	})
}

// twins returns a PersistentVolume for each claim, all with one handle.
type twins struct {
	mu   sync.Mutex
	away bool
}

func (c *twins) setAway(away bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.away = away
}

func (c *twins) Volume(key types.NamespacedName) (*corev1.PersistentVolumeClaim, *corev1.PersistentVolume, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.away {
		return nil, nil, errors.New("the claim is not bound")
	}
	return &corev1.PersistentVolumeClaim{}, persistent(driverName, "pv-"+key.Name, "handle").PersistentVolume, nil
}

func (*twins) NodeExpanded(string, resource.Quantity) {}

// manager is a reconciler on a machine until stop.
type manager struct {
	*reconciler.Reconciler
	h    *host
	stop func()
}

func (h *host) reconcile(t *testing.T, c reconciler.Claims) *manager {
	t.Helper()
	quiet := textlogger.NewLogger(textlogger.NewConfig(textlogger.Output(io.Discard)))
	ctx, cancel := context.WithCancel(klog.NewContext(context.Background(), quiet))
	executor := operation.New(ctx, nil)
	r := reconciler.New(ctx, plugins.Registry{h.Plugin}, h.Paths(), executor, &event.Recorder{}, c, func() *corev1.Node { return plugins.Node(nodeName) })
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		r.Run(ctx)
	}()
	stop := sync.OnceFunc(func() {
		cancel()
		<-ended
		executor.Wait()
	})
	t.Cleanup(stop)
	return &manager{r, h, stop}
}

// manifests returns pods, each with a claim of the same name.
func manifests(names ...string) *manifest.Objects {
	o := &manifest.Objects{Complete: true, Pods: map[types.NamespacedName]*corev1.Pod{}}
	for _, name := range names {
		p := pod(name)
		claim := &corev1.PersistentVolumeClaimVolumeSource{ClaimName: name}
		p.Spec.Volumes = []corev1.Volume{{Name: "data", VolumeSource: corev1.VolumeSource{PersistentVolumeClaim: claim}}}
		o.Pods[types.NamespacedName{Namespace: p.Namespace, Name: name}] = p
	}
	return o
}

// awaitMounts waits until the pods and the machine have n mounts.
func (m *manager) awaitMounts(t *testing.T, n int) {
	t.Helper()
	waitFor(t, func() error {
		if at := mounts(t, m.h.Root); len(at) != n {
			return fmt.Errorf("mounts %q, want %d", at, n)
		}
		return nil
	})
}
