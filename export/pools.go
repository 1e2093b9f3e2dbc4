package export

import (
	"cmp"
	"context"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// Options are the options of the workers of a driver.
type Options struct {
	// Pools are the nfs pools of the configuration.
	Pools []pool.Config
	// Kinds are the kinds of volumes of this version.
	Kinds backend.Kinds
	// Job is the part of the job that all workers have in common. Pool, Static, SilentSince and
	// SilentFor are set for each worker.
	Job Job
	// Program is the program of a worker process, which runs Role. If it is empty, the pools are
	// unavailable.
	Program string
	// Refused is the reason why no export may be mounted for pods. It is nil if exports may be mounted.
	Refused error
}

// Pools holds the workers. A pool that is not in the configuration has a worker only while it is
// used.
type Pools struct {
	options   Options
	ctx       context.Context
	intervals intervals
	tasks     sync.WaitGroup
	created   chan *Worker // new workers, which supervise watches

	mu      sync.Mutex
	workers map[string]*Worker // by the name of the pool; see staticPrefix
}

// New returns the pools. No worker process runs yet. All processes end with ctx.
func New(ctx context.Context, o Options) *Pools { return newPools(ctx, o, defaultIntervals) }

func newPools(ctx context.Context, o Options, intervals intervals) *Pools {
	ps := &Pools{options: o, ctx: ctx, intervals: intervals, workers: map[string]*Worker{}, created: make(chan *Worker)}
	ps.tasks.Go(ps.supervise)
	return ps
}

// Start starts the workers of the configured pools, so that they finish interrupted work, such as
// deletions. Without Start, the first call for a pool starts its worker.
func (ps *Pools) Start() {
	for _, c := range ps.options.Pools {
		if _, release, err := ps.byName(c.Name).acquire(false); err == nil {
			release()
		}
	}
}

// Wait returns when all workers have ended. They end with the context of New.
func (ps *Pools) Wait() { ps.tasks.Wait() }

// States returns the states of all workers, ordered by the names of their pools.
func (ps *Pools) States() []State {
	all := ps.all()
	states := make([]State, 0, len(all))
	for _, w := range all {
		states = append(states, w.state())
	}
	return states
}

// all returns the workers, ordered by the names of their pools.
func (ps *Pools) all() []*Worker {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	all := make([]*Worker, 0, len(ps.workers))
	for _, name := range slices.Sorted(maps.Keys(ps.workers)) {
		all = append(all, ps.workers[name])
	}
	return all
}

// configured returns the pool of the configuration with a name, and whether it exists.
func (ps *Pools) configured(name string) (pool.Config, bool) {
	i := slices.IndexFunc(ps.options.Pools, func(c pool.Config) bool { return c.Name == name })
	if i < 0 {
		return pool.Config{}, false
	}
	return ps.options.Pools[i], true
}

// byName returns the worker of a pool of the configuration, or of a direct pool, whose name contains
// its export. It returns nil for any other name.
func (ps *Pools) byName(name string) *Worker {
	c, ok := ps.configured(name)
	if !ok {
		c, ok = pool.DirectConfig(name)
	}
	if !ok {
		return nil
	}
	return ps.worker(c, false)
}

// staticPrefix begins the name that stands for a pool in workers for static volumes, which have no records.
const staticPrefix = "static "

// static returns the worker for the static volumes of a server that are mounted with the port and the
// protocol of at. It returns ErrInvalid for an invalid server.
func (ps *Pools) static(server string, at mount.Endpoint) (*Worker, error) {
	server, err := volume.CanonicalServer(server)
	if err != nil {
		return nil, volume.Errorf(volume.ErrInvalid, "%s%w", volume.ParamServer, err)
	}
	c := pool.Config{Name: staticPrefix + server, NFS: &pool.NFS{Server: server, Export: "/"}}
	for _, option := range []struct{ key, value string }{{"port", at.Port}, {"proto", at.Proto}} {
		if option.value != "" {
			word := option.key + "=" + option.value
			c.Name += " " + word
			c.NFS.MountOptions = append(c.NFS.MountOptions, word)
		}
	}
	return ps.worker(c, true), nil
}

// worker returns the worker of a pool, which it creates if necessary. static is Job.Static. worker restarts
// the idle time of an existing worker, so that the worker is not retired before the call.
func (ps *Pools) worker(c pool.Config, static bool) *Worker {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	w := ps.workers[c.Name]
	if w != nil {
		w.mu.Lock()
		w.lastCall = time.Now()
		w.mu.Unlock()
		return w
	}
	job := ps.options.Job
	job.Pool, job.Static = c, static
	w = newWorker(ps.ctx, job, ps.intervals, func(job Job) (*process, error) { return launch(ps.ctx, ps.options.Program, job) })
	ps.workers[c.Name] = w
	select {
	case ps.created <- w:
	case <-ps.ctx.Done():
	}
	return w
}

// supervise watches the workers that calls create.
func (ps *Pools) supervise() {
	for {
		select {
		case w := <-ps.created:
			ps.tasks.Go(func() { w.watch(ps.retire) })
		case <-ps.ctx.Done():
			return
		}
	}
}

// retire removes a worker that is idle, unless its pool is in the configuration, and reports
// whether it did.
func (ps *Pools) retire(w *Worker) bool {
	if _, configured := ps.configured(w.job.Pool.Name); configured {
		return false
	}
	ps.mu.Lock()
	defer ps.mu.Unlock()
	if !w.closeIfIdle() {
		return false
	}
	delete(ps.workers, w.job.Pool.Name)
	return true
}

// names returns the names of the configured pools for errors.
func (ps *Pools) names() string {
	var names []string
	for _, c := range ps.options.Pools {
		names = append(names, c.Name)
	}
	return cmp.Or(strings.Join(names, ", "), "none")
}
