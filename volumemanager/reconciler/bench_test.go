package reconciler_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/trivet-csi/trivet/internal/retry"
)

// BenchmarkReconcile measures the parts of Run while all volumes are mounted. Run calls pass after each
// operation, populate after a change of claims, and sync once a minute.
func BenchmarkReconcile(b *testing.B) {
	for _, n := range []int{100, 1000, 10000} {
		m := manyVolumes(b, n)
		for name, part := range map[string]func(context.Context){
			"pass":     m.Pass,
			"populate": func(context.Context) { m.Populate() },
			"sync":     m.Sync,
		} {
			b.Run(fmt.Sprintf("%s/%d", name, n), func(b *testing.B) {
				for b.Loop() {
					part(b.Context())
				}
				b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*n), "ns/volume")
			})
		}
	}
}

// manyVolumes returns a stopped manager with n mounted volumes. Each pod has two PersistentVolumes and
// two emptyDirs.
func manyVolumes(b *testing.B, n int) *manager {
	b.Helper()
	host := newFakeHost(b.TempDir())
	host.reportForbidden = b.Errorf
	c := newClaims()
	manifests := objects()
	for i := range n / 4 {
		one, other := fmt.Sprint("fs-", i), fmt.Sprint("disk-", i)
		c.set(volumeOf(one, "h-"+one, "Filesystem"))
		c.set(volumeOf(other, "h-"+other, "Block"))
		p := pod(fmt.Sprint("pod-", i), one, other, "e1", "e2")
		manifests.Pods[key(p.Name)] = p
	}
	m := start(b, host, c, fullPlugin{host}, plainPlugin{fakeHost: host})
	began := time.Now()
	m.Update(manifests)
	err := retry.For(b.Context(), 5*time.Minute, func() (bool, error) {
		if toMount, _ := m.StateDiff(); toMount > 0 {
			return true, errors.New("volumes are not mounted yet")
		}
		return false, nil
	})
	if err != nil {
		b.Fatal(err)
	}
	b.Logf("%d volumes mounted in %v", n, time.Since(began))
	m.stop()
	return m
}
