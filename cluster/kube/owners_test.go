package kube_test

import (
	"context"
	"fmt"
	"maps"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/trivet-csi/trivet/cluster/kube"
)

const ownersPath = "/api/v1/namespaces/" + namespace + "/configmaps/trivet-pools"

// ownersOf returns the record of a replica of the controller.
func ownersOf(t *testing.T, c *cluster) (o *kube.PoolOwners, stop func()) {
	t.Helper()
	o = kube.NewPoolOwners(namespace, "trivet-pools")
	_, stop = start(t, func(ctx context.Context) { o.Run(ctx, user{cluster: c}.connect) })
	return o, stop
}

func record(t *testing.T, o *kube.PoolOwners, pool, node string) {
	t.Helper()
	if err := o.Record(t.Context(), map[string]string{pool: node}); err != nil {
		t.Fatal(err)
	}
}

func knows(t *testing.T, o *kube.PoolOwners, want map[string]string) {
	t.Helper()
	synctest.Wait()
	if got := o.Known(); !maps.Equal(got, want) {
		t.Errorf("known is %v, want %v", got, want)
	}
}

// TestPoolOwners: entries are kept until an administrator changes them, also when the controller restarts.
func TestPoolOwners(t *testing.T) {
	bubble(t, func(t *testing.T, c *cluster) {
		o, stop := ownersOf(t, c)
		record(t, o, "disk.0", "a")
		record(t, o, "disk.1", "b")
		record(t, o, "disk.0", "impostor")
		knows(t, o, map[string]string{"disk.0": "a", "disk.1": "b"})
		stop()
		o, _ = ownersOf(t, c)
		record(t, o, "disk.1", "impostor")
		knows(t, o, map[string]string{"disk.0": "a", "disk.1": "b"})
		c.put(ownersPath, object{"data": object{"disk.0": "c"}})
		knows(t, o, map[string]string{"disk.0": "c"})
	})
}

// TestPoolOwnersOfTwo: if two replicas record one pool concurrently, the first entry is kept.
func TestPoolOwnersOfTwo(t *testing.T) {
	for name, before := range map[string]object{"first entry": nil, "further entry": {"data": object{"disk.9": "z"}}} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T, c *cluster) {
				want := map[string]string{"disk.0": "a", "disk.1": "b"}
				call := http.MethodPost
				if before != nil {
					c.put(ownersPath, before)
					want["disk.9"], call = "z", http.MethodPatch
				}
				one, _ := ownersOf(t, c)
				two, _ := ownersOf(t, c)
				synctest.Wait()
				c.before[call+" configmaps"] = func() { record(t, one, "disk.0", "a") }
				if err := two.Record(t.Context(), map[string]string{"disk.0": "b", "disk.1": "b"}); err != nil {
					t.Fatal(err)
				}
				knows(t, one, want)
				knows(t, two, want)
			})
		})
	}
}

// TestPoolOwnersAway: while the API server does not answer, no entry is added, and Known returns the last
// entries read.
func TestPoolOwnersAway(t *testing.T) {
	bubble(t, func(t *testing.T, c *cluster) {
		c.put(ownersPath, object{"data": object{"disk.0": "a"}})
		o, _ := ownersOf(t, c)
		knows(t, o, map[string]string{"disk.0": "a"})
		c.setUnreachable(true)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if err := o.Record(ctx, map[string]string{"disk.1": "b"}); err == nil {
			t.Error("the owner was recorded")
		}
		knows(t, o, map[string]string{"disk.0": "a"})
		late, _ := ownersOf(t, c)
		if err := late.Record(ctx, map[string]string{"disk.0": "impostor"}); err == nil || !strings.Contains(err.Error(), "check that the API server is reachable") {
			t.Errorf("before the first read: %v", err)
		}
		c.setUnreachable(false)
		record(t, o, "disk.1", "b")
		record(t, late, "disk.0", "impostor") // it waits for the first read
		knows(t, late, map[string]string{"disk.0": "a", "disk.1": "b"})
	})
}

// TestPoolOwnersRefused: Record returns the refusal of the API server, and does not retry.
func TestPoolOwnersRefused(t *testing.T) {
	bubble(t, func(t *testing.T, c *cluster) {
		c.fail["POST configmaps"] = []int{http.StatusForbidden}
		o, _ := ownersOf(t, c)
		if err := o.Record(t.Context(), map[string]string{"disk.0": "a"}); err == nil || !strings.Contains(err.Error(), "configmaps/trivet-pools") {
			t.Errorf("%v", err)
		}
		record(t, o, "disk.0", "a")
	})
}

// TestPoolOwnersOfMany: 500 nodes with names of 63 bytes and four pools each are recorded by few writes, and
// their entries are much smaller than the 1 MiB of a ConfigMap.
func TestPoolOwnersOfMany(t *testing.T) {
	bubble(t, func(t *testing.T, c *cluster) {
		o, _ := ownersOf(t, c)
		owners := map[string]string{}
		for i := range 2000 {
			owners[fmt.Sprintf("%s.%08x", strings.Repeat("p", 40), i)] = fmt.Sprintf("%063d", i/4)
		}
		if err := o.Record(t.Context(), owners); err != nil {
			t.Fatal(err)
		}
		knows(t, o, owners)
		size := 0
		for pool, node := range owners {
			size += len(pool) + len(node)
		}
		if n := c.called("POST configmaps") + c.called("PATCH configmaps"); n > 2 || size > 256<<10 {
			t.Errorf("%d writes, %d bytes", n, size)
		}
	})
}

// TestMoveCommand: a shell can run the command.
func TestMoveCommand(t *testing.T) {
	o := kube.NewPoolOwners(namespace, "trivet-pools")
	want := `kubectl -n trivet-system patch configmap trivet-pools --type=merge -p '{"data":{"disk.01234567":"b2"}}'`
	if got := o.MoveCommand("disk.01234567", "b2"); got != want {
		t.Errorf("%s", got)
	}
}
