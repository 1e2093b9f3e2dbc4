package driver

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"net/http/pprof"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"google.golang.org/grpc"
	grpcstatus "google.golang.org/grpc/status"
	"k8s.io/klog/v2"

	"github.com/trivet-csi/trivet/cluster/kube"
	"github.com/trivet-csi/trivet/cluster/router"
	"github.com/trivet-csi/trivet/cluster/status"
	"github.com/trivet-csi/trivet/cluster/transfer"
	"github.com/trivet-csi/trivet/export"
	"github.com/trivet-csi/trivet/internal/webserver"
	"github.com/trivet-csi/trivet/pool"
)

// metrics holds the metrics of gRPC calls, and the registry of all metrics.
type metrics struct {
	registry *prometheus.Registry
	calls    *prometheus.Registry // only the metrics of calls
	driver   string
	seconds  *prometheus.HistogramVec
	inFlight *prometheus.GaugeVec
}

func newMetrics(driver, version string, services []string, pools *pool.Set) *metrics {
	m := &metrics{
		registry: prometheus.NewRegistry(),
		calls:    prometheus.NewRegistry(),
		driver:   driver,
		// The name and the labels are those of csi-lib-utils, so that dashboards for other
		// drivers work. The buckets are not, because those of csi-lib-utils begin at 100 ms.
		seconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name:    "csi_plugin_operations_seconds",
			Help:    "Durations of CSI calls.",
			Buckets: []float64{.0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 15, 60, 300},
		}, []string{"driver_name", "method_name", "grpc_status_code"}),
		inFlight: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "trivet_calls_in_flight", Help: "Running CSI calls.",
		}, []string{"method_name"}),
	}
	build := prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "trivet_build_info", Help: "Always 1; alert if no driver has the service controller.",
		ConstLabels: prometheus.Labels{"version": version, "goversion": runtime.Version(), "services": strings.Join(slices.Sorted(slices.Values(services)), ",")},
	})
	build.Set(1)
	m.calls.MustRegister(m.seconds, m.inFlight)
	m.registry.MustRegister(m.seconds, m.inFlight, build, poolCollector{pools, slices.Contains(services, "controller")},
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return m
}

// poolCollector collects the metrics of pools. It reads the pools at each scrape.
type poolCollector struct {
	pools *pool.Set
	// publishes is true if this driver itself records the publications of volumes. A central controller records none
	// for the pools of nodes, so that the volumes of a dead node can be detached.
	publishes bool
}

// poolUp is a pool's only metric while the pool is not open.
var poolUp = poolDesc("up", "1 if the pool is open, else 0; alert on 0.")

// usageGauges are the metrics that are read from the usage of an open pool.
var usageGauges = []struct {
	desc  *prometheus.Desc
	value func(pool.Usage) int64
}{
	{poolDesc("size_bytes", "Configured size, or size of the filesystem without the blocks reserved for root."), func(u pool.Usage) int64 { return u.Total }},
	{poolDesc("used_bytes", "Allocated bytes of the pool's filesystem, including foreign files."), func(u pool.Usage) int64 { return u.Used }},
	{poolDesc("free_bytes", "Free bytes of the pool's filesystem."), func(u pool.Usage) int64 { return u.Free }},
	{poolDesc("promised_bytes", "Sizes of the volumes, and the space that snapshots reserve."), func(u pool.Usage) int64 { return u.Promised }},
	{poolDesc("room_bytes", "Bytes that can still be promised to new volumes."), func(u pool.Usage) int64 { return u.Room }},
	{poolDesc("reserve_bytes", "Bytes that are never promised; alert when fewer bytes are free."), func(u pool.Usage) int64 { return u.Reserve }},
	{poolDesc("other_pools_bytes", "Bytes that other pools of the filesystem take."), func(u pool.Usage) int64 { return u.OtherPools }},
	{poolDesc("trash_entries", "Deleted volumes and snapshots whose data is not removed yet."), func(u pool.Usage) int64 { return int64(u.Trash) }},
	{poolDesc("trash_stuck_entries", "Deleted volumes and snapshots whose removal failed and is retried; alert above 0."), func(u pool.Usage) int64 { return int64(u.TrashStuck) }},
	{poolDesc("snapshots", "Snapshots, including each of a group."), func(u pool.Usage) int64 { return int64(u.Snapshots) }},
	{poolDesc("copies", "Snapshots and volumes that are being copied, or received from other nodes."), func(u pool.Usage) int64 { return int64(u.Copies) }},
}

var (
	poolCopied = poolDesc("copied_bytes_total", "Bytes that this process has copied, including shared blocks, or received from other nodes.")
	volumes    = prometheus.NewDesc("trivet_volumes", "Volumes, including those that are being removed.", []string{"backend", "pool"}, nil)
	disks      = prometheus.NewDesc("trivet_disks", "Disks that match; alert on orphaned, unreadable and other-pool. Of a volume group: physical volumes (in-use, missing) and logical volumes without a volume (orphaned, wiping).", []string{"pool", "state"}, nil)
	copies     = prometheus.NewDesc("trivet_copy_timestamp_seconds", "Unix time of the newest snapshot of a volume of another node of which the pool has a copy that was never staged; alert if it is too old.", []string{"pool", "source"}, nil)
	published  = poolDesc("published_volumes", "Controller-published volumes. Only for pools of a driver that serves node and controller.")
	unwiped    = poolDesc("unwiped_bytes", "Bytes of deleted volumes that are not wiped yet; alert if above 0 and unchanged for an hour.")
)

// transferredBytes returns the counter of the transfers in one direction.
func transferredBytes(direction string, l *transfer.Limit) prometheus.Collector {
	return prometheus.NewCounterFunc(prometheus.CounterOpts{
		Name:        "trivet_transferred_bytes_total",
		Help:        "Bytes of volumes that this node has sent to other nodes or received from them, as on the network.",
		ConstLabels: prometheus.Labels{"direction": direction},
	}, func() float64 { return float64(l.Bytes()) })
}

// nodeCollector collects the state of the nodes from the router.
type nodeCollector struct{ router *router.Server }

// The label is not "node", because Prometheus often adds a label of that name for the node of the
// scraped driver.
var (
	nodeUp        = prometheus.NewDesc("trivet_node_up", "Controller: 1 if it has a connection to the node's driver, else 0; alert on 0.", []string{"csi_node"}, nil)
	nodeConflicts = prometheus.NewDesc("trivet_node_conflicting_pools", "Controller: pools of the node that another node also announces, or is recorded for; alert above 0.", []string{"csi_node"}, nil)
)

// Describe implements prometheus.Collector.
func (c nodeCollector) Describe(ch chan<- *prometheus.Desc) {
	ch <- nodeUp
	ch <- nodeConflicts
}

// Collect implements prometheus.Collector.
func (c nodeCollector) Collect(ch chan<- prometheus.Metric) {
	for _, s := range c.router.States() {
		up := 0.0
		if s.Connected {
			up = 1
		}
		gauge(ch, nodeUp, up, s.Name)
		gauge(ch, nodeConflicts, float64(s.Conflicts), s.Name)
	}
}

// nodeLossCollector collects the volumes of nodes that do not exist.
type nodeLossCollector struct{ loss *kube.NodeLoss }

// The number of lost nodes has no limit, so their names are not labels.
var (
	lostVolumes     = prometheus.NewDesc("trivet_node_loss_volumes", "Controller with nodeLoss: volumes whose node does not exist: kept; waiting for the delay or for finalizers; stopped: not released because that may be wrong; alert on kept and stopped.", []string{"state"}, nil)
	releasedVolumes = prometheus.NewDesc("trivet_node_loss_released_volumes_total", "Controller with nodeLoss: volumes whose claim and PersistentVolume this process has deleted because their node does not exist.", nil, nil)
)

// Describe implements prometheus.Collector.
func (c nodeLossCollector) Describe(ch chan<- *prometheus.Desc) {
	ch <- lostVolumes
	ch <- releasedVolumes
}

// Collect implements prometheus.Collector.
func (c nodeLossCollector) Collect(ch chan<- prometheus.Metric) {
	byState, released := c.loss.Counts()
	for _, state := range kube.LostStates {
		gauge(ch, lostVolumes, float64(byState[state]), string(state))
	}
	ch <- prometheus.MustNewConstMetric(releasedVolumes, prometheus.CounterValue, float64(released))
}

func poolDesc(name, help string) *prometheus.Desc {
	return prometheus.NewDesc("trivet_pool_"+name, help, []string{"pool"}, nil)
}

// Describe implements prometheus.Collector.
func (c poolCollector) Describe(ch chan<- *prometheus.Desc) { prometheus.DescribeByCollect(c, ch) }

// Collect implements prometheus.Collector.
func (c poolCollector) Collect(ch chan<- prometheus.Metric) {
	for _, s := range c.pools.States() {
		if s.Pool == nil || s.Pool.Check() != nil {
			gauge(ch, poolUp, 0, s.Name)
			continue
		}
		u, err := s.Pool.Usage()
		if err != nil {
			gauge(ch, poolUp, 0, s.Name)
			continue
		}
		collectUsage(ch, s.Name, u, s.Pool.VolumesByBackend())
		if c.publishes {
			gauge(ch, published, float64(u.Attached), s.Name)
		}
		collectDevices(ch, s.Pool)
		collectCopies(ch, s.Pool)
	}
}

// collectDevices collects the disks of a pool of disks. Other pools have none.
func collectDevices(ch chan<- prometheus.Metric, p *pool.Pool) {
	storage := p.Storage()
	if storage == nil {
		return
	}
	counts, unwipedBytes := map[string]int{}, int64(0) // counts of disks by state
	for _, d := range storage.Devices() {
		counts[d.State]++
		unwipedBytes += d.Unwiped
	}
	gauge(ch, unwiped, float64(unwipedBytes), p.Name())
	for state, count := range counts {
		gauge(ch, disks, float64(count), p.Name(), state)
	}
}

// collectCopies collects the ages of the copies of volumes of other nodes.
func collectCopies(ch chan<- prometheus.Metric, p *pool.Pool) {
	all, _ := p.Images.Copies() // without the folder, there are none
	for source, taken := range all {
		gauge(ch, copies, float64(taken.UnixMilli())/1000, p.Name(), source.String())
	}
}

func gauge(ch chan<- prometheus.Metric, d *prometheus.Desc, v float64, labels ...string) {
	ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
}

// collectUsage collects the usage of an open pool.
func collectUsage(ch chan<- prometheus.Metric, name string, u pool.Usage, byBackend map[string]int) {
	gauge(ch, poolUp, 1, name)
	for _, g := range usageGauges {
		gauge(ch, g.desc, float64(g.value(u)), name)
	}
	ch <- prometheus.MustNewConstMetric(poolCopied, prometheus.CounterValue, float64(u.Copied), name)
	for backend, n := range byBackend {
		gauge(ch, volumes, float64(n), backend, name)
	}
}

// workerCollector collects the last known state of the nfs pools. It never waits for a worker.
type workerCollector struct{ workers *export.Pools }

var (
	serverUp  = prometheus.NewDesc("trivet_nfs_server_up", "0 if the NFS server of the pool does not answer, else 1; alert on 0.", []string{"pool", "server"}, nil)
	starts    = prometheus.NewDesc("trivet_nfs_worker_starts_total", "Started workers by reason: first; ended: the last one ended by itself; silent, answering: it was killed because the server did not answer, or answered again; alert when ended grows.", []string{"pool", "reason"}, nil)
	abandoned = prometheus.NewDesc("trivet_nfs_workers_abandoned", "Killed workers that wait in the kernel; alert above 0.", []string{"pool"}, nil)
	nfsCalls  = prometheus.NewDesc("trivet_nfs_calls", "Running calls of the pool's worker.", []string{"pool"}, nil)
)

// Describe implements prometheus.Collector.
func (c workerCollector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{serverUp, starts, abandoned, nfsCalls} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (c workerCollector) Collect(ch chan<- prometheus.Metric) {
	for _, s := range c.workers.States() {
		up := 0.0
		if s.Answers {
			up = 1
		}
		gauge(ch, serverUp, up, s.Pool, s.Server)
		gauge(ch, abandoned, float64(s.Abandoned), s.Pool)
		gauge(ch, nfsCalls, float64(s.Calls), s.Pool)
		for why, n := range s.Starts {
			ch <- prometheus.MustNewConstMetric(starts, prometheus.CounterValue, float64(n), s.Pool, why)
		}
		switch {
		case s.Report == nil: // no report yet
		case s.Answers && s.Report.Err == "":
			collectUsage(ch, s.Pool, s.Report.Usage, s.Report.Volumes)
		default:
			gauge(ch, poolUp, 0, s.Pool)
		}
	}
}

// intercept is a gRPC interceptor that counts and times calls.
func (m *metrics) intercept(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	running := m.inFlight.WithLabelValues(info.FullMethod)
	running.Inc()
	defer running.Dec()
	start := time.Now()
	resp, err := handler(ctx, req)
	m.seconds.WithLabelValues(m.driver, info.FullMethod, grpcstatus.Code(err).String()).Observe(time.Since(start).Seconds())
	return resp, err
}

// awaitPool is a gRPC interceptor. If a call fails because its pool is still being opened, awaitPool
// waits for the end of that attempt and then repeats the call, unless the deadline of the call comes
// first. Lists, which concern all pools, do not wait, so a pool that hangs does not delay them.
func awaitPool(ctx context.Context, req any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	resp, err := handler(ctx, req)
	if pool.AwaitAttempt(ctx, err) {
		return handler(ctx, req)
	}
	return resp, err
}

// handler serves /metrics, /healthz, /readyz, the status and, if Config.Pprof is set, profiles.
func (d *Driver) handler() http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(d.metrics.registry, promhttp.HandlerOpts{}))
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { answer(w, d.usable()) })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) { answer(w, d.ready()) })
	status.Handle(mux, d.report)
	if d.config.Pprof {
		mux.HandleFunc("/debug/pprof/", pprof.Index)
		mux.HandleFunc("/debug/pprof/profile", pprof.Profile)
		mux.HandleFunc("/debug/pprof/cmdline", pprof.Cmdline)
		mux.HandleFunc("/debug/pprof/symbol", pprof.Symbol)
		mux.HandleFunc("/debug/pprof/trace", pprof.Trace)
	}
	return mux
}

// answer writes the status 200 if err is nil, otherwise 503 with the error.
func answer(w http.ResponseWriter, err error) {
	if err != nil {
		http.Error(w, err.Error(), http.StatusServiceUnavailable)
		return
	}
	fmt.Fprintln(w, "ok")
}

// serveHTTP serves until ctx ends.
func (d *Driver) serveHTTP(ctx context.Context, l net.Listener) {
	if err := webserver.Serve(ctx, l, d.handler()); err != nil {
		klog.FromContext(ctx).Error(err, "Serving HTTP ended")
	}
}
