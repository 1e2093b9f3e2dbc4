package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/trivet-csi/trivet/test/markdown"
)

// restShape is the shape of pods that stay: five volumes each.
var restShape = podShape{csi: 3, plain: true}

// restResult has the CPU time of an idle manager.
type restResult struct {
	changes []change
	idle    time.Duration // CPU
	over    time.Duration
	// looks is how often it has compared all volumes with disk and mount table.
	looks    int
	resident int64
}

// change is the time of a check of all volumes for a change that concerns none of them.
type change struct {
	volumes int
	cpu     sample
}

// marker is the pod whose ConfigMap changes.
const marker = "marker"

func measureRest(ctx context.Context, g *ground, o options, m *manager) (*restResult, error) {
	r := &restResult{over: o.idle}
	all := map[string]string{marker: podManifest(marker, "  - {name: config, configMap: {name: marker}}\n")}
	if _, err := m.put(all); err != nil {
		return nil, err
	}
	for _, n := range []int{o.pods / 4, o.pods / 2, o.pods} {
		pods, manifests := restShape.podsOf("rest", n)
		for name := range manifests {
			all[name] = manifests[name]
		}
		if _, err := m.put(manifests); err != nil {
			return nil, err
		}
		if err := m.awaitPods(ctx, pods); err != nil {
			return nil, err
		}
		if err := r.change(ctx, m, n*restShape.volumes(), 5*o.rounds); err != nil {
			return nil, err
		}
	}
	if err := r.rest(ctx, g, m, o.pods); err != nil {
		return nil, err
	}
	all["config"] = ""
	if _, err := m.remove(all); err != nil {
		return nil, err
	}
	return r, m.awaitGone(ctx)
}

// change changes a ConfigMap several times.
func (r *restResult) change(ctx context.Context, m *manager, volumes, turns int) error {
	c := change{volumes: volumes}
	for i := range turns {
		cpu, err := m.spent(ctx, func() error { return m.reconfigure(ctx, fmt.Sprintf("%d-%d", volumes, i)) })
		if err != nil {
			return err
		}
		c.cpu.took = append(c.cpu.took, cpu)
	}
	r.changes = append(r.changes, c)
	return nil
}

// spent is the CPU time of the process for a function, from idle to idle.
func (s *server) spent(ctx context.Context, do func() error) (time.Duration, error) {
	if err := s.awaitRest(ctx); err != nil {
		return 0, err
	}
	before, err := cpuTime(s.cmd.Process.Pid)
	if err != nil {
		return 0, err
	}
	if err := do(); err != nil {
		return 0, err
	}
	if err := s.awaitRest(ctx); err != nil {
		return 0, err
	}
	after, err := cpuTime(s.cmd.Process.Pid)
	return after - before, err
}

// reconfigure waits until the marker's volume has new content.
func (m *manager) reconfigure(ctx context.Context, content string) error {
	if _, err := m.put(map[string]string{"config": configMap(marker, content)}); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, managerPatience)
	defer cancel()
	file := filepath.Join(m.root, "pods", marker, "volumes/kubernetes.io~configmap/config/content")
	for {
		b, err := os.ReadFile(file)
		if err == nil && string(b) == content {
			return nil
		}
		if err := m.pause(ctx); err != nil {
			return fmt.Errorf("%s has %q: %w", file, b, err)
		}
	}
}

// rest gives the manager no work.
func (r *restResult) rest(ctx context.Context, g *ground, m *manager, pods int) error {
	if err := g.settle(); err != nil {
		return err
	}
	looked, err := m.remounts(ctx)
	if err != nil {
		return err
	}
	if r.idle, err = m.spent(ctx, func() error { return sleep(ctx, r.over) }); err != nil {
		return err
	}
	again, err := m.remounts(ctx)
	if err != nil {
		return err
	}
	r.looks = (again - looked) / (pods + 1)
	r.resident, err = m.memory("VmRSS")
	return err
}

func sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}

// String shows whether the time of a change grows with the number of volumes.
func (r *restResult) String() string {
	t := markdown.Table{{"mounted volumes", "CPU of a change elsewhere, p50", "most", "per volume", "per volume, to that of the fewest"}}
	fewest := r.changes[0].perVolume()
	for _, c := range r.changes {
		t.Row(strconv.Itoa(c.volumes), millis(c.cpu.p50()), millis(c.cpu.at(100)), micros(c.perVolume())+" µs", times(float64(c.perVolume())/float64(fewest)))
	}
	return fmt.Sprintf("### A volume manager with nothing to mount\n\nPods have %s.\n\n%s\nLeft alone for %v with %d volumes it took %s of CPU, %.2f %% of a core, and compared everything with disk and mount table %d times. RSS %s.\n",
		restShape, t.Text(true), r.over, r.changes[len(r.changes)-1].volumes, millis(r.idle), 100*r.idle.Seconds()/r.over.Seconds(), r.looks, mebibytes(r.resident))
}

func (c *change) perVolume() time.Duration { return c.cpu.p50() / time.Duration(c.volumes) }
