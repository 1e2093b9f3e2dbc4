package volumemanager

import "sync"

// changes notifies subscribers of changes. Several changes before a receive are one notification.
type changes struct {
	mu          sync.Mutex
	subscribers map[chan struct{}]bool
}

func (c *changes) subscribe() chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.subscribers == nil {
		c.subscribers = map[chan struct{}]bool{}
	}
	changed := make(chan struct{}, 1)
	c.subscribers[changed] = true
	return changed
}

func (c *changes) unsubscribe(changed chan struct{}) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.subscribers, changed)
}

func (c *changes) notify() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for changed := range c.subscribers {
		select {
		case changed <- struct{}{}:
		default:
		}
	}
}
