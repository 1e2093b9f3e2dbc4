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

// plainCopyResult contains the times of copies on a filesystem that cannot share blocks.
type plainCopyResult struct {
	bytes int64 // that the image occupies on the disk
	// volumes are those restored from the snapshots. cp are copies made by cp(1).
	snapshots, volumes, cp sample
}

// measurePlainCopies copies an image in turns with the driver, which takes a snapshot and restores
// it, and with cp(1).
func measurePlainCopies(ctx context.Context, g *testbed, o options) *plainCopyResult {
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

// byDriver takes the n-th snapshot, restores it to a volume, and deletes both.
func (r *plainCopyResult) byDriver(ctx context.Context, c *copier, source *vol, n int) {
	snap := &vol{name: fmt.Sprintf("snapshot-%d", n), source: source.id}
	r.snapshots.Time(func() error { return createSnapshot(ctx, c.clients[0], snap) })
	restored := &vol{name: fmt.Sprintf("copy-%d", n), class: source.class, content: contentOfSnapshot(snap.id)}
	r.volumes.Time(func() error { return createVolume(ctx, c.clients[0], restored) })
	measure.Must(errors.Join(deleteSnapshot(ctx, c.clients[0], snap), deleteVolume(ctx, c.clients[0], restored)))
	c.quiet(ctx)
}

// byCP copies an image with cp(1) and makes the copy durable, as the driver does.
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
	return fmt.Sprintf("### Copies that share no blocks, on ext4\n\nA 10 GiB image with %s of data, copied %d times: a snapshot %.0f MiB/s, a volume restored from it %.0f MiB/s, `cp --sparse=always` and sync %.0f MiB/s. Ratios to cp: %s and %s (goal: at least 0.8).\n",
		mebibytes(r.bytes), len(r.cp.Durations), rate(&r.snapshots), rate(&r.volumes), rate(&r.cp), times(r.cp.slower(&r.snapshots)), times(r.cp.slower(&r.volumes)))
}
