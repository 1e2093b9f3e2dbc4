package flexvolume

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/trivet-csi/trivet/identity"
	"github.com/trivet-csi/trivet/internal/atomicfile"
	"github.com/trivet-csi/trivet/internal/command"
	"github.com/trivet-csi/trivet/volume"
)

const (
	// answerTime is the timeout of a query for the pools of a driver.
	answerTime = 10 * time.Second
	// openTime limits the wait for a pool that is not open yet, because a driver that is ending may
	// still have it open.
	openTime = 15 * time.Second
	// pollTime is the interval between two attempts to connect to a driver, or to make a call.
	pollTime = 20 * time.Millisecond
	// yieldPoll is the interval at which an on-demand driver queries the pools of the running driver.
	yieldPoll = 500 * time.Millisecond
	// startPause is the delay before a call restarts an on-demand driver that ended because another
	// process holds its lock. The delay doubles up to startPauseMax.
	startPause    = 500 * time.Millisecond
	startPauseMax = 5 * time.Second
)

// connection is a connection to the driver that serves a pool: the running driver if it serves the
// pool, otherwise the on-demand driver. If that driver ends during a call, connection connects to its
// successor and repeats the call, because all calls are idempotent.
type connection struct {
	executable *Executable
	dir        *os.File // the state directory
	pool       string   // if it is empty, the on-demand driver serves the call
	socket     string   // the driver's socket, for error texts
	conn       *grpc.ClientConn
	started    *command.Child // the on-demand driver that this call started last
	pause      time.Duration  // the last delay before a restart
	restartAt  time.Time      // the end of that delay; zero while started is not known to have ended

	controller csi.ControllerClient
	node       csi.NodeClient
}

// connect connects to the driver that serves a pool. dir is the state directory.
func (e *Executable) connect(ctx context.Context, dir *os.File, pool string) (*connection, error) {
	c := &connection{executable: e, dir: dir, pool: pool}
	c.controller, c.node = csi.NewControllerClient(c), csi.NewNodeClient(c)
	return c, c.find(ctx)
}

func (c *connection) close() {
	if c.conn != nil {
		_ = c.conn.Close()
		c.conn = nil
	}
}

// find connects to a driver. If necessary it starts the on-demand driver, repeatedly because the
// on-demand driver that another call started may be ending.
func (c *connection) find(ctx context.Context) (err error) {
	e := c.executable
	onDemandSocket := fmt.Sprintf("/proc/self/fd/%d/%s", c.dir.Fd(), e.OnDemand.Socket) // socket paths are limited to 107 bytes
	for {
		if c.pool != "" { // the running driver may be configured to refuse calls without a pool
			if c.conn, err = dial(ctx, e.Socket, c.pool); err == nil {
				c.socket = e.Socket
				return nil
			}
			if !errors.Is(err, errNotServed) {
				return fmt.Errorf("driver at %s: %w", e.Socket, err)
			}
		}
		if c.conn, err = dial(ctx, onDemandSocket, c.pool); err == nil {
			c.socket = filepath.Join(e.StateDir, e.OnDemand.Socket)
			return nil
		}
		if !errors.Is(err, errNotServed) {
			return fmt.Errorf("on-demand driver: %w", err)
		}
		if err := c.start(); err != nil {
			return err
		}
		if err := sleep(ctx, pollTime); err != nil {
			return volume.Errorf(volume.ErrUnavailable, "the on-demand driver does not answer (%w): see %s", err, c.log())
		}
	}
}

// start starts the on-demand driver, unless the one that this call started is still running, or has ended
// so recently that the delay before a restart has not passed.
func (c *connection) start() (err error) {
	if c.started != nil {
		select {
		case <-c.started.Done():
			var exit *command.Error
			if errors.As(c.started.Err(), &exit) && exit.Signal == 0 {
				return fmt.Errorf("the on-demand driver does not start: %s (see %s)", c.lastLogLine(), c.log())
			}
			// Status 0: another process, which may be ending, holds the lock of the on-demand driver.
			if c.started.Err() == nil && c.restartAt.IsZero() {
				c.pause = min(max(2*c.pause, startPause), startPauseMax)
				c.restartAt = time.Now().Add(c.pause)
			}
			if time.Now().Before(c.restartAt) {
				return nil
			}
		default:
			return nil
		}
	}
	d := c.executable.OnDemand
	c.restartAt = time.Time{}
	c.started, err = command.Command{Name: d.Command[0], Args: d.Command[1:], Hold: []*os.File{c.dir}}.StartDetached()
	return err
}

// log returns the path of the on-demand driver's log.
func (c *connection) log() string { return filepath.Join(c.executable.StateDir, LogFile) }

func (c *connection) lastLogLine() string {
	b, err := os.ReadFile(c.log())
	if err != nil {
		return err.Error()
	}
	b = bytes.TrimSpace(b)
	return string(b[bytes.LastIndexByte(b, '\n')+1:])
}

// Invoke implements grpc.ClientConnInterface. An error contains only the message of the driver.
func (c *connection) Invoke(ctx context.Context, method string, args, reply any, opts ...grpc.CallOption) error {
	for retryUntil := time.Now().Add(lockTime); ; {
		if c.conn == nil {
			if err := c.find(ctx); err != nil {
				return err
			}
		}
		err := c.conn.Invoke(ctx, method, args, reply, opts...)
		switch {
		case err == nil:
			return nil
		case status.Code(err) == codes.Aborted && time.Now().Before(retryUntil) && sleep(ctx, pollTime) == nil:
			continue // the driver is still running a call for the volume that a killed process made
		case status.Code(err) != codes.Unavailable || ctx.Err() != nil || c.alive(ctx):
			return callError{status.Convert(err)}
		}
		c.close()
	}
}

// alive reports whether the driver still answers.
func (c *connection) alive(ctx context.Context) bool {
	_, err := queryPools(ctx, c.conn)
	return err == nil
}

// NewStream implements grpc.ClientConnInterface. It always fails.
func (c *connection) NewStream(context.Context, *grpc.StreamDesc, string, ...grpc.CallOption) (grpc.ClientStream, error) {
	return nil, status.Error(codes.Unimplemented, "streams are not used")
}

// callError is an error that a driver returned.
type callError struct{ *status.Status }

func (e callError) Error() string              { return e.Message() }
func (e callError) GRPCStatus() *status.Status { return e.Status }

// errNotServed means that no driver listens on a socket, or that the driver is ending or does not serve
// the pool.
var errNotServed = errors.New("no driver serves the pool")

// dial connects to the driver at a socket if the driver serves the pool. Otherwise it returns errNotServed. If
// pool is empty, it connects to any driver.
func dial(ctx context.Context, socket, pool string) (*grpc.ClientConn, error) {
	open := func(ctx context.Context, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", socket)
	}
	probe, err := open(ctx, "")
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errNotServed, err)
	}
	_ = probe.Close()
	conn, err := grpc.NewClient("passthrough:///"+socket, grpc.WithContextDialer(open), grpc.WithAuthority("localhost"),
		grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, err
	}
	pools, err := queryPools(ctx, conn)
	_, serves := pools[pool]
	switch {
	case err == nil && (serves || pool == ""):
		return conn, nil
	case err == nil || status.Code(err) == codes.Unavailable: // the driver is ending
		err = errNotServed
	}
	_ = conn.Close()
	return nil, err
}

// queryPools returns the UUIDs of a driver's pools by name. The UUID of a pool that is not open is
// empty.
func queryPools(ctx context.Context, conn grpc.ClientConnInterface) (map[string]string, error) {
	ctx, cancel := context.WithTimeout(ctx, answerTime)
	defer cancel()
	info, err := csi.NewIdentityClient(conn).GetPluginInfo(ctx, &csi.GetPluginInfoRequest{})
	pools, _ := identity.Pools(info.GetManifest())
	return pools, err
}

// PoolsServed returns those of the pools that the driver at a socket serves, whether they are open or not.
// It returns none if no driver listens on the socket.
func PoolsServed(ctx context.Context, socket string, pools []string) ([]string, error) {
	all, err := runningPools(ctx, socket)
	return slices.DeleteFunc(slices.Clone(pools), func(pool string) bool { return !slices.Contains(all, pool) }), err
}

// runningPools returns all pools that the driver at a socket serves, whether they are open or not. It
// returns none if no driver listens on the socket.
func runningPools(ctx context.Context, socket string) ([]string, error) {
	conn, err := dial(ctx, socket, "")
	if errors.Is(err, errNotServed) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	pools, err := queryPools(ctx, conn)
	if status.Code(err) == codes.Unavailable { // the driver is ending
		return nil, nil
	}
	return slices.Sorted(maps.Keys(pools)), err
}

// AwaitChange waits until the driver at a socket serves other ones of the pools than before, or until ctx
// ends. The on-demand driver must end then: it must release the pools that the driver at the socket now
// serves, and its successor must serve those that the driver at the socket no longer serves.
func AwaitChange(ctx context.Context, socket string, pools, before []string) {
	for sleep(ctx, yieldPoll) == nil {
		if served, err := PoolsServed(ctx, socket, pools); err == nil && !slices.Equal(served, before) {
			return
		}
	}
}

// poolUUID waits until the connection's pool is open, and returns the pool's UUID. The driver also
// validates the parameters.
func (c *connection) poolUUID(ctx context.Context, parameters map[string]string) (string, error) {
	limited, cancel := context.WithTimeout(ctx, openTime)
	defer cancel()
	for {
		_, err := c.controller.GetCapacity(ctx, &csi.GetCapacityRequest{Parameters: parameters})
		if err == nil {
			var pools map[string]string
			if pools, err = queryPools(ctx, c); err == nil {
				err = errNotServed
			}
			if uuid := pools[c.pool]; uuid != "" {
				return uuid, nil
			}
		}
		if !errors.Is(err, errNotServed) && status.Code(err) != codes.Unavailable {
			return "", err
		}
		if sleep(limited, 10*pollTime) != nil {
			return "", volume.Errorf(volume.ErrUnavailable, "driver at %s: pool %q is not open: %w", c.socket, c.pool, err)
		}
	}
}

// checkUUID returns an error if the recorded UUID of the pool with this name is not uuid. Without this
// check the running driver and the on-demand driver could have two pools with one name, and a volume of
// one pool would be created again in the other. If no UUID is recorded, checkUUID records uuid.
func checkUUID(state *os.Root, pool, uuid string) error {
	name := filepath.Join(uuidsDir, pool+".uuid")
	known, err := fs.ReadFile(state.FS(), name)
	if errors.Is(err, fs.ErrNotExist) {
		known = []byte(uuid)
		err = atomicfile.Write(state, name, known)
	}
	if err == nil && string(known) != uuid {
		err = volume.Errorf(volume.ErrPrecondition, "pool %q has the UUID %s…, but FlexVolume used a pool of that name with %s…: give the two pools different names; if the pool was replaced, remove %s",
			pool, uuid, known, filepath.Join(state.Name(), name))
	}
	return err
}

// sleep waits for a time. It returns an error if ctx ends first.
func sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}
