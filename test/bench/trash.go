package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/trivet-csi/trivet/test/markdown"
)

const (
	trashName = "trash"
	// emptyVolumes is how many empty volumes are deleted by themselves, and how many after
	// each large one, in one round.
	emptyVolumes = 10
	largeVolumes = 3
	// folders and fileSize, in bytes, describe the files of large volumes.
	folders  = 100
	fileSize = 1 << 10
	// nextSize is the size in bytes of volumes that are created and filled after a large one.
	nextSize = 32 * mib
)

// trashResult has the times of deleting directories and of emptying the trash.
type trashResult struct {
	fsType               string
	files                int
	empty, large, behind deletes
	// next is how much data volumes of nextSize held while a large one was in the trash.
	next []int64
}

// deletes has the times until the answer, and from the answer until the trash no longer has
// the volume.
type deletes struct{ answered, removed sample }

// measureTrash deletes empty volumes and volumes with many files.
func measureTrash(ctx context.Context, g *ground, o options) (*trashResult, error) {
	r := &trashResult{fsType: g.fsType, files: 100_000}
	if o.quick {
		r.files /= 10
	}
	driver, err := startTrivet(ctx, g, o.binary, trashName, classOf(localTarget, "dir", gib))
	if err != nil {
		return nil, err
	}
	for n := range o.rounds {
		if err := r.round(ctx, g, driver, fmt.Sprintf("round%d", n)); err != nil {
			return nil, err
		}
	}
	return r, driver.stop()
}

func (r *trashResult) round(ctx context.Context, g *ground, driver *contender, prefix string) error {
	dir, err := g.kubelet(trashName)
	if err != nil {
		return err
	}
	vols, err := newVolumes(dir, prefix, emptyVolumes, driver.class)
	if err != nil {
		return err
	}
	if err := callAll(ctx, driver.clients, vols, create); err != nil {
		return err
	}
	for _, v := range vols {
		if err := r.empty.one(ctx, g, driver.clients[0], v, func(context.Context) error { return nil }); err != nil {
			return err
		}
	}
	for n := range largeVolumes {
		if err := r.roundOfLarge(ctx, g, driver, dir, fmt.Sprintf("%s-%d", prefix, n)); err != nil {
			return err
		}
	}
	return removeFolders(vols)
}

func (r *trashResult) roundOfLarge(ctx context.Context, g *ground, driver *contender, dir, prefix string) error {
	vols, err := newVolumes(dir, prefix, 1+emptyVolumes, driver.class)
	if err != nil {
		return err
	}
	one := driver.class
	one.size = nextSize
	next, err := newVolumes(dir, prefix+"-next", 1, one)
	if err != nil {
		return err
	}
	if err := callAll(ctx, driver.clients, vols, create); err != nil {
		return err
	}
	large, behind := vols[0], vols[1:]
	if err := r.fill(ctx, driver, large); err != nil {
		return err
	}
	err = r.large.one(ctx, g, driver.clients[0], large, func(ctx context.Context) error {
		if err := r.after(ctx, g, driver.clients[0], large, behind); err != nil || g.fsType != btrfs {
			return err
		}
		return r.fillNext(ctx, g, driver, large, next)
	})
	if err != nil {
		return err
	}
	if err := driver.quiet(ctx); err != nil {
		return err
	}
	return removeFolders(append(vols, next...))
}

// fillNext creates a volume and writes to it until it is full. Only volumes that were filled
// while the trash has a large one count.
func (r *trashResult) fillNext(ctx context.Context, g *ground, driver *contender, large *vol, next []*vol) error {
	if err := callAll(ctx, driver.clients, next, create, controllerPublish, stage, publish); err != nil {
		return err
	}
	took, err := fillFile(filepath.Join(next[0].target, "file"))
	if err != nil {
		return err
	}
	if g.inTrash(large) {
		r.next = append(r.next, took)
	}
	return callAll(ctx, driver.clients, next, unpublish, unstage, controllerUnpublish, remove)
}

// fillFile writes a file until its filesystem refuses a write, and returns how much is on the
// disk.
func fillFile(path string) (size int64, err error) {
	f, err := os.Create(path)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	block := make([]byte, 64<<10)
	for err == nil {
		var n int
		n, err = f.Write(block)
		size += int64(n)
	}
	if errors.Is(err, syscall.EDQUOT) || errors.Is(err, syscall.ENOSPC) {
		err = f.Sync()
	}
	return size, err
}

// fill writes the files of a large volume, as a pod does.
func (r *trashResult) fill(ctx context.Context, driver *contender, v *vol) error {
	one := []*vol{v}
	if err := callAll(ctx, driver.clients, one, controllerPublish, stage, publish); err != nil {
		return err
	}
	for i := range folders {
		dir := filepath.Join(v.target, strconv.Itoa(i))
		if err := os.Mkdir(dir, 0o755); err != nil {
			return err
		}
		for k := range r.files / folders {
			if err := os.WriteFile(filepath.Join(dir, strconv.Itoa(k)), make([]byte, fileSize), 0o600); err != nil {
				return err
			}
		}
	}
	return callAll(ctx, driver.clients, one, unpublish, unstage, controllerUnpublish)
}

// one deletes a volume, and calls a function while the volume is in the trash.
func (d *deletes) one(ctx context.Context, g *ground, c *client, v *vol, meanwhile func(context.Context) error) error {
	if err := g.settle(); err != nil {
		return err
	}
	if err := d.delete(ctx, c, v); err != nil {
		return err
	}
	answered := time.Now()
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error {
		err := g.awaitRemoved(ctx, v)
		d.removed.took = append(d.removed.took, time.Since(answered))
		return err
	})
	group.Go(func() error { return meanwhile(ctx) })
	return group.Wait()
}

func (d *deletes) delete(ctx context.Context, c *client, v *vol) error {
	took, err := forAll(ctx, []*client{c}, remove, []*vol{v})
	d.answered.took = append(d.answered.took, took...)
	return err
}

// after deletes volumes after a large one, and counts those that were deleted while the trash
// has the large one.
func (r *trashResult) after(ctx context.Context, g *ground, c *client, large *vol, vols []*vol) error {
	for _, v := range vols {
		var d deletes
		if err := d.delete(ctx, c, v); err != nil {
			return err
		}
		if g.inTrash(large) {
			r.behind.answered.took = append(r.behind.answered.took, d.answered.took...)
		}
	}
	return nil
}

// inTrash reports whether the trash has a volume. Its name in the trash has a suffix after a
// dot.
func (g *ground) inTrash(v *vol) bool {
	found, _ := filepath.Glob(filepath.Join(g.trash(trashName), v.name+".*")) // the pattern is good
	return len(found) > 0
}

func (g *ground) awaitRemoved(ctx context.Context, v *vol) error {
	for g.inTrash(v) {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(poll):
		}
	}
	return nil
}

func (r *trashResult) String() string {
	t := markdown.Table{{"delete of", "times", "answered, least", "p50", "most", "p50 ratio", "removed, p50", "most"}}
	r.row(&t, "an empty volume", &r.empty)
	r.row(&t, fmt.Sprintf("one with %d files", r.files), &r.large)
	r.row(&t, "an empty one, while that is removed", &r.behind)
	text := fmt.Sprintf("### Emptying the trash on %s\n\n%s", title(r.fsType), t.Text(true))
	if len(r.next) > 0 {
		n := markdown.Table{{"made and filled", "times", "size in bytes", "written, least", "most"}}
		n.Row(fmt.Sprintf("the next volume, while one with %d files is removed", r.files), strconv.Itoa(len(r.next)), strconv.Itoa(nextSize), strconv.FormatInt(slices.Min(r.next), 10), strconv.FormatInt(slices.Max(r.next), 10))
		text += "\n" + n.Text(true)
	}
	return text
}

func (r *trashResult) row(t *markdown.Table, label string, d *deletes) {
	row := []string{label, strconv.Itoa(len(d.answered.took)), millis(d.answered.at(0)), millis(d.answered.p50()), millis(d.answered.at(100)), "", "", ""}
	if len(d.answered.took) > 0 {
		row[5] = times(d.answered.slower(&r.empty.answered))
	}
	if len(d.removed.took) > 0 {
		row[6], row[7] = millis(d.removed.p50()), millis(d.removed.at(100))
	}
	t.Row(row...)
}
