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

// invalidTokens returns tokens that lists refuse. id is the ID of an entry.
func invalidTokens(id string) []string {
	return []string{"nonsense", "loop:", "loop:p:v-0", "disk:p.01234567:v-0", id + "\x00", "x" + id, "pool " + id}
}

// fourPools returns a test cluster with three nodes and four pools, and the IDs of its volumes.
func fourPools(t *testing.T) (w *testCluster, ids []string) {
	t.Helper()
	w = newEmptyCluster(t)
	w.start("a", w.pool("p", "p", "1Gi"), w.pool("q", "q", "1Gi"))
	w.start("b", w.pool("r", "r", "1Gi"))
	w.start("c", w.pool("s", "empty", "1Gi"))
	w.updateHostsAndWait()
	for at, n := range map[struct{ node, pool string }]int{{"a", "p"}: 3, {"a", "q"}: 1, {"b", "r"}: 4} {
		for i := range n {
			ids = append(ids, w.mustCreateOn(at.node, fmt.Sprintf("%s-%d", at.pool, i), inPool(at.pool)))
		}
	}
	return w, ids
}

// TestPages: pages of every size contain each volume once and in the same order.
func TestPages(t *testing.T) {
	w, ids := fourPools(t)
	all, err := w.list(0)
	must(t, err)
	if !slices.Equal(sorted(all), sorted(ids)) {
		t.Fatalf("got volumes %q, want %q", all, ids)
	}
	for size := range int32(len(ids) + 2) {
		if got, err := w.list(size); err != nil || !slices.Equal(got, all) {
			t.Errorf("pages of %d: got %q, %v, want %q", size, got, err, all)
		}
	}
	for _, token := range invalidTokens(all[0]) {
		wantCode(t, w.send(&csi.ListVolumesRequest{StartingToken: token}), codes.Aborted, "starting_token")
		wantCode(t, w.send(&csi.ControllerListVolumeHealthRequest{StartingToken: token}), codes.Aborted, "starting_token")
	}
	wantCode(t, w.send(&csi.ListVolumesRequest{MaxEntries: -1}), codes.InvalidArgument, "max_entries")
}

// TestPagesWithChanges: a volume that exists all the time is listed once, although other volumes are created and
// deleted between the pages.
func TestPagesWithChanges(t *testing.T) {
	w, ids := fourPools(t)
	seen, err := listAll(t.Context(), w, relay.Volumes, 1, func(page int, token string) {
		must(t, w.delete(token)) // the token is the ID of the last listed volume
		if page < 4 {            // the first new volume precedes the next page, the second follows it
			w.mustCreateOn("a", fmt.Sprintf("a-%d", page), inPool("p"))
			w.mustCreateOn("b", fmt.Sprintf("z-%d", page), inPool("r"))
		}
	})
	must(t, err)
	for _, id := range ids {
		if !slices.Contains(seen, id) {
			t.Errorf("volume %s was not listed", id)
		}
	}
	if !slices.Equal(slices.Compact(sorted(seen)), sorted(seen)) {
		t.Errorf("got duplicates in %q", seen)
	}
}

// TestPagesOfMovedPool: the order of a list does not change when pools move to another node between pages.
func TestPagesOfMovedPool(t *testing.T) {
	w, ids := fourPools(t)
	all, err := w.list(0)
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
	if err != nil || !slices.Equal(seen, all) || len(all) != len(ids) {
		t.Errorf("got volumes %q, %v, want %q", seen, err, all)
	}
}

// TestIncompleteList: while a node does not answer, a list fails with an error that names the node.
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
		t.Errorf("got volumes %q, %v, want also %s", ids, err, id)
	}
	w.drivers["late"].Stop(t) // the router may still be connected
	wantCode(t, w.listError(), codes.Unavailable, `"late"`)
}

// TestHealthList: pages of every size contain each unhealthy volume of all nodes once.
func TestHealthList(t *testing.T) {
	w, _ := fourPools(t)
	for _, image := range []string{"p/volumes/p-0", "p/volumes/p-2", "r/volumes/r-3"} {
		must(t, os.Remove(filepath.Join(w.dir, image, "image")))
	}
	for size := range int32(5) {
		if ids, err := listAll(t.Context(), w, relay.VolumeHealths, size); err != nil || len(ids) != 3 || len(slices.Compact(sorted(ids))) != 3 {
			t.Errorf("pages of %d: got %q, %v, want 3 volumes", size, ids, err)
		}
	}
	list, err := w.ControllerListVolumeHealth(t.Context(), &csi.ControllerListVolumeHealthRequest{})
	must(t, err)
	for _, e := range list.GetEntries() {
		got, err := w.ControllerGetVolumeHealth(t.Context(), &csi.ControllerGetVolumeHealthRequest{VolumeId: e.GetVolumeId()})
		if err != nil || got.GetVolumeHealth().String() != e.String() {
			t.Errorf("ControllerGetVolumeHealth: got %v, %v, want the listed entry %v", got, err, e)
		}
	}
}

// TestPoolOpenedLater: a list requests closed pools again, and does not wait for the next periodic request.
func TestPoolOpenedLater(t *testing.T) {
	w := newEmptyCluster(t)
	b := w.fake()
	w.updateHostsAndWait()
	w.removeHosts("b")
	b.announce(map[string]string{"default": ""})
	b.refuse(nil) // clears the recorded calls
	w.addHost("b")

	awaitWithin(t, 10*time.Second, "another request for the pools", func() bool {
		err := w.listError()
		_, manifests := b.called()
		// The connection makes one request and the first list makes another.
		return manifests > 2 && err != nil && strings.Contains(err.Error(), `not open on "b"`)
	})
	b.announce(map[string]string{"default": fakeVolume.PoolUUID})
	awaitWithin(t, 10*time.Second, "a complete list", func() bool { return w.listError() == nil })
}
