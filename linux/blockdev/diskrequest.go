package blockdev

import (
	"errors"
	"fmt"
	"sync"
	"time"
)

// requestTimeout is the time within which a disk must respond. It is short, so that a disk that hangs does not
// delay the others, and longer than a sleeping disk needs to spin up.
const requestTimeout = 10 * time.Second

// ErrDiskLate means that the disk does not answer.
var ErrDiskLate = errors.New("disk does not answer")

// requestLocks holds a lock for each device number, so that a disk that hangs gets no further requests.
var requestLocks sync.Map

// request calls do, which accesses a disk. The error is ErrDiskLate if do does not return within requestTimeout. The
// result of do is then lost.
func request[T any](d Disk, do func() (T, error)) (T, error) {
	type result struct {
		value T
		err   error
	}
	var none T
	timeout := time.NewTimer(requestTimeout)
	defer timeout.Stop()
	stored, _ := requestLocks.LoadOrStore(d.number, make(chan struct{}, 1))
	lock := stored.(chan struct{})
	select {
	case lock <- struct{}{}:
	case <-timeout.C:
		return none, fmt.Errorf("%s: %w", d.Path, ErrDiskLate)
	}
	done := make(chan result, 1)
	go func() {
		value, err := do()
		<-lock
		done <- result{value, err}
	}()
	select {
	case r := <-done:
		return r.value, r.err
	case <-timeout.C:
		return none, fmt.Errorf("%s: %w", d.Path, ErrDiskLate)
	}
}
