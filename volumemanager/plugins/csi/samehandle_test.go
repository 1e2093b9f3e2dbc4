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

// TestTwoVolumesOfOneHandle: two PersistentVolumes with one handle are one volume of the driver. After a
// restart, the volume stays staged while a pod uses either PersistentVolume.
func TestTwoVolumesOfOneHandle(t *testing.T) {
	testenv.RequireRoot(t)
	h, f := registeredFake(t)
	failEarlyUnstage(t, h, f)
	c := &claims{}
	m := h.reconcile(t, c)
	m.Update(manifests("one", "two"))
	m.awaitMounts(t, 3)
	m.stop()

	h.start(t)
	h.waitForStatus(t, "fake-reg.sock", registered)
	c.setUnbound(true) // the manager finds the volume of pod two only on disk
	m = h.reconcile(t, c)
	m.Update(manifests("two"))
	waitFor(t, func() error { // the pod's directory is removed after the device was checked
		_, err := os.Lstat(h.Paths().Pod("uid-one"))
		if err == nil {
			return errors.New("the directory of pod one still exists")
		}
		if !os.IsNotExist(err) {
			return err
		}
		return nil
	})
	m.awaitMounts(t, 2)
	if n := f.count("NodeUnstageVolume") + f.count("ControllerUnpublishVolume"); n > 0 {
		t.Errorf("got %d calls of NodeUnstageVolume and ControllerUnpublishVolume, want none", n)
	}
	m.Update(manifests())
	waitFor(t, func() error {
		if _, toUnmount := m.StateDiff(); toUnmount > 0 {
			return fmt.Errorf("got %d volumes to unmount, want none", toUnmount)
		}
		return nil
	})
	m.stop()
	wantNothingLeft(t, h.Root)
}

// failEarlyUnstage makes the test fail if the volume is unstaged while it is published.
func failEarlyUnstage(t *testing.T, h *host, f *fake) {
	t.Helper()
	f.replace("NodeUnstageVolume", func(_ context.Context, r any) error {
		if at := mounts(t, h.Root+"/pods"); len(at) > 0 {
			t.Errorf("NodeUnstageVolume was called while the volume was published at %v", at)
		}
		return syscall.Unmount(r.(*csi.NodeUnstageVolumeRequest).GetStagingTargetPath(), 0)
	})
}

// claims implements reconciler.Claims. It binds each claim to its own PersistentVolume, and all these
// have one handle.
type claims struct {
	mu      sync.Mutex
	unbound bool
}

func (c *claims) setUnbound(unbound bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.unbound = unbound
}

func (c *claims) Volume(key types.NamespacedName) (*corev1.PersistentVolumeClaim, *corev1.PersistentVolume, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.unbound {
		return nil, nil, errors.New("the claim is not bound")
	}
	return &corev1.PersistentVolumeClaim{}, persistent(driverName, "pv-"+key.Name, "handle").PersistentVolume, nil
}

func (*claims) NodeExpanded(string, resource.Quantity) {}

// manager is a reconciler that runs until stop is called.
type manager struct {
	*reconciler.Reconciler
	h    *host
	stop func()
}

// reconcile runs a reconciler until the test ends.
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

// awaitMounts waits until there are n mounts below the root directory.
func (m *manager) awaitMounts(t *testing.T, n int) {
	t.Helper()
	waitFor(t, func() error {
		if at := mounts(t, m.h.Root); len(at) != n {
			return fmt.Errorf("got mounts %q, want %d", at, n)
		}
		return nil
	})
}
