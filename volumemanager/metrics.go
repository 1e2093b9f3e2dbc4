package volumemanager

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"github.com/trivet-csi/trivet/volumemanager/operation"
)

// metrics are the Prometheus metrics of a manager.
type metrics struct {
	registry   *prometheus.Registry
	operations *prometheus.CounterVec
	durations  *prometheus.HistogramVec
}

func newMetrics(m *Manager) *metrics {
	all := &metrics{
		registry: prometheus.NewRegistry(),
		operations: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "trivet_volume_manager_operations_total",
			Help: "Completed operations by operation, plugin and status (success, fail).",
		}, []string{"operation", "plugin", "status"}),
		durations: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name:    "trivet_volume_manager_operation_duration_seconds",
			Help:    "Duration of operations.",
			Buckets: []float64{.001, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 120},
		}, []string{"operation", "plugin"}),
	}
	all.registry.MustRegister(
		all.operations, all.durations,
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
		stateDiff("to_mount", func() int { n, _ := m.reconciler.StateDiff(); return n }),
		stateDiff("to_unmount", func() int { _, n := m.reconciler.StateDiff(); return n }),
	)
	return all
}

// stateDiff returns the gauge of one direction: to_mount or to_unmount.
func stateDiff(direction string, count func() int) prometheus.Collector {
	return prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name:        "trivet_volume_manager_state_diff",
		Help:        "Volumes that must still be mounted or unmounted, by direction (to_mount, to_unmount).",
		ConstLabels: prometheus.Labels{"direction": direction},
	}, func() float64 { return float64(count()) })
}

// observe counts a completed operation. err is nil if the operation succeeded.
func (m *metrics) observe(o operation.Operation, err error, duration time.Duration) {
	status := "success"
	if err != nil {
		status = "fail"
	}
	m.operations.WithLabelValues(o.Name, o.Plugin, status).Inc()
	m.durations.WithLabelValues(o.Name, o.Plugin).Observe(duration.Seconds())
}
