package ledger

import (
	"errors"
	"testing"
	"time"
)

// fakePool is a pool whose numbers a test sets.
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
	limited.foreignHere, all.foreign = 5, 100
	at := Space{Here: Extent{Total: 50, Free: 40}, Whole: Extent{Total: 1000, Free: 800}}
	if u := limited.Usage(at); u.Total != 50 || u.Room != 50-5-10 || u.OtherPools != 300 {
		t.Errorf("the quota leaves room for 35 of 50 bytes: %+v", u)
	}
	other.Set("volumes/v", Reservation{Bytes: 870})
	if u := limited.Usage(at); u.Room != 1000-100-870-10 {
		t.Errorf("the other pool leaves room for 20 bytes: %+v", u)
	}
	other.config.Overcommit, other.used = 10, 880
	if u := limited.Usage(at); u.OtherPools != 880 || u.Room != 10 {
		t.Errorf("the other pool's volumes leave room for 10 bytes: %+v", u)
	}
}

// TestMeasureBesideFailingPool: a pool that cannot be measured keeps its last measurement, and the
// other pools on its filesystem are measured.
func TestMeasureBesideFailingPool(t *testing.T) {
	var all filesystem
	whole := Extent{Total: 1000, Free: 800}
	fails, works := all.join(), all.join()
	for l, p := range map[*Ledger]*fakePool{
		fails: {err: errors.New("statfs")},
		works: {space: Space{Here: whole, Whole: whole}, used: 50},
	} {
		l.Open(Config{}, p)
		l.Complete()
	}
	fails.used, fails.foreignHere = 30, 7
	if fails.Measure() == nil {
		t.Error("the pool that leads was measured without its directory")
	}
	if all.foreign != 200-50-30 || works.foreignHere != all.foreign {
		t.Errorf("%d and %d bytes of foreign use, want 120: what is used but by the two pools", all.foreign, works.foreignHere)
	}
	if fails.foreignHere != 7 {
		t.Errorf("the failing pool has %d bytes of foreign use, want the 7 of the last measurement", fails.foreignHere)
	}
}
