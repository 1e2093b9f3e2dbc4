package export

import (
	"context"
	"net"
	"strings"
	"time"

	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/volume"
)

// server is asked whether it answers.
type server struct {
	job Job
	// usual is how it is reached, without an address.
	usual mount.Endpoint
	// table reads the mount table.
	table func(keep func(*mount.Entry) bool) ([]*mount.Entry, error)
}

// lookUpTime bounds a look-up.
const lookUpTime = 2 * time.Second

func newServer(job Job) *server {
	return &server{job: job, usual: mount.ParseEndpoint(job.Pool.NFS.MountOptions), table: mount.Table}
}

// ping returns nil when the server answers, or when nobody can tell. What hangs, and
// would lose data if it were given up, are mounts: so it is asked at their addresses,
// wherever its name leads by now, and has to answer at each of them. While nothing is
// mounted one address of its name is enough, and the name service's silence is not the
// server's.
func (s *server) ping(ctx context.Context) error {
	used, err := s.used()
	if err == nil && len(used) > 0 {
		_, err := pingAll(ctx, used)
		return err
	}
	answers, err := pingAll(ctx, s.named(ctx))
	if answers > 0 {
		return nil
	}
	return err
}

// pingAll asks endpoints at once, and returns how many answer, and why one does not.
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

// used are where the mounts of the pool on this node reach the server.
func (s *server) used() ([]mount.Endpoint, error) {
	mounts, err := s.table(s.has)
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

// has tells whether a mount is of the pool: the worker's own, or a volume's.
func (s *server) has(e *mount.Entry) bool {
	if !mount.IsNFS(e) {
		return false
	}
	name, path, ok := mount.ParseNFSSource(e.Source)
	if !ok || canonical(name) != canonical(s.job.Pool.NFS.Server) {
		return false
	}
	if s.job.Static {
		at := mount.NFSEndpoint(e)
		return at.Port == s.usual.Port && at.Proto == s.usual.Proto
	}
	below, ok := strings.CutPrefix(path, strings.TrimRight(s.job.Pool.NFS.Export, "/"))
	return ok && (below == "" || strings.HasPrefix(below, "/"))
}

// canonical is volume.CanonicalServer for a server that was checked before.
func canonical(server string) string {
	one, _ := volume.CanonicalServer(server)
	return one
}

// named are the addresses that the server's name has.
func (s *server) named(ctx context.Context) []mount.Endpoint {
	ctx, cancel := context.WithTimeout(ctx, lookUpTime)
	defer cancel()
	hosts, _ := net.DefaultResolver.LookupHost(ctx, strings.Trim(s.job.Pool.NFS.Server, "[]"))
	var all []mount.Endpoint
	for _, host := range hosts {
		at := s.usual
		at.Address = host
		all = append(all, at)
	}
	return all
}
