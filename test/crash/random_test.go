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

var seed = flag.Uint64("seed", 0, "seed of TestRandomMoments; 0 means the current time")

const (
	// lives is how often each volume is created and deleted.
	lives = 8
	// The driver is killed between these durations after its start, sometimes before it is ready.
	minRun = time.Millisecond
	maxRun = 100 * time.Millisecond
	// maxKills limits the number of kills, so that the test ends on a slow machine.
	maxKills = 120
)

// TestRandomMoments kills the driver at random moments while it serves several volumes of a target.
func TestRandomMoments(t *testing.T) {
	for _, first := range onePerTarget {
		target := first.Target().Name
		ofTarget := slices.DeleteFunc(kindsWith(backendtest.NodeLocal), func(k kind) bool { return k.Target().Name != target })
		if !first.Has(backendtest.WholeDisk) { // a pool of disks has only one disk, for one volume
			ofTarget = slices.Repeat(ofTarget, 3)[:len(ofTarget)+2] // two volumes more than kinds
		}
		t.Run(target, func(t *testing.T) { first.host(t).randomMoments(t, ofTarget...) })
	}
}

// randomMoments creates, uses and deletes one volume of each element of kinds at the same time, and kills
// the driver meanwhile. Then it checks that nothing is left.
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
	must(t, h.awaitEmpty())
	if kinds[0].Has(backendtest.Limited) {
		must(t, h.wantNoLimits())
	}
	must(t, h.stop())
}

// keepKilling kills and restarts the driver until ctx ends. The last driver keeps running.
func (h *host) keepKilling(ctx context.Context, r *rand.Rand) (kills int, err error) {
	longest, most := maxRun, maxKills
	if h.group != nil { // each call starts processes, which are killed too
		longest, most = 50*maxRun, maxKills/4
	}
	if testing.Short() {
		most /= 4
	}
	for {
		moment := time.NewTimer(minRun + time.Duration(r.Int64N(int64(longest-minRun))))
		if kills == most {
			moment.Stop() // moment.C then receives nothing
		}
		select {
		case <-ctx.Done():
			moment.Stop()
			return kills, nil
		case <-h.process.dead: // the loop restarts the driver, as Kubernetes would
			h.addError(fmt.Errorf("the driver ended by itself with %v", h.process.cmd.ProcessState))
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

// life creates a volume and writes to it, may take a snapshot, stages the volume again, may expand it,
// and deletes the volume and the snapshot in random order.
func (c *co) life(r *rand.Rand) error {
	c.readOnly, c.thick, c.frozen = false, r.IntN(4) == 0, c.kind.Has(backendtest.Filesystem) && r.IntN(2) == 0
	path := []call{create, controllerPublish, stage, publish, write, unpublish, unstage, controllerUnpublish}
	later, err := c.callsAfterSnapshot()
	if err != nil {
		return err
	}
	if c.kind.Has(backendtest.Snapshots) && r.IntN(2) == 0 {
		path = slices.Insert(path, len(path)-r.IntN(later+1), snapshot)
	}
	if err := c.do(path...); err != nil {
		return err
	}
	c.readOnly = r.IntN(2) == 0
	if err := c.do(controllerPublish, stage, publish); err != nil {
		return err
	}
	if c.kind.FSType != "ext4" && r.IntN(2) == 0 { // see growable
		if err := c.do(expand, nodeExpand); err != nil {
			return err
		}
	}
	if err := c.verify(); err != nil {
		return fmt.Errorf("volume %s (%s): %w", c.name, c.kind, err)
	}
	if err := c.do(unpublish, unstage, controllerUnpublish); err != nil {
		return err
	}
	ends := []func() error{func() error { return c.do(remove) }, c.finishSnapshots}
	if r.IntN(2) == 0 {
		slices.Reverse(ends)
	}
	return errors.Join(ends[0](), ends[1]())
}

// callsAfterSnapshot returns how many of the calls unpublish, unstage and controllerUnpublish may come
// after a snapshot. Snapshots of a directory that is not a subvolume can only be taken while it is not
// in use.
func (c *co) callsAfterSnapshot() (int, error) {
	if !c.isLocal() {
		return 3, nil
	}
	poolMount, err := c.host.filesystem()
	if err == nil && poolMount.FSType == "btrfs" {
		return 3, nil
	}
	return 1, err
}
