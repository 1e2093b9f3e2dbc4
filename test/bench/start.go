package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/trivet-csi/trivet/backend/loop"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/test/markdown"
	"github.com/trivet-csi/trivet/volume"
)

// startResult has the times until a driver with a full pool is ready, and of its lists.
type startResult struct {
	volumes int
	// warm: the driver was restarted. cold: the pool's filesystem was mounted again, as after
	// a restart of the machine.
	warm, cold starts
	pages      sample
	resident   int64
}

// starts are times since exec.
type starts struct{ answers, ready sample }

const pageSize = 100

// measureStart fills a pool with records and starts drivers on it.
func measureStart(ctx context.Context, g *ground, o options) (*startResult, error) {
	r := &startResult{volumes: 10_000}
	if o.quick {
		r.volumes = 1000
	}
	if err := r.fill(ctx, g, o.binary); err != nil {
		return nil, err
	}
	for range 3 {
		if err := r.warm.once(ctx, g, o.binary, r.list); err != nil {
			return nil, err
		}
		if err := g.forgetCaches(ctx); err != nil {
			return nil, err
		}
		if err := r.cold.once(ctx, g, o.binary, r.weigh); err != nil {
			return nil, err
		}
	}
	return r, nil
}

const fullPool = "full"

// fill lets a driver create the pool, and writes the volumes itself, which is faster than ten
// thousand calls.
func (r *startResult) fill(ctx context.Context, g *ground, binary string) error {
	s, err := g.launchTrivet(binary, fullPool)
	if err != nil {
		return err
	}
	if _, err := s.connect(ctx, 1); err != nil {
		return err
	}
	if err := s.stop(); err != nil {
		return err
	}
	b, err := os.ReadFile(filepath.Join(g.poolPath(fullPool), "pool.json"))
	if err != nil {
		return err
	}
	var marker struct{ UUID string }
	if err := json.Unmarshal(b, &marker); err != nil {
		return err
	}
	for i := range r.volumes {
		if err := writeVolume(g.poolPath(fullPool), marker.UUID, fmt.Sprintf("pvc-%08d", i)); err != nil {
			return err
		}
	}
	return g.settle()
}

func writeVolume(poolPath, uuid, name string) error {
	section := loop.Kind.Section()
	if err := json.Unmarshal([]byte(`{"allocation":"thin"}`), section); err != nil {
		return err
	}
	v := volume.Volume{
		Version: volume.RecordVersion, CoName: name, Capacity: manySize, FSType: "ext4",
		ID:         volume.ID{Backend: "loop", Pool: poolName, PoolUUID: uuid[:8], Name: name},
		SectorSize: 4096, Section: section, Created: time.Now().UTC().Truncate(time.Second),
	}
	record, err := v.MarshalRecord()
	if err != nil {
		return err
	}
	dir := filepath.Join(poolPath, "volumes", name)
	if err := os.Mkdir(dir, 0o700); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(dir, "volume.json"), record, 0o600); err != nil {
		return err
	}
	image, err := os.Create(filepath.Join(dir, pool.ImageFile))
	if err != nil {
		return err
	}
	return errors.Join(image.Truncate(manySize), image.Close())
}

// once starts a driver, measures the time until it is ready, calls then, and stops the driver.
func (s *starts) once(ctx context.Context, g *ground, binary string, then func(context.Context, *server, *client) error) error {
	begin := time.Now()
	driver, err := g.launchTrivet(binary, fullPool)
	if err != nil {
		return err
	}
	if err := driver.awaitSocket(ctx); err != nil {
		return err
	}
	s.answers.took = append(s.answers.took, time.Since(begin))
	clients, err := driver.connect(ctx, 1)
	if err != nil {
		return err
	}
	s.ready.took = append(s.ready.took, time.Since(begin))
	return errors.Join(then(ctx, driver, clients[0]), driver.stop())
}

// list goes through all volumes, page by page.
func (r *startResult) list(ctx context.Context, _ *server, c *client) error {
	listed, token := 0, ""
	for {
		start := time.Now()
		resp, err := c.ListVolumes(ctx, &csi.ListVolumesRequest{MaxEntries: pageSize, StartingToken: token})
		if err != nil {
			return err
		}
		r.pages.took = append(r.pages.took, time.Since(start))
		listed += len(resp.GetEntries())
		if token = resp.GetNextToken(); token == "" {
			break
		}
	}
	if listed != r.volumes {
		return fmt.Errorf("ListVolumes gave %d volumes of %d", listed, r.volumes)
	}
	return nil
}

func (r *startResult) weigh(_ context.Context, s *server, _ *client) (err error) {
	r.resident, err = s.memory("VmRSS")
	return err
}

func (r *startResult) String() string {
	t := markdown.Table{{fmt.Sprintf("since exec (median of %d)", len(r.warm.ready.took)), "socket answers", "ready"}}
	t.Row("driver restarted", millis(r.warm.answers.p50()), millis(r.warm.ready.p50()))
	t.Row("filesystem mounted anew", millis(r.cold.answers.p50()), millis(r.cold.ready.p50()))
	return fmt.Sprintf("### Start with %d volumes in the pool\n\n%s\nListVolumes, a page of %d of %d: p50 %s, p99 %s. RSS when ready: %s.\n",
		r.volumes, t.Text(true), pageSize, r.volumes, millis(r.pages.p50()), millis(r.pages.at(99)), mebibytes(r.resident))
}
