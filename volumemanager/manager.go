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

// Options are those of one manager.
type Options struct {
	// Manifests is the directory that says what is wanted.
	Manifests string
	// RootDir is what /var/lib/kubelet is to a kubelet, and this manager's alone.
	RootDir string
	// Registry is where CSI drivers register.
	Registry string
	// FlexVolumes is the directory of FlexVolume executables.
	FlexVolumes string
	// HTTPAddress is the host:port of metrics, health and the tokens' issuer; empty for
	// none.
	HTTPAddress string
	// NodeName is what this machine is called.
	NodeName string
}

// resync is how often manifests are read though nothing tells of a change.
const resync = 5 * time.Minute

// ErrRunning means: another manager has the root directory.
var ErrRunning = errors.New("another volume manager has it")

// ErrForeign means: the root directory has pods, and no manager has ever had it. What it
// does not find in its manifests it would take down, and remove.
var ErrForeign = errors.New("it has pods of another program, such as a kubelet")

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
	changes     changes
	// looked is closed when the first manifests were looked at.
	looked     chan struct{}
	lookedOnce sync.Once
}

// Run serves until ctx ends. What is mounted then stays mounted: pods may be using it.
func Run(ctx context.Context, o Options) error {
	dir := stateDir(o.RootDir)
	if err := checkOwn(o.RootDir); err != nil {
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

func newManager(ctx context.Context, o Options) (*Manager, error) {
	url, err := issuer(o)
	if err != nil {
		return nil, err
	}
	signer, err := token.Open(stateDir(o.RootDir), url)
	if err != nil {
		return nil, err
	}
	m := &Manager{options: o, events: &event.Recorder{}, host: &host{paths: plugins.Paths{Root: o.RootDir}, node: o.NodeName, signer: signer}, looked: make(chan struct{})}
	if m.store, err = store.Open(stateDir(o.RootDir)); err != nil {
		return nil, err
	}
	m.metrics = newMetrics(m)
	m.executor = operation.New(ctx, m.done)
	m.csi = csi.New(m.host, csi.Options{Registry: o.Registry, Changed: m.retry})
	servers := mount.NewNFSUnmounter()
	m.nfs = nfsvolume.New(m.host, servers)
	m.flexVolumes = flexvolume.New(m.host, servers, o.FlexVolumes, m.retry)
	registry := m.plugins()
	m.claims = claim.New(m.store, registry, m.executor, m.events, m)
	m.reconciler = reconciler.New(ctx, registry, m.host.paths, m.executor, m.events, m.claims, m.Node)
	return m, nil
}

// plugins are all there are: a new one is a folder and a line here.
func (m *Manager) plugins() plugins.Registry {
	return append(plugins.Registry{
		emptydir.New(m.host),
		hostpath.New(),
		localvolume.New(m.host),
		m.nfs,
		m.csi,
		m.flexVolumes,
	}, payload.New(m.host)...)
}

// done hears of each operation that ended.
func (m *Manager) done(o operation.Operation, err error, took time.Duration) {
	m.metrics.observe(o, err, took)
	m.changes.tell()
}

// retry has what failed tried again: a driver has come, or is ready.
func (m *Manager) retry() {
	m.claims.Retry()
	m.reconciler.Retry()
	m.changes.tell()
}

// InUse implements claim.Machine.
func (m *Manager) InUse(volume string) bool { return m.reconciler.InUse(volume) }

// Node implements claim.Machine, and is the reconciler's. A machine has its drivers' topology as labels.
func (m *Manager) Node() *corev1.Node {
	node := plugins.Node(m.options.NodeName)
	for _, d := range m.csi.Drivers() {
		maps.Copy(node.Labels, d.Topology)
	}
	return node
}

// run serves until ctx, which is that of its parts and of newManager, ends, or one of the
// parts cannot go on.
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
	for _, part := range append(serve, m.csi.Run, m.nfs.Run, m.flexVolumes.Run, m.follow(objects), m.reconcile) {
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

// rest is how much longer than looking at all claims the pause after it is, up to
// longestRest: with many of them, a look sees what many operations have done.
const (
	rest        = 4
	longestRest = 100 * time.Millisecond
)

// follow gives new manifests, and what has changed since, to who makes something of them.
func (m *Manager) follow(objects <-chan *manifest.Objects) func(context.Context) error {
	return func(ctx context.Context) error {
		changed := m.changes.subscribe()
		defer m.changes.unsubscribe(changed)
		var again time.Time
		for {
			var fresh *manifest.Objects
			select {
			case fresh = <-objects:
				if fresh == nil {
					return nil
				}
			case <-changed:
			case <-at(again):
			}
			start := time.Now()
			again = m.look(ctx, fresh)
			select {
			case <-ctx.Done():
			case <-time.After(min(rest*time.Since(start), longestRest)):
			}
		}
	}
}

// look looks at all claims, of new manifests if there are some. again is when it is to be
// called if nothing changes.
func (m *Manager) look(ctx context.Context, fresh *manifest.Objects) (again time.Time) {
	if fresh == nil {
		again = m.claims.Sync(ctx)
		m.reconciler.Wake()
		return again
	}
	m.host.objects.Store(fresh)
	again = m.claims.Update(ctx, fresh)
	m.reconciler.Update(fresh)
	m.lookedOnce.Do(func() { close(m.looked) })
	m.changes.tell()
	return again
}

// at fires at a time; never if that is zero.
func at(t time.Time) <-chan time.Time {
	if t.IsZero() {
		return nil
	}
	return time.After(time.Until(t))
}

// stateDir has what the manager itself writes down.
func stateDir(root string) string { return filepath.Join(root, "volume-manager") }

// checkOwn refuses a root directory with pods that no manager has made.
func checkOwn(root string) error {
	if _, err := os.Lstat(stateDir(root)); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	pods, err := os.ReadDir(plugins.Paths{Root: root}.Pods())
	if len(pods) > 0 {
		return fmt.Errorf("--root-dir %s: %w: use a directory of its own", root, ErrForeign)
	}
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// lockDir keeps other managers out until the file is closed, or the process is gone.
func lockDir(dir string) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	err = syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
	if errors.Is(err, syscall.EWOULDBLOCK) {
		err = fmt.Errorf("%w: end that, or use another directory", ErrRunning)
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}
