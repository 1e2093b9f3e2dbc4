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

// TestTwoVolumesOfOneHandle: two PersistentVolumes are one volume for the driver. After a
// restart it stays staged as long as a pod has it by either name.
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
	c.setAway(true) // so that it is the disk that tells what the other pod has
	m = h.reconcile(t, c)
	m.Update(manifests("two"))
	waitFor(t, func() error { // until it has looked at the device, too
		if _, err := os.Lstat(h.Paths().Pod("uid-one")); !os.IsNotExist(err) {
			return fmt.Errorf("the first pod is there: %w", err)
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
			return fmt.Errorf("%d to take down", down)
		}
		return nil
	})
	m.stop()
	nothingLeft(t, h.root)
}

// unstageUnused makes the driver refuse what a manager must not ask for.
func unstageUnused(t *testing.T, h *host, f *fake) {
	t.Helper()
	f.on("NodeUnstageVolume", func(_ context.Context, r any) error {
		if at := mounts(t, h.root+"/pods"); len(at) > 0 {
			t.Errorf("it is unstaged while it is published at %v", at)
		}
		return syscall.Unmount(r.(*csi.NodeUnstageVolumeRequest).GetStagingTargetPath(), 0)
	})
}

// twins has a PersistentVolume of its name for each claim, all with one handle.
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
		return nil, nil, errors.New("it is not bound")
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

// manifests have pods with a claim of their name.
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

// awaitMounts waits until so many are there, of pods and of the machine.
func (m *manager) awaitMounts(t *testing.T, n int) {
	t.Helper()
	waitFor(t, func() error {
		if at := mounts(t, m.h.root); len(at) != n {
			return fmt.Errorf("mounts %q, want %d", at, n)
		}
		return nil
	})
}
