package router_test

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/trivet-csi/trivet/internal/relay"
)

// invalidTokens are refused by lists. id is an entry of the list.
func invalidTokens(id string) []string {
	return []string{"nonsense", "loop:", "loop:p:v-0", "disk:p.01234567:v-0", id + "\x00", "x" + id, "pool " + id}
}

// fourPools returns a test cluster with three nodes and four pools, and the volumes in them.
func fourPools(t *testing.T) (w *testCluster, ids []string) {
	t.Helper()
	w = newEmptyCluster(t)
	w.start("a", w.pool("p", "p", "1Gi"), w.pool("q", "q", "1Gi"))
	w.start("b", w.pool("r", "r", "1Gi"))
	w.start("c", w.pool("s", "empty", "1Gi"))
	w.updateHostsAndWait()
	for where, n := range map[[2]string]int{{"a", "p"}: 3, {"a", "q"}: 1, {"b", "r"}: 4} {
		for i := range n {
			ids = append(ids, w.mustCreateOn(where[0], fmt.Sprintf("%s-%d", where[1], i), inPool(where[1])))
		}
	}
	return w, ids
}

// TestPages: pages of every size contain each volume once and in the same order.
func TestPages(t *testing.T) {
	w, ids := fourPools(t)
	whole, err := w.list(0)
	must(t, err)
	if !slices.Equal(sorted(whole), sorted(ids)) {
		t.Fatalf("listed %q, want %q", whole, ids)
	}
	for size := range int32(len(ids) + 2) {
		if got, err := w.list(size); err != nil || !slices.Equal(got, whole) {
			t.Errorf("pages of %d: %q, %v", size, got, err)
		}
	}
	for _, token := range invalidTokens(whole[0]) {
		wantCode(t, w.send(&csi.ListVolumesRequest{StartingToken: token}), codes.Aborted, "starting_token")
		wantCode(t, w.send(&csi.ControllerListVolumeHealthRequest{StartingToken: token}), codes.Aborted, "starting_token")
	}
	wantCode(t, w.send(&csi.ListVolumesRequest{MaxEntries: -1}), codes.InvalidArgument, "max_entries")
}

// TestPagesWithChanges: a volume that exists all the time is listed once, whatever is created
// and deleted between the pages.
func TestPagesWithChanges(t *testing.T) {
	w, ids := fourPools(t)
	seen, err := listAll(t.Context(), w, relay.Volumes, 1, func(page int, token string) {
		must(t, w.delete(token)) // the last one listed
		if page < 4 {            // one is before the next page, one is after it
			w.mustCreateOn("a", fmt.Sprintf("a-%d", page), inPool("p"))
			w.mustCreateOn("b", fmt.Sprintf("z-%d", page), inPool("r"))
		}
	})
	must(t, err)
	for _, id := range ids {
		if !slices.Contains(seen, id) {
			t.Errorf("%s was not listed", id)
		}
	}
	if !slices.Equal(slices.Compact(sorted(seen)), sorted(seen)) {
		t.Errorf("%q contains duplicates", seen)
	}
}

// TestPagesOfMovedPool: pools keep their places in the order when they move to another node between
// the pages.
func TestPagesOfMovedPool(t *testing.T) {
	w, ids := fourPools(t)
	whole, err := w.list(0)
	must(t, err)
	seen, err := listAll(t.Context(), w, relay.Volumes, 1, func(page int, _ string) {
		if page == 3 {
			a := w.drivers["a"].Options.Config.Pools
			w.drivers["a"].Stop(t)
			w.removeHosts("a")
			w.restartWith("b", append(slices.Clone(w.drivers["b"].Options.Config.Pools), a...)...)
			w.replaceOwner("a", "b")
			w.updateHostsAndWait()
		}
	})
	if err != nil || !slices.Equal(seen, whole) || len(whole) != len(ids) {
		t.Errorf("listed %q, %v, want %q", seen, err, whole)
	}
}

// TestIncompleteList: a list without a node is an error that names the node.
func TestIncompleteList(t *testing.T) {
	w, _ := fourPools(t)
	w.setHost("late", "")
	for range 2 {
		wantCode(t, w.listError(), codes.Unavailable, "incomplete", `"late"`)
		wantCode(t, w.send(&csi.ControllerListVolumeHealthRequest{}), codes.Unavailable, "incomplete", `"late"`)
	}
	w.start("late", w.pool("late", "late", "1Gi"))
	w.updateHostsAndWait()
	id := w.mustCreateOn("late", "v", inPool("late"))
	if ids, err := w.list(1); err != nil || !slices.Contains(ids, id) {
		t.Errorf("listed %q, %v", ids, err)
	}
	w.drivers["late"].Stop(t) // the router may not have noticed yet
	wantCode(t, w.listError(), codes.Unavailable, `"late"`)
}

// TestHealthList lists the unhealthy volumes of all nodes by pages.
func TestHealthList(t *testing.T) {
	w, _ := fourPools(t)
	for _, image := range []string{"p/volumes/p-0", "p/volumes/p-2", "r/volumes/r-3"} {
		must(t, os.Remove(filepath.Join(w.dir, image, "image")))
	}
	for size := range int32(5) {
		if ids, err := listAll(t.Context(), w, relay.VolumeHealths, size); err != nil || len(ids) != 3 || len(slices.Compact(sorted(ids))) != 3 {
			t.Errorf("pages of %d: %q, %v", size, ids, err)
		}
	}
	list, err := w.ControllerListVolumeHealth(t.Context(), &csi.ControllerListVolumeHealthRequest{})
	must(t, err)
	for _, e := range list.GetEntries() {
		got, err := w.ControllerGetVolumeHealth(t.Context(), &csi.ControllerGetVolumeHealthRequest{VolumeId: e.GetVolumeId()})
		if err != nil || got.GetVolumeHealth().String() != e.String() {
			t.Errorf("listed %v, got %v, %v", e, got, err)
		}
	}
}

// TestPoolOpenedLater: a list becomes complete before the next periodic question to the nodes.
func TestPoolOpenedLater(t *testing.T) {
	w := newEmptyCluster(t)
	b := w.fake()
	w.updateHostsAndWait()
	w.removeHosts("b")
	b.announce(map[string]string{"default": ""})
	b.refuse(nil) // forgets the calls
	w.addHost("b")

	awaitWithin(t, 10*time.Second, "another question for the pools", func() bool {
		err := w.listError()
		_, manifests := b.called()
		// One is for the connection, one for the first list.
		return manifests > 2 && err != nil && strings.Contains(err.Error(), `not open on "b"`)
	})
	b.announce(map[string]string{"default": own.PoolUUID})
	awaitWithin(t, 10*time.Second, "the list", func() bool { return w.listError() == nil })
}
