// Package crowd bounds how many connections of strangers a server holds.
package crowd

import (
	"net"
	"net/netip"
	"sync"
)

// Limit holds connections up to a number. One more makes it close a connection of the address
// that has most: nobody is kept out, and an address that opens many connections closes its
// own. Of these it closes one that is not busy first, then the oldest.
type Limit struct {
	most int

	mu    sync.Mutex
	conns map[net.Conn]*entry
	hosts map[string]int // how many each address has
	last  uint64
}

// entry is what is known of a connection.
type entry struct {
	host   string
	number uint64 // in the order of arrival
	busy   bool
}

// NewLimit is one without connections.
func NewLimit(most int) *Limit {
	return &Limit{most: most, conns: map[net.Conn]*entry{}, hosts: map[string]int{}}
}

// Add holds a connection, and closes one if these are too many.
func (l *Limit) Add(c net.Conn) {
	h := host(c)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.last++
	l.conns[c] = &entry{host: h, number: l.last}
	l.hosts[h]++
	if len(l.conns) > l.most {
		victim := l.victim()
		l.forget(victim)
		_ = victim.Close()
	}
}

// SetBusy notes whether a request of a connection is being answered.
func (l *Limit) SetBusy(c net.Conn, busy bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if e := l.conns[c]; e != nil {
		e.busy = busy
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

// victim is the connection to close. The address comes first: otherwise one address with
// many busy connections keeps everybody else out.
func (l *Limit) victim() net.Conn {
	var victim net.Conn
	for c := range l.conns {
		if victim == nil || l.before(l.conns[c], l.conns[victim]) {
			victim = c
		}
	}
	return victim
}

func (l *Limit) before(a, b *entry) bool {
	if l.hosts[a.host] != l.hosts[b.host] {
		return l.hosts[a.host] > l.hosts[b.host]
	}
	if a.busy != b.busy {
		return b.busy
	}
	return a.number < b.number
}

func (l *Limit) forget(c net.Conn) {
	h := l.conns[c].host
	delete(l.conns, c)
	if l.hosts[h]--; l.hosts[h] == 0 {
		delete(l.hosts, h)
	}
}

// host is the address that a connection counts for. Of IPv6 it is the /64, all of which one
// machine may have.
func host(c net.Conn) string {
	address, err := netip.ParseAddrPort(c.RemoteAddr().String())
	if err != nil {
		return c.RemoteAddr().String()
	}
	ip := address.Addr().Unmap()
	prefix, _ := ip.Prefix(min(ip.BitLen(), 64)) // no more bits than it has
	return prefix.String()
}
