package blockdev

import (
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
)

// TestRequestLate: a disk that hangs is ErrDiskLate, gets no further requests meanwhile, and
// responds again afterwards.
func TestRequestLate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := Disk{Path: "/dev/hangs", number: ^uint64(0)}
		var calls atomic.Int32
		hang := make(chan struct{})
		read := func() (int32, error) {
			n := calls.Add(1)
			<-hang
			return n, nil
		}
		for range 3 {
			if _, err := request(d, read); !errors.Is(err, ErrDiskLate) {
				t.Errorf("%v", err)
			}
		}
		if n := calls.Load(); n != 1 {
			t.Errorf("%d requests", n)
		}
		if _, err := request(Disk{number: d.number - 1}, func() (int, error) { return 0, nil }); err != nil {
			t.Errorf("another disk: %v", err)
		}
		close(hang)
		if n, err := request(d, read); n != 2 || err != nil {
			t.Errorf("%d, %v", n, err)
		}
	})
}
