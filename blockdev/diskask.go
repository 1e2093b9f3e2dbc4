package blockdev

import (
	"errors"
	"fmt"
	"sync"
	"time"
)

// answerTime is how long a disk has to answer: one that hangs is not to keep the others
// waiting, and one that sleeps needs some seconds to turn.
const answerTime = 10 * time.Second

// ErrDiskLate means: the disk does not answer.
var ErrDiskLate = errors.New("disk does not answer")

// turns has, by device number, what one goroutine at a time holds: of a disk that hangs
// nothing more is asked.
var turns sync.Map

// ask asks something of a disk. ErrDiskLate if it has no answer in answerTime; one that
// comes later is nobody's.
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
