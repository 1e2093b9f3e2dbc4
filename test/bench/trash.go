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

	"github.com/trivet-csi/trivet/backend/backendtest/targets"
	"github.com/trivet-csi/trivet/test/markdown"
	"github.com/trivet-csi/trivet/test/measure"
)

const (
	trashName = "trash"
	// emptyVolumes is how many empty volumes are deleted alone, and how many after each large
	// one, in one round.
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
func measureTrash(ctx context.Context, g *ground, o options) *trashResult {
	r := &trashResult{fsType: g.fsType, files: 100_000}
	if o.quick {
		r.files /= 10
	}
	driver := startTrivet(ctx, g, o.binary, trashName, classOf(targets.Volume(localTarget, "dir"), gib))
	for n := range o.rounds {
		r.round(ctx, g, driver, fmt.Sprintf("round%d", n))
	}
	driver.stop()
	return r
}

func (r *trashResult) round(ctx context.Context, g *ground, driver *contender, prefix string) {
	dir := g.kubelet(trashName)
	vols := newVolumes(dir, prefix, emptyVolumes, driver.class)
	callAll(ctx, driver.clients, vols, create)
	for _, v := range vols {
		r.empty.one(ctx, g, driver, v, func() {})
	}
	for n := range largeVolumes {
		r.roundOfLarge(ctx, g, driver, dir, fmt.Sprintf("%s-%d", prefix, n))
	}
	removeFolders(vols)
}

func (r *trashResult) roundOfLarge(ctx context.Context, g *ground, driver *contender, dir, prefix string) {
	vols := newVolumes(dir, prefix, 1+emptyVolumes, driver.class)
	one := driver.class
	one.size = nextSize
	next := newVolumes(dir, prefix+"-next", 1, one)
	callAll(ctx, driver.clients, vols, create)
	large, behind := vols[0], vols[1:]
	r.fill(ctx, driver, large)
	r.large.one(ctx, g, driver, large, func() {
		r.after(ctx, driver, large, behind)
		if g.fsType == btrfs {
			r.fillNext(ctx, driver, large, next)
		}
	})
	driver.quiet(ctx)
	removeFolders(append(vols, next...))
}

// fillNext creates a volume and writes to it until it is full. Only volumes that were filled
// while the trash has a large one count.
func (r *trashResult) fillNext(ctx context.Context, driver *contender, large *vol, next []*vol) {
	callAll(ctx, driver.clients, next, create, controllerPublish, stage, publish)
	size := measure.Get(fillFile(filepath.Join(next[0].target, "file")))
	if driver.inTrash(large) {
		r.next = append(r.next, size)
	}
	callAll(ctx, driver.clients, next, unpublish, unstage, controllerUnpublish, remove)
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
func (r *trashResult) fill(ctx context.Context, driver *contender, v *vol) {
	one := []*vol{v}
	callAll(ctx, driver.clients, one, controllerPublish, stage, publish)
	for i := range folders {
		dir := filepath.Join(v.target, strconv.Itoa(i))
		measure.Must(os.Mkdir(dir, 0o755))
		for k := range r.files / folders {
			measure.Must(os.WriteFile(filepath.Join(dir, strconv.Itoa(k)), make([]byte, fileSize), 0o600))
		}
	}
	callAll(ctx, driver.clients, one, unpublish, unstage, controllerUnpublish)
}

// one deletes a volume, and calls a function while the volume is in the trash.
func (d *deletes) one(ctx context.Context, g *ground, driver *contender, v *vol, meanwhile func()) {
	g.Settle()
	d.answered.Add(forAll(ctx, driver.clients[:1], remove, []*vol{v})...)
	answered := time.Now()
	removed := make(chan time.Duration, 1)
	go func() {
		for driver.inTrash(v) && sleep(ctx, poll) == nil {
		}
		removed <- time.Since(answered)
	}()
	meanwhile()
	d.removed.Add(<-removed)
	measure.Must(ctx.Err())
}

// after deletes volumes after a large one, and counts those that were deleted while the trash
// has the large one.
func (r *trashResult) after(ctx context.Context, driver *contender, large *vol, vols []*vol) {
	for _, v := range vols {
		took := forAll(ctx, driver.clients[:1], remove, []*vol{v})
		if driver.inTrash(large) {
			r.behind.answered.Add(took...)
		}
	}
}

// inTrash reports whether the trash has a volume. Its name in the trash has a suffix after a
// dot.
func (c *contender) inTrash(v *vol) bool {
	found, _ := filepath.Glob(filepath.Join(c.trash, v.name+".*")) // the pattern is valid
	return len(found) > 0
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
	row := []string{label, strconv.Itoa(len(d.answered.Durations)), millis(d.answered.At(0)), millis(d.answered.P50()), millis(d.answered.At(100)), "", "", ""}
	if len(d.answered.Durations) > 0 {
		row[5] = times(d.answered.slower(&r.empty.answered))
	}
	if len(d.removed.Durations) > 0 {
		row[6], row[7] = millis(d.removed.P50()), millis(d.removed.At(100))
	}
	t.Row(row...)
}
