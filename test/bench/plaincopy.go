package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/test/measure"
)

// plainCopyResult has the times of copies that share no blocks.
type plainCopyResult struct {
	bytes int64
	// snapshots and volumes made of them, and copies by cp(1).
	snapshots, volumes, cp sample
}

// measurePlainCopies copies an image with snapshots and volumes made of them, and with cp(1),
// in turns.
func measurePlainCopies(ctx context.Context, g *ground, o options) *plainCopyResult {
	c := startCopier(ctx, g, o)
	image := images(o)[0]
	c.makeSource(ctx, image)
	source := c.sources[image.name]
	var st unix.Stat_t
	measure.Must(unix.Stat(c.image(source.name), &st))
	r := &plainCopyResult{bytes: st.Blocks * 512}
	ways := []func(int){
		func(n int) { r.byDriver(ctx, c, source, n) },
		func(int) { r.byCP(ctx, c.image(source.name), filepath.Join(g.Disk, "copy")) },
	}
	for n := range 3 * o.rounds {
		slices.Reverse(ways)
		for _, way := range ways {
			g.Settle()
			way(n)
		}
	}
	c.takeDown(ctx)
	return r
}

func (r *plainCopyResult) byDriver(ctx context.Context, c *copier, source *vol, n int) {
	snap := &vol{name: fmt.Sprintf("snapshot-%d", n), source: source.id}
	r.snapshots.Time(func() error { return createSnapshot(ctx, c.clients[0], snap) })
	restored := &vol{name: fmt.Sprintf("copy-%d", n), class: source.class, content: ofSnapshot(snap.id)}
	r.volumes.Time(func() error { return createVolume(ctx, c.clients[0], restored) })
	measure.Must(errors.Join(deleteSnapshot(ctx, c.clients[0], snap), deleteVolume(ctx, c.clients[0], restored)))
	c.quiet(ctx)
}

// byCP makes the copy durable, as the driver does.
func (r *plainCopyResult) byCP(ctx context.Context, from, to string) {
	r.cp.Time(func() error {
		if err := measure.Command(ctx, "cp", "--sparse=always", from, to); err != nil {
			return err
		}
		return measure.Command(ctx, "sync", to)
	})
	measure.Must(os.Remove(to))
}

func (r *plainCopyResult) String() string {
	rate := func(s *sample) float64 { return float64(r.bytes) / mib / s.P50().Seconds() }
	return fmt.Sprintf("### Copies where no blocks are shared, on ext4\n\nA 10 GiB image with %s of data, %d times: a snapshot %.0f MiB/s, a volume of it %.0f MiB/s, `cp --sparse=always` and sync %.0f MiB/s: ratios %s and %s (goal: at least 0.8).\n",
		mebibytes(r.bytes), len(r.cp.Durations), rate(&r.snapshots), rate(&r.volumes), rate(&r.cp), times(r.cp.slower(&r.snapshots)), times(r.cp.slower(&r.volumes)))
}
