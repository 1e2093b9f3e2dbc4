package volumemanager

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"

	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/volumemanager/claim"
	"github.com/trivet-csi/trivet/volumemanager/event"
	"github.com/trivet-csi/trivet/volumemanager/manifest"
	"github.com/trivet-csi/trivet/volumemanager/operation"
	"github.com/trivet-csi/trivet/volumemanager/plugins"
	"github.com/trivet-csi/trivet/volumemanager/plugins/csi"
	"github.com/trivet-csi/trivet/volumemanager/plugins/emptydir"
	"github.com/trivet-csi/trivet/volumemanager/plugins/flexvolume"
	"github.com/trivet-csi/trivet/volumemanager/plugins/hostpath"
	"github.com/trivet-csi/trivet/volumemanager/plugins/localvolume"
	"github.com/trivet-csi/trivet/volumemanager/plugins/nfsvolume"
	"github.com/trivet-csi/trivet/volumemanager/plugins/payload"
	"github.com/trivet-csi/trivet/volumemanager/reconciler"
	"github.com/trivet-csi/trivet/volumemanager/store"
	"github.com/trivet-csi/trivet/volumemanager/token"
)

// Options configure a manager.
type Options struct {
	// Manifests is the directory of manifests.
	Manifests string
	// RootDir corresponds to the kubelet's /var/lib/kubelet. No other program may use it.
	RootDir string
	// Registry is the directory in which CSI drivers register.
	Registry string
	// FlexVolumes is the directory of FlexVolume executables.
	FlexVolumes string
	// HTTPAddress is the host:port that serves metrics, health and the public keys of tokens. If it is
	// empty, there is no HTTP server.
	HTTPAddress string
	// NodeName is the name of this machine.
	NodeName string
}

// resync is the interval at which manifests are read even if no file has changed.
const resync = 5 * time.Minute

// ErrRunning is returned if another manager uses the root directory.
var ErrRunning = errors.New("another volume manager uses this directory")

// ErrForeign is returned if the root directory contains pods although no manager has used it. A manager
// would unmount and remove the volumes of these pods.
var ErrForeign = errors.New("the directory contains pods of another program, such as a kubelet")

// Manager is a running volume manager.
type Manager struct {
	options     Options
	host        *host
	csi         *csi.Plugin
	nfs         *nfsvolume.Plugin
	flexVolumes *flexvolume.Plugin
	store       *store.Store
	events      *event.Recorder
	executor    *operation.Executor
	claims      *claim.Controller
	reconciler  *reconciler.Reconciler
	metrics     *metrics
	// changes notifies syncManifests, and the clients that wait for a pod.
	changes changes
	// synced is closed after the first sync of manifests.
	synced     chan struct{}
	syncedOnce sync.Once
}

// Run runs a manager until ctx ends. It leaves volumes mounted, because pods may still use them.
func Run(ctx context.Context, o Options) error {
	dir := stateDir(o.RootDir)
	if err := checkOwner(o.RootDir); err != nil {
		return err
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	lock, err := lockDir(dir)
	if err != nil {
		return fmt.Errorf("--root-dir %s: %w", o.RootDir, err)
	}
	defer lock.Close()
	if err := os.MkdirAll(o.Registry, 0o750); err != nil {
		return err
	}
	parts, ctx := errgroup.WithContext(ctx)
	m, err := newManager(ctx, o)
	if err != nil {
		return err
	}
	defer func() { _ = m.store.Close() }()
	return m.run(ctx, parts)
}

// newManager creates a manager whose parts are not running. The operations that the manager starts end with
// ctx.
func newManager(ctx context.Context, o Options) (*Manager, error) {
	url, err := issuer(o)
	if err != nil {
		return nil, err
	}
	signer, err := token.Open(stateDir(o.RootDir), url)
	if err != nil {
		return nil, err
	}
	m := &Manager{
		options: o, events: &event.Recorder{}, synced: make(chan struct{}),
		host: &host{Signer: signer, paths: plugins.Paths{Root: o.RootDir}, node: o.NodeName},
	}
	if m.store, err = store.Open(stateDir(o.RootDir)); err != nil {
		return nil, err
	}
	m.metrics = newMetrics(m)
	m.executor = operation.New(ctx, m.done)
	m.csi = csi.New(m.host, csi.Options{Registry: o.Registry, Changed: m.retry})
	unmounter := mount.NewNFSUnmounter()
	m.nfs = nfsvolume.New(m.host, unmounter)
	m.flexVolumes = flexvolume.New(m.host, unmounter, o.FlexVolumes, m.retry)
	registry := append(plugins.Registry{
		emptydir.New(m.host),
		hostpath.New(),
		localvolume.New(m.host),
		m.nfs,
		m.csi,
		m.flexVolumes,
	}, payload.New(m.host)...)
	m.claims = claim.New(m.store, registry, m.executor, m.events, m)
	m.reconciler = reconciler.New(ctx, registry, m.host.paths, m.executor, m.events, m.claims, m.Node)
	return m, nil
}

// done is called after each operation.
func (m *Manager) done(o operation.Operation, err error, duration time.Duration) {
	m.metrics.observe(o, err, duration)
	m.changes.notify()
}

// retry ends all back-offs. It is called when a driver has registered or has become ready.
func (m *Manager) retry() {
	m.claims.Retry()
	m.reconciler.Retry()
	m.changes.notify()
}

// InUse implements claim.Machine.
func (m *Manager) InUse(volume string) bool { return m.reconciler.InUse(volume) }

// Node implements claim.Machine. The node has the labels of plugins.Node, and the topology that the
// CSI drivers report.
func (m *Manager) Node() *corev1.Node {
	node := plugins.Node(m.options.NodeName)
	for _, d := range m.csi.Drivers() {
		maps.Copy(node.Labels, d.Topology)
	}
	return node
}

// run runs the parts of the manager until ctx ends or one of them fails. ctx must be the context of the
// group parts, and newManager must have been called with the same context.
func (m *Manager) run(ctx context.Context, parts *errgroup.Group) error {
	objects, err := manifest.Watch(ctx, m.options.Manifests, resync)
	if err != nil {
		return err
	}
	serve, err := m.listen(ctx)
	if err != nil {
		return err
	}
	klog.FromContext(ctx).Info("Managing volumes", "manifests", m.options.Manifests, "rootDir", m.options.RootDir, "registry", m.options.Registry, "node", m.options.NodeName)
	for _, part := range append(serve, m.csi.Run, m.nfs.Run, m.flexVolumes.Run, m.syncManifests(objects), m.reconcile) {
		parts.Go(func() error { return part(ctx) })
	}
	err = parts.Wait()
	m.executor.Wait()
	return err
}

func (m *Manager) reconcile(ctx context.Context) error {
	m.reconciler.Run(ctx)
	return nil
}

// syncManifests returns a function that calls sync after each change of the manifests or of the state,
// and at the time that the previous call of sync returned.
func (m *Manager) syncManifests(objects <-chan *manifest.Objects) func(context.Context) error {
	return func(ctx context.Context) error {
		changed := m.changes.next()
		var again time.Time
		for {
			var updated *manifest.Objects
			select {
			case updated = <-objects:
				if updated == nil {
					return nil
				}
			case <-changed:
			case <-after(again):
			}
			start := time.Now()
			changed = m.changes.next()
			again = m.sync(ctx, updated)
			reconciler.Rest(ctx, start)
		}
	}
}

// sync syncs the claims and wakes the reconciler. updated holds the new manifests; it is nil if they
// have not changed. again is the time of the next sync if nothing changes until then; it is zero if no
// sync is needed.
func (m *Manager) sync(ctx context.Context, updated *manifest.Objects) (again time.Time) {
	if updated == nil {
		again = m.claims.Sync(ctx)
		m.reconciler.Wake()
		return again
	}
	m.host.objects.Store(updated)
	again = m.claims.Update(ctx, updated)
	m.reconciler.Update(updated)
	m.syncedOnce.Do(func() { close(m.synced) })
	m.changes.notify()
	return again
}

// after returns a channel that fires at t; it never fires if t is zero.
func after(t time.Time) <-chan time.Time {
	if t.IsZero() {
		return nil
	}
	return time.After(time.Until(t))
}

// stateDir is the directory of the manager's own files.
func stateDir(root string) string { return filepath.Join(root, "volume-manager") }

// checkOwner returns ErrForeign if the root directory contains pods, and no manager has used it.
func checkOwner(root string) error {
	if _, err := os.Lstat(stateDir(root)); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	pods, err := os.ReadDir(plugins.Paths{Root: root}.Pods())
	if len(pods) > 0 {
		return fmt.Errorf("--root-dir %s: %w: use another directory", root, ErrForeign)
	}
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// lockDir locks the directory until the returned file is closed or the process ends.
func lockDir(dir string) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	err = syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
	if errors.Is(err, syscall.EWOULDBLOCK) {
		err = fmt.Errorf("%w: stop that manager, or use another directory", ErrRunning)
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}
