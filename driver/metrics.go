package driver

import (
	"context"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"google.golang.org/grpc"
	"google.golang.org/grpc/status"

	"github.com/trivet-csi/trivet/cluster/router"
	"github.com/trivet-csi/trivet/export"
	"github.com/trivet-csi/trivet/pool"
)

// metrics are what /metrics shows.
type metrics struct {
	registry *prometheus.Registry
	driver   string
	seconds  *prometheus.HistogramVec
	inFlight *prometheus.GaugeVec
}

func newMetrics(driver, version string, services []string, pools *pool.Set) *metrics {
	m := &metrics{
		registry: prometheus.NewRegistry(),
		driver:   driver,
		// The name and labels are those of csi-lib-utils, so that dashboards
		// made for other drivers work; its buckets begin at 100 ms.
		seconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name:    "csi_plugin_operations_seconds",
			Help:    "Duration of CSI calls by gRPC status code.",
			Buckets: []float64{.0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 15, 60, 300},
		}, []string{"driver_name", "method_name", "grpc_status_code"}),
		inFlight: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "trivet_calls_in_flight", Help: "CSI calls that are being worked on.",
		}, []string{"method_name"}),
	}
	build := prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "trivet_build_info", Help: "1, labelled with what runs.",
		ConstLabels: prometheus.Labels{"version": version, "goversion": runtime.Version(), "services": strings.Join(slices.Sorted(slices.Values(services)), ",")},
	})
	build.Set(1)
	m.registry.MustRegister(m.seconds, m.inFlight, build, poolCollector{pools},
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return m
}

func (m *metrics) intercept(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	running := m.inFlight.WithLabelValues(info.FullMethod)
	running.Inc()
	defer running.Dec()
	start := time.Now()
	resp, err := handler(ctx, req)
	m.seconds.WithLabelValues(m.driver, info.FullMethod, status.Code(err).String()).Observe(time.Since(start).Seconds())
	return resp, err
}

// poolCollector reads the pools when it is asked.
type poolCollector struct{ pools *pool.Set }

var (
	poolUp        = poolDesc("up", "1 if the pool is open and is what it was, else 0.")
	poolSize      = poolDesc("size_bytes", "Size of the pool.")
	poolUsed      = poolDesc("used_bytes", "Allocated on the pool's filesystem, by anybody.")
	poolFree      = poolDesc("free_bytes", "Free on the pool's filesystem.")
	poolPromised  = poolDesc("promised_bytes", "Sum of the sizes of the pool's volumes.")
	poolRoom      = poolDesc("room_bytes", "What can still be promised.")
	poolOthers    = poolDesc("other_pools_bytes", "What other pools have of the pool's filesystem: what they promised, divided by their overcommit, or what their volumes use, if that is more.")
	poolTrash     = poolDesc("trash_entries", "Deleted volumes and snapshots that are not removed yet.")
	poolStuck     = poolDesc("trash_stuck_entries", "Those of them that could not be removed; they are tried again.")
	poolReserve   = poolDesc("reserve_bytes", "What is kept from being promised.")
	poolSnapshots = poolDesc("snapshots", "Snapshots in the pool, those of groups one by one.")
	poolCopies    = poolDesc("copies", "Copies under way: snapshots and volumes that are being made of others.")
	poolCopied    = poolDesc("copied_bytes_total", "Bytes copied for snapshots and volumes by this process; what shares blocks counts, too.")
	poolAttached  = poolDesc("published_volumes", "Volumes that are controller-published.")
	volumes       = prometheus.NewDesc("trivet_volumes", "Volumes by backend and pool, those being removed included.", []string{"backend", "pool"}, nil)
)

var disks = prometheus.NewDesc("trivet_disks", "Disks that a pool of disks matches, by what they are: free, claimed, or why they are not to be had.", []string{"pool", "state"}, nil)

var unwiped = poolDesc("unwiped_bytes", "Of a pool of disks: bytes of deleted volumes' disks that are still to be wiped.")

// nodeCollector asks the router about the nodes when it is asked.
type nodeCollector struct{ router *router.Server }

// Their label is not "node": Prometheus often has one of that name for where the
// driver that was asked runs.
var (
	nodeUp        = prometheus.NewDesc("trivet_node_up", "1 if the controller's driver has a connection to the node's, else 0.", []string{"csi_node"}, nil)
	nodeConflicts = prometheus.NewDesc("trivet_node_conflicting_pools", "Pools of the node that another node announces too, or is recorded for. Only the recorded node gets calls.", []string{"csi_node"}, nil)
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
		ch <- prometheus.MustNewConstMetric(nodeUp, prometheus.GaugeValue, up, s.Name)
		ch <- prometheus.MustNewConstMetric(nodeConflicts, prometheus.GaugeValue, float64(s.Shared), s.Name)
	}
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
		collectDevices(ch, s.Pool)
	}
}

// collectDevices is of a pool on storage of its own; others have none.
func collectDevices(ch chan<- prometheus.Metric, p *pool.Pool) {
	storage := p.Storage()
	if storage == nil {
		return
	}
	n, left := map[string]int{}, int64(0)
	for _, d := range storage.Devices() {
		n[d.State]++
		left += d.Unwiped
	}
	gauge(ch, unwiped, float64(left), p.Name())
	for state, count := range n {
		gauge(ch, disks, float64(count), p.Name(), state)
	}
}

func gauge(ch chan<- prometheus.Metric, d *prometheus.Desc, v float64, labels ...string) {
	ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
}

// collectUsage is of a pool that is open.
func collectUsage(ch chan<- prometheus.Metric, name string, u pool.Usage, byBackend map[string]int) {
	gauge(ch, poolUp, 1, name)
	gauge(ch, poolSize, float64(u.Total), name)
	gauge(ch, poolUsed, float64(u.Used), name)
	gauge(ch, poolFree, float64(u.Free), name)
	gauge(ch, poolPromised, float64(u.Promised), name)
	gauge(ch, poolRoom, float64(u.Room), name)
	gauge(ch, poolReserve, float64(u.Reserve), name)
	gauge(ch, poolOthers, float64(u.OtherPools), name)
	gauge(ch, poolTrash, float64(u.Trash), name)
	gauge(ch, poolStuck, float64(u.TrashStuck), name)
	gauge(ch, poolAttached, float64(u.Attached), name)
	gauge(ch, poolSnapshots, float64(u.Snapshots), name)
	gauge(ch, poolCopies, float64(u.Copies), name)
	ch <- prometheus.MustNewConstMetric(poolCopied, prometheus.CounterValue, float64(u.Copied), name)
	for backend, n := range byBackend {
		gauge(ch, volumes, float64(n), backend, name)
	}
}

// workerCollector reads what is known of nfs pools; it asks nobody.
type workerCollector struct{ workers *export.Pools }

var (
	serverUp  = prometheus.NewDesc("trivet_nfs_server_up", "1 while the server of the pool answers, for all that is known, else 0.", []string{"pool", "server"}, nil)
	starts    = prometheus.NewDesc("trivet_nfs_worker_starts_total", "Worker processes started for the pool, by what was before.", []string{"pool", "reason"}, nil)
	abandoned = prometheus.NewDesc("trivet_nfs_workers_abandoned", "Worker processes of the pool that were killed and have not ended.", []string{"pool"}, nil)
	nfsCalls  = prometheus.NewDesc("trivet_nfs_calls", "Calls that the pool's worker is working on.", []string{"pool"}, nil)
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
		case s.Report == nil: // nothing was heard of it yet
		case s.Answers && s.Report.Err == "":
			collectUsage(ch, s.Pool, s.Report.Usage, s.Report.Volumes)
		default:
			gauge(ch, poolUp, 0, s.Pool)
		}
	}
}
