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

	"github.com/trivet-csi/trivet/identity"
	"github.com/trivet-csi/trivet/pool"
)

// shelves are three nodes with four pools, and volumes in them.
func shelves(t *testing.T) (w *world, ids []string) {
	t.Helper()
	w = newWorld(t)
	for node, pools := range map[string][]pool.Config{
		"a": {w.pool("p", "a", "1Gi"), w.pool("q", "q", "1Gi")}, "b": {w.pool("r", "r", "1Gi")}, "c": {w.pool("s", "empty", "1Gi")},
	} {
		w.start(node, pools...)
	}
	w.know()
	for where, n := range map[[2]string]int{{"a", "p"}: 3, {"a", "q"}: 1, {"b", "r"}: 4} {
		for i := range n {
			ids = append(ids, w.make(where[0], fmt.Sprintf("%s-%d", where[1], i), inPool(where[1])))
		}
	}
	return w, ids
}

func sorted(ids []string) []string { return slices.Sorted(slices.Values(ids)) }

// TestPages: pages of every size have each volume once, and in the same order.
func TestPages(t *testing.T) {
	w, ids := shelves(t)
	whole, err := w.list(0)
	must(t, err)
	if !slices.Equal(sorted(whole), sorted(ids)) {
		t.Fatalf("listed are %q, made were %q", whole, ids)
	}
	for size := range int32(len(ids) + 2) {
		if got, err := w.list(size); err != nil || !slices.Equal(got, whole) {
			t.Errorf("by pages of %d: %q, %v", size, got, err)
		}
	}
	for _, bad := range []string{"nonsense", "loop:", "loop:p:v-0", "disk:p.01234567:v-0", whole[0] + "\x00", "x" + whole[0], "pool " + whole[0]} {
		_, err := w.ListVolumes(t.Context(), &csi.ListVolumesRequest{StartingToken: bad})
		wantCode(t, err, codes.Aborted, "starting_token")
		_, err = w.ControllerListVolumeHealth(t.Context(), &csi.ControllerListVolumeHealthRequest{StartingToken: bad})
		wantCode(t, err, codes.Aborted, "starting_token")
	}
	_, err = w.ListVolumes(t.Context(), &csi.ListVolumesRequest{MaxEntries: -1})
	wantCode(t, err, codes.InvalidArgument, "max_entries")
}

// TestPagesOfWhatChanges: what is there all the time is listed once, whatever comes
// and goes between the pages.
func TestPagesOfWhatChanges(t *testing.T) {
	w, ids := shelves(t)
	var seen []string
	for page, token := 0, ""; ; page++ {
		resp, err := w.ListVolumes(t.Context(), &csi.ListVolumesRequest{MaxEntries: 1, StartingToken: token})
		must(t, err)
		for _, e := range resp.GetEntries() {
			seen = append(seen, e.GetVolume().GetVolumeId())
		}
		if token = resp.GetNextToken(); token == "" {
			break
		}
		// The one that the token names goes, and others come before and after it.
		_, err = w.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: token})
		must(t, err)
		if page < 4 {
			w.make("a", fmt.Sprintf("a-%d", page), inPool("p"))
			w.make("b", fmt.Sprintf("z-%d", page), inPool("r"))
		}
	}
	for _, id := range ids {
		if n := len(slices.DeleteFunc(slices.Clone(seen), func(s string) bool { return s != id })); n != 1 {
			t.Errorf("%s was listed %d times", id, n)
		}
	}
	if !slices.Equal(slices.Compact(sorted(seen)), sorted(seen)) {
		t.Errorf("twice in %q", seen)
	}
}

// TestPagesOfMovedPool: pools keep their places when they move to another node
// between the pages.
func TestPagesOfMovedPool(t *testing.T) {
	w := newWorld(t)
	a := w.start("a", w.pool("p", "p", "1Gi"), w.pool("q", "q", "1Gi"))
	b := w.start("b", w.pool("r", "r", "1Gi"))
	w.know()
	var ids []string
	for i := range 3 {
		ids = append(ids, w.make("a", fmt.Sprintf("p-%d", i), inPool("p")), w.make("a", fmt.Sprintf("q-%d", i), inPool("q")), w.make("b", fmt.Sprintf("r-%d", i), inPool("r")))
	}
	whole, err := w.list(0)
	must(t, err)
	var seen []string
	for page, token := 0, ""; ; page++ {
		if page == 4 {
			a.Stop(t)
			w.forget("a")
			b.Options.Config.Pools = append(b.Options.Config.Pools, a.Options.Config.Pools...)
			b.Restart(t)
			w.move("a", "b")
			w.know()
		}
		resp, err := w.ListVolumes(t.Context(), &csi.ListVolumesRequest{MaxEntries: 1, StartingToken: token})
		must(t, err)
		for _, e := range resp.GetEntries() {
			seen = append(seen, e.GetVolume().GetVolumeId())
		}
		if token = resp.GetNextToken(); token == "" {
			break
		}
	}
	if !slices.Equal(seen, whole) || len(whole) != len(ids) {
		t.Errorf("listed were %q, there are %q", seen, whole)
	}
}

// TestIncompleteList is an error that names who is missing.
func TestIncompleteList(t *testing.T) {
	w, _ := shelves(t)
	w.hosts["late"] = ""
	w.tell()
	for range 2 {
		_, err := w.list(1)
		wantCode(t, err, codes.Unavailable, "incomplete", `"late"`)
		_, err = w.ControllerListVolumeHealth(t.Context(), &csi.ControllerListVolumeHealthRequest{})
		wantCode(t, err, codes.Unavailable, "incomplete", `"late"`)
	}
	d := w.start("late", w.pool("late", "late", "1Gi"))
	w.know()
	id := w.make("late", "v", inPool("late"))
	if ids, err := w.list(1); err != nil || !slices.Contains(ids, id) {
		t.Errorf("%q, %v", ids, err)
	}
	d.Stop(t) // whether or not that is noticed yet
	_, err := w.list(1)
	wantCode(t, err, codes.Unavailable, `"late"`)
}

// TestHealthList has the volumes that something is wrong with, of all nodes, by pages.
func TestHealthList(t *testing.T) {
	w, _ := shelves(t)
	for _, image := range []string{"a/volumes/p-0", "a/volumes/p-2", "r/volumes/r-3"} {
		must(t, os.Remove(filepath.Join(w.dir, image, "image")))
	}
	for size := range int32(5) {
		var got []string
		for token := ""; ; {
			resp, err := w.ControllerListVolumeHealth(t.Context(), &csi.ControllerListVolumeHealthRequest{MaxEntries: size, StartingToken: token})
			must(t, err)
			for _, e := range resp.GetEntries() {
				got = append(got, e.GetVolumeId())
				one, err := w.ControllerGetVolumeHealth(t.Context(), &csi.ControllerGetVolumeHealthRequest{VolumeId: e.GetVolumeId()})
				if err != nil || one.GetVolumeHealth().String() != e.String() {
					t.Errorf("alone it is %v, %v; in the list %v", one, err, e)
				}
			}
			if token = resp.GetNextToken(); token == "" {
				break
			}
		}
		if len(got) != 3 || len(slices.Compact(sorted(got))) != 3 {
			t.Errorf("by pages of %d: %q", size, got)
		}
	}
}

// TestPoolOpenedLater: a list does not stay incomplete until the next time that all
// nodes are asked.
func TestPoolOpenedLater(t *testing.T) {
	w := newWorld(t)
	liar := w.lie()
	w.know()
	address := w.hosts["b"]
	w.forget("b")
	liar.say(func() { liar.manifest = identity.Manifest(map[string]string{"default": ""}) })
	liar.say(func() { liar.asked = 0 })
	w.hosts["b"] = address
	w.tell()
	again := false // besides the first list, and when the connection was there
	awaitWithin(t, 10*time.Second, "the pool to be asked for again", func() bool {
		_, err := w.list(0)
		liar.say(func() { again = liar.asked > 2 })
		return again && err != nil && strings.Contains(err.Error(), `not open on "b"`)
	})
	liar.say(func() { liar.manifest = identity.Manifest(map[string]string{"default": own.PoolUUID}) })
	awaitWithin(t, 10*time.Second, "the list", func() bool { _, err := w.list(0); return err == nil })
}
