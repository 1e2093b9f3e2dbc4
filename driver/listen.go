package driver

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/stats"
	"k8s.io/klog/v2"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/trivet-csi/trivet/internal/retry"
	"github.com/trivet-csi/trivet/volume"
)

// ports holds the driver's listeners. The listener of a port that is not configured is nil.
type ports struct{ socket, forwarding, web, registration net.Listener }

// listen opens all configured ports, or none.
func (o Options) listen(ctx context.Context) (p ports, err error) {
	defer func() {
		if err != nil {
			p.close()
		}
	}()
	if p.socket, err = listenSocket(ctx, o.Endpoint); err != nil {
		return p, err
	}
	if o.receivesForwarded() {
		if p.forwarding, err = listenTCP(ctx, "forwarding.listen", o.Config.Forwarding.Listen); err != nil {
			return p, err
		}
	}
	if o.HTTPAddress != "" {
		if p.web, err = listenTCP(ctx, "--http-address", o.HTTPAddress); err != nil {
			return p, err
		}
	}
	p.registration, err = o.listenRegistration(ctx)
	return p, err
}

func (p ports) close() {
	for _, l := range []net.Listener{p.socket, p.forwarding, p.web, p.registration} {
		if l != nil {
			_ = l.Close()
		}
	}
}

// listenTCP listens on host:port. setting is the flag or the configuration key with the address, for errors.
func listenTCP(ctx context.Context, setting, address string) (net.Listener, error) {
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", address)
	if err != nil {
		return nil, fmt.Errorf("%s %s: %w", setting, address, err)
	}
	return l, nil
}

// listenSocket listens on the endpoint, unix:///path, with mode 0600. It replaces the socket of a
// driver that has ended. It returns ErrPrecondition if another process listens on the socket, or
// if the path is not a socket.
func listenSocket(ctx context.Context, endpoint string) (net.Listener, error) {
	path, err := SocketPath(endpoint)
	if err != nil {
		return nil, err
	}
	if err := removeStale(ctx, path); err != nil {
		return nil, err
	}
	// The socket must never exist with another mode. The umask applies to the whole process, but
	// nothing else creates files this early.
	old := syscall.Umask(0o177)
	defer syscall.Umask(old)
	l, err := (&net.ListenConfig{}).Listen(ctx, "unix", path)
	if errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("endpoint %s: its directory does not exist: create the directory, or correct --endpoint: %w", endpoint, err)
	}
	return l, err
}

// SocketPath returns the path in an endpoint such as unix:///path. It returns ErrInvalid for other endpoints.
func SocketPath(endpoint string) (string, error) {
	path, ok := strings.CutPrefix(endpoint, "unix:")
	path = strings.TrimPrefix(path, "//")
	if !ok || !strings.HasPrefix(path, "/") {
		return "", volume.Errorf(volume.ErrInvalid, "endpoint %q: must be unix:///absolute/path.sock", endpoint)
	}
	return path, nil
}

// removeStale removes the socket of a driver that has ended.
func removeStale(ctx context.Context, path string) error {
	info, err := os.Lstat(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if info.Mode().Type() != os.ModeSocket {
		return volume.Errorf(volume.ErrPrecondition, "endpoint %s exists and is not a socket: remove it, or correct --endpoint", path)
	}
	if err := awaitUnused(ctx, path); err != nil {
		return fmt.Errorf("endpoint %s: %w", path, err)
	}
	return os.Remove(path)
}

// awaitUnused waits until no process listens on a socket, for at most one second: if a driver is
// killed while it starts a program, the child process keeps the driver's descriptors for a moment.
func awaitUnused(ctx context.Context, path string) error {
	const timeout = time.Second
	return retry.For(ctx, timeout, func() (bool, error) {
		conn, err := (&net.Dialer{Timeout: timeout}).DialContext(ctx, "unix", path)
		if errors.Is(err, syscall.ECONNREFUSED) {
			return false, nil
		}
		if err != nil {
			return false, err
		}
		_ = conn.Close()
		return true, volume.Errorf(volume.ErrPrecondition, "another driver is listening on that socket: stop it, or give this driver another --endpoint")
	})
}

// registrar registers the driver with a kubelet or a volume manager, as node-driver-registrar does,
// by the plugin registration API (k8s.io/kubelet/pkg/apis/pluginregistration/v1).
type registrar struct {
	registration.UnimplementedRegistrationServer
	name, endpoint string
}

// GetInfo implements registration.RegistrationServer.
func (r registrar) GetInfo(context.Context, *registration.InfoRequest) (*registration.PluginInfo, error) {
	return &registration.PluginInfo{
		Type: registration.CSIPlugin, Name: r.name, Endpoint: r.endpoint, SupportedVersions: []string{"1.0.0"},
	}, nil
}

// NotifyRegistrationStatus implements registration.RegistrationServer. It only logs the status,
// because the caller retries a refused registration.
func (r registrar) NotifyRegistrationStatus(ctx context.Context, status *registration.RegistrationStatus) (*registration.RegistrationStatusResponse, error) {
	log := klog.FromContext(ctx)
	if status.GetPluginRegistered() {
		log.Info("Registered", "driver", r.name)
	} else {
		log.Error(errors.New(status.GetError()), "The registration was refused; the kubelet or the volume manager retries it", "driver", r.name)
	}
	return &registration.RegistrationStatusResponse{}, nil
}

// listenRegistration opens the driver's socket in Options.Registry. It returns nil if Registry is
// empty.
func (o Options) listenRegistration(ctx context.Context) (net.Listener, error) {
	if o.Registry == "" {
		return nil, nil
	}
	if err := os.MkdirAll(o.Registry, 0o750); err != nil {
		return nil, fmt.Errorf("--plugins-registry: %w", err)
	}
	l, err := listenSocket(ctx, "unix://"+filepath.Join(o.Registry, o.Name+"-reg.sock"))
	if err != nil {
		return nil, fmt.Errorf("--plugins-registry: %w", err)
	}
	return l, nil
}

// serveRegistration serves until ctx ends and then removes the socket, which unregisters the driver.
func (d *Driver) serveRegistration(ctx context.Context, l net.Listener) {
	server := grpc.NewServer()
	endpoint, _ := SocketPath(d.options.Endpoint) // valid: the driver listens on it
	registration.RegisterRegistrationServer(server, registrar{name: d.options.Name, endpoint: endpoint})
	defer context.AfterFunc(ctx, server.Stop)()
	if err := server.Serve(l); err != nil && ctx.Err() == nil {
		klog.FromContext(ctx).Error(err, "The registration server failed")
	}
}

// idle is a stats.Handler that closes done when the server has had no connection for timeout.
type idle struct {
	timeout time.Duration
	done    chan struct{}

	mu          sync.Mutex
	connections int
	timer       *time.Timer
}

func newIdle(timeout time.Duration) *idle {
	i := &idle{timeout: timeout, done: make(chan struct{})}
	i.timer = time.AfterFunc(timeout, i.end)
	return i
}

// ended returns a channel that is closed when the server must end. For a nil handler it returns nil,
// because a driver without an idle time does not end.
func (i *idle) ended() <-chan struct{} {
	if i == nil {
		return nil
	}
	return i.done
}

// end closes done unless the server has a connection.
func (i *idle) end() {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.connections > 0 { // a connection was accepted while the timer fired
		return
	}
	select {
	case <-i.done:
	default:
		close(i.done)
	}
}

// HandleConn implements stats.Handler.
func (i *idle) HandleConn(_ context.Context, s stats.ConnStats) {
	i.mu.Lock()
	defer i.mu.Unlock()
	switch s.(type) {
	case *stats.ConnBegin:
		i.connections++
		i.timer.Stop()
	case *stats.ConnEnd:
		if i.connections--; i.connections == 0 {
			i.timer.Reset(i.timeout)
		}
	}
}

// TagConn implements stats.Handler.
func (i *idle) TagConn(ctx context.Context, _ *stats.ConnTagInfo) context.Context { return ctx }

// TagRPC implements stats.Handler.
func (i *idle) TagRPC(ctx context.Context, _ *stats.RPCTagInfo) context.Context { return ctx }

// HandleRPC implements stats.Handler.
func (i *idle) HandleRPC(context.Context, stats.RPCStats) {}
