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

	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/router"
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
	poolUp       = poolDesc("up", "1 if the pool is open and is what it was, else 0.")
	poolSize     = poolDesc("size_bytes", "Size of the pool.")
	poolUsed     = poolDesc("used_bytes", "Allocated on the pool's filesystem, by anybody.")
	poolFree     = poolDesc("free_bytes", "Free on the pool's filesystem.")
	poolPromised = poolDesc("promised_bytes", "Sum of the sizes of the pool's volumes.")
	poolRoom     = poolDesc("room_bytes", "What can still be promised.")
	poolReserve  = poolDesc("reserve_bytes", "What is kept from being promised.")
	poolAttached = poolDesc("published_volumes", "Volumes that are controller-published.")
	volumes      = prometheus.NewDesc("trivet_volumes", "Volumes by backend and pool, those being removed included.", []string{"backend", "pool"}, nil)
)

// nodeCollector asks the router about the nodes when it is asked.
type nodeCollector struct{ router *router.Server }

// Their label is not "node": Prometheus often has one of that name for where the
// driver that was asked runs.
var (
	nodeUp        = prometheus.NewDesc("trivet_node_up", "1 if the controller's driver has a connection to the node's, else 0.", []string{"csi_node"}, nil)
	nodeConflicts = prometheus.NewDesc("trivet_node_conflicting_pools", "Pools of the node that another node has too: a disk and its copy. Their calls are refused.", []string{"csi_node"}, nil)
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
		gauge := func(d *prometheus.Desc, v float64, labels ...string) {
			ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
		}
		if s.Pool == nil || s.Pool.Check() != nil {
			gauge(poolUp, 0, s.Name)
			continue
		}
		u, err := s.Pool.Usage()
		if err != nil {
			gauge(poolUp, 0, s.Name)
			continue
		}
		gauge(poolUp, 1, s.Name)
		gauge(poolSize, float64(u.Total), s.Name)
		gauge(poolUsed, float64(u.Used), s.Name)
		gauge(poolFree, float64(u.Free), s.Name)
		gauge(poolPromised, float64(u.Promised), s.Name)
		gauge(poolRoom, float64(u.Room), s.Name)
		gauge(poolReserve, float64(u.Reserve), s.Name)
		gauge(poolAttached, float64(u.Attached), s.Name)
		for backend, n := range s.Pool.VolumesByBackend() {
			gauge(volumes, float64(n), backend, s.Name)
		}
	}
}
