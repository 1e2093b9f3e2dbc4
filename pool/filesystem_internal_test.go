package pool

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/trivet-csi/trivet/volume"
)

// TestRoomUnderProjectQuota: a pool in a directory with a project quota has what the quota
// leaves it, or what the other pools leave of the filesystem, if that is less.
func TestRoomUnderProjectQuota(t *testing.T) {
	var all filesystem
	open := func(name string, promised int64) *Pool {
		p := &Pool{cfg: Config{Name: name}, ledger: all.join()}
		p.ledger.begins(p)
		p.ledger.promised = promised
		return p
	}
	limited, other := open("limited", 10), open("other", 300)
	limited.ledger.foreignHere, all.foreign = 5, 100
	at := space{here: extent{total: 50, free: 40}, whole: extent{total: 1000, free: 800}}
	if u := limited.usageLocked(at); u.Total != 50 || u.Room != 50-5-10 || u.OtherPools != 300 {
		t.Errorf("the quota leaves room for 35 of 50 bytes: %+v", u)
	}
	other.ledger.promised = 870
	if u := limited.usageLocked(at); u.Room != 1000-100-870-10 {
		t.Errorf("the other pool leaves room for 20 bytes: %+v", u)
	}
	other.cfg.Overcommit, other.ledger.used = 10, 880
	if u := limited.usageLocked(at); u.OtherPools != 880 || u.Room != 10 {
		t.Errorf("the other pool's volumes leave room for 10 bytes: %+v", u)
	}
}

// openTogether opens pools in one directory, and so on one filesystem.
func openTogether(t *testing.T, names ...string) []*Pool {
	t.Helper()
	state, err := os.OpenRoot(t.TempDir())
	must(t, err)
	t.Cleanup(func() { must(t, state.Close()) })
	dir, filesystems := t.TempDir(), new(Filesystems)
	var pools []*Pool
	for _, name := range names {
		c := Config{Name: name, Directory: Directory{Path: filepath.Join(dir, name)}, Reserve: "0"}
		at, err := siteOf(c.Directory.Path)
		must(t, err)
		p, err := openOn(t.Context(), c, state, filesystems.join(at, c), nil)
		must(t, err)
		t.Cleanup(p.Close)
		pools = append(pools, p)
	}
	return pools
}

// TestNoPromiseBesideUnreadPool: while the volumes of another pool on the filesystem are
// being read, a pool promises nothing more and shows no room.
func TestNoPromiseBesideUnreadPool(t *testing.T) {
	p := openTogether(t, "ready")[0]
	must(t, p.reserve("volumes/before", stake{bytes: 4096}))
	read := p.ledger.expect("slow")
	err := p.reserve("volumes/v", stake{bytes: 4096})
	if !errors.Is(err, volume.ErrUnavailable) || !strings.Contains(err.Error(), `volumes of pool "slow"`) {
		t.Errorf("%v; want an error that names the pool", err)
	}
	if err := p.reserve("volumes/before", stake{bytes: 4096}); err != nil {
		t.Errorf("a volume that was promised before: %v", err)
	}
	if u, err := p.Usage(); err != nil || u.Room != 0 || u.Largest != 0 {
		t.Errorf("%+v, %v; want no room", u, err)
	}
	go read()
	if err := p.reserve("volumes/v", stake{bytes: 4096}); err != nil {
		t.Errorf("after the other pool was read: %v", err)
	}
}

// TestMeasureBesideFailingPool: a pool that cannot be measured keeps its measurement, and
// the others on its filesystem are measured all the same.
func TestMeasureBesideFailingPool(t *testing.T) {
	pools := openTogether(t, "fails", "works")
	fails, works := pools[0], pools[1]
	must(t, fails.volumes.Close())
	fails.ledger.foreignHere, works.ledger.foreignHere, works.ledger.foreign = 7, -1, -1
	if fails.ledger.measure() == nil {
		t.Error("the pool that leads was measured without its directory")
	}
	if works.ledger.foreign < 0 || works.ledger.foreignHere < 0 {
		t.Error("the other pool was not measured")
	}
	if got := fails.ledger.foreignHere; got != 7 {
		t.Errorf("the failing pool has %d bytes of foreign use, want the 7 of the last measurement", got)
	}
}

// TestRemovedElsewhere: entries that another process removed are not waited for. One that
// this process is removing stays until it is removed.
func TestRemovedElsewhere(t *testing.T) {
	r := newReaper()
	r.add(trashEntry{name: "taken"}, trashEntry{name: "queued"})
	taken, _ := r.take()
	r.drop(map[string]*trashEntry{"taken": taken, "queued": r.queued()["queued"]})
	if n := r.count(); n != 1 || r.awaited != 1 {
		t.Errorf("%d entries, %d of them awaited; want the one that is being removed", n, r.awaited)
	}
	r.finish(taken)
	select {
	case <-r.drained:
	default:
		t.Error("the trash is not drained after the last entry")
	}
	others := []string{"another process's"}
	if r.waitsFor(others, false) || !r.waitsFor(others, true) {
		t.Error("only a process that empties the trash waits for unknown entries")
	}
}
