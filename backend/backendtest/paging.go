package backendtest

import (
	"fmt"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/trivet-csi/trivet/driver"
	"github.com/trivet-csi/trivet/internal/retry"
)

// await waits until a condition holds.
func await(tb testing.TB, what string, holds func() bool) {
	tb.Helper()
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(2 * time.Minute); !holds(); <-tick.C {
		if time.Now().After(deadline) {
			tb.Fatalf("timed out waiting for %s", what)
		}
	}
}

// Eventually waits until f returns no error.
func Eventually(tb testing.TB, f func() error) {
	tb.Helper()
	err := retry.For(tb.Context(), 2*time.Minute, func() (again bool, err error) {
		err = f()
		return err != nil, err
	})
	if err != nil {
		tb.Fatalf("timed out: %v", err)
	}
}

// testPaging lists 250 volumes in pages while volumes are created and deleted. Each of the 250 volumes is listed
// once, even if the last volume of a page is deleted before the next page.
func testPaging(t *testing.T, _ *Driver, kind Kind) {
	d := kind.start(t, "20G", func(o *driver.Options) { o.Config.Pools[0].Overcommit = 100 })
	c := kind.Capability(multiWriter)
	ids := map[string]string{}
	for i := range 250 {
		name := fmt.Sprintf("v-%03d", i)
		ids[name] = volumeNamed(t, d, name, kind, c)
	}
	var seen []string
	token, page := "", 0
	for {
		resp, err := d.Control.ListVolumes(t.Context(), &csi.ListVolumesRequest{MaxEntries: 20, StartingToken: token})
		must(t, err)
		if len(resp.GetEntries()) > 20 {
			t.Fatalf("got a page of %d entries, want at most 20", len(resp.GetEntries()))
		}
		for _, e := range resp.GetEntries() {
			seen = append(seen, e.GetVolume().GetVolumeId())
		}
		page++
		// Delete the last volume of this page, and create one before and one after it.
		last := resp.GetEntries()[len(resp.GetEntries())-1].GetVolume().GetVolumeId()
		_, err = d.Control.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: last})
		must(t, err)
		volumeNamed(t, d, fmt.Sprintf("a-%03d", page), kind, c)
		volumeNamed(t, d, fmt.Sprintf("z-%03d", page), kind, c)
		if token = resp.GetNextToken(); token == "" {
			break
		}
	}
	for name, id := range ids {
		if n := count(seen, id); n != 1 {
			t.Errorf("volume %s was listed %d times, want once", name, n)
		}
	}
	if page < 13 {
		t.Errorf("got %d pages, want at least 13", page)
	}
	good, err := d.Control.ListVolumes(t.Context(), &csi.ListVolumesRequest{MaxEntries: 1})
	must(t, err)
	for _, bad := range []string{"nonsense", "loop:", "loop:default.00000000:v-001", "disk:x:y", good.GetNextToken() + "\x00", "x" + good.GetNextToken()} {
		_, err := d.Control.ListVolumes(t.Context(), &csi.ListVolumesRequest{StartingToken: bad})
		wantCode(t, err, codes.Aborted, "starting_token")
	}
	_, err = d.Control.ListVolumes(t.Context(), &csi.ListVolumesRequest{MaxEntries: -1})
	wantCode(t, err, codes.InvalidArgument, "max_entries")
}

// count returns how often a string is in a list.
func count(in []string, what string) int {
	n := 0
	for _, s := range in {
		if s == what {
			n++
		}
	}
	return n
}
