package doctor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/cluster/pki"
	"github.com/trivet-csi/trivet/driver"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// callTimeout limits each call to the driver, so that a pool on a disk that hangs does not block the
// calls for other pools.
const callTimeout = `{"methodConfig": [{"name": [{}], "timeout": "3s"}]}`

// driverFacts holds the responses of the driver at Options.Endpoint.
type driverFacts struct {
	name, version string
	ready         bool
	err           error
	// pools holds the result of GetCapacity by pool. A pool that the driver does not serve
	// has no entry.
	pools map[string]error
	// nodes is the error of ListVolumes of a controller's driver, which fails unless every node answers.
	nodes error
}

// readDriver queries the driver's name and version, whether it is ready, and whether it has the
// configured pools open. It does not query a node's driver for nfs pools, because the controller's driver
// serves those.
func readDriver(ctx context.Context, o Options, config driver.Config) (f driverFacts) {
	path := strings.TrimPrefix(strings.TrimPrefix(o.Endpoint, "unix:"), "//")
	if _, f.err = os.Stat(path); f.err != nil {
		return f
	}
	conn, err := grpc.NewClient("unix:"+path, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithAuthority("localhost"),
		grpc.WithDefaultServiceConfig(callTimeout))
	if err != nil {
		f.err = err
		return f
	}
	defer conn.Close()
	f.identify(ctx, csi.NewIdentityClient(conn))
	controller := csi.NewControllerClient(conn)
	f.pools = map[string]error{}
	forwarded := config.Forwarding != nil && !config.Forwarding.Controller()
	for _, p := range config.Pools {
		if !forwarded || !p.Shared() {
			f.pools[p.Name] = checkServed(ctx, controller, o.Kinds, p)
		}
	}
	if config.Forwarding.Controller() {
		_, f.nodes = controller.ListVolumes(ctx, &csi.ListVolumesRequest{MaxEntries: 1})
	}
	return f
}

// identify queries the driver's name and version, and whether it is ready.
func (f *driverFacts) identify(ctx context.Context, c csi.IdentityClient) {
	info, err := c.GetPluginInfo(ctx, &csi.GetPluginInfoRequest{})
	if err != nil {
		f.err = err
		return
	}
	f.name, f.version = info.GetName(), info.GetVendorVersion()
	probe, err := c.Probe(ctx, &csi.ProbeRequest{})
	f.ready, f.err = probe.GetReady().GetValue(), err
}

// checkServed returns nil if the driver has the pool open.
func checkServed(ctx context.Context, c csi.ControllerClient, kinds backend.Kinds, p pool.Config) error {
	class := map[string]string{volume.ParamPool: p.Name}
	if k, ok := kinds.For(p); ok {
		class[volume.ParamBackend] = k.Name
	}
	capacity, err := c.GetCapacity(ctx, &csi.GetCapacityRequest{Parameters: class})
	// The minimum volume size is 0 only if the driver does not know the pool.
	if err == nil && capacity.GetMinimumVolumeSize().GetValue() == 0 {
		return errUnknownPool
	}
	return err
}

// errUnknownPool is returned if the configuration file contains a pool that the running driver
// was started without.
var errUnknownPool = errors.New("the running driver does not have this pool")

// judgeServed reports whether a ready driver has the pool open. Another driver may hold its
// lock, or the disk may have changed since the driver opened the pool.
func judgeServed(name string, err error) Check {
	switch {
	case errors.Is(err, errUnknownPool):
		return failure(name, err.Error(), "restart the driver: it reads its configuration when it starts")
	case err != nil:
		return failure(name, reason(err), "follow the message")
	}
	return ok(name, "the driver has the pool open")
}

// judgeDriver judges the driver at Options.Endpoint, but not its pools.
func judgeDriver(f driverFacts, o Options) Check {
	const (
		name  = "driver"
		start = "start the driver, or set --endpoint to its socket"
	)
	switch {
	case errors.Is(f.err, fs.ErrNotExist) && !o.Pod.InCluster:
		return warning(name, o.Endpoint+": no driver runs there", start)
	case f.name == "" && f.err != nil:
		return failure(name, o.Endpoint+": "+reason(f.err), start+"; if the driver has ended, its log contains the reason")
	}
	seen := fmt.Sprintf("%s %s at %s", f.name, f.version, o.Endpoint)
	switch {
	case f.err != nil:
		return failure(name, seen+": "+reason(f.err), "follow the message")
	case !f.ready:
		return failure(name, seen+" is still opening its pools", "repeat the check in a minute; if the driver is still opening pools, the disk of a pool does not answer (dmesg)")
	case o.DriverName != "" && f.name != o.DriverName:
		return failure(name, seen+", but the expected name is "+o.DriverName, "use the same --driver-name for driver and doctor")
	case f.version != o.Version:
		return warning(name, seen+", but this program is "+o.Version, "restart the driver after an upgrade")
	}
	return ok(name, "%s is ready", seen)
}

// reason returns the message of a gRPC status without its code.
func reason(err error) string { return status.Convert(err).Message() }

// forwardingChecks checks the driver's certificates and, for a controller, whether all nodes answer. It
// returns no checks if calls are not forwarded.
func forwardingChecks(f *driver.Forwarding, o Options, driverName string, serving driverFacts) []Check {
	if f == nil {
		return nil
	}
	checks := []Check{judgeCertificates(pki.OpenDirectory(f.CertificatesDir(o.StateDir)), owner(f, o, driverName))}
	if f.Controller() && serving.ready {
		checks = append(checks, judgeNodes(serving.nodes))
	}
	return checks
}

// owner returns the URI that the driver's certificate must contain, or nil if the node's name is unknown.
func owner(f *driver.Forwarding, o Options, driverName string) *url.URL {
	switch {
	case f.Controller():
		return pki.ControllerURI(driverName)
	case o.Pod.Node != "":
		return pki.NodeURI(driverName, o.Pod.Node)
	}
	return nil
}

// judgeCertificates judges the certificates in a directory. If owner is nil, it accepts every URI in them.
func judgeCertificates(dir *pki.Directory, owner *url.URL) Check {
	const name = "certificates"
	err := dir.Usable()
	if owner != nil {
		err = dir.UsableAs(owner)
	}
	return judgeError(name, err, nil, "install certificates; in Kubernetes the driver requests them itself, and its log contains the reason of a failure (docs/operations/certificates.md)", "all are valid")
}

// judgeNodes judges the error of a list of all volumes, for which every node must answer.
func judgeNodes(err error) Check {
	const name = "nodes"
	if err != nil {
		return failure(name, reason(err), "if the message contains a command, decide whether to run the command (docs/operations/nodes.md, \"Which node has a pool\"); otherwise check the driver of the node; if a node was removed permanently, delete its Node object in Kubernetes, or remove it from forwarding.nodes")
	}
	return ok(name, "all nodes answer")
}
