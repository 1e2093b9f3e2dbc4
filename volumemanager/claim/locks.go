package claim

import "sync"

// locks are held by name: writes are slow, and those of one volume wait for no other's.
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

// lock waits until nobody holds a name, and holds it.
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
