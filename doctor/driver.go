package doctor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/trivet-csi/trivet/driver"
	"github.com/trivet-csi/trivet/identity"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// driverPatience bounds a call to the driver, which does those made here at once.
const driverPatience = 3 * time.Second

// driverFacts is what a driver on the socket answered.
type driverFacts struct {
	name, version string
	ready         bool
	err           error
	// open are the UUIDs of its pools, empty for one that is not open.
	open map[string]string
	// pools is the error that it answered when it was asked for the room in each;
	// those that it does not speak of are not among them.
	pools map[string]error
	// nodes is the error that a controller's driver answered when it was asked for
	// what is on all of them.
	nodes error
}

// lookAtDriver asks the driver who it is, whether it is ready, and whether it
// serves the pools.
func lookAtDriver(ctx context.Context, endpoint string, config driver.Config) (f driverFacts) {
	path := strings.TrimPrefix(strings.TrimPrefix(endpoint, "unix:"), "//")
	if _, f.err = os.Stat(path); f.err != nil {
		return f
	}
	conn, err := grpc.NewClient("unix:"+path, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithAuthority("localhost"))
	if err != nil {
		f.err = err
		return f
	}
	defer conn.Close()
	f.identify(ctx, csi.NewIdentityClient(conn))
	controller := csi.NewControllerClient(conn)
	f.pools = map[string]error{}
	for _, p := range config.Pools {
		if err := f.askForPool(ctx, controller, p); !errors.Is(err, errNotAsked) {
			f.pools[p.Name] = err
		}
	}
	if config.Forwarding.Controller() {
		f.nodes = askForAll(ctx, controller)
	}
	return f
}

// askForAll wants an answer of every node.
func askForAll(ctx context.Context, c csi.ControllerClient) error {
	ctx, cancel := context.WithTimeout(ctx, driverPatience)
	defer cancel()
	_, err := c.ListVolumes(ctx, &csi.ListVolumesRequest{MaxEntries: 1})
	return err
}

// askForPool is nil if the driver has the pool open.
func (f *driverFacts) askForPool(ctx context.Context, c csi.ControllerClient, p pool.Config) error {
	err := askForRoom(ctx, c, p)
	if status.Code(err) != codes.Unimplemented {
		return err
	}
	// A node's driver serves that to the controller alone, and says this to all.
	switch uuid, known := f.open[p.Name]; {
	case p.Shared():
		return errNotAsked
	case !known:
		return errUnknownPool
	case uuid == "":
		return errClosedPool
	}
	return nil
}

func (f *driverFacts) identify(ctx context.Context, c csi.IdentityClient) {
	ctx, cancel := context.WithTimeout(ctx, driverPatience)
	defer cancel()
	info, err := c.GetPluginInfo(ctx, &csi.GetPluginInfoRequest{})
	if err != nil {
		f.err = err
		return
	}
	f.name, f.version, f.open = info.GetName(), info.GetVendorVersion(), identity.Pools(info.GetManifest())
	probe, err := c.Probe(ctx, &csi.ProbeRequest{})
	f.ready, f.err = probe.GetReady().GetValue(), err
}

// askForRoom has a time of its own: a pool on a disk that hangs says nothing of
// the others.
func askForRoom(ctx context.Context, c csi.ControllerClient, p pool.Config) error {
	ctx, cancel := context.WithTimeout(ctx, driverPatience)
	defer cancel()
	class := map[string]string{volume.ParamPool: p.Name}
	if p.Disks != nil {
		class[volume.ParamBackend] = volume.BackendLocal
	}
	room, err := c.GetCapacity(ctx, &csi.GetCapacityRequest{Parameters: class})
	// Of a pool that it knows the driver always tells the smallest volume.
	if err == nil && room.GetMinimumVolumeSize().GetValue() == 0 {
		return errUnknownPool
	}
	return err
}

var (
	// errUnknownPool means: the configuration has a pool that the driver has not.
	errUnknownPool = errors.New("the running driver does not know it")
	errClosedPool  = errors.New("the running driver does not have it open")
	// errNotAsked means: this driver tells nobody whether it serves the pool.
	errNotAsked = errors.New("the running driver does not say")
)

// judgeServed tells whether a driver that is ready has the pool open: another may
// have its lock, or the disk may have changed since the driver opened it.
func judgeServed(name string, err error) Check {
	switch {
	case errors.Is(err, errUnknownPool):
		return failure(name, err.Error(), "restart it: it reads its configuration when it starts")
	case errors.Is(err, errClosedPool):
		return failure(name, err.Error(), "its log says why")
	case err != nil:
		return failure(name, reason(err), "do what the message says")
	}
	return ok(name, "the driver has it open")
}

func judgeDriver(f driverFacts, o Options) Check {
	const (
		name  = "driver"
		start = "start it, or name its socket with --endpoint"
	)
	switch {
	case errors.Is(f.err, fs.ErrNotExist) && !o.Pod.InCluster:
		return warning(name, o.Endpoint+": no driver runs there", start)
	case f.name == "" && f.err != nil:
		return failure(name, o.Endpoint+": "+reason(f.err), start+"; its log says why it ended")
	}
	seen := fmt.Sprintf("%s %s at %s", f.name, f.version, o.Endpoint)
	switch {
	case f.err != nil:
		return failure(name, seen+": "+reason(f.err), "do what the message says")
	case !f.ready:
		return failure(name, seen+" is still opening its pools", "look again in a moment; if it stays so, a pool's disk does not answer (dmesg)")
	case o.DriverName != "" && f.name != o.DriverName:
		return failure(name, seen+", wanted is "+o.DriverName, "give driver and doctor the same --driver-name")
	case f.version != o.Version:
		return warning(name, seen+", this is "+o.Version, "restart the driver after an upgrade")
	}
	return ok(name, "%s is ready", seen)
}

// reason is an error's text, without gRPC's words around it.
func reason(err error) string { return status.Convert(err).Message() }
