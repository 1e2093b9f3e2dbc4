package driver

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"math"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	grpcstatus "google.golang.org/grpc/status"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/cluster/kube"
	"github.com/trivet-csi/trivet/cluster/router"
	"github.com/trivet-csi/trivet/cluster/status"
	"github.com/trivet-csi/trivet/export"
	"github.com/trivet-csi/trivet/internal/grpcserver"
	"github.com/trivet-csi/trivet/internal/relay"
	"github.com/trivet-csi/trivet/internal/translate"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

const (
	// defaultHealthInterval is the time between two examinations of the volumes of a node, and between two requests of
	// the controller's driver for their results.
	defaultHealthInterval = 30 * time.Second
	// examinationTime limits the examination of one volume, and the list of one pool. It is longer than an NFS server
	// may not answer until it counts as silent.
	examinationTime = 10 * time.Second
	// maxExaminations is the number of volumes that are examined at a time.
	maxExaminations = 16
	// nodeHealthTimeout limits the wait for the result of one node.
	nodeHealthTimeout = 5 * time.Second
	// maxNodeVolumes limits the volumes of one node's result, because the controller does not trust the nodes and keeps the result
	// in memory.
	maxNodeVolumes = 10000
)

// examiner examines the volumes of this node by NodeGetVolumeHealth, and keeps the conditions that it finds. These are all
// volumes in pools of the node, and the volumes of NFS servers that the kubelet has staged. A driver that serves node and
// controller also examines all volumes of its nfs pools.
type examiner struct {
	kinds backend.Kinds
	pools *pool.Set
	calls *export.Relay
	// exports lists the volumes of each nfs pool. It is empty if the controller is another process.
	exports map[string]relay.Service
	staged  func() []kube.StagedVolume
	// listed contains the IDs of the volumes in the last list of each pool, because the pool may be unavailable now.
	listed map[string][]string

	mu      sync.Mutex
	found   status.Examination
	ended   bool            // an examination has ended
	running map[string]bool // the examinations that have not returned yet, also after their timeout
	// calling waits for them: the pools must not be closed before.
	calling sync.WaitGroup
}

// newExaminer returns the examiner of the volumes that calls serves.
func (d *Driver) newExaminer(calls *export.Relay) *examiner {
	e := &examiner{
		kinds: d.options.Kinds, pools: d.pools, calls: calls,
		staged: func() []kube.StagedVolume { return nil },
		listed: map[string][]string{}, running: map[string]bool{},
	}
	if k := d.config.Kubernetes; k != nil {
		e.staged = func() []kube.StagedVolume { return kube.Kubelet{Dir: k.KubeletDir}.Staged(d.options.Name) }
	}
	if exports, ok := d.lists.(*export.Relay); ok && d.options.serves("controller") {
		e.exports = exports.Services()
	}
	return e
}

// last returns the result of the last examination. ok is false before the first one has ended.
func (e *examiner) last() (found status.Examination, ok bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.found, e.ended
}

// examination is served to other drivers.
func (d *Driver) examination() (status.Examination, error) {
	found, ok := d.examiner.last()
	if !ok {
		return found, volume.Errorf(volume.ErrUnavailable, "the volumes have not been examined yet")
	}
	return found, nil
}

// subject is a volume that is to be examined.
type subject struct {
	id string
	// staging is the staging path of a static volume, which has no record.
	staging string
	// unusable is the reason why its pool cannot be used.
	unusable error
}

// examine examines all volumes.
func (e *examiner) examine(ctx context.Context) {
	subjects, unexamined := e.subjects(ctx)
	earlier := map[string][]status.Health{}
	for _, v := range e.found.Volumes { // only this method writes it
		earlier[v.ID] = v.Health
	}
	results, failed := make([]status.Examined, len(subjects)), make([]bool, len(subjects))
	var group errgroup.Group
	group.SetLimit(maxExaminations)
	for i, s := range subjects {
		group.Go(func() error {
			results[i], failed[i] = e.examineVolume(ctx, s, earlier[s.id])
			return nil
		})
	}
	_ = group.Wait()      // no error is returned
	if ctx.Err() != nil { // the pools are being closed
		return
	}
	for i, s := range subjects {
		if id, err := volume.ParseID(s.id); failed[i] && err == nil && !slices.Contains(unexamined, id.Pool) {
			unexamined = append(unexamined, id.Pool)
		}
	}
	results = slices.DeleteFunc(results, func(v status.Examined) bool { return len(v.Health) == 0 })
	e.mu.Lock()
	defer e.mu.Unlock()
	e.found, e.ended = status.Examination{Volumes: results, Unexamined: unexamined}, true
}

// subjects returns the volumes, and the names of the pools whose volumes cannot be examined.
func (e *examiner) subjects(ctx context.Context) (all []subject, unexamined []string) {
	unusable := map[string]error{} // by pool
	for _, s := range e.pools.States() {
		err := e.list(ctx, s.Name, func(context.Context) ([]string, error) { return e.volumesIn(s) })
		if err != nil {
			unusable[s.Name], unexamined = err, append(unexamined, s.Name)
		}
		all = append(all, subjectsOf(e.listed[s.Name], err)...)
	}
	for _, name := range slices.Sorted(maps.Keys(e.exports)) {
		_ = e.list(ctx, name, func(ctx context.Context) ([]string, error) { return exported(ctx, e.exports[name]) })
		all = append(all, subjectsOf(e.listed[name], nil)...) // the calls return the reason
	}
	for _, s := range e.calls.Pools.States() {
		if !s.Answers {
			unexamined = append(unexamined, s.Pool)
		}
	}
	return append(all, e.stagedOnly(all, unusable)...), unexamined
}

// stagedOnly returns the staged volumes that are not among the others: those of NFS servers, and of node-local pools that
// cannot be used.
func (e *examiner) stagedOnly(others []subject, unusable map[string]error) (all []subject) {
	known := map[string]bool{}
	for _, s := range others {
		known[s.id] = true
	}
	for _, v := range e.staged() {
		id, err := volume.ParseID(v.Handle)
		switch {
		case known[v.Handle]:
		case err != nil:
			all = append(all, subject{id: v.Handle, staging: v.Path})
		case id.Shared():
			all = append(all, subject{id: v.Handle})
		case unusable[id.Pool] != nil:
			all = append(all, subject{id: v.Handle, unusable: unusable[id.Pool]})
		}
	}
	return all
}

func subjectsOf(ids []string, unusable error) (all []subject) {
	for _, id := range ids {
		all = append(all, subject{id: id, unusable: unusable})
	}
	return all
}

// list reads the IDs of the volumes of a pool. If it gets none because of an error, the IDs of the last list remain.
func (e *examiner) list(ctx context.Context, pool string, read func(context.Context) ([]string, error)) error {
	ids, err := within(ctx, e, "pool "+pool, read)
	if err == nil || len(ids) > 0 {
		e.listed[pool] = ids
	}
	return err
}

// volumesIn returns the IDs of the volumes in a pool of this node, and the reason why the pool cannot be used.
func (e *examiner) volumesIn(s pool.State) (ids []string, err error) {
	if s.Err != nil {
		return nil, s.Err
	}
	ids, err = e.volumesOf(s)
	if err == nil {
		err = s.Pool.Check()
	}
	return ids, cmp.Or(s.Pool.Probe(), err) // a disk that fails is also the reason for other errors
}

// volumesOf reads the IDs of the volumes in an open pool of this node.
func (e *examiner) volumesOf(s pool.State) (ids []string, err error) {
	media := e.pools.Kinds()[s.Name]
	for _, kind := range e.kinds {
		if !kind.Uses(media) {
			continue
		}
		volumes, _, err := s.Pool.List(kind.Name, "", math.MaxInt)
		if err != nil {
			return nil, err
		}
		for _, v := range volumes {
			ids = append(ids, v.ID.String())
		}
	}
	return ids, nil
}

// exported returns the IDs of the volumes in an nfs pool.
func exported(ctx context.Context, service relay.Service) (ids []string, err error) {
	entries, err := relay.Volumes.All(ctx, service)
	if err != nil { // the entries are incomplete
		return nil, err
	}
	for _, e := range entries {
		ids = append(ids, e.GetVolume().GetVolumeId())
	}
	return ids, nil
}

// examineVolume returns the conditions of a volume. If the examination fails, it returns those of the earlier one.
func (e *examiner) examineVolume(ctx context.Context, s subject, earlier []status.Health) (found status.Examined, failed bool) {
	err := s.unusable
	var resp *csi.NodeGetVolumeHealthResponse
	if err == nil {
		resp, err = within(ctx, e, s.id, func(ctx context.Context) (*csi.NodeGetVolumeHealthResponse, error) {
			return relay.Call[*csi.NodeGetVolumeHealthResponse](ctx, e.calls, csi.Node_NodeGetVolumeHealth_FullMethodName,
				&csi.NodeGetVolumeHealthRequest{VolumeId: s.id, StagingTargetPath: s.staging})
		})
	}
	id, parseErr := volume.ParseID(s.id)
	local := parseErr == nil && !id.Shared()
	switch {
	case err == nil:
		return healthOf(resp.GetVolumeHealth()), false
	case errors.Is(err, errUnresponsive):
		return examined(s.id, backend.Condition{Severity: backend.Inaccessible, Reason: backend.ReasonUnresponsive, Message: err.Error()}), false
	case errors.Is(err, volume.ErrNotFound) || grpcstatus.Code(err) == codes.NotFound: // deleted or unstaged meanwhile
		return found, false
	case errors.Is(err, pool.ErrDiskUnreadable):
		return examined(s.id, backend.Condition{Severity: backend.Inaccessible, Reason: backend.ReasonDiskUnreadable, Message: err.Error()}), false
	case local && (s.unusable != nil || errors.Is(err, volume.ErrUnavailable)):
		return examined(s.id, backend.PoolUnavailable(err)), false
	}
	return status.Examined{ID: s.id, Health: earlier}, true
}

func examined(id string, c backend.Condition) status.Examined {
	return healthOf(translate.VolumeHealth(id, []backend.Condition{c}))
}

var errUnresponsive = volume.Errorf(volume.ErrUnavailable, "an examination has not ended after %s: a disk or a server does not answer: see the kernel's log", examinationTime)

// within calls f in a goroutine, because a system call can hang. It returns errUnresponsive if f does not return within
// examinationTime, or if an earlier call with the same key has not returned yet.
func within[T any](ctx context.Context, e *examiner, key string, f func(context.Context) (T, error)) (T, error) {
	type result struct {
		value T
		err   error
	}
	var none T
	if !e.begin(key) {
		return none, errUnresponsive
	}
	limited, cancel := context.WithTimeout(ctx, examinationTime)
	defer cancel()
	done := make(chan result, 1)
	e.calling.Go(func() {
		value, err := grpcserver.RecoverPanics(limited, nil, &grpc.UnaryServerInfo{FullMethod: "examination of " + key}, func(ctx context.Context, _ any) (any, error) { return f(ctx) })
		e.end(key)
		r := result{err: err}
		r.value, _ = value.(T) // none after a panic
		done <- r
	})
	select {
	case r := <-done:
		return r.value, r.err
	case <-limited.Done():
		return none, errUnresponsive
	}
}

// begin marks an examination as running. It returns false if it already runs.
func (e *examiner) begin(key string) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.running[key] {
		return false
	}
	e.running[key] = true
	return true
}

func (e *examiner) end(key string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.running, key)
}

var volumeHealth = prometheus.NewDesc("trivet_volume_health", "Volumes with an adverse condition, by its reason (see health of volumes) and severity: degraded, inaccessible or data-loss. A node counts the volumes of its pools, and the volumes of NFS servers that are staged on it. There is no value without such a volume.", []string{"reason", "severity"}, nil)

// Describe implements prometheus.Collector.
func (e *examiner) Describe(ch chan<- *prometheus.Desc) { ch <- volumeHealth }

// Collect implements prometheus.Collector.
func (e *examiner) Collect(ch chan<- prometheus.Metric) {
	type labels struct{ reason, severity string }
	counts := map[labels]int{}
	found, _ := e.last()
	for _, v := range found.Volumes {
		for _, h := range v.Health {
			counts[labels{h.Reason, strings.ReplaceAll(strings.ToLower(h.Status), "_", "-")}]++
		}
	}
	for l, n := range counts {
		gauge(ch, volumeHealth, float64(n), l.reason, l.severity)
	}
}

// nodeHealth holds the last results of the examiners of all nodes.
type nodeHealth struct {
	router *router.Server
	mu     sync.Mutex
	found  map[string]status.Examination // by node
}

func newNodeHealth(r *router.Server) *nodeHealth {
	return &nodeHealth{router: r, found: map[string]status.Examination{}}
}

// last returns the last results of the nodes that answer.
func (n *nodeHealth) last() map[string]status.Examination {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.found
}

// collect requests the results of the connected nodes.
func (n *nodeHealth) collect(ctx context.Context) {
	connected := map[string]bool{}
	for _, s := range n.router.States() {
		connected[s.Name] = s.Connected
	}
	var mu sync.Mutex
	found := map[string]status.Examination{}
	n.router.EachNode(ctx, func(ctx context.Context, node string, conn grpc.ClientConnInterface) {
		if !connected[node] {
			return
		}
		ctx, cancel := context.WithTimeout(ctx, nodeHealthTimeout)
		defer cancel()
		if e, err := status.FetchExamination(ctx, conn); err == nil { // kubectl trivet and the metrics show a node that does not answer
			mu.Lock()
			defer mu.Unlock()
			found[node] = accepted(e, func(id volume.ID) bool { return n.router.Owns(node, id.Pool, id.PoolUUID) })
		}
	})
	n.mu.Lock()
	defer n.mu.Unlock()
	n.found = found
}

// accepted returns the part of a node's result that the controller accepts: of a volume in a pool of a node only if that node
// owns the pool, and of all volumes of NFS servers, because it is not known which of them are staged on the node. It accepts known reasons
// only, and at most maxNodeVolumes volumes.
func accepted(e status.Examination, owns func(volume.ID) bool) status.Examination {
	out := status.Examination{Unexamined: e.Unexamined}
	for _, v := range e.Volumes {
		id, err := volume.ParseID(v.ID)
		v.Health = slices.DeleteFunc(v.Health, func(h status.Health) bool { return !backend.Reason(h.Reason).Known() })
		switch {
		case len(v.Health) == 0 || err == nil && !id.Shared() && !owns(id):
		case len(out.Volumes) < maxNodeVolumes:
			out.Volumes = append(out.Volumes, v)
		case err == nil && !slices.Contains(out.Unexamined, id.Pool): // its conditions are not known to be gone
			out.Unexamined = append(out.Unexamined, id.Pool)
		}
	}
	return out
}

// observeHealth examines the volumes of this node, or requests the results of all nodes, until ctx ends. It records the
// conditions as events.
func (d *Driver) observeHealth(ctx context.Context) {
	if d.pools.AwaitReady(ctx) != nil {
		return
	}
	tick := time.NewTicker(cmp.Or(d.options.HealthInterval, defaultHealthInterval))
	defer tick.Stop()
	for {
		d.recordHealth(ctx)
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

func (d *Driver) recordHealth(ctx context.Context) {
	found := map[string]status.Examination{}
	if d.examiner != nil {
		d.examiner.examine(ctx)
		found[d.options.NodeID], _ = d.examiner.last()
	}
	if d.nodeHealth != nil {
		if !d.router.Ready() {
			return
		}
		d.nodeHealth.collect(ctx)
		found = d.nodeHealth.last()
	}
	if d.healthEvents != nil && ctx.Err() == nil {
		d.healthEvents.Update(ctx, d.healthRound(found))
	}
}

// healthRound converts the results of the nodes.
func (d *Driver) healthRound(found map[string]status.Examination) kube.HealthRound {
	nodes := map[string]bool{d.options.NodeID: true}
	if d.router != nil {
		for _, s := range d.router.States() {
			nodes[s.Name] = true
		}
	}
	round := kube.HealthRound{
		Exists: func(node string) bool { return nodes[node] },
		Examined: func(node, text string) bool {
			e, answered := found[node]
			id, err := volume.ParseID(text)
			if err != nil { // a static volume
				return answered
			}
			unexamined := slices.Contains(e.Unexamined, id.Pool) ||
				d.router != nil && !id.Shared() && !d.router.Serves(node, id.Pool, id.PoolUUID)
			return answered && !unexamined
		},
	}
	for _, node := range slices.Sorted(maps.Keys(found)) {
		for _, v := range found[node].Volumes {
			for _, h := range v.Health {
				round.Conditions = append(round.Conditions, kube.VolumeCondition{
					Volume: v.ID, Node: node, Reason: h.Reason, Message: h.Message,
					// A volume whose record is damaged has no other check.
					Inaccessible: h.Status == csi.VolumeHealthErrorType_INACCESSIBLE.String() || h.Reason == string(backend.ReasonRecordDamaged),
				})
			}
		}
	}
	return round
}
