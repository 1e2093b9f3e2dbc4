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

// restShape is the shape of pods that stay: five volumes each.
var restShape = podShape{csi: 3, plain: true}

// restResult has the CPU time of an idle manager.
type restResult struct {
	changes []change
	idle    time.Duration // CPU
	over    time.Duration
	// checks is how often it has compared all volumes with disk and mount table.
	checks   int
	resident int64
}

// change is the time of a check of all volumes for a change that concerns none of them.
type change struct {
	volumes int
	cpu     measure.Durations
}

// marker is the pod whose ConfigMap changes.
const marker = "marker"

func measureRest(ctx context.Context, g *ground, o options, m *manager) *restResult {
	r := &restResult{over: o.idle}
	all := map[string]string{marker: podManifest(marker, "  - {name: config, configMap: {name: marker}}\n")}
	m.put(all)
	for _, n := range []int{o.pods / 4, o.pods / 2, o.pods} {
		pods, manifests := restShape.podsOf("rest", n)
		maps.Copy(all, manifests)
		m.put(manifests)
		m.awaitPods(ctx, pods)
		r.change(ctx, m, n*restShape.volumes(), 5*o.rounds)
	}
	r.rest(ctx, g, m, o.pods)
	all["config"] = ""
	m.remove(all)
	m.awaitGone(ctx)
	return r
}

// change changes a ConfigMap several times.
func (r *restResult) change(ctx context.Context, m *manager, volumes, turns int) {
	c := change{volumes: volumes}
	for i := range turns {
		c.cpu.Add(m.spent(ctx, func() { m.reconfigure(ctx, fmt.Sprintf("%d-%d", volumes, i)) }))
	}
	r.changes = append(r.changes, c)
}

// spent is the CPU time of the process for a function, from idle to idle.
func (s *server) spent(ctx context.Context, do func()) time.Duration {
	s.awaitRest(ctx)
	before := s.cpuTime()
	do()
	s.awaitRest(ctx)
	return s.cpuTime() - before
}

// reconfigure waits until the marker's volume has new content.
func (m *manager) reconfigure(ctx context.Context, content string) {
	m.put(map[string]string{"config": configMap(marker, content)})
	file := filepath.Join(m.root, "pods", marker, "volumes/kubernetes.io~configmap/config/content")
	measure.Must(m.Await(ctx, content+" in "+file, poll, managerPatience, func() bool {
		b, err := os.ReadFile(file)
		return err == nil && string(b) == content
	}))
}

// rest gives the manager no work.
func (r *restResult) rest(ctx context.Context, g *ground, m *manager, pods int) {
	g.Settle()
	before := m.remounts(ctx)
	r.idle = m.spent(ctx, func() { measure.Must(sleep(ctx, r.over)) })
	r.checks = (m.remounts(ctx) - before) / (pods + 1)
	r.resident = m.Memory("VmRSS")
}

// String shows whether the time of a change grows with the number of volumes.
func (r *restResult) String() string {
	t := markdown.Table{{"mounted volumes", "CPU of a change elsewhere, p50", "most", "per volume", "per volume, to that of the fewest"}}
	fewest := r.changes[0].perVolume()
	for _, c := range r.changes {
		t.Row(strconv.Itoa(c.volumes), millis(c.cpu.P50()), millis(c.cpu.At(100)), micros(c.perVolume())+" µs", times(float64(c.perVolume())/float64(fewest)))
	}
	return fmt.Sprintf("### A volume manager with nothing to mount\n\nPods have %s.\n\n%s\nWithout work for %v with %d volumes it took %s of CPU, %.2f %% of a core, and compared everything with disk and mount table %d times. RSS %s.\n",
		restShape, t.Text(true), r.over, r.changes[len(r.changes)-1].volumes, millis(r.idle), 100*r.idle.Seconds()/r.over.Seconds(), r.checks, mebibytes(r.resident))
}

func (c *change) perVolume() time.Duration { return c.cpu.P50() / time.Duration(c.volumes) }
