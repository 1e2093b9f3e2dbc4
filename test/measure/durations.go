package measure

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sync/errgroup"
)

// Durations are the durations of calls.
type Durations []time.Duration

// Add adds durations.
func (d *Durations) Add(took ...time.Duration) { *d = append(*d, took...) }

// Time calls a function and adds its duration.
func (d *Durations) Time(do func() error) {
	start := time.Now()
	Must(do())
	d.Add(time.Since(start))
}

// At returns a percentile, or 0 without durations.
func (d Durations) At(percent int) time.Duration {
	if len(d) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(d))
	return sorted[min(len(sorted)*percent/100, len(sorted)-1)]
}

// P50 returns the median.
func (d Durations) P50() time.Duration { return d.At(50) }

// ForAll calls do once for each item, with the items divided among concurrent callers, and returns
// the duration of each call.
func ForAll[T any](ctx context.Context, callers int, items []T, do func(ctx context.Context, caller int, item T) error) Durations {
	took := make(Durations, len(items))
	group, ctx := errgroup.WithContext(ctx)
	for i := range callers {
		group.Go(func() error {
			for k := i; k < len(items); k += callers {
				start := time.Now()
				if err := do(ctx, i, items[k]); err != nil {
					return err
				}
				took[k] = time.Since(start)
			}
			return nil
		})
	}
	Must(group.Wait())
	return took
}

// ListVolumes reads the list of all volumes and returns the duration of each page. It fails if the
// list does not contain the given number of volumes.
func ListVolumes(ctx context.Context, c csi.ControllerClient, pageSize, volumes int) (pages Durations, err error) {
	listed, token := 0, ""
	for {
		start := time.Now()
		resp, err := c.ListVolumes(ctx, &csi.ListVolumesRequest{MaxEntries: int32(pageSize), StartingToken: token})
		if err != nil {
			return nil, err
		}
		pages.Add(time.Since(start))
		listed += len(resp.GetEntries())
		if token = resp.GetNextToken(); token == "" {
			break
		}
	}
	if listed != volumes {
		err = fmt.Errorf("ListVolumes returned %d volumes, want %d", listed, volumes)
	}
	return pages, err
}
