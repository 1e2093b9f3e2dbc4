package background

import "time"

const (
	// quietShare is the share of rests with requests of others, over the last time, below which the disk does not rest for them. The requests
	// that the kernel makes for the task itself, such as those of a journal, are in fewer rests. A disk that is quiet rests only for
	// listenTime once in listenInterval, to detect others.
	quietShare     = 1. / 8
	listenTime     = 5 * time.Millisecond
	listenInterval = 50 * time.Millisecond
	// unknownShare is the share that is assumed before a disk has rested.
	unknownShare = 1.5 * quietShare
	// memory is the time over which the number of requests of others is averaged, and memoryShare that of the share of rests.
	// maxShareWeight bounds the weight of one rest in that share.
	memory         = 500 * time.Millisecond
	memoryShare    = time.Second
	maxShareWeight = 1. / 4

	// maxRests bounds the rest after a piece for the requests of others, as a multiple of the time of the piece.
	maxRests = 30
	// minShare is the part of their rate that the tasks have on a disk that others use all the time, and minRate the least rate in bytes
	// per second. The disk may be too slow for that.
	minShare = 1. / 16
	minRate  = 1 << 20
	// minRest is the shortest rest. Shorter ones are added up, because the runtime of Go would prolong each to at least a millisecond.
	minRest = 2 * time.Millisecond
)

// disk is the budget of one disk.
type disk struct {
	// requests returns the number of requests that the disk has completed, also of this process, and of those that it has not completed
	// yet. ok is false if they are not known.
	requests func() (completed, inFlight uint64, ok bool)

	// The following fields belong to the task that has the turn.

	// restBegan is the beginning of the rest before the turn, and zero if it has been listened to or there was none. requestsBefore is
	// the number of requests at that time, also of those in flight.
	restBegan      time.Time
	requestsBefore uint64
	requestsKnown  bool
	// dueBefore is the sum of the rests after the last pieces that are still due.
	dueBefore time.Duration
	// listenedAt is when the last rest ended. othersKnown means that requests of others could be detected in it.
	listenedAt  time.Time
	othersKnown bool
	// others is the number of requests of others per second, and othersShare the share of rests with such requests.
	others, othersShare float64

	// The following fields are protected by turns.

	running, resting bool // a task has the turn, or the disk rests after one
	restUntil        time.Time
	began            time.Time // of the turn
	awaited          bool      // the end of longPiece in this turn causes queue.next
	// lastTurnUse is the largest use that a task had at the beginning of its turn. A task that begins does not count as having used
	// it for less by more than maxLead.
	lastTurnUse time.Duration
}

// listen counts the requests of others since the beginning of the rest that has ended. The number can decrease: the kernel reads its parts
// one after the other, and a device can be replaced. A request in flight at the end of the rest is also one of others: they
// may have waited for the piece for so long that they have begun no request since.
func (d *disk) listen() {
	if d.restBegan.IsZero() {
		return
	}
	completed, inFlight, ok := d.requests()
	count, now := max(0, int64(completed+inFlight-d.requestsBefore)), time.Now()
	elapsed, listened := now.Sub(d.listenedAt), now.Sub(d.restBegan)
	known := ok && d.requestsKnown
	if known && listened > 0 {
		weight, used := min(1, elapsed.Seconds()/memory.Seconds()), 0.
		if !d.othersKnown {
			weight, d.othersShare = 1, unknownShare
		}
		if count > 0 || inFlight > 0 {
			used = 1
		}
		d.others += weight * (float64(count)/listened.Seconds() - d.others)
		d.othersShare += min(maxShareWeight, elapsed.Seconds()/memoryShare.Seconds()) * (used - d.othersShare)
	}
	d.othersKnown, d.restBegan, d.listenedAt = known, time.Time{}, now
}

// isQuiet reports whether others do not use the disk, or use it so rarely that few requests wait, each for one piece.
func (d *disk) isQuiet() bool { return d.othersKnown && d.othersShare < quietShare }

// due returns for how long the disk rests for others after a piece with a number of bytes of a task with a rate. The more requests of
// others come in the time of a piece, the longer it rests. Pieces without a known number of bytes are commands, such as those of trims.
func (d *disk) due(took time.Duration, bytes int64, rate float64) time.Duration {
	forRate := func(rate float64) time.Duration {
		return time.Duration(float64(bytes)/rate*float64(time.Second)) - took
	}
	forOthers := time.Duration(0)
	if d.othersKnown {
		forOthers = time.Duration(maxRests * min(1, d.others*took.Seconds()) * float64(took))
	}
	return max(took, forRate(rate), min(forOthers, forRate(max(rate*minShare, minRate))))
}

// restAfter begins a rest after a piece, and returns its length. due is that length while others use the disk.
func (d *disk) restAfter(due time.Duration) time.Duration {
	rest := due
	if d.isQuiet() {
		if time.Since(d.listenedAt) < listenInterval {
			return 0
		}
		rest = listenTime // also if less is due: a short rest would miss most requests
	} else if rest += d.dueBefore; rest < minRest {
		d.dueBefore = rest
		return 0
	}
	d.dueBefore, d.restBegan = 0, time.Now()
	completed, inFlight, known := d.requests()
	d.requestsBefore, d.requestsKnown = completed+inFlight, known
	return rest
}

// extend makes the disk rest for some time from now on. The caller holds turns.
func (d *disk) extend(rest time.Duration) {
	if until := time.Now().Add(min(rest, maxRest)); until.After(d.restUntil) {
		d.restUntil = until
	}
}
