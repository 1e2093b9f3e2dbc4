package backend

import (
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/trivet-csi/trivet/pool"
)

var errDisk = errors.New("input/output error")

// TestVerified: verified parts become durable at most once in syncInterval unless there are many bytes, and at the end. After a failed sync,
// nothing is recorded any more, because the kernel reports an error only once.
func TestVerified(t *testing.T) {
	const part = 64 << 20
	for name, row := range map[string]struct {
		pause time.Duration // before each part
		fail  int           // the sync that fails; 0 for none
		parts int64
		want  []int64 // the parts up to which the content was recorded
	}{
		"slow":           {2 * syncInterval, 0, 3, []int64{1, 2, 3}},
		"fast":           {0, 0, 10, []int64{1, 5, 9, 10}},
		"two at once":    {0, 0, 2, []int64{1, 2}},
		"the first sync": {0, 1, 2, nil},
		"a later sync":   {2 * syncInterval, 2, 4, []int64{1}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				syncs, recorded := 0, []int64(nil)
				x := &target{partial: &pool.Partial{}, unattended: func() time.Duration { return 0 }, zeroUpTo: func(int64) error { return nil }}
				x.setVerified = func(upTo, bytes int64) error {
					if upTo != bytes {
						t.Errorf("got %d bytes up to offset %d, want equal numbers", bytes, upTo)
					}
					if syncs++; syncs == row.fail {
						return errDisk
					}
					recorded = append(recorded, upTo/part)
					return nil
				}
				var err error
				for i := int64(1); err == nil && i <= row.parts; i++ {
					time.Sleep(row.pause)
					x.written = i * part
					err = x.Verified(i * part)
				}
				err = errors.Join(err, x.end())
				if errors.Is(err, errDisk) != (row.fail > 0) || !slices.Equal(recorded, row.want) {
					t.Errorf("got %v, %v; want %v", recorded, err, row.want)
				}
			})
		})
	}
}
