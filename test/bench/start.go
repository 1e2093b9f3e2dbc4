package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/trivet-csi/trivet/backend/loop"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/test/markdown"
	"github.com/trivet-csi/trivet/test/measure"
	"github.com/trivet-csi/trivet/volume"
)

// startResult contains the start times of a driver whose pool has many volumes, and the times of
// its ListVolumes pages.
type startResult struct {
	volumes int
	// Before a warm start, only the driver was stopped. Before a cold start, the pool's filesystem
	// was mounted again, so that its caches are empty as after a restart of the machine.
	warm, cold starts
	pages      measure.Durations
	resident   int64 // VmRSS in bytes after a cold start
}

// starts contains the times from exec until the socket answers, and until the driver is ready.
type starts struct{ answers, ready measure.Durations }

// pageSize is the number of volumes in a page of ListVolumes.
const pageSize = 100

// measureStart fills a pool with records and starts drivers on it.
func measureStart(ctx context.Context, g *testbed, o options) *startResult {
	r := &startResult{volumes: 10_000}
	if o.quick {
		r.volumes = 1000
	}
	r.fill(ctx, g, o.binary)
	for range 3 {
		r.warm.once(ctx, g, o.binary, func(_ *server, c *client) {
			r.pages.Add(measure.Get(measure.ListVolumes(ctx, c, pageSize, r.volumes))...)
		})
		g.Remount(ctx)
		r.cold.once(ctx, g, o.binary, func(s *server, _ *client) { r.resident = s.Memory("VmRSS") })
	}
	return r
}

// manyPool is the name of the drivers that are started. They have the same pool, because its path contains
// the name.
const manyPool = "many"

// fill lets a driver create the pool, stops it, and then writes the volumes to the pool without a
// driver, because thousands of CreateVolume calls take longer.
func (r *startResult) fill(ctx context.Context, g *testbed, binary string) {
	s := g.launchTrivet(binary, manyPool)
	s.connect(ctx, 1)
	s.stop()
	var marker struct{ UUID string }
	measure.Must(json.Unmarshal(measure.Get(os.ReadFile(filepath.Join(g.poolPath(manyPool), "pool.json"))), &marker))
	for i := range r.volumes {
		measure.Must(writeVolume(g.poolPath(manyPool), marker.UUID, fmt.Sprintf("pvc-%08d", i)))
	}
	g.Settle()
}

// writeVolume writes the record and the image of a blank volume to a pool.
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
	image := filepath.Join(dir, pool.ImageFile)
	return errors.Join(os.WriteFile(filepath.Join(dir, "volume.json"), record, 0o600), os.WriteFile(image, nil, 0o600), os.Truncate(image, manySize))
}

// once starts a driver, measures the time until it is ready, calls use, and stops the driver.
func (s *starts) once(ctx context.Context, g *testbed, binary string, use func(*server, *client)) {
	begin := time.Now()
	driver := g.launchTrivet(binary, manyPool)
	driver.awaitSocket(ctx)
	s.answers.Add(time.Since(begin))
	clients := driver.connect(ctx, 1)
	s.ready.Add(time.Since(begin))
	use(driver, clients[0])
	driver.stop()
}

func (r *startResult) String() string {
	t := markdown.Table{{fmt.Sprintf("since exec (median of %d)", len(r.warm.ready)), "socket answers", "ready"}}
	t.Row("driver restarted", millis(r.warm.answers.P50()), millis(r.warm.ready.P50()))
	t.Row("filesystem mounted again", millis(r.cold.answers.P50()), millis(r.cold.ready.P50()))
	return fmt.Sprintf("### Start with %d volumes in the pool\n\n%s\nListVolumes, a page of %d of %d: p50 %s, p99 %s. RSS when ready: %s.\n",
		r.volumes, t.Text(true), pageSize, r.volumes, millis(r.pages.P50()), millis(r.pages.At(99)), mebibytes(r.resident))
}
