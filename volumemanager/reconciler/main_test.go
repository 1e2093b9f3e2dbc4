package reconciler_test

import (
	"context"
	"io"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/textlogger"

	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/volumemanager/event"
	"github.com/trivet-csi/trivet/volumemanager/manifest"
	"github.com/trivet-csi/trivet/volumemanager/operation"
	"github.com/trivet-csi/trivet/volumemanager/plugins"
	"github.com/trivet-csi/trivet/volumemanager/reconciler"
	"github.com/trivet-csi/trivet/volumemanager/state"
)

func TestMain(m *testing.M) { testenv.Main(m) }

// manager is a running reconciler. It is stopped by stop or at the end of the test.
type manager struct {
	*reconciler.Reconciler
	events *event.Recorder
	stop   func()
}

// start starts a reconciler with the plugins in registry.
func start(tb testing.TB, host *fakeHost, c *claims, registry ...plugins.VolumePlugin) *manager {
	tb.Helper()
	discard := textlogger.NewLogger(textlogger.NewConfig(textlogger.Output(io.Discard)))
	ctx, cancel := context.WithCancel(klog.NewContext(context.Background(), discard))
	executor := operation.New(ctx, nil)
	events := &event.Recorder{}
	r := reconciler.New(ctx, registry, host.paths, executor, events, c, host.node)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		r.Run(ctx)
	}()
	m := &manager{r, events, func() {
		cancel()
		<-ended
		executor.Wait()
	}}
	tb.Cleanup(m.stop)
	return m
}

// volumeOf returns a PersistentVolume with 1 GiB, which fullPlugin supports.
func volumeOf(name, handle string, mode corev1.PersistentVolumeMode) *corev1.PersistentVolume {
	return &corev1.PersistentVolume{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: corev1.PersistentVolumeSpec{
			VolumeMode:             &mode,
			AccessModes:            []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
			Capacity:               corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")},
			PersistentVolumeSource: corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{Driver: "full", VolumeHandle: handle}},
		},
	}
}

// newClaims returns bound claims. Claim and volume have the same name. A volume whose name begins with
// d is a raw device, any other a filesystem.
func newClaims(names ...string) *claims {
	c := &claims{volumes: map[string]*corev1.PersistentVolume{}, expanded: map[string]string{}}
	for _, n := range names {
		mode := corev1.PersistentVolumeFilesystem
		if n[0] == 'd' {
			mode = corev1.PersistentVolumeBlock
		}
		c.set(volumeOf(n, "h-"+n, mode))
	}
	return c
}

// pod returns a pod with volumes. A volume whose name begins with e is an emptyDir, any other is the
// claim of the same name.
func pod(name string, volumes ...string) *corev1.Pod {
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, UID: types.UID("uid-" + name)}}
	for _, v := range volumes {
		volume := corev1.Volume{Name: v}
		if v[0] == 'e' {
			volume.EmptyDir = &corev1.EmptyDirVolumeSource{}
		} else {
			volume.PersistentVolumeClaim = &corev1.PersistentVolumeClaimVolumeSource{ClaimName: v}
		}
		p.Spec.Volumes = append(p.Spec.Volumes, volume)
	}
	return p
}

// objects returns complete manifests with these pods.
func objects(pods ...*corev1.Pod) *manifest.Objects {
	o := &manifest.Objects{Complete: true, Pods: map[types.NamespacedName]*corev1.Pod{}}
	for _, p := range pods {
		o.Pods[types.NamespacedName{Namespace: p.Namespace, Name: p.Name}] = p
	}
	return o
}

// apply calls Update with the pods and settles.
func (m *manager) apply(pods ...*corev1.Pod) {
	m.Update(objects(pods...))
	settle()
}

// wantRemoved removes all pods, and fails the test if a volume or directory of a pod is left.
func (m *manager) wantRemoved(t *testing.T, host *fakeHost) {
	t.Helper()
	m.apply()
	wantAllRemoved(t, host, m)
}

// wantPhase fails the test if a volume has another phase, or its message does not contain all words.
func (m *manager) wantPhase(t *testing.T, pod, volume string, phase state.Phase, words ...string) reconciler.VolumeStatus {
	t.Helper()
	v := m.volume(t, pod, volume)
	if v.Phase != phase {
		t.Errorf("volume %s of pod %s: got phase %s with message %q, want phase %s", volume, pod, v.Phase, v.Message, phase)
	}
	for _, w := range words {
		if !strings.Contains(v.Message, w) {
			t.Errorf("volume %s of pod %s: got message %q, want it to contain %q", volume, pod, v.Message, w)
		}
	}
	return v
}

// wantMounted fails the test unless a volume of pod a is mounted and has the message.
func (m *manager) wantMounted(t *testing.T, volume, message string) {
	t.Helper()
	if s := m.wantPhase(t, "a", volume, state.Mounted); s.Message != message {
		t.Errorf("volume %s: got message %q, want %q", volume, s.Message, message)
	}
}

// volume returns the status of a volume of a pod.
func (m *manager) volume(t *testing.T, pod, volume string) reconciler.VolumeStatus {
	t.Helper()
	_, volumes, _ := m.PodReady(key(pod))
	i := slices.IndexFunc(volumes, func(v reconciler.VolumeStatus) bool { return v.Volume == volume })
	if i < 0 {
		t.Fatalf("pod %s has no volume %s: %+v", pod, volume, volumes)
	}
	return volumes[i]
}

// wantReady fails the test unless all volumes of the pods are mounted.
func (m *manager) wantReady(t *testing.T, pods ...string) {
	t.Helper()
	for _, p := range pods {
		if ready, volumes, known := m.PodReady(key(p)); !ready || !known {
			t.Errorf("pod %s: got ready %t, known %t, want both; volumes: %+v", p, ready, known, volumes)
		}
	}
}

// wantCalls fails the test unless the operations since the last use of calls are want, in any order.
func wantCalls(t *testing.T, host *fakeHost, want ...string) {
	t.Helper()
	got := host.calls()
	slices.Sort(got)
	slices.Sort(want)
	if !slices.Equal(got, want) {
		t.Errorf("got operations:\n%q\nwant:\n%q", got, want)
	}
}

// withFakeClock runs a test with a fake clock (synctest).
func withFakeClock(t *testing.T, test func(t *testing.T, host *fakeHost)) {
	t.Helper()
	root := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		host := newFakeHost(root)
		host.reportForbidden = t.Errorf
		test(t, host)
	})
}

// settle waits until all operations to which the script gives no duration have ended. It waits for less than
// the sync period.
func settle() {
	time.Sleep(20 * time.Millisecond)
	synctest.Wait()
}

func key(pod string) types.NamespacedName {
	return types.NamespacedName{Namespace: "default", Name: pod}
}
