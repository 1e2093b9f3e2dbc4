package csi

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/fsnotify/fsnotify"
	"k8s.io/apimachinery/pkg/util/version"
	"k8s.io/klog/v2"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

const (
	// resync is how often the registry is looked at without a reason.
	resync = 10 * time.Second
	// A registration that failed is tried again after firstWait, then after twice as long
	// each time, to lastWait.
	firstWait = 500 * time.Millisecond
	lastWait  = 10 * time.Second
	// socketTarget is what gRPC shows of a connection.
	socketTarget = "socket"
)

// DriverStatus is what is known of a driver, or of a socket in the registry that did not
// become one.
type DriverStatus struct {
	Name       string            `json:"name"`
	Socket     string            `json:"socket"`
	Endpoint   string            `json:"endpoint,omitempty"`
	Registered bool              `json:"registered"`
	NodeID     string            `json:"nodeID,omitempty"`
	MaxVolumes int64             `json:"maxVolumes,omitempty"`
	Topology   map[string]string `json:"topology,omitempty"`
	// Capabilities are by their names in csi-spec: Node/STAGE_UNSTAGE_VOLUME.
	Capabilities []string `json:"capabilities,omitempty"`
	// Error is why it cannot be used, or what is wrong with it.
	Error string `json:"error,omitempty"`
}

// listing is a registrar's socket.
type listing struct {
	path string
	file os.FileInfo
	end  context.CancelFunc
	done chan struct{}

	// Of Plugin.mu:
	name   string
	driver *driver
	err    error
}

// Drivers tells of all sockets in the registry, by driver and path.
func (p *Plugin) Drivers() []DriverStatus {
	p.mu.Lock()
	defer p.mu.Unlock()
	all := []DriverStatus{}
	for _, s := range p.listings {
		all = append(all, s.status())
	}
	slices.SortFunc(all, func(a, b DriverStatus) int {
		return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.Socket, b.Socket))
	})
	return all
}

func (s *listing) status() DriverStatus {
	status := DriverStatus{Name: s.name, Socket: s.path}
	err := s.err
	if d := s.driver; d != nil {
		d.mu.Lock()
		defer d.mu.Unlock()
		status.Registered, status.Endpoint, err = true, d.endpoint, cmp.Or(d.failed, err)
		status.NodeID, status.MaxVolumes, status.Topology, status.Capabilities = d.about.nodeID, d.about.limit, d.about.topology, d.about.capabilities()
	}
	if err != nil {
		status.Error = err.Error()
	}
	return status
}

// driver finds one that is registered and can be used.
func (p *Plugin) driver(name string) (*driver, error) {
	p.mu.Lock()
	d := p.drivers[name]
	p.mu.Unlock()
	if d == nil {
		return nil, fmt.Errorf("driver %s is not registered: start it and its node-driver-registrar, whose socket belongs into %s", name, p.registry)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	return d, d.failed
}

// Run registers drivers as a kubelet's plugin manager does, until ctx ends: each socket in
// the registry is asked for its driver by the API pluginregistration/v1. Where it cannot be
// watched it is looked at each resync.
func (p *Plugin) Run(ctx context.Context) error {
	var events <-chan fsnotify.Event
	var missed <-chan error
	watch := func(string) error { return nil }
	watcher, err := fsnotify.NewWatcher()
	if err != nil {
		klog.FromContext(ctx).Error(err, "The plugin registry cannot be watched: raise fs.inotify.max_user_instances, and start again", "directory", p.registry, "lookedAtEach", resync)
	} else {
		defer func() { _ = watcher.Close() }()
		events, missed, watch = watcher.Events, watcher.Errors, watcher.Add
	}
	defer p.endListings()
	tick := time.NewTicker(resync)
	defer tick.Stop()
	for {
		err := p.look(ctx, watch)
		select {
		case <-ctx.Done():
			return nil
		case <-events:
		case err = <-missed: // a queue that overflowed, perhaps: it is looked at again
		case <-tick.C:
		}
		if err != nil {
			klog.FromContext(ctx).V(2).Info("The plugin registry cannot be watched", "directory", p.registry, "err", err)
		}
	}
}

// look begins a listing for each socket that is new, and ends those of sockets that are
// gone or were replaced. It watches before, each time: the directory may be another by then.
func (p *Plugin) look(ctx context.Context, watch func(dir string) error) error {
	if err := os.MkdirAll(p.registry, 0o750); err != nil {
		return err
	}
	unwatched := watch(p.registry)
	sockets, err := sockets(p.registry)
	if err != nil {
		return errors.Join(unwatched, err)
	}
	for path, s := range p.running() {
		if file := sockets[path]; file == nil || !same(file, s.file) {
			p.endListing(s)
		}
	}
	running := p.running()
	for path, file := range sockets {
		if running[path] == nil {
			p.begin(ctx, path, file)
		}
	}
	return unwatched
}

func (p *Plugin) running() map[string]*listing {
	p.mu.Lock()
	defer p.mu.Unlock()
	all := make(map[string]*listing, len(p.listings))
	for path, s := range p.listings {
		all[path] = s
	}
	return all
}

// sockets are those in a directory but the hidden ones, which registrars are about to
// rename.
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

// same tells whether a socket is the one it was: a number is soon given to another file.
func same(a, b os.FileInfo) bool { return os.SameFile(a, b) && a.ModTime().Equal(b.ModTime()) }

func (p *Plugin) begin(ctx context.Context, path string, file os.FileInfo) {
	ctx, end := context.WithCancel(ctx)
	s := &listing{path: path, file: file, end: end, done: make(chan struct{})}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.listings[path] = s
	go func() {
		defer close(s.done)
		p.serve(ctx, s)
	}()
}

func (p *Plugin) endListing(s *listing) {
	s.end()
	<-s.done
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.listings, s.path)
}

func (p *Plugin) endListings() {
	for _, s := range p.running() {
		p.endListing(s)
	}
}

// serve keeps a socket's driver registered until ctx ends.
func (p *Plugin) serve(ctx context.Context, s *listing) {
	wait := firstWait
	for ctx.Err() == nil {
		d, err := p.register(ctx, s)
		if d != nil {
			p.stay(ctx, s, d)
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

// register asks a socket for its driver, asks that what it can, and tells the socket how
// it went. An error beside a driver is of the latter alone.
func (p *Plugin) register(ctx context.Context, s *listing) (*driver, error) {
	conn, err := dial(s.path)
	if err != nil {
		return nil, p.note(s, nil, fmt.Errorf("--plugins-registry %s: %w", p.registry, err))
	}
	defer conn.Close()
	registrar := registration.NewRegistrationClient(conn)
	soon, cancel := context.WithTimeout(ctx, connectTimeout)
	info, err := registrar.GetInfo(soon, &registration.InfoRequest{})
	cancel()
	if err != nil {
		return nil, p.note(s, nil, fmt.Errorf("registrar %s: GetInfo: %w: remove the socket if its driver is gone", s.path, err))
	}
	d, err := p.admit(ctx, s, info)
	answer := &registration.RegistrationStatus{PluginRegistered: err == nil}
	if err != nil {
		answer.Error = err.Error()
	}
	soon, cancel = context.WithTimeout(ctx, connectTimeout)
	defer cancel()
	if _, told := registrar.NotifyRegistrationStatus(soon, answer); told != nil && err == nil {
		err = fmt.Errorf("registrar %s: NotifyRegistrationStatus: %w", s.path, told)
	}
	return d, p.note(s, d, err)
}

// note keeps the state of a listing for status.
func (p *Plugin) note(s *listing, d *driver, err error) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	s.driver, s.err = d, err
	return err
}

// admit makes a driver of what a registrar says.
func (p *Plugin) admit(ctx context.Context, s *listing, info *registration.PluginInfo) (*driver, error) {
	p.mu.Lock()
	s.name = info.GetName()
	p.mu.Unlock()
	if info.GetType() != registration.CSIPlugin {
		return nil, fmt.Errorf("registrar %s: type %q: only %s is known here", s.path, info.GetType(), registration.CSIPlugin)
	}
	if !validDriver(info.GetName()) {
		return nil, fmt.Errorf("registrar %s: driver name %q: want a domain name of at most 63 characters", s.path, info.GetName())
	}
	newest := newestVersion(info.GetSupportedVersions())
	if newest == nil {
		return nil, fmt.Errorf("driver %s: supported_versions %q: want one of 1.x: use a newer node-driver-registrar", info.GetName(), info.GetSupportedVersions())
	}
	d, err := newDriver(info.GetName(), strings.TrimPrefix(cmp.Or(info.GetEndpoint(), s.path), "unix://"), newest)
	if err != nil {
		return nil, err
	}
	if err = d.ask(ctx); err == nil {
		err = p.enter(d)
	}
	if err != nil {
		_ = d.conn.Close()
		return nil, err
	}
	return d, nil
}

// newestVersion is the highest version 1.x; nil if there is none.
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

// enter makes the driver the one of its name. Of two the one with the higher version is,
// of equals the one that was there, as in the kubelet.
func (p *Plugin) enter(d *driver) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	old := p.drivers[d.name]
	if old != nil && !old.version.LessThan(d.version) {
		return fmt.Errorf("driver %s is registered already, at %s with version %s, which is not older than %s: stop one of the two", d.name, old.endpoint, old.version, d.version)
	}
	p.drivers[d.name] = d
	if old != nil {
		_ = old.conn.Close() // its listing ends by that
	}
	return nil
}

// stay keeps a driver until ctx ends, or another took its name.
func (p *Plugin) stay(ctx context.Context, s *listing, d *driver) {
	p.changed()
	d.follow(ctx, p.changed)
	p.mu.Lock()
	defer p.mu.Unlock()
	s.driver = nil
	if p.drivers[d.name] == d {
		delete(p.drivers, d.name)
		_ = d.conn.Close()
	}
}

func unixDialer(path string) func(context.Context, string) (net.Conn, error) {
	return func(ctx context.Context, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", path)
	}
}
