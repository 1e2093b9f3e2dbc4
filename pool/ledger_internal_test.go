package pool

import (
	"errors"
	"strings"
	"testing"

	"github.com/trivet-csi/trivet/pool/ledger"
	"github.com/trivet-csi/trivet/volume"
)

// TestNoPromiseBesideUnreadPool: while the volumes of another pool on the filesystem are being
// read, a pool promises nothing more and shows no room.
func TestNoPromiseBesideUnreadPool(t *testing.T) {
	p, _ := openPlain(t)
	must(t, p.ledger.Reserve("volumes/before", ledger.Reservation{Bytes: 4096}))
	read := p.ledger.Expect("slow")
	err := p.ledger.Reserve("volumes/v", ledger.Reservation{Bytes: 4096})
	if !errors.Is(err, volume.ErrUnavailable) || !strings.Contains(err.Error(), `volumes of pool "slow"`) {
		t.Errorf("got %v, want ErrUnavailable with the name of the pool", err)
	}
	if err := p.ledger.Reserve("volumes/before", ledger.Reservation{Bytes: 4096}); err != nil {
		t.Errorf("second reservation of a volume that was promised before: %v", err)
	}
	if u, err := p.Usage(); err != nil || u.Room != 0 || u.Largest != 0 {
		t.Errorf("usage: got %+v, %v; want no room", u, err)
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
	taken, _ := r.next() // this process removes it
	r.drop(map[string]*trashEntry{"taken": taken, "queued": r.queued()["queued"]})
	if n := r.count(); n != 1 || r.awaited != 1 {
		t.Errorf("got %d entries, %d of them awaited; want one, which is being removed", n, r.awaited)
	}
	r.finish(taken)
	select {
	case <-r.drained:
	default:
		t.Error("drained is not closed after the last entry was removed")
	}
	others := []string{"another process's"}
	if r.waitsFor(others, false) || !r.waitsFor(others, true) {
		t.Errorf("waitsFor an entry that was not added: got %t with unknown=false and %t with unknown=true, want false and true", r.waitsFor(others, false), r.waitsFor(others, true))
	}
}
