package csi

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/fsnotify/fsnotify"
	"k8s.io/apimachinery/pkg/util/version"
	"k8s.io/klog/v2"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/trivet-csi/trivet/volumemanager/plugins"
)

const (
	// resync is the interval between periodic scans of the registry. Events trigger other scans.
	resync = 10 * time.Second
	// A failed registration is retried after firstWait. The interval doubles up to lastWait.
	firstWait = 500 * time.Millisecond
	lastWait  = 10 * time.Second
	// socketTarget is the name of the connection in gRPC errors.
	socketTarget = "socket"
)

// DriverStatus is the state of a driver, or of a socket in the registry without a usable driver.
type DriverStatus struct {
	Name       string            `json:"name"`
	Socket     string            `json:"socket"`
	Endpoint   string            `json:"endpoint,omitempty"`
	Registered bool              `json:"registered"`
	NodeID     string            `json:"nodeID,omitempty"`
	MaxVolumes int64             `json:"maxVolumes,omitempty"`
	Topology   map[string]string `json:"topology,omitempty"`
	// Capabilities have the names of csi-spec, such as Node/STAGE_UNSTAGE_VOLUME.
	Capabilities []string `json:"capabilities,omitempty"`
	// Problem is the reason why the driver cannot be used, or why the registrar was not notified.
	Problem string `json:"problem,omitempty"`
}

// registrarSocket is the socket of a registrar.
type registrarSocket struct {
	path string
	// file identifies the socket, because a registrar may replace it.
	file os.FileInfo
	// stop ends serve, which then closes done.
	stop context.CancelFunc
	done chan struct{}

	// The following fields are protected by Plugin.mu.
	// name is the name of the driver; empty before the first answer of the registrar.
	name string
	// driver is nil while the driver is not registered.
	driver *driver
	err    error
}

// Drivers returns the state of all sockets in the registry, sorted by driver and path.
func (p *Plugin) Drivers() []DriverStatus {
	p.mu.Lock()
	defer p.mu.Unlock()
	all := []DriverStatus{}
	for _, s := range p.registrars {
		all = append(all, s.status())
	}
	slices.SortFunc(all, func(a, b DriverStatus) int {
		return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.Socket, b.Socket))
	})
	return all
}

// status returns the state of the socket and its driver. The caller holds Plugin.mu.
func (s *registrarSocket) status() DriverStatus {
	status := DriverStatus{Name: s.name, Socket: s.path}
	err := s.err
	if d := s.driver; d != nil {
		d.mu.Lock()
		defer d.mu.Unlock()
		status.Registered, status.Endpoint, err = true, d.endpoint, cmp.Or(d.unusable, err)
		status.NodeID, status.MaxVolumes, status.Topology, status.Capabilities = d.last.nodeID, d.last.limit, d.last.topology, d.last.capabilities()
	}
	if err != nil {
		status.Problem = err.Error()
	}
	return status
}

// driver returns a registered driver that can be used.
func (p *Plugin) driver(name string) (*driver, error) {
	p.mu.Lock()
	d := p.drivers[name]
	p.mu.Unlock()
	if d == nil {
		return nil, fmt.Errorf("driver %s is not registered: start it and its node-driver-registrar, whose socket belongs in %s", name, p.registry)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	return d, d.unusable
}

// Run registers drivers until ctx ends, as a kubelet's plugin manager does: it queries each
// socket in the registry through the API pluginregistration/v1. If the registry cannot be watched,
// Run only scans it periodically (resync).
func (p *Plugin) Run(ctx context.Context) error {
	var events <-chan fsnotify.Event
	var watchErrors <-chan error
	watch := func(string) error { return nil }
	watcher, err := fsnotify.NewWatcher()
	if err != nil {
		klog.FromContext(ctx).Error(err, "The plugin registry cannot be watched: raise fs.inotify.max_user_instances, and restart the volume manager", "directory", p.registry, "interval", resync)
	} else {
		defer func() { _ = watcher.Close() }()
		events, watchErrors, watch = watcher.Events, watcher.Errors, watcher.Add
	}
	defer func() {
		for _, s := range p.running() {
			p.stopRegistrar(s)
		}
	}()
	tick := time.NewTicker(resync)
	defer tick.Stop()
	for {
		err := p.scanRegistry(ctx, watch)
		select {
		case <-ctx.Done():
			return nil
		case <-events:
		case err = <-watchErrors: // the queue of events may have overflowed
		case <-tick.C:
		}
		if err != nil {
			klog.FromContext(ctx).V(2).Info("The plugin registry cannot be watched", "directory", p.registry, "err", err)
		}
	}
}

// scanRegistry starts serving each new socket, and stops serving each socket that was removed or
// replaced. It first renews the watch, because the directory may have been replaced.
func (p *Plugin) scanRegistry(ctx context.Context, watch func(dir string) error) error {
	if err := os.MkdirAll(p.registry, 0o750); err != nil {
		return err
	}
	watchErr := watch(p.registry)
	sockets, err := sockets(p.registry)
	if err != nil {
		return errors.Join(watchErr, err)
	}
	running := p.running()
	for path, s := range running {
		if file := sockets[path]; file == nil || !plugins.Unchanged(file, s.file) {
			p.stopRegistrar(s)
			delete(running, path)
		}
	}
	for path, file := range sockets {
		if running[path] == nil {
			p.startRegistrar(ctx, path, file)
		}
	}
	return watchErr
}

// running returns the sockets that are served, by path.
func (p *Plugin) running() map[string]*registrarSocket {
	p.mu.Lock()
	defer p.mu.Unlock()
	return maps.Clone(p.registrars)
}

// sockets returns the sockets in a directory by path. It omits hidden sockets, which registrars rename
// when they are ready.
func sockets(dir string) (map[string]os.FileInfo, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	all := map[string]os.FileInfo{}
	for _, e := range entries {
		if e.Type() != os.ModeSocket || strings.HasPrefix(e.Name(), ".") {
			continue
		}
		file, err := e.Info()
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		all[filepath.Join(dir, e.Name())] = file
	}
	return all, nil
}

// startRegistrar starts serving a socket.
func (p *Plugin) startRegistrar(ctx context.Context, path string, file os.FileInfo) {
	ctx, stop := context.WithCancel(ctx)
	s := &registrarSocket{path: path, file: file, stop: stop, done: make(chan struct{})}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.registrars[path] = s
	go func() {
		defer close(s.done)
		p.serve(ctx, s)
	}()
}

// stopRegistrar stops serving a socket, which unregisters its driver.
func (p *Plugin) stopRegistrar(s *registrarSocket) {
	s.stop()
	<-s.done
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.registrars, s.path)
}

// serve keeps the driver of a socket registered until ctx ends.
func (p *Plugin) serve(ctx context.Context, s *registrarSocket) {
	wait := firstWait
	for ctx.Err() == nil {
		d, err := p.register(ctx, s)
		if d != nil {
			p.keepDriver(ctx, s, d)
			wait = firstWait
		}
		if err != nil {
			klog.FromContext(ctx).V(2).Info("A driver cannot be registered", "socket", s.path, "err", err)
		}
		select {
		case <-ctx.Done():
		case <-time.After(wait):
		}
		wait = min(2*wait, lastWait)
	}
}

// register queries the registrar of a socket, connects to its driver, and notifies the registrar
// of the result. If it returns both a driver and an error, only the notification failed.
func (p *Plugin) register(ctx context.Context, s *registrarSocket) (*driver, error) {
	conn, err := dial(s.path)
	if err != nil {
		return nil, p.setState(s, nil, fmt.Errorf("--plugins-registry %s: %w", p.registry, err))
	}
	defer conn.Close()
	registrar := registration.NewRegistrationClient(conn)
	callCtx, cancel := context.WithTimeout(ctx, connectTimeout)
	info, err := registrar.GetInfo(callCtx, &registration.InfoRequest{})
	cancel()
	if err != nil {
		return nil, p.setState(s, nil, fmt.Errorf("registrar %s: GetInfo: %w: remove the socket if its driver no longer exists", s.path, err))
	}
	d, err := p.addDriver(ctx, s, info)
	result := &registration.RegistrationStatus{PluginRegistered: err == nil}
	if err != nil {
		result.Error = err.Error()
	}
	callCtx, cancel = context.WithTimeout(ctx, connectTimeout)
	defer cancel()
	if _, notifyErr := registrar.NotifyRegistrationStatus(callCtx, result); notifyErr != nil && err == nil {
		err = fmt.Errorf("registrar %s: NotifyRegistrationStatus: %w", s.path, notifyErr)
	}
	return d, p.setState(s, d, err)
}

// setState sets the driver and the error that status reports. It returns the error.
func (p *Plugin) setState(s *registrarSocket, d *driver, err error) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	s.driver, s.err = d, err
	return err
}

// addDriver validates a registrar's answer, connects to its driver, and adds the driver to
// Plugin.drivers.
func (p *Plugin) addDriver(ctx context.Context, s *registrarSocket, info *registration.PluginInfo) (*driver, error) {
	p.mu.Lock()
	s.name = info.GetName()
	p.mu.Unlock()
	if info.GetType() != registration.CSIPlugin {
		return nil, fmt.Errorf("registrar %s: type %q: only %s is supported", s.path, info.GetType(), registration.CSIPlugin)
	}
	if !validDriver(info.GetName()) {
		return nil, fmt.Errorf("registrar %s: driver name %q: want a domain name of at most 63 characters", s.path, info.GetName())
	}
	newest := newestVersion(info.GetSupportedVersions())
	if newest == nil {
		return nil, fmt.Errorf("driver %s: supported_versions %q: want a version 1.x: use a newer node-driver-registrar", info.GetName(), info.GetSupportedVersions())
	}
	d, err := newDriver(info.GetName(), strings.TrimPrefix(cmp.Or(info.GetEndpoint(), s.path), "unix://"), newest)
	if err != nil {
		return nil, err
	}
	if err = d.refresh(ctx); err == nil {
		err = p.replaceDriver(d)
	}
	if err != nil {
		_ = d.conn.Close()
		return nil, err
	}
	return d, nil
}

// newestVersion returns the highest version 1.x; nil if there is none.
func newestVersion(versions []string) *version.Version {
	var newest *version.Version
	for _, s := range versions {
		v, err := version.ParseGeneric(s)
		if err == nil && v.Major() == 1 && (newest == nil || newest.LessThan(v)) {
			newest = v
		}
	}
	return newest
}

// replaceDriver registers a driver under its name. As in the kubelet, it replaces an earlier driver
// of that name only if the new version is higher.
func (p *Plugin) replaceDriver(d *driver) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	old := p.drivers[d.name]
	if old != nil && !old.version.LessThan(d.version) {
		return fmt.Errorf("driver %s is registered already, at %s with version %s, which is not older than %s: stop one of them", d.name, old.endpoint, old.version, d.version)
	}
	p.drivers[d.name] = d
	if old != nil {
		_ = old.conn.Close() // ends keepDriver of the old driver
	}
	return nil
}

// keepDriver keeps a driver registered until ctx ends, or until another driver replaces it.
func (p *Plugin) keepDriver(ctx context.Context, s *registrarSocket, d *driver) {
	p.changed()
	d.watch(ctx, p.changed)
	p.mu.Lock()
	defer p.mu.Unlock()
	s.driver = nil
	if p.drivers[d.name] == d {
		delete(p.drivers, d.name)
		_ = d.conn.Close()
	}
}
