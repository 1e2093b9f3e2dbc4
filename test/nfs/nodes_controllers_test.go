//go:build vm

package nfs

import (
	"context"
	"fmt"
	"strconv"
	"sync"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/trivet-csi/trivet/internal/retry"
	"github.com/trivet-csi/trivet/internal/testenv/nfsd"
)

// smallPool has room for a number of directories of 1 MiB.
func smallPool(s *nfsd.Server, export string) string {
	return fmt.Sprintf("- name: small\n  size: %dMi\n  reserve: 0%%\n  nfs: {server: %s, export: %s, init: true}\n", smallRoom, s.Address(), export)
}

const smallRoom = 8

// Two controllers that make and delete the same volumes at once agree.
func testSameVolumes(t *testing.T, p pair) {
	const n = 8
	ids := make([][n]string, 2)
	p.both(func(i int, m *machine) {
		for k := range n {
			ids[i][k] = m.createAgain(t, pool, "same-"+strconv.Itoa(k))
		}
	})
	if ids[0] != ids[1] {
		t.Errorf("the controllers made %q and %q of the same names", ids[0], ids[1])
	}
	p.both(func(_ int, m *machine) {
		for k := range n {
			again(t, func() error { return m.delete(t, &vol{id: ids[0][k]}) })
		}
	})
}

// Two controllers that fill a pool at once promise no more than there is.
func testFullPool(t *testing.T, p pair) {
	made := make([][]string, 2)
	p.both(func(i int, m *machine) {
		for k := range smallRoom {
			if id := m.createAgain(t, "small", fmt.Sprintf("%s-%d", m.name, k)); id != "" {
				made[i] = append(made[i], id)
			}
		}
	})
	if n := len(made[0]) + len(made[1]); n != smallRoom {
		t.Errorf("%d volumes were made where there is room for %d", n, smallRoom)
	}
	// Each deletes what the other made.
	p.both(func(i int, m *machine) {
		for _, id := range made[1-i] {
			again(t, func() error { return m.delete(t, &vol{id: id}) })
		}
	})
	p.both(func(_ int, m *machine) {
		if err := m.awaitRoom(smallRoom * mib); err != nil {
			t.Errorf("%s, with an empty pool: %v", m.name, err)
		}
	})
}

// awaitRoom waits until the small pool has that many bytes: a controller looks now and
// then for what others gave back.
func (m *machine) awaitRoom(want int64) error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	return retry.For(ctx, patience, func() (bool, error) {
		resp, err := m.control.GetCapacity(ctx, &csi.GetCapacityRequest{Parameters: directoryIn("small")})
		if free := resp.GetAvailableCapacity(); err == nil && free != want {
			err = fmt.Errorf("there is room for %d bytes, not %d", free, want)
		}
		return err != nil, err
	})
}

// both does something on both nodes at once.
func (p pair) both(do func(i int, m *machine)) {
	var all sync.WaitGroup
	for i, m := range []*machine{p.first, p.second} {
		all.Go(func() { do(i, m) })
	}
	all.Wait()
}

func directoryIn(pool string) map[string]string {
	return map[string]string{"backend": "nfs", "pool": pool}
}

// createAgain makes a directory volume; its ID is empty if there is no room.
func (m *machine) createAgain(t *testing.T, pool, name string) (id string) {
	again(t, func() error {
		resp, err := m.control.CreateVolume(deadline(t), &csi.CreateVolumeRequest{
			Name: name, CapacityRange: &csi.CapacityRange{RequiredBytes: mib},
			VolumeCapabilities: []*csi.VolumeCapability{filesystem("", manyNodes)}, Parameters: directoryIn(pool),
		})
		id = resp.GetVolume().GetVolumeId()
		if code := status.Code(err); code == codes.ResourceExhausted || code == codes.OutOfRange {
			return nil
		}
		return err
	})
	return id
}

// again repeats a call that is in the way of another, as orchestrators do.
func again(t *testing.T, call func() error) {
	var err error
	for range 20 {
		if err = call(); status.Code(err) != codes.Aborted {
			break
		}
	}
	if err != nil {
		t.Error(err)
	}
}
