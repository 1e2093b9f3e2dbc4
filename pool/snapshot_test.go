package pool_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// setOf is the record of a new set of snapshots of a volume.
func setOf(p *pool.Pool, name string, v volume.Volume, members int) *volume.SnapshotSet {
	set := &volume.SnapshotSet{Version: volume.RecordVersion, ID: p.ID("loop", name), CoName: name, Created: time.Now().UTC()}
	for i := range members {
		id := set.ID
		if set.IsGroup() {
			id.Name = volume.MemberName(name, i)
		}
		set.Snapshots = append(set.Snapshots, volume.Snapshot{
			ID: id, Source: v.ID, Size: v.Capacity, Bytes: 1 << 20, FSType: v.FSType, SectorSize: v.SectorSize,
		})
	}
	return set
}

// imagesIn is the build function for Snapshots.Create that makes images of 1 MiB.
func imagesIn(folders []*os.Root) error {
	for _, f := range folders {
		if err := image(1 << 20)(f); err != nil {
			return err
		}
	}
	return nil
}

// addSet creates a set of snapshots.
func addSet(t *testing.T, p *pool.Pool, name string, v volume.Volume, members int) volume.SnapshotSet {
	t.Helper()
	set := setOf(p, name, v, members)
	must(t, p.Snapshots.Create(t.Context(), set, imagesIn))
	return *set
}

// TestSnapshotOrder: snapshots are listed in the order of their names, including members of groups,
// with any page size. Foreign files are not listed. A set with an unreadable record is listed by
// its ID.
func TestSnapshotOrder(t *testing.T) {
	e := newEnv(t)
	p := e.open(t)
	v := add(t, p, "v")
	want := []string{"a", "a-b", "a.000", "a.001", "a.002", "a0", "b.000", "damaged"}
	for name, members := range map[string]int{"a": 1, "a-b": 1, "a.group": 3, "a0": 1, "b.group": 1, "damaged": 1} {
		addSet(t, p, name, v, members)
	}
	at := filepath.Join(e.cfg.Directory.Path, "snapshots")
	must(t, os.WriteFile(filepath.Join(at, "damaged/snapshot.json"), []byte("{}"), 0o600))
	must(t, os.WriteFile(filepath.Join(at, "file"), nil, 0o600))
	must(t, os.Mkdir(filepath.Join(at, "Strange"), 0o700))
	for limit := 1; limit <= len(want)+1; limit++ {
		var got []string
		for after, more := "", true; more; {
			page, m, err := p.Snapshots.List("loop", after, limit)
			must(t, err)
			for _, s := range page {
				got = append(got, s.ID.Name)
			}
			after, more = got[len(got)-1], m
		}
		if !slices.Equal(got, want) {
			t.Errorf("pages of %d: got %q, want %q", limit, got, want)
		}
	}
	if other, _, err := p.Snapshots.List("local", "", 10); err != nil || len(other) > 0 {
		t.Errorf("snapshots of another backend: got %v, %v; want none", other, err)
	}
	_, err := p.Snapshots.Set(p.ID("loop", "damaged"))
	wantError(t, err, volume.ErrDamaged, "damaged")
	_, err = p.Snapshots.Set(p.ID("local", "a"))
	wantError(t, err, volume.ErrNotFound)
	_, err = p.Snapshots.Get(p.ID("loop", "a.003"))
	wantError(t, err, volume.ErrNotFound, "a.003")
}

// TestSnapshotLedger: snapshots count with the space that they can use, before and after a restart,
// and do not count as volumes.
func TestSnapshotLedger(t *testing.T) {
	e := newEnv(t)
	p := e.open(t)
	v := add(t, p, "v")
	before := usage(t, p)
	one, group := addSet(t, p, "one", v, 1), addSet(t, p, "three.group", v, 3)
	wantUsage := func(when string, snapshots int) {
		t.Helper()
		u := usage(t, p)
		if u.Promised != before.Promised+int64(snapshots)<<20 || u.Snapshots != snapshots || u.Volumes != before.Volumes {
			t.Errorf("%s: got %d promised bytes, %d snapshots, %d volumes; want %d, %d, %d", when,
				u.Promised, u.Snapshots, u.Volumes, before.Promised+int64(snapshots)<<20, snapshots, before.Volumes)
		}
	}
	wantUsage("after the creates", 4)
	if err := p.Snapshots.Create(t.Context(), setOf(p, "one", v, 1), imagesIn); !errors.Is(err, pool.ErrExists) {
		t.Errorf("second create of a set: got %v, want ErrExists", err)
	}
	wantUsage("after the second create", 4)
	p.Close()
	p = e.open(t)
	await(t, "the trash to be emptied", func() bool { return usage(t, p).Snapshots == 4 })
	wantUsage("after a restart", 4)
	must(t, p.Snapshots.Remove(group))
	await(t, "the trash to be emptied", func() bool { return usage(t, p).Snapshots == 1 })
	wantUsage("without the group", 1)
	must(t, p.Snapshots.Remove(one))
	await(t, "the trash to be emptied", func() bool { return usage(t, p).Snapshots == 0 })
	wantUsage("without all sets", 0)
}

// TestFailedSnapshot: a create of a set that fails, or whose driver is killed, leaves no files and no
// reservation.
func TestFailedSnapshot(t *testing.T) {
	e := newEnv(t)
	p := e.open(t)
	v := add(t, p, "v")
	before := usage(t, p)
	failed := errors.New("failed")
	left := func(folder string) []os.DirEntry {
		entries, err := os.ReadDir(filepath.Join(e.cfg.Directory.Path, folder))
		must(t, err)
		return entries
	}
	wantNothing := func() {
		t.Helper()
		await(t, "tmp and the trash to be empty", func() bool { return len(left(".trivet/tmp"))+len(left(".trivet/trash")) == 0 })
		if u := usage(t, p); u.Promised != before.Promised || u.Snapshots != 0 {
			t.Errorf("got usage %+v, want %+v as before", u, before)
		}
		if sets := left("snapshots"); len(sets) > 0 {
			t.Errorf("got the sets %v, want none", sets)
		}
	}
	err := p.Snapshots.Create(t.Context(), setOf(p, "s", v, 1), func(folders []*os.Root) error { return errors.Join(imagesIn(folders), failed) })
	wantError(t, err, failed)
	wantNothing()
	huge := setOf(p, "s", v, 1)
	huge.Snapshots[0].Bytes = 1 << 60
	wantError(t, p.Snapshots.Create(t.Context(), huge, imagesIn), volume.ErrExhausted, "room")
	wantNothing()
	// The actual size is larger than the expected one.
	larger := setOf(p, "s", v, 1)
	err = p.Snapshots.Create(t.Context(), larger, func(folders []*os.Root) error {
		larger.Snapshots[0].Bytes = 1 << 60
		return imagesIn(folders)
	})
	wantError(t, err, volume.ErrExhausted, "room")
	wantNothing()
	p.Close()
	must(t, os.MkdirAll(filepath.Join(e.cfg.Directory.Path, ".trivet/tmp/s.snapshot/0"), 0o700))
	must(t, os.WriteFile(filepath.Join(e.cfg.Directory.Path, ".trivet/tmp/s.snapshot/0/image"), make([]byte, 4096), 0o600))
	p = e.open(t)
	wantNothing()
}

// TestJobs: a call for a name with a running job joins that job. Cancel and Close end the job.
func TestJobs(t *testing.T) {
	e := newEnv(t)
	p := e.open(t)
	begun := make(chan struct{})
	calls := 0
	work := func(ctx context.Context, j *pool.Job) error {
		calls++
		j.Progress(5 << 20)
		close(begun)
		<-ctx.Done()
		return fmt.Errorf("stopped: %w", ctx.Err())
	}
	ended := make(chan error, 1)
	go func() { ended <- p.Jobs.Do(t.Context(), "x", work) }()
	<-begun
	if u := usage(t, p); u.Copies != 1 || u.Copied != 5<<20 {
		t.Errorf("got %d copies and %d copied bytes, want 1 and %d", u.Copies, u.Copied, 5<<20)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	wantError(t, p.Jobs.Do(ctx, "x", work), volume.ErrPending, "5 MiB", "retry")
	p.Jobs.Cancel("x")
	wantError(t, <-ended, context.Canceled, "stopped")
	p.Jobs.Cancel("x") // there is no such job any more
	if calls != 1 {
		t.Errorf("the job was started %d times, want 1", calls)
	}
	begun = make(chan struct{})
	go func() { ended <- p.Jobs.Do(t.Context(), "y", work) }()
	<-begun
	p.Close()
	wantError(t, <-ended, context.Canceled, "stopped")
	wantError(t, p.Jobs.Do(t.Context(), "z", work), volume.ErrUnavailable, "closed")
}

// TestCopySlots: at most MaxTreeCopies directories are copied into a pool at a time, and the others are
// queued. Copies into other pools do not count. A queued copy stays in the queue when its calls end;
// Cancel removes it.
func TestCopySlots(t *testing.T) {
	p, other := newEnv(t).open(t), newEnv(t).open(t)
	var running atomic.Int32
	end, ended := make(chan struct{}), make(chan error, pool.MaxTreeCopies+2)
	begun := make(chan struct{}, pool.MaxTreeCopies+2)
	work := func(ctx context.Context, j *pool.Job) error {
		for range 2 { // the second call keeps the slot of the first one
			if err := j.AwaitSlot(ctx); err != nil {
				return err
			}
		}
		running.Add(1)
		defer running.Add(-1)
		begun <- struct{}{}
		<-end
		return nil
	}
	for i := range pool.MaxTreeCopies {
		go func() { ended <- p.Jobs.Do(t.Context(), fmt.Sprint(i), work) }()
	}
	for range pool.MaxTreeCopies {
		<-begun
	}
	for _, name := range []string{"kept", "cancelled"} {
		go func() { ended <- p.Jobs.Do(t.Context(), name, work) }()
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		await(t, name+" to be queued", func() bool {
			err := p.Jobs.Do(ctx, name, work)
			return errors.Is(err, volume.ErrPending) && strings.Contains(err.Error(), " is queued: ")
		})
	}
	if u := usage(t, p); u.Copies != pool.MaxTreeCopies {
		t.Errorf("usage: got %d copies, want %d, without the queued ones", u.Copies, pool.MaxTreeCopies)
	}
	must(t, other.Jobs.Do(t.Context(), "other", func(ctx context.Context, j *pool.Job) error { return j.AwaitSlot(ctx) }))
	p.Jobs.Cancel("cancelled")
	wantError(t, <-ended, context.Canceled, "")
	if n := running.Load(); n != pool.MaxTreeCopies {
		t.Errorf("got %d running copies, want %d", n, pool.MaxTreeCopies)
	}
	end <- struct{}{}
	<-begun // the queued copy begins
	close(end)
	for range pool.MaxTreeCopies + 1 {
		must(t, <-ended)
	}
}
