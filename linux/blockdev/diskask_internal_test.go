package blockdev

import (
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
)

// TestRequestLate: a disk that hangs is ErrDiskLate, gets no further requests meanwhile, and
// answers again afterwards.
func TestRequestLate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := Disk{Path: "/dev/hangs", number: ^uint64(0)}
		var asked atomic.Int32
		hang := make(chan struct{})
		question := func() (int32, error) {
			n := asked.Add(1)
			<-hang
			return n, nil
		}
		for range 3 {
			if _, err := request(d, question); !errors.Is(err, ErrDiskLate) {
				t.Errorf("%v", err)
			}
		}
		if n := asked.Load(); n != 1 {
			t.Errorf("it was asked %d times", n)
		}
		if _, err := request(Disk{number: d.number - 1}, func() (int, error) { return 0, nil }); err != nil {
			t.Errorf("another disk: %v", err)
		}
		close(hang)
		if n, err := request(d, question); n != 2 || err != nil {
			t.Errorf("%d, %v", n, err)
		}
	})
}
