package main

import (
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/trivet-csi/trivet/test/markdown"
	"github.com/trivet-csi/trivet/test/measure"
)

// idleShape is the shape of the pods whose volumes stay mounted: five volumes each.
var idleShape = podShape{csi: 3, plain: true}

// idleResult contains the CPU time of a manager whose volumes are all mounted.
type idleResult struct {
	changes []change
	// idle is the CPU time that the manager used in period, without any change.
	idle, period time.Duration
	// checks is how often the manager compared all volumes with the disk and the mount table.
	checks   int
	resident int64 // VmRSS in bytes
}

// A change of one ConfigMap makes the manager check all volumes. change contains the CPU time of that.
type change struct {
	volumes int
	cpu     measure.Durations
}

// marker is the name of the pod whose ConfigMap changes, and of the ConfigMap.
const marker = "marker"

// measureIdleManager measures changes with a growing number of mounted volumes, and then the idle manager.
func measureIdleManager(ctx context.Context, g *testbed, o options, m *manager) *idleResult {
	r := &idleResult{period: o.idle}
	all := map[string]string{marker: podManifest(marker, "  - {name: config, configMap: {name: marker}}\n")}
	m.put(all)
	for _, n := range []int{o.pods / 4, o.pods / 2, o.pods} {
		pods, manifests := idleShape.podsOf("rest", n)
		maps.Copy(all, manifests)
		m.put(manifests)
		m.awaitPods(ctx, pods)
		r.change(ctx, m, n*idleShape.volumes(), 5*o.rounds)
	}
	r.measureIdle(ctx, g, m, o.pods)
	all["config"] = "" // the name of the manifest that reconfigure created
	m.remove(all)
	m.awaitGone(ctx)
	return r
}

// change measures several changes of the marker's ConfigMap while the given number of other volumes are mounted.
func (r *idleResult) change(ctx context.Context, m *manager, volumes, turns int) {
	c := change{volumes: volumes}
	for i := range turns {
		c.cpu.Add(m.spent(ctx, func() { m.reconfigure(ctx, fmt.Sprintf("%d-%d", volumes, i)) }))
	}
	r.changes = append(r.changes, c)
}

// spent returns the CPU time that the process uses because of a function. It waits until the process
// is idle before the function and after it.
func (s *server) spent(ctx context.Context, do func()) time.Duration {
	s.awaitRest(ctx)
	before := s.cpuTime()
	do()
	s.awaitRest(ctx)
	return s.cpuTime() - before
}

// reconfigure changes the marker's ConfigMap and waits until its volume has the new content.
func (m *manager) reconfigure(ctx context.Context, content string) {
	m.put(map[string]string{"config": configMap(marker, content)})
	file := filepath.Join(m.root, "pods", marker, "volumes/kubernetes.io~configmap/config/content")
	measure.Must(m.Await(ctx, content+" in "+file, poll, managerTimeout, func() bool {
		b, err := os.ReadFile(file)
		return err == nil && string(b) == content
	}))
}

// measureIdle measures the manager while no manifest changes.
func (r *idleResult) measureIdle(ctx context.Context, g *testbed, m *manager, pods int) {
	g.Settle()
	before := m.configMapChecks(ctx)
	r.idle = m.spent(ctx, func() { measure.Must(sleep(ctx, r.period)) })
	r.checks = (m.configMapChecks(ctx) - before) / (pods + 1) // a check of all volumes counts one configMap for each pod and one for the marker
	r.resident = m.Memory("VmRSS")
}

// String shows how the CPU time of a change grows with the number of volumes.
func (r *idleResult) String() string {
	t := markdown.Table{{"mounted volumes", "CPU of a change of one ConfigMap, p50", "max", "per volume", "ratio to the first row"}}
	fewest := r.changes[0].perVolume()
	for _, c := range r.changes {
		t.Row(strconv.Itoa(c.volumes), millis(c.cpu.P50()), millis(c.cpu.At(100)), micros(c.perVolume())+" µs", times(float64(c.perVolume())/float64(fewest)))
	}
	return fmt.Sprintf("### A volume manager with nothing to mount\n\nEach pod has %s.\n\n%s\nIn %v without changes, with %d volumes, the manager used %s of CPU, %.2f %% of a core, and compared all volumes with the disk and the mount table %d times. RSS %s.\n",
		idleShape, t.Text(true), r.period, r.changes[len(r.changes)-1].volumes, millis(r.idle), 100*r.idle.Seconds()/r.period.Seconds(), r.checks, mebibytes(r.resident))
}

// perVolume returns the median of the CPU time, divided by the number of volumes.
func (c *change) perVolume() time.Duration { return c.cpu.P50() / time.Duration(c.volumes) }
