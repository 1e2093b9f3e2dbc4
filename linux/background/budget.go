package background

import (
	"context"
	"math"
	"time"

	"github.com/trivet-csi/trivet/linux/sys"
)

// Piece is the size in bytes of the pieces into which a task is divided while others use a disk. A request of another process waits for one
// piece at most, and a disk with heads needs some size to be efficient. quietPiece is that on disks that are quiet, if a
// piece of that size takes at most maxQuietPiece. With larger pieces, turns and waits for the disk take less of the time.
const (
	Piece         = 128 << 10
	quietPiece    = 1 << 20
	maxQuietPiece = 10 * time.Millisecond
)

// maxRest bounds the time for which a disk rests after one piece. Other tasks wait for that, and must show from time to time that they
// are alive.
const maxRest = time.Second

// Budget is the part of one task in the budgets of the disks that it uses. One piece of all tasks runs on a disk at a time. After it, the
// disk rests as long as the piece took, up to maxRests times as long if others use it much, and as long as the rate requires, unless others
// hardly use it. Then the task that has used the disk least has its turn. A nil Budget limits nothing. One goroutine uses a Budget at a time.
type Budget struct {
	shares []share
	rate   int64 // bytes per second while others use a disk
	// restUntil is the end of a rest of more than maxRest, for which only this task waits.
	restUntil time.Time
	// quiet means that the disks were quiet after the last piece, and fast enough for quietPiece.
	quiet bool
}

// share is the part of a task in the budget of one disk.
type share struct {
	*disk
	// use is the time for which the task has used the disk, with the rests after it. It is protected by turns.
	use time.Duration
}

// PieceSize returns the largest size in bytes of the next piece. Without a budget, it has no limit.
func (b *Budget) PieceSize() int64 {
	switch {
	case b == nil:
		return math.MaxInt64
	case b.quiet:
		return quietPiece
	}
	return Piece
}

// Do waits for the turn of the task on all of its disks, and runs a piece of it. piece returns the number of bytes that it has read and
// written. It must not wait for other tasks. The error is that of ctx or piece.
func (b *Budget) Do(ctx context.Context, piece func() (bytes int64, err error)) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if b == nil {
		_, err := piece()
		return err
	}
	if err := b.begin(ctx); err != nil {
		return err
	}
	var bytes int64
	began := time.Now()
	defer func() { b.end(time.Since(began), bytes) }()
	var err error
	bytes, err = piece()
	return err
}

// Idle calls a part of a piece with the idle I/O priority, if there is a budget. It may read, and write to a device. A write to a file
// waits for the disk while it holds locks of the filesystem, for which requests of others with a higher priority would wait.
func (b *Budget) Idle(part func() error) error {
	if b == nil {
		return part()
	}
	return sys.WithIdleIO(part)
}

// begin waits for the turn.
func (b *Budget) begin(ctx context.Context) error {
	if err := sleepUntil(ctx, b.restUntil); err != nil {
		return err
	}
	w := turns.add(b)
	select {
	case <-w.turn:
		for _, s := range b.shares {
			s.listen()
		}
		return nil
	case <-ctx.Done():
		turns.leave(w)
		return ctx.Err()
	}
}

// end ends the turn, after a piece with a number of bytes.
func (b *Budget) end(took time.Duration, bytes int64) {
	rest := time.Duration(0)
	b.quiet = float64(took)*quietPiece <= float64(maxQuietPiece)*float64(bytes)
	for _, s := range b.shares {
		b.quiet = b.quiet && s.isQuiet()
		rest = max(rest, s.restAfter(s.due(took, bytes, float64(b.rate))))
	}
	if rest > maxRest {
		b.restUntil = time.Now().Add(rest)
	}
	turns.end(b, took, rest)
}

// sleepUntil waits for a time, or returns the error of ctx if that ends before.
func sleepUntil(ctx context.Context, t time.Time) error {
	left := time.Until(t)
	if left <= 0 {
		return ctx.Err()
	}
	timer := time.NewTimer(left)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
