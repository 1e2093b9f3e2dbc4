package connlimit_test

import (
	"net"
	"slices"
	"testing"

	"github.com/trivet-csi/trivet/internal/connlimit"
)

// conn is a connection from an address. It records whether it was closed.
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

// TestLimit: if the limit of four is exceeded, the oldest connection of the address with the most is closed.
func TestLimit(t *testing.T) {
	for name, tc := range map[string]struct {
		from   []byte // last bytes of the addresses, in the order of connecting
		closed []int  // indexes of the closed connections
	}{
		"limit not exceeded":             {[]byte{1, 1, 1, 1}, nil},
		"one address":                    {[]byte{1, 1, 1, 1, 1, 1}, []int{0, 1}},
		"address with most connections":  {[]byte{2, 1, 1, 1, 3, 1}, []int{1, 2}},
		"address of the last connection": {[]byte{1, 2, 3, 2, 2}, []int{1}},
		"one connection per address":     {[]byte{1, 2, 3, 4, 5, 6}, []int{0, 1}},
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
					t.Errorf("connection %d: got closed=%t, want %t", i, c.closed, !c.closed)
				}
				if held := limit.Remove(c); held == c.closed {
					t.Errorf("connection %d: Remove returned %t, want %t", i, held, !held)
				}
			}
		})
	}
}

// TestLimitSparesBusy: a busy connection of an address is not closed while the address has an idle one.
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
		t.Errorf("closed: got %t, %t, %t, %t; want false for the first and the last, true for the others", conns[0].closed, conns[1].closed, conns[2].closed, conns[3].closed)
	}
	if limit.SetBusy(conns[0], false); !limit.Remove(conns[0]) {
		t.Error("Remove of the idle connection: got false, want true")
	}
}

// TestLimitOfNetworks: IPv6 addresses of one /64 prefix count as one address.
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
			t.Errorf("connection from %v: got closed=%t, want %t", c.from.IP, c.closed, i == 2)
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
			t.Fatalf("connection %d was closed or not held, or was removed twice", i)
		}
	}
}
