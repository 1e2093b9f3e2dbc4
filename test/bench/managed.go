package main

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/trivet-csi/trivet/test/markdown"
	"github.com/trivet-csi/trivet/test/measure"
)

// shapes are the shapes of the pods that are created and removed.
var shapes = []podShape{{csi: 1, plain: true}, {csi: 3}}

// Volumes are set up by the volume manager, or by a client that calls the driver directly. The client
// handles all volumes at the same time. It makes the calls for each volume one after the other.
const (
	byManager = "manager"
	byClient  = "client"
)

// turns contains, for each turn, the duration and the CPU time of the driver and of the manager.
type turns struct{ wall, driver, manager sample }

type managedKey struct {
	shape podShape
	who   string // byManager or byClient
	up    bool   // volumes are set up, not torn down
}

// managedResult contains the times of setting up and tearing down the volumes of pods.
type managedResult struct {
	pods  int
	turns map[managedKey]*turns
	// busiest is the largest one-minute load average during the measurement.
	busiest float64
}

// managed is a driver, and the volume manager that calls it.
type managed struct {
	testbed *testbed
	driver  *contender
	manager *manager
	result  *managedResult
}

// measureManaged measures rounds in alternating order, each with the manager and with the client.
func measureManaged(ctx context.Context, g *testbed, o options, driver *contender, m *manager) *managedResult {
	r := &managedResult{pods: 2, turns: map[managedKey]*turns{}}
	both := &managed{g, driver, m, r}
	order := []string{byManager, byClient}
	both.round(ctx, "warm", order) // the first round is slower, so its result is dropped
	r.pods, r.turns = o.pods, map[managedKey]*turns{}
	for n := range 2 * o.rounds {
		both.round(ctx, fmt.Sprintf("round%d", n), order)
		slices.Reverse(order)
	}
	return r
}

// round sets up and tears down the volumes of each shape once by each of byManager and byClient.
func (b *managed) round(ctx context.Context, prefix string, order []string) {
	ways := map[string]func(context.Context, string, podShape) (up, down way){byManager: b.throughManager, byClient: b.throughClient}
	for i, shape := range shapes {
		for _, who := range order {
			up, down := ways[who](ctx, fmt.Sprintf("%s-%d", prefix, i), shape)
			b.turn(ctx, managedKey{shape, who, true}, up)
			b.turn(ctx, managedKey{shape, who, false}, down)
		}
	}
}

// way sets up volumes, or tears them down. It returns the time at which it began.
type way func() time.Time

// throughManager returns the ways of the manager: it creates the manifests of pods, and removes them.
func (b *managed) throughManager(ctx context.Context, prefix string, shape podShape) (up, down way) {
	pods, manifests := shape.podsOf(prefix, b.result.pods)
	up = func() time.Time {
		start := b.manager.put(manifests)
		b.manager.awaitPods(ctx, pods)
		return start
	}
	down = func() time.Time {
		start := b.manager.remove(manifests)
		b.manager.awaitGone(ctx)
		return start
	}
	return up, down
}

// throughClient returns the ways of the client: it makes the CSI calls for the volumes of all pods.
func (b *managed) throughClient(ctx context.Context, prefix string, shape podShape) (up, down way) {
	vols := newVolumes(b.testbed.kubelet(byClient), prefix, b.result.pods*shape.csi, b.driver.class)
	callers := slices.Repeat(b.driver.clients[:1], len(vols)) // one for each volume, on the same connection
	through := func(calls ...call) way {
		return func() time.Time {
			start := time.Now()
			forAll(ctx, callers, inTurn(calls...), vols)
			return start
		}
	}
	return through(create, controllerPublish, stage, publish), through(unpublish, unstage, controllerUnpublish, remove)
}

// inTurn returns a call that makes several calls for a volume, one after the other.
func inTurn(calls ...call) call {
	return call{"all calls", func(ctx context.Context, c *client, v *vol) error {
		for _, one := range calls {
			if err := one.do(ctx, c, v); err != nil {
				return fmt.Errorf("%s: %w", one.name, err)
			}
		}
		return nil
	}}
}

// turn measures one way. What the processes do in the background after the way has ended counts in the
// CPU time, but not in the duration.
func (b *managed) turn(ctx context.Context, key managedKey, one way) {
	b.testbed.Settle()
	t := b.result.turns[key]
	if t == nil {
		t = &turns{}
		b.result.turns[key] = t
	}
	driver, manager := b.driver.cpuTime(), b.manager.cpuTime()
	t.wall.Add(time.Since(one()))
	b.driver.quiet(ctx)
	b.manager.awaitRest(ctx)
	t.driver.Add(b.driver.cpuTime() - driver)
	t.manager.Add(b.manager.cpuTime() - manager)
	b.result.noteLoad()
}

// A process is idle if it uses less than idleCPU in idlePeriod. An idle process still checks its
// connections.
const (
	idlePeriod = 300 * time.Millisecond
	idleCPU    = time.Millisecond
)

// awaitRest waits until the process is idle.
func (s *server) awaitRest(ctx context.Context) {
	for before := time.Duration(0); ; measure.Must(sleep(ctx, idlePeriod)) {
		now := s.cpuTime()
		if now-before < idleCPU {
			return
		}
		before = now
	}
}

// noteLoad records the current one-minute load average (proc_loadavg(5)).
func (r *managedResult) noteLoad() {
	b := measure.Get(os.ReadFile("/proc/loadavg"))
	r.busiest = max(r.busiest, measure.Get(strconv.ParseFloat(strings.Fields(string(b))[0], 64)))
}

// String returns a table that compares the manager with the client.
func (r *managedResult) String() string {
	t := markdown.Table{{"volumes of each pod", "direction", "manager: p50", "max", "manager's CPU", "driver's CPU", "client: p50", "max", "driver's CPU", "p50 ratio"}}
	for _, shape := range shapes {
		for _, up := range []bool{true, false} {
			a, b := r.turns[managedKey{shape, byManager, up}], r.turns[managedKey{shape, byClient, up}]
			t.Row(shape.String(), direction(up), millis(a.wall.P50()), millis(a.wall.At(100)), millis(a.manager.P50()), millis(a.driver.P50()),
				millis(b.wall.P50()), millis(b.wall.At(100)), millis(b.driver.P50()), times(a.wall.slower(&b.wall)))
		}
	}
	turns := r.turns[managedKey{shapes[0], byManager, true}]
	return fmt.Sprintf("### %d pods through the volume manager\n\nEach row is measured %d times, in turns with a client that calls the driver directly. The load of the machine was at most %.0f.\n\n%s",
		r.pods, len(turns.wall.Durations), r.busiest, t.Text(true))
}

// direction returns the text of managedKey.up in tables.
func direction(up bool) string {
	if up {
		return "up"
	}
	return "down"
}
