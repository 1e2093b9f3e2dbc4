package blockdev

import (
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
)

// TestRequestLate: requests to a disk that hangs fail with ErrDiskLate and are not sent to the disk. When the
// disk responds again, requests succeed.
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
				t.Errorf("a disk that hangs: got %v, want %v", err, ErrDiskLate)
			}
		}
		if n := calls.Load(); n != 1 {
			t.Errorf("the disk that hangs got %d requests, want 1", n)
		}
		if _, err := request(Disk{number: d.number - 1}, func() (int, error) { return 0, nil }); err != nil {
			t.Errorf("a request to another disk: got %v, want no error", err)
		}
		close(hang)
		if n, err := request(d, read); n != 2 || err != nil {
			t.Errorf("a request after the disk responds again: got %d, %v, want 2", n, err)
		}
	})
}
