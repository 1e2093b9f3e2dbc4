package driver

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"syscall"
	"time"

	"github.com/trivet-csi/trivet/internal/retry"
	"github.com/trivet-csi/trivet/volume"
)

// ports holds the driver's listeners. One that is not configured is nil.
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
	if o.isForwardedTo() {
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

func listenTCP(ctx context.Context, setting, address string) (net.Listener, error) {
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", address)
	if err != nil {
		return nil, fmt.Errorf("%s %s: %w", setting, address, err)
	}
	return l, nil
}

// listenSocket listens on the endpoint, unix:///path, with mode 0600. It replaces a stale socket.
// ErrPrecondition is returned if another process listens there.
func listenSocket(ctx context.Context, endpoint string) (net.Listener, error) {
	path, err := SocketPath(endpoint)
	if err != nil {
		return nil, err
	}
	if err := removeStale(ctx, path); err != nil {
		return nil, err
	}
	// The socket must never exist with another mode. The umask is the process's, but nothing
	// else creates files this early.
	old := syscall.Umask(0o177)
	defer syscall.Umask(old)
	l, err := (&net.ListenConfig{}).Listen(ctx, "unix", path)
	if errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("endpoint %s: its directory does not exist: create it, or correct --endpoint: %w", endpoint, err)
	}
	return l, err
}

// SocketPath is the path of an endpoint, `unix:///path` (ErrInvalid).
func SocketPath(endpoint string) (string, error) {
	path, ok := strings.CutPrefix(endpoint, "unix:")
	path = strings.TrimPrefix(path, "//")
	if !ok || !strings.HasPrefix(path, "/") {
		return "", volume.Errorf(volume.ErrInvalid, "endpoint %q: want unix:///absolute/path.sock", endpoint)
	}
	return path, nil
}

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

// awaitUnused returns when no process listens on a socket. A driver that is killed between fork
// and exec of a program leaves a child with all its descriptors for a moment.
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
		return true, volume.Errorf(volume.ErrPrecondition, "another driver is listening there: stop it, or give this one another --endpoint")
	})
}
