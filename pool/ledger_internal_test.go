package pool

import (
	"errors"
	"path/filepath"
	"strings"
	"testing"

	"github.com/trivet-csi/trivet/pool/ledger"
	"github.com/trivet-csi/trivet/volume"
)

// openTogether opens pools in one directory, and so on one filesystem.
func openTogether(t *testing.T, names ...string) []*Pool {
	t.Helper()
	dir, state, filesystems := t.TempDir(), stateRoot(t), new(ledger.Filesystems)
	var pools []*Pool
	for _, name := range names {
		c := Config{Name: name, Directory: Directory{Path: filepath.Join(dir, name)}, Reserve: "0"}
		at, err := siteOf(c.Directory.Path)
		must(t, err)
		p, err := openOn(t.Context(), Forms, c, state, joinLedger(filesystems, at, c), nil)
		must(t, err)
		t.Cleanup(p.Close)
		pools = append(pools, p)
	}
	return pools
}

// TestNoPromiseBesideUnreadPool: while the volumes of another pool on the filesystem are being
// read, a pool promises nothing more and shows no room.
func TestNoPromiseBesideUnreadPool(t *testing.T) {
	p := openTogether(t, "ready")[0]
	must(t, p.ledger.Reserve("volumes/before", ledger.Reservation{Bytes: 4096}))
	read := p.ledger.Expect("slow")
	err := p.ledger.Reserve("volumes/v", ledger.Reservation{Bytes: 4096})
	if !errors.Is(err, volume.ErrUnavailable) || !strings.Contains(err.Error(), `volumes of pool "slow"`) {
		t.Errorf("%v; want an error that names the pool", err)
	}
	if err := p.ledger.Reserve("volumes/before", ledger.Reservation{Bytes: 4096}); err != nil {
		t.Errorf("a volume that was promised before: %v", err)
	}
	if u, err := p.Usage(); err != nil || u.Room != 0 || u.Largest != 0 {
		t.Errorf("%+v, %v; want no room", u, err)
	}
	go read()
	if err := p.ledger.Reserve("volumes/v", ledger.Reservation{Bytes: 4096}); err != nil {
		t.Errorf("after the other pool was read: %v", err)
	}
}

// TestRemovedElsewhere: the pool does not wait for entries that another process removed. An entry
// that this process is removing stays until it is removed.
func TestRemovedElsewhere(t *testing.T) {
	r := newReaper()
	r.add("taken", "queued")
	taken, _ := r.next()
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
