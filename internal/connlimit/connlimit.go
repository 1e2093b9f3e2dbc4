// Package connlimit limits the number of unauthenticated connections of a server.
package connlimit

import (
	"net"
	"net/netip"
	"sync"
)

// Limit holds up to a maximum number of connections. When one more is added, Limit closes a connection
// of the address that has the most, so that an address that opens many connections cannot keep out the
// others. Of these connections it closes the oldest that is not busy, or the oldest if all are busy.
type Limit struct {
	max int

	mu    sync.Mutex
	conns map[net.Conn]*entry
	hosts map[string]int // number of connections by address
	last  uint64         // number of the last connection
}

// entry is the state of a connection.
type entry struct {
	host   string
	number uint64 // in the order of arrival
	busy   bool
}

// New returns a Limit of a maximum number of connections.
func New(maximum int) *Limit {
	return &Limit{max: maximum, conns: map[net.Conn]*entry{}, hosts: map[string]int{}}
}

// Add adds a connection. If the maximum is exceeded, it closes one connection.
func (l *Limit) Add(c net.Conn) {
	h := host(c)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.last++
	l.conns[c] = &entry{host: h, number: l.last}
	l.hosts[h]++
	if len(l.conns) > l.max {
		victim := l.victim()
		l.forget(victim)
		_ = victim.Close()
	}
}

// SetBusy records whether a request of a connection is being answered.
func (l *Limit) SetBusy(c net.Conn, busy bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if e := l.conns[c]; e != nil {
		e.busy = busy
	}
}

// Remove removes a connection. It returns false if Add has closed the connection.
func (l *Limit) Remove(c net.Conn) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	_, held := l.conns[c]
	if held {
		l.forget(c)
	}
	return held
}

// victim returns the connection to close.
func (l *Limit) victim() net.Conn {
	var victim net.Conn
	for c := range l.conns {
		if victim == nil || l.closesFirst(l.conns[c], l.conns[victim]) {
			victim = c
		}
	}
	return victim
}

// closesFirst reports whether a is closed before b. It first compares how many connections their addresses have,
// because otherwise one address with many busy connections would keep out all others.
func (l *Limit) closesFirst(a, b *entry) bool {
	if l.hosts[a.host] != l.hosts[b.host] {
		return l.hosts[a.host] > l.hosts[b.host]
	}
	if a.busy != b.busy {
		return b.busy
	}
	return a.number < b.number
}

// forget removes a connection from the counts.
func (l *Limit) forget(c net.Conn) {
	h := l.conns[c].host
	delete(l.conns, c)
	if l.hosts[h]--; l.hosts[h] == 0 {
		delete(l.hosts, h)
	}
}

// host returns the address to which a connection is counted. For IPv6 this is the /64 prefix, because one
// machine may use all addresses of a prefix.
func host(c net.Conn) string {
	address, err := netip.ParseAddrPort(c.RemoteAddr().String())
	if err != nil {
		return c.RemoteAddr().String()
	}
	ip := address.Addr().Unmap()
	prefix, _ := ip.Prefix(min(ip.BitLen(), 64)) // cannot fail, because the prefix is not longer than the address
	return prefix.String()
}
