package background

import "time"

const (
	// quietTime is the time of rests without requests of others after which the disk no longer rests for them. Then it rests only for
	// listenTime once in listenInterval, to detect them.
	quietTime      = 500 * time.Millisecond
	listenTime     = 5 * time.Millisecond
	listenInterval = 50 * time.Millisecond

	// maxRests bounds the rest after a piece for the requests of others, as a multiple of the time of the piece.
	maxRests = 30
	// minShare is the part of their rate that the tasks have on a disk that others use all the time, and minRate the least rate in bytes
	// per second. The disk may be too slow for that.
	minShare = 1. / 16
	minRate  = 1 << 20
	// minRest is the shortest rest. Shorter ones are added up, because the runtime of Go would prolong each to at least a millisecond.
	minRest = 2 * time.Millisecond
	// memory is the time over which the requests of others are averaged.
	memory = 500 * time.Millisecond
)

// disk is the budget of one disk.
type disk struct {
	// requests returns the number of requests that the disk has got, also of this process. ok is false if it is not known.
	requests func() (n uint64, ok bool)

	// The following fields belong to the task that has the turn.

	// restBegan is the beginning of the rest before the turn, and zero if it has been listened to or there was none. requestsBefore is
	// the number of requests at that time.
	restBegan      time.Time
	requestsBefore uint64
	requestsKnown  bool
	// dueBefore is the sum of the rests after the last pieces that are still due.
	dueBefore time.Duration
	// others is the number of requests of others per second, and 0 if it is not known.
	others float64
	// listenedAt is when the last rest ended, and quiet the sum of the rests since the last one with requests of others.
	listenedAt time.Time
	quiet      time.Duration

	// The following fields are protected by turns.

	running, resting bool // a task has the turn, or the disk rests after one
	restUntil        time.Time
	began            time.Time // of the turn
	awaited          bool      // the end of longPiece in this turn causes queue.next
	// lastTurnUse is the largest use that a task had at the beginning of its turn. A task that begins does not count as having used less.
	lastTurnUse time.Duration
}

// listen counts the requests of others since the beginning of the rest that has ended. The number can decrease: the kernel reads its parts
// one after the other, and a device can be replaced.
func (d *disk) listen() {
	if d.restBegan.IsZero() {
		return
	}
	n, ok := d.requests()
	count := int64(n - d.requestsBefore)
	switch listened := time.Since(d.restBegan); {
	case !ok || !d.requestsKnown:
		d.quiet, d.others = 0, 0
	case count <= 0:
		d.quiet += listened
		d.average(0, listened)
	default:
		d.quiet = 0
		d.average(float64(count), listened)
	}
	d.restBegan, d.listenedAt = time.Time{}, time.Now()
}

// average updates others after a rest with a number of requests of others.
func (d *disk) average(count float64, listened time.Duration) {
	if d.quiet >= quietTime {
		d.others = 0
	} else if listened > 0 {
		d.others += min(1, listened.Seconds()/memory.Seconds()) * (count/listened.Seconds() - d.others)
	}
}

// due returns for how long the disk rests for others after a piece with a number of bytes of a task with a rate. The more requests of
// others come in the time of a piece, the longer it rests. Pieces without a known number of bytes are commands, such as those of trims.
func (d *disk) due(took time.Duration, bytes int64, rate float64) time.Duration {
	forRate := func(rate float64) time.Duration {
		return time.Duration(float64(bytes)/rate*float64(time.Second)) - took
	}
	forOthers := time.Duration(maxRests * min(1, d.others*took.Seconds()) * float64(took))
	return max(took, forRate(rate), min(forOthers, forRate(max(rate*minShare, minRate))))
}

// restAfter begins a rest after a piece, and returns its length. due is that length while others use the disk.
func (d *disk) restAfter(due time.Duration) time.Duration {
	rest := due
	if d.quiet >= quietTime {
		if time.Since(d.listenedAt) < listenInterval {
			return 0
		}
		rest = listenTime // also if less is due: a short rest would miss most requests
	} else if rest += d.dueBefore; rest < minRest {
		d.dueBefore = rest
		return 0
	}
	d.dueBefore, d.restBegan = 0, time.Now()
	d.requestsBefore, d.requestsKnown = d.requests()
	return rest
}

// extend makes the disk rest for some time from now on. The caller holds turns.
func (d *disk) extend(rest time.Duration) {
	if until := time.Now().Add(min(rest, maxRest)); until.After(d.restUntil) {
		d.restUntil = until
	}
}
