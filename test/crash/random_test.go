package crash

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/trivet-csi/trivet/backend/backendtest"
)

var seed = flag.Uint64("seed", 0, "seed of TestRandomMoments; 0: the time")

const (
	// lives is how often each volume is made and deleted.
	lives = 8
	// A driver is killed between these times after its start, sometimes before it is ready.
	// The number of kills is limited, so that the test ends on a slow machine.
	soonest  = time.Millisecond
	latest   = 100 * time.Millisecond
	maxKills = 120
)

// TestRandomMoments kills the driver at random moments while several volumes of a target are
// used at once.
func TestRandomMoments(t *testing.T) {
	for _, first := range each {
		target := first.Target().Name
		own := slices.DeleteFunc(with(backendtest.NodeLocal), func(k kind) bool { return k.Target().Name != target })
		if !first.Has(backendtest.WholeDisk) { // the pool has one disk
			own = slices.Repeat(own, 3)[:len(own)+2]
		}
		t.Run(target, func(t *testing.T) { first.host(t, "").randomMoments(t, own...) })
	}
}

func (h *host) randomMoments(t *testing.T, kinds ...kind) {
	t.Helper()
	if *seed == 0 {
		*seed = uint64(time.Now().UnixNano())
	}
	t.Logf("-seed=%d", *seed)
	ctx, done := context.WithCancel(t.Context())
	var workers, killer errgroup.Group
	kills := 0
	killer.Go(func() (err error) {
		kills, err = h.keepKilling(ctx, rand.New(rand.NewPCG(*seed, 0)))
		return err
	})
	for i, k := range kinds {
		workers.Go(func() error {
			return h.live(fmt.Sprintf("pvc-%d", i+1), k, rand.New(rand.NewPCG(*seed, uint64(i+1))))
		})
	}
	err := workers.Wait()
	done()
	must(t, errors.Join(err, killer.Wait()))
	t.Logf("%d kills", kills)
	must(t, h.empty())
	if kinds[0].Has(backendtest.Limited) {
		must(t, h.limitsNothing())
	}
	must(t, h.stop())
}

// keepKilling kills and starts the driver until ctx ends. The last driver keeps running.
func (h *host) keepKilling(ctx context.Context, r *rand.Rand) (kills int, err error) {
	for {
		moment := time.NewTimer(soonest + time.Duration(r.Int64N(int64(latest-soonest))))
		if kills == maxKills {
			moment.Stop()
		}
		select {
		case <-ctx.Done():
			moment.Stop()
			return kills, nil
		case <-h.process.dead: // a supervisor starts it again
			h.complain(fmt.Errorf("the driver ended without a signal, with %v", h.process.cmd.ProcessState))
		case <-moment.C:
			kills++
		}
		h.kill()
		if err := h.launch(""); err != nil {
			return kills, err
		}
	}
}

// live creates, uses and deletes one volume several times.
func (h *host) live(name string, k kind, r *rand.Rand) error {
	c, err := newCO(h, name, k)
	if err != nil {
		return err
	}
	for range lives {
		if err := c.life(r); err != nil {
			return err
		}
	}
	return nil
}

// life creates a volume, writes it, may take a snapshot, stages it again, may expand it, and
// deletes the volume and the snapshot in any order.
func (c *co) life(r *rand.Rand) error {
	c.readOnly, c.thick, c.frozen = false, r.IntN(4) == 0, c.kind.Has(backendtest.Filesystem) && r.IntN(2) == 0
	path := []call{create, attach, stage, publish, write, unpublish, unstage, detached}
	later, err := c.mayComeAfterCut()
	if err != nil {
		return err
	}
	if c.kind.Has(backendtest.Snapshots) && r.IntN(2) == 0 {
		path = slices.Insert(path, len(path)-r.IntN(later+1), cut)
	}
	if err := c.do(path...); err != nil {
		return err
	}
	c.readOnly = r.IntN(2) == 0
	if err := c.do(attach, stage, publish); err != nil {
		return err
	}
	if c.kind.FSType != "ext4" && r.IntN(2) == 0 { // as for growable
		if err := c.do(expand, nodeExpand); err != nil {
			return err
		}
	}
	if err := c.verify(); err != nil {
		return fmt.Errorf("volume %s (%s): %w", c.name, c.kind, err)
	}
	if err := c.do(unpublish, unstage, detached); err != nil {
		return err
	}
	ends := []func() error{func() error { return c.do(remove) }, c.finishSnapshots}
	if r.IntN(2) == 0 {
		slices.Reverse(ends)
	}
	return errors.Join(ends[0](), ends[1]())
}

// mayComeAfterCut is how many of unpublish, unstage and detached may follow a snapshot. A
// directory that is no subvolume has snapshots only while it is not in use.
func (c *co) mayComeAfterCut() (int, error) {
	if !c.isLocal() {
		return 3, nil
	}
	own, err := c.host.filesystem()
	if err == nil && own.FSType == "btrfs" {
		return 3, nil
	}
	return 1, err
}
