package export

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// Options are what the workers of a driver work with.
type Options struct {
	// Pools are the nfs pools of the configuration.
	Pools []pool.Config
	// Kinds are the kinds of volumes of this version.
	Kinds backend.Kinds
	// Job is what all workers are told; Pool and SilentSince are each one's own.
	Job Job
	// Program has Run as a role (reexec.Run); empty: the pools are unavailable.
	Program string
	// Refused is why nothing of a server may be mounted for pods here; nil: it may.
	Refused error
}

// Pools finds the worker for a call. Of pools that no configuration names there is
// one while it is used.
type Pools struct {
	options Options
	ctx     context.Context
	pace    pace
	tasks   sync.WaitGroup
	fresh   chan *Worker // to be watched

	mu      sync.Mutex
	workers map[string]*Worker // by pool; see staticKey
}

// New makes the workers' supervisors; no process runs yet. All end with ctx.
func New(ctx context.Context, o Options) *Pools { return newPools(ctx, o, usual) }

func newPools(ctx context.Context, o Options, pace pace) *Pools {
	ps := &Pools{options: o, ctx: ctx, pace: pace, workers: map[string]*Worker{}, fresh: make(chan *Worker)}
	ps.tasks.Go(ps.supervise)
	return ps
}

// Start starts the workers of the configured pools, so that what was left to be done
// is done. Without it the first call starts each.
func (ps *Pools) Start() {
	for _, c := range ps.options.Pools {
		if _, leave, err := ps.named(c.Name).enter(false); err == nil {
			leave()
		}
	}
}

// Wait returns when all workers have ended, after the context given to New has.
func (ps *Pools) Wait() { ps.tasks.Wait() }

// States are those of all workers, in the order of their pools' names.
func (ps *Pools) States() []State {
	all := ps.all()
	states := make([]State, 0, len(all))
	for _, w := range all {
		states = append(states, w.state())
	}
	return states
}

func (ps *Pools) all() []*Worker {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	all := make([]*Worker, 0, len(ps.workers))
	for _, name := range slices.Sorted(maps.Keys(ps.workers)) {
		all = append(all, ps.workers[name])
	}
	return all
}

func (ps *Pools) configured(name string) (pool.Config, bool) {
	i := slices.IndexFunc(ps.options.Pools, func(c pool.Config) bool { return c.Name == name })
	if i < 0 {
		return pool.Config{}, false
	}
	return ps.options.Pools[i], true
}

// named is the worker of a pool of the configuration, or of one that stands for an
// export; nil for any other name.
func (ps *Pools) named(name string) *Worker {
	c, ok := ps.configured(name)
	if !ok {
		c, ok = pool.DirectConfig(name)
	}
	if !ok {
		return nil
	}
	return ps.worker(name, c, false)
}

// staticKey begins the keys of workers for volumes that have no records.
const staticKey = "static "

// static is the worker for volumes of a server that have no records, and are reached
// in the same way.
func (ps *Pools) static(server string, at mount.Endpoint) (*Worker, error) {
	server, err := volume.CanonicalServer(server)
	if err != nil {
		return nil, volume.Errorf(volume.ErrInvalid, "%s%w", volume.ParamServer, err)
	}
	c := pool.Config{Name: staticKey + server, NFS: &pool.NFS{Server: server, Export: "/"}}
	for _, word := range []string{option("port", at.Port), option("proto", at.Proto)} {
		if word != "" {
			c.Name += " " + word
			c.NFS.MountOptions = append(c.NFS.MountOptions, word)
		}
	}
	return ps.worker(c.Name, c, true), nil
}

// option is a mount option; empty if it has no value.
func option(key, value string) string {
	if value == "" {
		return ""
	}
	return key + "=" + value
}

// worker finds or makes a worker.
func (ps *Pools) worker(key string, c pool.Config, static bool) *Worker {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	w := ps.workers[key]
	if w != nil {
		w.touch()
		return w
	}
	job := ps.options.Job
	job.Pool, job.Static = c, static
	w = newWorker(ps.ctx, job, ps.pace, func(job Job) (*process, error) { return launch(ps.ctx, ps.options.Program, job) })
	ps.workers[key] = w
	select {
	case ps.fresh <- w:
	case <-ps.ctx.Done():
	}
	return w
}

// supervise watches the workers that calls have made, which outlive them.
func (ps *Pools) supervise() {
	for {
		select {
		case w := <-ps.fresh:
			ps.tasks.Go(func() { w.watch(ps.retire) })
		case <-ps.ctx.Done():
			return
		}
	}
}

// retire forgets a worker that is not used any more; those of the configuration stay.
func (ps *Pools) retire(w *Worker) bool {
	if _, stays := ps.configured(w.job.Pool.Name); stays {
		return false
	}
	ps.mu.Lock()
	defer ps.mu.Unlock()
	if !w.resting() {
		return false
	}
	delete(ps.workers, w.job.Pool.Name)
	return true
}

// Shared tells whether volumes with these parameters are in an nfs pool.
func (ps *Pools) Shared(p volume.Parameters) bool {
	_, configured := ps.configured(p.Pool)
	return configured || ps.options.Kinds.Shared(p)
}

// byParameters is the worker that makes volumes with these parameters; nil if it is
// none's.
func (ps *Pools) byParameters(raw map[string]string) (*Worker, error) {
	p, err := ps.options.Kinds.Parse(raw)
	if err != nil || !ps.Shared(p) {
		return nil, err
	}
	if p.Pool == "" && len(ps.options.Pools) > 0 {
		p.Pool = ps.options.Pools[0].Name
	}
	if w := ps.named(p.Pool); w != nil {
		return w, nil
	}
	if p.Pool == "" {
		return nil, volume.Errorf(volume.ErrInvalid, "parameter %s=%q: the configuration has no nfs pool: add one, or name %s and %s of an export in the StorageClass", volume.ParamBackend, p.Backend, volume.ParamServer, volume.ParamShare)
	}
	return nil, volume.Errorf(volume.ErrInvalid, "parameter %s=%q: backend %s wants an nfs pool, and the configuration has no such one (it has %s)", volume.ParamPool, p.Pool, p.Backend, ps.names())
}

func (ps *Pools) names() string {
	var names []string
	for _, c := range ps.options.Pools {
		names = append(names, c.Name)
	}
	return cmp.Or(strings.Join(names, ", "), "none")
}

// having is the worker of the pool in an ID; nil if the pool is node-local. foreign: the ID
// is not one of this driver.
func (ps *Pools) having(id volume.ID, foreign error) (*Worker, error) {
	if foreign != nil || !id.Shared() {
		return nil, nil //nolint:nilerr,nilnil // what it is not is an answer
	}
	if w := ps.named(id.Pool); w != nil {
		return w, nil
	}
	return nil, volume.Errorf(volume.ErrUnavailable, "%s: the configuration here has no nfs pool %q (it has %s): add it", id, id.Pool, ps.names())
}

// onNode is the worker for a volume of the Node service; nil: it is none's. A volume
// that has no record is known by its context or, where the call brings none, by what
// is mounted at its path; and so is one whose pool is not in the configuration any
// more.
func (ps *Pools) onNode(text string, volumeContext map[string]string, flags []string, path string) (*Worker, error) {
	w, err := ps.having(volume.ParseID(text))
	if w != nil {
		return w, nil
	}
	if _, foreign := volume.ParseID(text); err == nil && foreign == nil { // node-local
		return nil, nil //nolint:nilnil // what it is not is an answer
	}
	if volume.IsInline(volumeContext) { // of which a pod may say anything
		return nil, nil //nolint:nilnil // as above
	}
	server := volume.Attribute(volumeContext, volume.ParamServer)
	share, shareErr := volume.Share(volumeContext)
	if err == nil && text != "" && (server != "" || share != "" || shareErr != nil) { // the worker refuses two shares
		w, err := ps.static(server, mount.ParseEndpoint(flags))
		if err != nil {
			return nil, volume.Errorf(volume.ErrInvalid, "volume_context.%w", err)
		}
		return w, nil
	}
	if at, tableErr := ps.at(path); at != nil || tableErr != nil {
		return at, tableErr
	}
	return nil, err
}

// toMount is onNode for a call that mounts.
func (ps *Pools) toMount(text string, volumeContext map[string]string, flags []string, path string) (*Worker, error) {
	w, err := ps.onNode(text, volumeContext, flags, path)
	if err == nil && w != nil && ps.options.Refused != nil {
		return nil, fmt.Errorf("volume %q: %w", text, ps.options.Refused)
	}
	return w, err
}

// at is the worker for what is mounted at a path, by the mount table; nil if that is
// nothing of a server.
func (ps *Pools) at(path string) (*Worker, error) {
	if !filepath.IsAbs(path) {
		return nil, nil //nolint:nilnil // as below
	}
	e, err := mount.OnPath(path)
	if err != nil || e == nil || !mount.IsNFS(e) {
		return nil, err
	}
	server, _, ok := mount.ParseNFSSource(e.Source)
	if !ok {
		return nil, volume.Errorf(volume.ErrPrecondition, "path %q: %q is mounted there, which names no server: it is left alone", path, e.Source)
	}
	return ps.static(server, mount.NFSEndpoint(e))
}
