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

// The two ways of setting up volumes: the volume manager, or a client that makes the driver's
// calls itself, for all volumes at once and for each volume in order.
const (
	byManager = "manager"
	byClient  = "client"
)

// turns has the times of each way, and the CPU time of both processes.
type turns struct{ wall, driver, manager sample }

type managedKey struct {
	shape podShape
	who   string
	up    bool
}

// managedResult has the times of setting up and tearing down the volumes of pods.
type managedResult struct {
	pods  int
	turns map[managedKey]*turns
	// busiest is the largest load average of one minute during the measurement.
	busiest float64
}

// managed is the driver and the volume manager above it.
type managed struct {
	ground  *ground
	driver  *contender
	manager *manager
	result  *managedResult
}

func measureManaged(ctx context.Context, g *ground, o options, driver *contender, m *manager) *managedResult {
	r := &managedResult{pods: 2, turns: map[managedKey]*turns{}}
	both := &managed{g, driver, m, r}
	order := []string{byManager, byClient}
	both.round(ctx, "warm", order)
	r.pods, r.turns = o.pods, map[managedKey]*turns{}
	for n := range 2 * o.rounds {
		both.round(ctx, fmt.Sprintf("round%d", n), order)
		slices.Reverse(order)
	}
	return r
}

// round sets up and tears down all volumes once in each way.
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

// way sets up volumes, or tears them down. It returns the time of its begin.
type way func() time.Time

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

func (b *managed) throughClient(ctx context.Context, prefix string, shape podShape) (up, down way) {
	vols := newVolumes(b.ground.kubelet(byClient), prefix, b.result.pods*shape.csi, b.driver.class)
	all := slices.Repeat(b.driver.clients[:1], len(vols))
	through := func(calls ...call) way {
		return func() time.Time {
			start := time.Now()
			forAll(ctx, all, inTurn(calls...), vols)
			return start
		}
	}
	return through(create, controllerPublish, stage, publish), through(unpublish, unstage, controllerUnpublish, remove)
}

// inTurn makes several calls for a volume, one after the other.
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

// turn measures one way. The work of the processes after it counts only as CPU time.
func (b *managed) turn(ctx context.Context, key managedKey, one way) {
	b.ground.Settle()
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

// calm is how long an idle process uses no CPU time, except to check connections.
const (
	calm  = 300 * time.Millisecond
	still = time.Millisecond
)

// awaitRest waits until the process is idle.
func (s *server) awaitRest(ctx context.Context) {
	for before := time.Duration(0); ; measure.Must(sleep(ctx, calm)) {
		now := s.cpuTime()
		if now-before < still {
			return
		}
		before = now
	}
}

// noteLoad reads proc_loadavg(5).
func (r *managedResult) noteLoad() {
	b := measure.Get(os.ReadFile("/proc/loadavg"))
	r.busiest = max(r.busiest, measure.Get(strconv.ParseFloat(strings.Fields(string(b))[0], 64)))
}

// String shows the manager beside the client.
func (r *managedResult) String() string {
	t := markdown.Table{{"volumes of each pod", "all", "p50", "most", "CPU", "driver's", "client: p50", "most", "driver's CPU", "p50 ratio"}}
	for _, shape := range shapes {
		for _, up := range []bool{true, false} {
			a, b := r.turns[managedKey{shape, byManager, up}], r.turns[managedKey{shape, byClient, up}]
			t.Row(shape.String(), direction(up), millis(a.wall.P50()), millis(a.wall.At(100)), millis(a.manager.P50()), millis(a.driver.P50()),
				millis(b.wall.P50()), millis(b.wall.At(100)), millis(b.driver.P50()), times(a.wall.slower(&b.wall)))
		}
	}
	turns := r.turns[managedKey{shapes[0], byManager, true}]
	return fmt.Sprintf("### %d pods through the volume manager\n\n%d times each, the manager and a client of the driver in turns; the machine's load was %.0f at most.\n\n%s",
		r.pods, len(turns.wall.Durations), r.busiest, t.Text(true))
}

func direction(up bool) string {
	if up {
		return "up"
	}
	return "down"
}
