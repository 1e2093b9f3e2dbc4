//go:build vm

package nfs

import (
	"fmt"
	"strconv"
	"sync"
	"testing"

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

// testSameVolumes: two controllers create and delete the same volumes at the same time.
func testSameVolumes(t *testing.T, p pair) {
	const n = 8
	ids := make([][n]string, 2)
	p.both(func(i int, m *machine) {
		for k := range n {
			ids[i][k] = m.createAgain(t, pool, "same-"+strconv.Itoa(k))
		}
	})
	if ids[0] != ids[1] {
		t.Errorf("the controllers returned IDs %q and %q for the same names", ids[0], ids[1])
	}
	p.both(func(_ int, m *machine) {
		for k := range n {
			again(t, func() error { return m.delete(t, &vol{id: ids[0][k]}) })
		}
	})
}

// testFullPool: two controllers that fill a pool at the same time do not exceed its size.
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
		t.Errorf("the controllers created %d volumes, want %d", n, smallRoom)
	}
	// Each deletes the other's volumes.
	p.both(func(i int, m *machine) {
		for _, id := range made[1-i] {
			again(t, func() error { return m.delete(t, &vol{id: id}) })
		}
	})
	// One of them fills the pool again, as soon as the other has emptied its trash.
	var refill []*vol
	for k := range smallRoom {
		refill = append(refill, &vol{id: p.first.createWithRoom(t, "small", "again-"+strconv.Itoa(k))})
	}
	for _, v := range refill {
		must(t, p.second.delete(t, v))
	}
}

// createWithRoom creates a directory volume when there is room.
func (m *machine) createWithRoom(t *testing.T, pool, name string) (id string) {
	t.Helper()
	err := retry.For(t.Context(), patience, func() (bool, error) {
		if id = m.createAgain(t, pool, name); id == "" {
			return true, fmt.Errorf("pool %s has no room for %s", pool, name)
		}
		return false, nil
	})
	must(t, err)
	return id
}

// both calls a function for both nodes at the same time.
func (p pair) both(do func(i int, m *machine)) {
	var all sync.WaitGroup
	for i, m := range []*machine{p.first, p.second} {
		all.Go(func() { do(i, m) })
	}
	all.Wait()
}

// createAgain creates a directory volume; the ID is empty if there is no room.
func (m *machine) createAgain(t *testing.T, pool, name string) (id string) {
	again(t, func() error {
		v, err := m.tryCreate(t, name, mib, filesystem("", manyNodes), directoryIn(pool))
		id = v.id
		if code := status.Code(err); code == codes.ResourceExhausted || code == codes.OutOfRange {
			return nil
		}
		return err
	})
	return id
}

// again repeats a call that conflicts with another, as orchestrators do.
func again(t *testing.T, call func() error) {
	err := retry.For(t.Context(), patience, func() (bool, error) {
		err := call()
		code := status.Code(err)
		return code == codes.Aborted || code == codes.Unavailable, err
	})
	if err != nil {
		t.Error(err)
	}
}
