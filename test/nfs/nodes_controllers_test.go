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

// smallPool returns the configuration of a pool with room for smallRoom directories of 1 MiB.
func smallPool(s *nfsd.Server, export string) string {
	return fmt.Sprintf("- name: small\n  size: %dMi\n  reserve: 0%%\n  nfs: {server: %s, export: %s, init: true}\n", smallRoom, s.Address(), export)
}

// smallRoom is the number of directories for which the pool of smallPool has room.
const smallRoom = 8

// testSameVolumes: two controllers create and delete the same volumes at the same time.
func testSameVolumes(t *testing.T, p pair) {
	const n = 8
	ids := make([][n]string, 2)
	p.both(func(i int, m *machine) {
		for k := range n {
			ids[i][k] = m.createUnlessFull(t, pool, "same-"+strconv.Itoa(k))
		}
	})
	if ids[0] != ids[1] {
		t.Errorf("got IDs %q and %q from the two controllers, want equal IDs", ids[0], ids[1])
	}
	p.both(func(_ int, m *machine) {
		for k := range n {
			retryConflicts(t, func() error { return m.delete(t, &vol{id: ids[0][k]}) })
		}
	})
}

// testFullPool: two controllers that fill a pool at the same time do not exceed its size.
func testFullPool(t *testing.T, p pair) {
	created := make([][]string, 2)
	p.both(func(i int, m *machine) {
		for k := range smallRoom {
			if id := m.createUnlessFull(t, "small", fmt.Sprintf("%s-%d", m.name, k)); id != "" {
				created[i] = append(created[i], id)
			}
		}
	})
	if n := len(created[0]) + len(created[1]); n != smallRoom {
		t.Errorf("got %d volumes in the full pool, want %d", n, smallRoom)
	}
	// Each controller deletes the volumes of the other one.
	p.both(func(i int, m *machine) {
		for _, id := range created[1-i] {
			retryConflicts(t, func() error { return m.delete(t, &vol{id: id}) })
		}
	})
	// The first controller fills the pool again when the drivers have emptied the trash.
	var refill []*vol
	for k := range smallRoom {
		refill = append(refill, &vol{id: p.first.createWithRoom(t, "small", "again-"+strconv.Itoa(k))})
	}
	for _, v := range refill {
		must(t, p.second.delete(t, v))
	}
}

// createWithRoom creates a directory. It retries until the pool has room for it.
func (m *machine) createWithRoom(t *testing.T, pool, name string) (id string) {
	t.Helper()
	err := retry.For(t.Context(), waitTimeout, func() (bool, error) {
		if id = m.createUnlessFull(t, pool, name); id == "" {
			return true, fmt.Errorf("pool %s has no room for %s", pool, name)
		}
		return false, nil
	})
	must(t, err)
	return id
}

// both calls do for both nodes at the same time.
func (p pair) both(do func(i int, m *machine)) {
	var all sync.WaitGroup
	for i, m := range []*machine{p.first, p.second} {
		all.Go(func() { do(i, m) })
	}
	all.Wait()
}

// createUnlessFull creates a directory and returns its ID, or an empty string if the pool has no room.
func (m *machine) createUnlessFull(t *testing.T, pool, name string) (id string) {
	retryConflicts(t, func() error {
		v, err := m.tryCreate(t, name, mib, filesystem("", manyNodes), directoryIn(pool))
		id = v.id
		if code := status.Code(err); code == codes.ResourceExhausted || code == codes.OutOfRange {
			return nil
		}
		return err
	})
	return id
}

// retryConflicts repeats a call that returns ABORTED or UNAVAILABLE, as orchestrators do.
func retryConflicts(t *testing.T, call func() error) {
	err := retry.For(t.Context(), waitTimeout, func() (bool, error) {
		err := call()
		code := status.Code(err)
		return code == codes.Aborted || code == codes.Unavailable, err
	})
	if err != nil {
		t.Error(err)
	}
}
