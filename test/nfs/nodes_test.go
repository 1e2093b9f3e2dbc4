//go:build vm

package nfs

import (
	"fmt"
	"os"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/trivet-csi/trivet/internal/testenv/nfsd"
)

// pair is two nodes that share a pool.
type pair struct {
	server        *nfsd.Server
	export        string
	first, second *machine
}

// pool is the name of the pool that the nodes share.
const pool = "nas"

// lease is the server's NFSv4 lease time. It is longer than NodeStageVolume takes, and short enough to
// wait for its end.
const lease = 15 * time.Second

// TestTwoNodes runs scenarios in which two nodes with their own drivers use one pool.
func TestTwoNodes(t *testing.T) {
	s := nfsd.Start(t, nfsd.Options{Lease: lease})
	p := pair{server: s, export: s.Export(t, "volumes")}
	pools := nfsPool(pool, s, p.export) + smallPool(s, s.Export(t, "small"))
	p.first = start(t, s.Node(t, "node-1"), "node-1", pools)
	p.second = start(t, s.Node(t, "node-2"), "node-2", pools)
	for _, tc := range []struct {
		name string
		run  func(*testing.T, pair)
	}{
		{"same volumes", testSameVolumes},
		{"full pool", testFullPool},
		{"written by both", testBothWrite},
		{"moved", testMoved},
		{"second refused", testSecondRefused},
		{"declared dead", testDeclaredDead},
		{"driver killed", testDriverKilled},
		{"server restarted", testServerRestarted},
		{"expired", testExpired},
		{"cut off", testCutOff},
		{"used by another node while cut off", testUsedElsewhere},
	} {
		if !t.Run(tc.name, func(t *testing.T) { tc.run(t, p) }) {
			t.Logf("%s:\n%s", p.first.name, p.first.log())
			t.Logf("%s:\n%s", p.second.name, p.second.log())
		}
	}
	wantEmpty(t, s, p.export)
}

// takeOver unpublishes a volume from the first node and publishes it to the second.
func (p pair) takeOver(t *testing.T, v *vol) {
	t.Helper()
	must(t, p.second.controllerUnpublish(t, v, p.first.name))
	must(t, p.second.controllerPublish(t, v))
}

// testBothWrite: two nodes write to one directory at the same time, and in turns to the same file. Each
// node reads the data of the other after the other has closed the file.
func testBothWrite(t *testing.T, p pair) {
	v := p.first.directory(t, pool, "both")
	both := []*machine{p.first, p.second}
	for _, m := range both {
		m.up(t, v)
	}
	var writers sync.WaitGroup
	for _, m := range both {
		writers.Go(func() {
			for i := range 20 {
				if err := os.WriteFile(m.file(v, fmt.Sprintf("%s-%d", m.name, i)), []byte(m.name), 0o644); err != nil {
					t.Error(err)
				}
			}
		})
	}
	writers.Wait()
	for i, m := range both {
		for n := range 20 {
			wantText(t, both[1-i].file(v, fmt.Sprintf("%s-%d", m.name, n)), m.name)
		}
	}
	for n := range 6 {
		text := fmt.Sprint(n)
		write(t, both[n%2].file(v, "common"), text)
		wantText(t, both[1-n%2].file(v, "common"), text)
		wantText(t, both[n%2].file(v, "common"), text)
	}
	for _, m := range both {
		if found := m.health(t, v); len(found) > 0 {
			t.Errorf("got health reasons %q on %s, want none", found, m.name)
		}
	}
	// The first node unpublishes the volume, and the second one still uses it.
	p.first.down(t, v)
	write(t, p.second.file(v, "common"), "still in use")
	wantCode(t, p.first.delete(t, v), codes.FailedPrecondition, "node-2")
	p.second.down(t, v)
	must(t, p.first.delete(t, v))
}

// testMoved: a volume moves between nodes and keeps its data.
func testMoved(t *testing.T, p pair) {
	for fsType, size := range map[string]int64{"ext4": 64 * mib, "xfs": 320 * mib} {
		v := p.first.image(t, pool, "moved-"+fsType, fsType, size)
		from, to := p.first, p.second
		from.up(t, v)
		for n := range 2 {
			text := fmt.Sprint(n)
			write(t, from.file(v, "text"), text)
			from.down(t, v)
			to.up(t, v)
			wantText(t, to.file(v, "text"), text)
			from, to = to, from
		}
		from.remove(t, v)
	}
}

// testSecondRefused: an image that is published to one node cannot be published to another.
func testSecondRefused(t *testing.T, p pair) {
	v := p.first.image(t, pool, "refused", "ext4", 64*mib)
	p.first.up(t, v)
	wantCode(t, p.second.controllerPublish(t, v), codes.FailedPrecondition, "node-1")
	wantCode(t, p.second.stage(t, v), codes.FailedPrecondition, "node-1")
	wantCode(t, p.second.delete(t, v), codes.FailedPrecondition, "node-1")
	if found := p.first.health(t, v); len(found) > 0 {
		t.Errorf("got health reasons %q, want none", found)
	}
	p.first.down(t, v)
	must(t, p.second.delete(t, v))
}

// testDriverKilled: the driver of the first node is killed. The node's volume still works and stays
// locked.
func testDriverKilled(t *testing.T, p pair) {
	v := p.first.image(t, pool, "killed", "ext4", 64*mib)
	p.first.up(t, v)
	w := startWriter(t, p.first.file(v, "log"))
	w.awaitProgress(t)
	p.first.kill(t)
	p.takeOver(t, v)
	wantCode(t, p.second.stage(t, v), codes.Unavailable, "locked by another node")
	w.awaitProgress(t)
	p.first.run(t)
	w.finish(t)
	eventually(t, func() error { return p.first.unpublish(t, v) })
	must(t, p.first.unstage(t, v))
	p.second.mount(t, v)
	w.wantRecords(t, p.second.file(v, "log"))
	p.second.remove(t, v)
}

// testServerRestarted: the server restarts. Writers continue, and the nodes keep their locks.
func testServerRestarted(t *testing.T, p pair) {
	d, v := p.first.directory(t, pool, "restart-d"), p.first.image(t, pool, "restart-i", "ext4", 64*mib)
	p.first.up(t, d)
	p.second.up(t, d)
	p.first.up(t, v)
	writers := []*writer{
		startWriter(t, p.first.file(d, "first")), startWriter(t, p.second.file(d, "second")), startWriter(t, p.first.file(v, "log")),
	}
	for _, w := range writers {
		w.awaitProgress(t)
	}
	p.server.Restart(t)
	for _, w := range writers {
		w.awaitProgress(t)
	}
	eventually(t, func() error { return p.second.controllerUnpublish(t, v, p.first.name) })
	eventually(t, func() error { return p.second.controllerPublish(t, v) })
	wantCode(t, p.second.stage(t, v), codes.Unavailable, "locked by another node")
	for _, w := range writers {
		w.awaitProgress(t)
		w.finish(t)
	}
	writers[0].wantRecords(t, p.second.file(d, "first"))
	writers[1].wantRecords(t, p.first.file(d, "second"))
	p.first.down(t, d)
	p.second.down(t, d)
	p.first.down(t, v)
	p.second.mount(t, v)
	writers[2].wantRecords(t, p.second.file(v, "log"))
	p.second.remove(t, v)
	must(t, p.second.delete(t, d))
}
