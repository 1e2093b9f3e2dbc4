package background

import (
	"cmp"
	"slices"
	"sync"
	"time"
)

// grace is the time in which a task can begin to wait again after its piece, so that it is compared with the others that wait. It is only
// needed if these have used the disk for longer by more than maxLead. The runtime of Go prolongs it to at least a millisecond.
const (
	grace   = 200 * time.Microsecond
	maxLead = 2 * time.Millisecond
)

// On disks without rests, the moment in which no piece runs on any disk of a task may never come. So a task on several disks that has
// waited for patience keeps its disks from other tasks while pieces run on some of them, but not for a piece that takes longer than
// longPiece: it may not end.
const (
	patience  = 100 * time.Millisecond
	longPiece = time.Second
)

// queue gives the turns on all disks. A task gets the turn on all of its disks at once, so it keeps no disk from other tasks while it
// waits for a piece on another disk, which may take long or not end.
type queue struct {
	sync.Mutex
	waiting []*waiter
}

// turns is the queue of this process.
var turns queue

// waiter is a task that waits for its turn.
type waiter struct {
	*Budget
	turn  chan struct{} // closed when the task has the turn
	since time.Time     // the beginning of the wait
}

// add adds a task to those that wait.
func (q *queue) add(b *Budget) *waiter {
	q.Lock()
	defer q.Unlock()
	for i, s := range b.shares {
		b.shares[i].use = max(s.use, s.lastTurnUse-maxLead) // a smaller lead adds up
	}
	w := &waiter{b, make(chan struct{}), time.Now()}
	q.waiting = append(q.waiting, w)
	q.next()
	return w
}

// leave removes a task from those that wait, or ends its turn.
func (q *queue) leave(w *waiter) {
	q.Lock()
	defer q.Unlock()
	if i := slices.Index(q.waiting, w); i >= 0 {
		q.waiting = slices.Delete(q.waiting, i, i+1)
		q.next() // the task may have been before others
		return
	}
	for _, s := range w.shares {
		q.pass(s.disk)
	}
	q.next()
}

// end ends the turn of a task after a piece. The disks rest.
func (q *queue) end(b *Budget, took, rest time.Duration) {
	q.Lock()
	defer q.Unlock()
	for i, s := range b.shares {
		b.shares[i].use += took + rest
		s.extend(rest)
		if least, ok := q.leastUse()[s.disk]; ok && least > b.shares[i].use+maxLead {
			s.extend(grace)
		}
		q.pass(s.disk)
	}
	q.next()
}

// pass ends the turn on a disk when it has rested. The caller holds q.
func (q *queue) pass(d *disk) {
	left := time.Until(d.restUntil)
	d.running, d.resting = false, left > 0
	if !d.resting {
		return
	}
	time.AfterFunc(left, func() {
		q.Lock()
		defer q.Unlock()
		q.pass(d)
		q.next()
	})
}

// next gives turns to the tasks that can have them, those with the least excess first. A task that waits only for rests keeps its disks
// from the tasks after it. Otherwise it could wait for ever for a moment in which no disk rests. A task that reserves
// its disks does the same. The caller holds q.
func (q *queue) next() {
	running := func(d *disk) bool { return d.running }
	least := q.leastUse()
	slices.SortStableFunc(q.waiting, func(v, w *waiter) int { return cmp.Compare(v.excess(least), w.excess(least)) })
	kept := map[*disk]bool{}
	q.waiting = slices.DeleteFunc(q.waiting, func(w *waiter) bool {
		if w.any(running) && !q.reserves(w) {
			return false
		}
		free := !w.any(running) && !w.any(func(d *disk) bool { return d.resting || kept[d] })
		for _, s := range w.shares {
			kept[s.disk] = true
		}
		if free {
			w.start()
		}
		return free
	})
}

// reserves reports whether a task keeps its disks from others while pieces run on some of them. The caller holds q.
func (q *queue) reserves(w *waiter) bool {
	if time.Since(w.since) < patience {
		return false
	}
	reserves := true
	for _, s := range w.shares {
		if !s.running {
			continue
		}
		ran := time.Since(s.began)
		reserves = reserves && ran < longPiece
		if reserves && !s.awaited {
			s.awaited = true
			time.AfterFunc(longPiece-ran, func() { // no other event may come
				q.Lock()
				defer q.Unlock()
				q.next()
			})
		}
	}
	return reserves
}

// leastUse returns the use of each disk by the waiting task that has used it least.
func (q *queue) leastUse() map[*disk]time.Duration {
	least := map[*disk]time.Duration{}
	for _, w := range q.waiting {
		for _, s := range w.shares {
			if use, ok := least[s.disk]; !ok || s.use < use {
				least[s.disk] = s.use
			}
		}
	}
	return least
}

// excess returns by how much the task has used a disk more than the others that wait for it: the largest of its disks. The use of one
// disk is not compared with that of another.
func (w *waiter) excess(least map[*disk]time.Duration) (excess time.Duration) {
	for _, s := range w.shares {
		excess = max(excess, s.use-least[s.disk])
	}
	return excess
}

// any reports whether a condition holds for any disk of the task.
func (w *waiter) any(holds func(*disk) bool) bool {
	return slices.ContainsFunc(w.shares, func(s share) bool { return holds(s.disk) })
}

// start begins the turn of the task.
func (w *waiter) start() {
	for _, s := range w.shares {
		s.running, s.began, s.awaited = true, time.Now(), false
		s.lastTurnUse = max(s.lastTurnUse, s.use)
	}
	close(w.turn)
}
