package connlimit_test

import (
	"fmt"
	"net"
	"slices"
	"testing"

	"github.com/trivet-csi/trivet/internal/connlimit"
)

// conn is a connection from an address, which records that it was closed.
type conn struct {
	net.Conn
	from   net.TCPAddr
	closed bool
}

func (c *conn) RemoteAddr() net.Addr { return &c.from }

func (c *conn) Close() error {
	c.closed = true
	return nil
}

// TestLimit: the connections that are closed when there are too many.
func TestLimit(t *testing.T) {
	for name, tc := range map[string]struct {
		from   []byte // last bytes of addresses; at most four are held
		closed []int
	}{
		"none":                     {[]byte{1, 1, 1, 1}, nil},
		"the oldest":               {[]byte{1, 1, 1, 1, 1, 1}, []int{0, 1}},
		"oldest of most frequent":  {[]byte{2, 1, 1, 1, 3, 1}, []int{1, 2}},
		"the newcomer's own":       {[]byte{1, 2, 3, 2, 2}, []int{1}},
		"the oldest of all, alike": {[]byte{1, 2, 3, 4, 5, 6}, []int{0, 1}},
	} {
		t.Run(name, func(t *testing.T) {
			limit := connlimit.New(4)
			var conns []*conn
			for i, last := range tc.from {
				c := &conn{from: net.TCPAddr{IP: net.IPv4(10, 0, 0, last), Port: 1000 + i}}
				conns = append(conns, c)
				limit.Add(c)
			}
			for i, c := range conns {
				if c.closed != slices.Contains(tc.closed, i) {
					t.Errorf("%d of %v: closed %t", i, tc.from, c.closed)
				}
				if held := limit.Remove(c); held == c.closed {
					t.Errorf("%d is held: %t", i, held)
				}
			}
		})
	}
}

// TestLimitSparesBusy: of one address a busy connection is closed only if all are busy.
func TestLimitSparesBusy(t *testing.T) {
	limit := connlimit.New(2)
	var conns []*conn
	for range 4 {
		c := &conn{from: net.TCPAddr{IP: net.IPv4(10, 0, 0, 1), Port: 1}}
		conns = append(conns, c)
		limit.Add(c)
		limit.SetBusy(c, len(conns) == 1)
	}
	if conns[0].closed || !conns[1].closed || !conns[2].closed || conns[3].closed {
		t.Errorf("closed: %t %t %t %t", conns[0].closed, conns[1].closed, conns[2].closed, conns[3].closed)
	}
	if limit.SetBusy(conns[0], false); !limit.Remove(conns[0]) {
		t.Error("the idle one is not held")
	}
}

// TestLimitOfNetworks: IPv6 addresses of one /64 count as one, and IPv4 addresses each.
func TestLimitOfNetworks(t *testing.T) {
	limit := connlimit.New(3)
	var conns []*conn
	for _, from := range []string{"2001:db8:0:1::1", "10.0.0.1", "2001:db8::1", "2001:db8::2"} {
		c := &conn{from: net.TCPAddr{IP: net.ParseIP(from), Port: 1}}
		conns = append(conns, c)
		limit.Add(c)
	}
	for i, c := range conns {
		if c.closed != (i == 2) {
			t.Errorf("%v: closed %t", c.from.IP, c.closed)
		}
	}
}

// TestLimitRemove: removed connections do not count.
func TestLimitRemove(t *testing.T) {
	limit := connlimit.New(1)
	for i := range 1000 {
		c := &conn{from: net.TCPAddr{IP: net.IPv4(10, 0, byte(i>>8), byte(i)), Port: 1}}
		limit.Add(c)
		if c.closed || !limit.Remove(c) || limit.Remove(c) {
			t.Fatal(fmt.Sprint(i, c.closed))
		}
	}
}
