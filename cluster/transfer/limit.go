package transfer

import (
	"context"
	"sync/atomic"

	"golang.org/x/sync/semaphore"
	"golang.org/x/time/rate"
)

// DefaultStreams is the number of transfers that a node sends at a time if no other number is configured.
const DefaultStreams = 4

// Limit limits the transfers of a node in one direction.
type Limit struct {
	bytes   *rate.Limiter // nil if the rate is not limited
	streams *semaphore.Weighted
	moved   atomic.Int64
}

// Bytes returns the size of the content that was transferred, as it was on the wire.
func (l *Limit) Bytes() int64 { return l.moved.Load() }

// NewLimit returns a limit for the bytes per second of all transfers together, and for the number of transfers at a time. If
// bytesPerSecond is 0, the rate is not limited.
func NewLimit(bytesPerSecond int64, streams int) *Limit {
	l := &Limit{streams: semaphore.NewWeighted(int64(streams))}
	if bytesPerSecond > 0 {
		l.bytes = rate.NewLimiter(rate.Limit(bytesPerSecond), headerSize+chunkSize)
	}
	return l
}

// wait waits until n bytes may be transferred. n is at most the size of a frame.
func (l *Limit) wait(ctx context.Context, n int) error {
	l.moved.Add(int64(n))
	if l.bytes == nil {
		return nil
	}
	return l.bytes.WaitN(ctx, n)
}

// acquire waits for the permission to begin a transfer, and calls idle repeatedly meanwhile.
func (l *Limit) acquire(ctx context.Context, idle func() error) (release func(), err error) {
	release = func() { l.streams.Release(1) }
	for {
		waiting, cancel := context.WithTimeout(ctx, waitInterval)
		err := l.streams.Acquire(waiting, 1)
		cancel()
		if err == nil {
			return release, nil
		}
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		if err := idle(); err != nil {
			return nil, err
		}
	}
}
