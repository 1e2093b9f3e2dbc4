package blockdev

import (
	"errors"
	"fmt"
	"sync"
	"time"
)

// answerTime is how long a disk has to answer: a disk that hangs must not delay the others,
// and a sleeping disk needs some seconds to spin up.
const answerTime = 10 * time.Second

// ErrDiskLate means that the disk does not answer.
var ErrDiskLate = errors.New("disk does not answer")

// turns has, by device number, what one goroutine at a time holds, so that a disk that
// hangs gets no further requests.
var turns sync.Map

// ask makes a request to a disk. ErrDiskLate if there is no answer within answerTime; a
// later answer is dropped.
func ask[T any](d Disk, question func() (T, error)) (T, error) {
	type answer struct {
		value T
		err   error
	}
	var none T
	late := time.NewTimer(answerTime)
	defer late.Stop()
	shared, _ := turns.LoadOrStore(d.number, make(chan struct{}, 1))
	turn := shared.(chan struct{})
	select {
	case turn <- struct{}{}:
	case <-late.C:
		return none, fmt.Errorf("%s: %w", d.Path, ErrDiskLate)
	}
	answered := make(chan answer, 1)
	go func() {
		value, err := question()
		<-turn
		answered <- answer{value, err}
	}()
	select {
	case a := <-answered:
		return a.value, a.err
	case <-late.C:
		return none, fmt.Errorf("%s: %w", d.Path, ErrDiskLate)
	}
}
