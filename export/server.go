package export

import (
	"context"
	"net"
	"strings"
	"time"

	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/volume"
)

// server pings an NFS server.
type server struct {
	job Job
	// endpoint is the protocol and the port of the server, without an address.
	endpoint mount.Endpoint
	// table reads the mount table.
	table func(keep func(*mount.Entry) bool) ([]*mount.Entry, error)
}

// lookUpTime is the timeout of resolving the server's name.
const lookUpTime = 2 * time.Second

func newServer(job Job) *server {
	return &server{job: job, endpoint: mount.ParseEndpoint(job.Pool.NFS.MountOptions), table: mount.Table}
}

// ping returns nil if the server answers, or if that cannot be determined. If the node has mounts from the
// server, the server must answer at the addresses of all these mounts, even if the server's name has another
// address now, because a mount whose address does not answer hangs. Otherwise one address of the name is
// enough, and a name that cannot be resolved is no error.
func (s *server) ping(ctx context.Context) error {
	mounted, err := s.mounted()
	if err == nil && len(mounted) > 0 {
		_, err := pingAll(ctx, mounted)
		return err
	}
	answers, err := pingAll(ctx, s.resolve(ctx))
	if answers > 0 {
		return nil
	}
	return err
}

// pingAll pings endpoints in parallel. It returns the number of those that answer, and the error of one of
// the others.
func pingAll(ctx context.Context, all []mount.Endpoint) (answers int, err error) {
	errs := make(chan error, len(all))
	for _, at := range all {
		go func() { errs <- at.Ping(ctx) }()
	}
	for range all {
		if failed := <-errs; failed != nil {
			err = failed
		} else {
			answers++
		}
	}
	return answers, err
}

// mounted returns the endpoints of the pool's mounts on this node.
func (s *server) mounted() ([]mount.Endpoint, error) {
	mounts, err := s.table(s.isOwn)
	seen := map[mount.Endpoint]bool{}
	var all []mount.Endpoint
	for _, e := range mounts {
		if at := mount.NFSEndpoint(e); at.Address != "" && !seen[at] {
			seen[at] = true
			all = append(all, at)
		}
	}
	return all, err
}

// isOwn reports whether a mount is one of the pool: a base mount, or the mount of a volume.
func (s *server) isOwn(e *mount.Entry) bool {
	if !mount.IsNFS(e) {
		return false
	}
	name, path, ok := mount.ParseNFSSource(e.Source)
	if !ok || canonical(name) != canonical(s.job.Pool.NFS.Server) {
		return false
	}
	if s.job.Static {
		at := mount.NFSEndpoint(e)
		return at.Port == s.endpoint.Port && at.Proto == s.endpoint.Proto
	}
	below, ok := strings.CutPrefix(path, strings.TrimRight(s.job.Pool.NFS.Export, "/"))
	return ok && (below == "" || strings.HasPrefix(below, "/"))
}

// canonical is volume.CanonicalServer for a server that is known to be valid.
func canonical(server string) string {
	name, _ := volume.CanonicalServer(server)
	return name
}

// resolve returns the endpoints of the server's name, or none if it cannot be resolved.
func (s *server) resolve(ctx context.Context) []mount.Endpoint {
	ctx, cancel := context.WithTimeout(ctx, lookUpTime)
	defer cancel()
	hosts, _ := net.DefaultResolver.LookupHost(ctx, strings.Trim(s.job.Pool.NFS.Server, "[]"))
	var all []mount.Endpoint
	for _, host := range hosts {
		at := s.endpoint
		at.Address = host
		all = append(all, at)
	}
	return all
}
