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
	// Each round deletes emptyVolumes empty volumes and largeVolumes large volumes. Directly after each
	// large volume, it deletes emptyVolumes more.
	emptyVolumes = 10
	largeVolumes = 3
	// The files of a large volume are in this number of directories, and have this size in bytes.
	largeDirectories = 100
	fileSize         = 1 << 10
	// nextSize is the size in bytes of the volumes that are created and filled directly after a large
	// one was deleted.
	nextSize = 32 * mib
)

// trashResult contains the times of deleting directories and of emptying the trash.
type trashResult struct {
	fsType string
	files  int // of a large volume
	// behind are empty volumes that were deleted while a large one was in the trash.
	empty, large, behind deletes
	// next contains the number of bytes that could be written to each volume of nextSize while a large
	// one was in the trash.
	next []int64
}

// deletes contains the times until DeleteVolume answers, and from the answer until the trash no
// longer has the volume.
type deletes struct{ answered, removed sample }

// measureTrash deletes empty volumes and volumes with many files.
func measureTrash(ctx context.Context, g *testbed, o options) *trashResult {
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

// round deletes empty volumes, and then large volumes.
func (r *trashResult) round(ctx context.Context, g *testbed, driver *contender, prefix string) {
	dir := g.kubelet(trashName)
	vols := newVolumes(dir, prefix, emptyVolumes, driver.class)
	callAll(ctx, driver.clients, vols, create)
	for _, v := range vols {
		r.empty.deleteOne(ctx, g, driver, v, func() {})
	}
	for n := range largeVolumes {
		r.roundOfLarge(ctx, g, driver, dir, fmt.Sprintf("%s-%d", prefix, n))
	}
	removeStaging(vols)
}

// roundOfLarge deletes a large volume, and while that is in the trash, empty volumes. On btrfs, it also
// fills a volume meanwhile.
func (r *trashResult) roundOfLarge(ctx context.Context, g *testbed, driver *contender, dir, prefix string) {
	vols := newVolumes(dir, prefix, 1+emptyVolumes, driver.class)
	nextClass := driver.class
	nextClass.size = nextSize
	next := newVolumes(dir, prefix+"-next", 1, nextClass)
	callAll(ctx, driver.clients, vols, create)
	large, behind := vols[0], vols[1:]
	r.fill(ctx, driver, large)
	r.large.deleteOne(ctx, g, driver, large, func() {
		r.deleteBehind(ctx, driver, large, behind)
		if g.fsType == btrfs {
			r.fillNext(ctx, driver, large, next)
		}
	})
	driver.quiet(ctx)
	removeStaging(append(vols, next...))
}

// fillNext creates a volume and writes to it until it is full. The result counts only if the large
// volume is still in the trash afterwards.
func (r *trashResult) fillNext(ctx context.Context, driver *contender, large *vol, next []*vol) {
	callAll(ctx, driver.clients, next, create, controllerPublish, stage, publish)
	size := measure.Get(fillFile(filepath.Join(next[0].target, "file")))
	if driver.inTrash(large) {
		r.next = append(r.next, size)
	}
	callAll(ctx, driver.clients, next, unpublish, unstage, controllerUnpublish, remove)
}

// fillFile writes a file until the filesystem refuses a write, and returns the number of bytes
// written.
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
	vols := []*vol{v}
	callAll(ctx, driver.clients, vols, controllerPublish, stage, publish)
	for i := range largeDirectories {
		dir := filepath.Join(v.target, strconv.Itoa(i))
		measure.Must(os.Mkdir(dir, 0o755))
		for k := range r.files / largeDirectories {
			measure.Must(os.WriteFile(filepath.Join(dir, strconv.Itoa(k)), make([]byte, fileSize), 0o600))
		}
	}
	callAll(ctx, driver.clients, vols, unpublish, unstage, controllerUnpublish)
}

// deleteOne deletes a volume, and calls meanwhile while the volume is in the trash.
func (d *deletes) deleteOne(ctx context.Context, g *testbed, driver *contender, v *vol, meanwhile func()) {
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

// deleteBehind deletes volumes after a large one, and counts those that were deleted while the large
// one was still in the trash.
func (r *trashResult) deleteBehind(ctx context.Context, driver *contender, large *vol, vols []*vol) {
	for _, v := range vols {
		took := forAll(ctx, driver.clients[:1], remove, []*vol{v})
		if driver.inTrash(large) {
			r.behind.answered.Add(took...)
		}
	}
}

// inTrash reports whether a volume is in the trash, where its name has a suffix after a dot.
func (c *contender) inTrash(v *vol) bool {
	found, _ := filepath.Glob(filepath.Join(c.trash, v.name+".*")) // the pattern is valid
	return len(found) > 0
}

func (r *trashResult) String() string {
	t := markdown.Table{{"deleted volume", "times", "answered, min", "p50", "max", "p50 ratio", "removed, p50", "max"}}
	r.row(&t, "empty", &r.empty)
	r.row(&t, fmt.Sprintf("with %d files", r.files), &r.large)
	r.row(&t, fmt.Sprintf("empty, while one with %d files is in the trash", r.files), &r.behind)
	text := fmt.Sprintf("### Emptying the trash on %s\n\n%s", title(r.fsType), t.Text(true))
	if len(r.next) > 0 {
		n := markdown.Table{{"created and filled volume", "times", "size in bytes", "bytes written, min", "max"}}
		n.Row(fmt.Sprintf("while one with %d files is in the trash", r.files), strconv.Itoa(len(r.next)), strconv.Itoa(nextSize), strconv.FormatInt(slices.Min(r.next), 10), strconv.FormatInt(slices.Max(r.next), 10))
		text += "\n" + n.Text(true)
	}
	return text
}

// row adds the times of deletes, whose ratio is to those of empty volumes.
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
