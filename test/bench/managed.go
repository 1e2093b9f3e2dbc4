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

func measureManaged(ctx context.Context, g *ground, o options, driver *contender, m *manager) (*managedResult, error) {
	r := &managedResult{pods: 2, turns: map[managedKey]*turns{}}
	both := &managed{g, driver, m, r}
	order := []string{byManager, byClient}
	if err := both.round(ctx, "warm", order); err != nil {
		return nil, err
	}
	r.pods, r.turns = o.pods, map[managedKey]*turns{}
	for n := range 2 * o.rounds {
		if err := both.round(ctx, fmt.Sprintf("round%d", n), order); err != nil {
			return nil, err
		}
		slices.Reverse(order)
	}
	return r, nil
}

// round sets up and tears down all volumes once in each way.
func (b *managed) round(ctx context.Context, prefix string, order []string) error {
	for i, shape := range shapes {
		for _, who := range order {
			up, down, err := b.through(who, fmt.Sprintf("%s-%d", prefix, i), shape)
			if err != nil {
				return err
			}
			if err := b.turn(ctx, managedKey{shape, who, true}, up); err != nil {
				return err
			}
			if err := b.turn(ctx, managedKey{shape, who, false}, down); err != nil {
				return err
			}
		}
	}
	return nil
}

// way sets up volumes, or tears them down. It returns the time of its begin.
type way func(context.Context) (time.Time, error)

func (b *managed) through(who, prefix string, shape podShape) (up, down way, err error) {
	if who == byManager {
		up, down = b.throughManager(prefix, shape)
		return up, down, nil
	}
	return b.throughClient(prefix, shape)
}

func (b *managed) throughManager(prefix string, shape podShape) (up, down way) {
	pods, manifests := shape.podsOf(prefix, b.result.pods)
	up = func(ctx context.Context) (time.Time, error) {
		start, err := b.manager.put(manifests)
		if err != nil {
			return start, err
		}
		return start, b.manager.awaitPods(ctx, pods)
	}
	down = func(ctx context.Context) (time.Time, error) {
		start, err := b.manager.remove(manifests)
		if err != nil {
			return start, err
		}
		return start, b.manager.awaitGone(ctx)
	}
	return up, down
}

func (b *managed) throughClient(prefix string, shape podShape) (up, down way, err error) {
	dir, err := b.ground.kubelet(byClient)
	if err != nil {
		return nil, nil, err
	}
	vols, err := newVolumes(dir, prefix, b.result.pods*shape.csi, b.driver.class)
	if err != nil {
		return nil, nil, err
	}
	all := slices.Repeat(b.driver.clients[:1], len(vols))
	up = func(ctx context.Context) (time.Time, error) {
		start := time.Now()
		_, err := forAll(ctx, all, inTurn(create, controllerPublish, stage, publish), vols)
		return start, err
	}
	down = func(ctx context.Context) (time.Time, error) {
		start := time.Now()
		_, err := forAll(ctx, all, inTurn(unpublish, unstage, controllerUnpublish, remove), vols)
		return start, err
	}
	return up, down, nil
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
func (b *managed) turn(ctx context.Context, key managedKey, one way) error {
	if err := b.ground.settle(); err != nil {
		return err
	}
	t := b.result.turns[key]
	if t == nil {
		t = &turns{}
		b.result.turns[key] = t
	}
	driver, manager, err := b.cpu()
	if err != nil {
		return err
	}
	start, err := one(ctx)
	if err != nil {
		return err
	}
	t.wall.took = append(t.wall.took, time.Since(start))
	if err := b.driver.quiet(ctx); err != nil {
		return err
	}
	if err := b.manager.awaitRest(ctx); err != nil {
		return err
	}
	driverAfter, managerAfter, err := b.cpu()
	if err != nil {
		return err
	}
	t.driver.took = append(t.driver.took, driverAfter-driver)
	t.manager.took = append(t.manager.took, managerAfter-manager)
	return b.result.noteLoad()
}

func (b *managed) cpu() (driver, manager time.Duration, err error) {
	if driver, err = cpuTime(b.driver.cmd.Process.Pid); err != nil {
		return 0, 0, err
	}
	manager, err = cpuTime(b.manager.cmd.Process.Pid)
	return driver, manager, err
}

// calm is how long an idle process uses no CPU time, except to check connections.
const (
	calm  = 300 * time.Millisecond
	still = time.Millisecond
)

// awaitRest waits until the process is idle.
func (s *server) awaitRest(ctx context.Context) error {
	var before time.Duration
	for {
		now, err := cpuTime(s.cmd.Process.Pid)
		if err != nil || now-before < still {
			return err
		}
		before = now
		if err := sleep(ctx, calm); err != nil {
			return err
		}
	}
}

// noteLoad reads proc_loadavg(5).
func (r *managedResult) noteLoad() error {
	b, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return err
	}
	load, err := strconv.ParseFloat(strings.Fields(string(b))[0], 64)
	r.busiest = max(r.busiest, load)
	return err
}

// String shows the manager beside the client.
func (r *managedResult) String() string {
	t := markdown.Table{{"volumes of each pod", "all", "p50", "most", "CPU", "driver's", "client: p50", "most", "driver's CPU", "p50 ratio"}}
	for _, shape := range shapes {
		for _, up := range []bool{true, false} {
			a, b := r.turns[managedKey{shape, byManager, up}], r.turns[managedKey{shape, byClient, up}]
			t.Row(shape.String(), direction(up), millis(a.wall.p50()), millis(a.wall.at(100)), millis(a.manager.p50()), millis(a.driver.p50()),
				millis(b.wall.p50()), millis(b.wall.at(100)), millis(b.driver.p50()), times(a.wall.slower(&b.wall)))
		}
	}
	turns := r.turns[managedKey{shapes[0], byManager, true}]
	return fmt.Sprintf("### %d pods through the volume manager\n\n%d times each, the manager and a client of the driver in turns; the machine's load was %.0f at most.\n\n%s",
		r.pods, len(turns.wall.took), r.busiest, t.Text(true))
}

func direction(up bool) string {
	if up {
		return "up"
	}
	return "down"
}
