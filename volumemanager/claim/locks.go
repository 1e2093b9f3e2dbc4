package claim

import "sync"

// locks is a set of mutexes by name, so that a slow write of one volume does not delay another
// volume.
type locks struct {
	mu   sync.Mutex
	free *sync.Cond
	held map[string]bool
}

func newLocks() *locks {
	l := &locks{held: map[string]bool{}}
	l.free = sync.NewCond(&l.mu)
	return l
}

// lock locks a name and returns the function that unlocks it.
func (l *locks) lock(name string) (unlock func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for l.held[name] {
		l.free.Wait()
	}
	l.held[name] = true
	return func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		delete(l.held, name)
		l.free.Broadcast()
	}
}
