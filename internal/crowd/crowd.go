// Package crowd bounds how many connections of strangers a server holds.
package crowd

import (
	"cmp"
	"net"
	"slices"
	"sync"
)

// Limit holds connections up to a number. One more makes it close the oldest connection of
// the address that has most: nobody is kept out, and an address that opens many connections
// closes its own.
type Limit struct {
	most int

	mu    sync.Mutex
	conns map[net.Conn]uint64 // when each came, as a number
	hosts map[string]int      // how many each address has
	last  uint64
}

// NewLimit is one without connections.
func NewLimit(most int) *Limit {
	return &Limit{most: most, conns: map[net.Conn]uint64{}, hosts: map[string]int{}}
}

// Add holds a connection, and closes one if these are too many.
func (l *Limit) Add(c net.Conn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.last++
	l.conns[c] = l.last
	l.hosts[host(c)]++
	if len(l.conns) > l.most {
		victim := l.victim()
		l.forget(victim)
		_ = victim.Close()
	}
}

// Remove holds a connection no longer. It is false if the connection was closed by Add.
func (l *Limit) Remove(c net.Conn) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	_, held := l.conns[c]
	if held {
		l.forget(c)
	}
	return held
}

// victim is the oldest connection of the address that has most.
func (l *Limit) victim() net.Conn {
	all := make([]net.Conn, 0, len(l.conns))
	for c := range l.conns {
		all = append(all, c)
	}
	return slices.MinFunc(all, func(a, b net.Conn) int {
		return cmp.Or(cmp.Compare(l.hosts[host(b)], l.hosts[host(a)]), cmp.Compare(l.conns[a], l.conns[b]))
	})
}

func (l *Limit) forget(c net.Conn) {
	delete(l.conns, c)
	h := host(c)
	if l.hosts[h]--; l.hosts[h] == 0 {
		delete(l.hosts, h)
	}
}

func host(c net.Conn) string {
	address := c.RemoteAddr().String()
	if h, _, err := net.SplitHostPort(address); err == nil {
		return h
	}
	return address
}
