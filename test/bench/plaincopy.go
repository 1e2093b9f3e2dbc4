package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"
)

// plainCopyResult has the times of copies that share no blocks.
type plainCopyResult struct {
	bytes int64
	// snapshots and volumes made of them, and copies by cp(1).
	snapshots, volumes, cp sample
}

// measurePlainCopies copies an image with snapshots and volumes made of them, and with cp(1),
// in turns.
func measurePlainCopies(ctx context.Context, g *ground, o options) (*plainCopyResult, error) {
	driver, err := startTrivet(ctx, g, o.binary, trivet, rawOf(0))
	if err != nil {
		return nil, err
	}
	c := &copier{driver, func(name string) string { return filepath.Join(g.poolPath(trivet), "volumes", name, "image") }, map[string]*vol{}}
	image := images(o)[0]
	if err := c.makeSource(ctx, image); err != nil {
		return nil, err
	}
	source := c.sources[image.name]
	r := &plainCopyResult{}
	if r.bytes, err = allocated(c.image(source.name)); err != nil {
		return nil, err
	}
	ways := []func(int) error{
		func(n int) error { return r.byDriver(ctx, c, source, n) },
		func(int) error { return r.byCP(ctx, c.image(source.name), filepath.Join(g.disk, "copy")) },
	}
	for n := range 3 * o.rounds {
		slices.Reverse(ways)
		for _, way := range ways {
			if err := errors.Join(g.settle(), way(n)); err != nil {
				return nil, err
			}
		}
	}
	return r, c.takeDown(ctx)
}

func (r *plainCopyResult) byDriver(ctx context.Context, c *copier, source *vol, n int) error {
	snap := &vol{name: fmt.Sprintf("snapshot-%d", n), source: source.id}
	if err := timed(&r.snapshots, func() error { return createSnapshot(ctx, c.clients[0], snap) }); err != nil {
		return err
	}
	restored := &vol{name: fmt.Sprintf("copy-%d", n), class: source.class, content: ofSnapshot(snap.id)}
	if err := timed(&r.volumes, func() error { return createVolume(ctx, c.clients[0], restored) }); err != nil {
		return err
	}
	return errors.Join(deleteSnapshot(ctx, c.clients[0], snap), deleteVolume(ctx, c.clients[0], restored), c.quiet(ctx))
}

// byCP makes the copy durable, as the driver does.
func (r *plainCopyResult) byCP(ctx context.Context, from, to string) error {
	err := timed(&r.cp, func() error {
		if err := command(ctx, "cp", "--sparse=always", from, to); err != nil {
			return err
		}
		return command(ctx, "sync", to)
	})
	return errors.Join(err, os.Remove(to))
}

// allocated is the allocated size of a file in bytes.
func allocated(path string) (int64, error) {
	var st unix.Stat_t
	err := unix.Stat(path, &st)
	return st.Blocks * 512, err
}

func timed(into *sample, do func() error) error {
	start := time.Now()
	err := do()
	into.took = append(into.took, time.Since(start))
	return err
}

func (r *plainCopyResult) String() string {
	rate := func(s *sample) float64 { return float64(r.bytes) / mib / s.p50().Seconds() }
	return fmt.Sprintf("### Copies where no blocks are shared, on ext4\n\nA 10 GiB image with %s of data, %d times: a snapshot %.0f MiB/s, a volume of it %.0f MiB/s, `cp --sparse=always` and sync %.0f MiB/s: ratios %s and %s (wanted: at least 0.8).\n",
		mebibytes(r.bytes), len(r.cp.took), rate(&r.snapshots), rate(&r.volumes), rate(&r.cp), times(r.cp.slower(&r.snapshots)), times(r.cp.slower(&r.volumes)))
}
