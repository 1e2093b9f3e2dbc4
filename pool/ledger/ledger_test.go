package ledger

import (
	"errors"
	"testing"
	"time"

	"github.com/trivet-csi/trivet/volume"
)

// fakePool is a pool with fixed results.
type fakePool struct {
	space Space
	used  int64
	err   error
}

func (p *fakePool) Space() (Space, error) { return p.space, p.err }

func (p *fakePool) Used() (int64, error) { return p.used, p.err }

func (p *fakePool) Drain(time.Duration) {}

// TestRoomUnderProjectQuota: a pool in a directory with a project quota has the room that the quota
// leaves, or the room that the other pools leave on the filesystem, if that is less.
func TestRoomUnderProjectQuota(t *testing.T) {
	var all filesystem
	open := func(name string, promised int64) *Ledger {
		l := all.join()
		l.Open(Config{Name: name}, &fakePool{})
		l.Set("volumes/v", Reservation{Bytes: promised})
		return l
	}
	limited, other := open("limited", 10), open("other", 300)
	limited.foreignInDirectory, all.foreign = 5, 100
	space := Space{Directory: Extent{Total: 50, Free: 40}, Filesystem: Extent{Total: 1000, Free: 800}}
	if u := limited.Usage(space); u.Total != 50 || u.Room != 50-5-10 || u.OtherPools != 300 {
		t.Errorf("limited by the quota: got %+v, want total 50, room 35, other pools 300", u)
	}
	other.Set("volumes/v", Reservation{Bytes: 870})
	if u := limited.Usage(space); u.Room != 1000-100-870-10 {
		t.Errorf("limited by the promises of the other pool: got %+v, want room 20", u)
	}
	other.config.Overcommit, other.used = 10, 880
	if u := limited.Usage(space); u.OtherPools != 880 || u.Room != 10 {
		t.Errorf("limited by the usage of the other pool: got %+v, want room 10, other pools 880", u)
	}
}

// TestExists: data that exists is counted, even if the pool has no room for it.
func TestExists(t *testing.T) {
	l := New()
	extent := Extent{Total: 100, Free: 100}
	l.Open(Config{Name: "full"}, &fakePool{})
	l.Set("volumes/v", Reservation{Bytes: 90})
	space := Space{Directory: extent, Filesystem: extent}
	if err := l.TryReserve("volumes/new", Reservation{Bytes: 50}, space); !errors.Is(err, volume.ErrExhausted) {
		t.Errorf("new data: got %v, want ErrExhausted", err)
	}
	if err := l.TryReserve("volumes/existing", Reservation{Bytes: 50, Exists: true}, space); err != nil {
		t.Errorf("existing data: %v", err)
	}
	if u := l.Usage(space); u.Promised != 140 || u.Room != 0 {
		t.Errorf("got usage %+v, want 140 bytes promised and no room", u)
	}
}

// TestAttachedCount: published volumes are counted, also if the usage of the pool is estimated (thin pools), but not if
// other processes publish volumes too.
func TestAttachedCount(t *testing.T) {
	for config, want := range map[Config]int{{Accounting: Estimated}: 1, {Accounting: Estimated, Shared: true}: 0} {
		l := New()
		l.Open(config, &fakePool{})
		l.Set("volumes/v", Reservation{Backend: "lvm"})
		l.SetAttached("volumes/v", true)
		if n := l.AttachedCount("lvm"); n != want {
			t.Errorf("%+v: got %d published volumes, want %d", config, n, want)
		}
	}
}

// TestMeasureBesideFailingPool: a pool that cannot be measured keeps its last measurement, and the
// other pools on its filesystem are measured.
func TestMeasureBesideFailingPool(t *testing.T) {
	var all filesystem
	extent := Extent{Total: 1000, Free: 800}
	fails, works := all.join(), all.join()
	for l, p := range map[*Ledger]*fakePool{
		fails: {err: errors.New("statfs")},
		works: {space: Space{Directory: extent, Filesystem: extent}, used: 50},
	} {
		l.Open(Config{}, p)
		l.Complete()
	}
	fails.used, fails.foreignInDirectory = 30, 7
	if fails.Measure() == nil {
		t.Error("Measure returned no error of its own pool")
	}
	if all.foreign != 200-50-30 || works.foreignInDirectory != all.foreign {
		t.Errorf("foreign use: got %d bytes of the filesystem and %d of the directory, want 120", all.foreign, works.foreignInDirectory)
	}
	if fails.foreignInDirectory != 7 {
		t.Errorf("foreign use of the failing pool: got %d bytes, want 7 as in the last measurement", fails.foreignInDirectory)
	}
}
