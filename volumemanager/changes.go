package volumemanager

import "sync"

// changes wakes whoever waits for one. Several that come before somebody looks are one.
type changes struct {
	mu      sync.Mutex
	waiting map[chan struct{}]bool
}

func (c *changes) subscribe() chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.waiting == nil {
		c.waiting = map[chan struct{}]bool{}
	}
	wake := make(chan struct{}, 1)
	c.waiting[wake] = true
	return wake
}

func (c *changes) unsubscribe(wake chan struct{}) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.waiting, wake)
}

func (c *changes) tell() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for wake := range c.waiting {
		select {
		case wake <- struct{}{}:
		default:
		}
	}
}
