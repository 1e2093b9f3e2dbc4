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

// startOwners starts PoolOwners as a replica of the controller does.
func startOwners(t *testing.T, c *cluster) (o *kube.PoolOwners, stop func()) {
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

// wantKnown fails the test unless Known returns want when all goroutines are blocked.
func wantKnown(t *testing.T, o *kube.PoolOwners, want map[string]string) {
	t.Helper()
	synctest.Wait()
	if got := o.Known(); !maps.Equal(got, want) {
		t.Errorf("Known: got %v, want %v", got, want)
	}
}

// TestPoolOwners: entries are kept until an administrator changes them, also when the controller restarts.
func TestPoolOwners(t *testing.T) {
	bubble(t, func(t *testing.T, c *cluster) {
		o, stop := startOwners(t, c)
		record(t, o, "disk.0", "a")
		record(t, o, "disk.1", "b")
		record(t, o, "disk.0", "impostor")
		wantKnown(t, o, map[string]string{"disk.0": "a", "disk.1": "b"})
		stop()
		o, _ = startOwners(t, c)
		record(t, o, "disk.1", "impostor")
		wantKnown(t, o, map[string]string{"disk.0": "a", "disk.1": "b"})
		c.put(ownersPath, object{"data": object{"disk.0": "c"}})
		wantKnown(t, o, map[string]string{"disk.0": "c"})
	})
}

// TestPoolOwnersTwoReplicas: if two replicas record one pool concurrently, the first entry is kept.
func TestPoolOwnersTwoReplicas(t *testing.T) {
	for name, existing := range map[string]object{"no ConfigMap yet": nil, "existing ConfigMap": {"data": object{"disk.9": "z"}}} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T, c *cluster) {
				want := map[string]string{"disk.0": "a", "disk.1": "b"}
				call := http.MethodPost
				if existing != nil {
					c.put(ownersPath, existing)
					want["disk.9"], call = "z", http.MethodPatch
				}
				one, _ := startOwners(t, c)
				two, _ := startOwners(t, c)
				synctest.Wait()
				c.before[call+" configmaps"] = func() { record(t, one, "disk.0", "a") }
				if err := two.Record(t.Context(), map[string]string{"disk.0": "b", "disk.1": "b"}); err != nil {
					t.Fatal(err)
				}
				wantKnown(t, one, want)
				wantKnown(t, two, want)
			})
		})
	}
}

// TestPoolOwnersWithoutAPIServer: while the API server does not answer, no entry is added, and Known returns the last
// entries read.
func TestPoolOwnersWithoutAPIServer(t *testing.T) {
	bubble(t, func(t *testing.T, c *cluster) {
		c.put(ownersPath, object{"data": object{"disk.0": "a"}})
		o, _ := startOwners(t, c)
		wantKnown(t, o, map[string]string{"disk.0": "a"})
		c.setUnreachable(true)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if err := o.Record(ctx, map[string]string{"disk.1": "b"}); err == nil {
			t.Error("Record succeeded while the API server did not answer")
		}
		wantKnown(t, o, map[string]string{"disk.0": "a"})
		late, _ := startOwners(t, c)
		if err := late.Record(ctx, map[string]string{"disk.0": "impostor"}); err == nil || !strings.Contains(err.Error(), "check that the API server is reachable") {
			t.Errorf("Record before the first read: got %v, want an error with the remedy", err)
		}
		c.setUnreachable(false)
		record(t, o, "disk.1", "b")
		record(t, late, "disk.0", "impostor") // waits for the first read, which finds the entry
		wantKnown(t, late, map[string]string{"disk.0": "a", "disk.1": "b"})
	})
}

// TestPoolOwnersRefused: Record does not retry if the API server refuses the write, and returns the error.
func TestPoolOwnersRefused(t *testing.T) {
	bubble(t, func(t *testing.T, c *cluster) {
		c.fail["POST configmaps"] = []int{http.StatusForbidden}
		o, _ := startOwners(t, c)
		if err := o.Record(t.Context(), map[string]string{"disk.0": "a"}); err == nil || !strings.Contains(err.Error(), "configmaps/trivet-pools") {
			t.Errorf("got %v, want an error about configmaps/trivet-pools", err)
		}
		record(t, o, "disk.0", "a")
	})
}

// TestPoolOwnersManyNodes: at most two writes record 500 nodes with names of 63 bytes and four pools each, and
// their entries need at most 256 KiB of the 1 MiB of a ConfigMap.
func TestPoolOwnersManyNodes(t *testing.T) {
	bubble(t, func(t *testing.T, c *cluster) {
		o, _ := startOwners(t, c)
		owners := map[string]string{}
		for i := range 2000 {
			owners[fmt.Sprintf("%s.%08x", strings.Repeat("p", 40), i)] = fmt.Sprintf("%063d", i/4)
		}
		if err := o.Record(t.Context(), owners); err != nil {
			t.Fatal(err)
		}
		wantKnown(t, o, owners)
		size := 0
		for pool, node := range owners {
			size += len(pool) + len(node)
		}
		if n := c.called("POST configmaps") + c.called("PATCH configmaps"); n > 2 || size > 256<<10 {
			t.Errorf("got %d writes and %d bytes, want at most 2 and %d", n, size, 256<<10)
		}
	})
}

// TestMoveCommand: the command is quoted for a shell.
func TestMoveCommand(t *testing.T) {
	o := kube.NewPoolOwners(namespace, "trivet-pools")
	want := `kubectl -n trivet-system patch configmap trivet-pools --type=merge -p '{"data":{"disk.01234567":"b2"}}'`
	if got := o.MoveCommand("disk.01234567", "b2"); got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}
