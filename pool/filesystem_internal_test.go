package pool

import "testing"

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
