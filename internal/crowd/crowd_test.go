package crowd_test

import (
	"fmt"
	"net"
	"slices"
	"testing"

	"github.com/trivet-csi/trivet/internal/crowd"
)

// conn is a connection from an address, which notes that it was closed.
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

// TestLimit: who is closed when one too many comes.
func TestLimit(t *testing.T) {
	for name, tc := range map[string]struct {
		from   []byte // last bytes of addresses; at most four are held
		closed []int
	}{
		"none":                     {[]byte{1, 1, 1, 1}, nil},
		"the oldest":               {[]byte{1, 1, 1, 1, 1, 1}, []int{0, 1}},
		"the oldest of the most":   {[]byte{2, 1, 1, 1, 3, 1}, []int{1, 2}},
		"the newcomer's own":       {[]byte{1, 2, 3, 2, 2}, []int{1}},
		"the oldest of all, alike": {[]byte{1, 2, 3, 4, 5, 6}, []int{0, 1}},
	} {
		t.Run(name, func(t *testing.T) {
			limit := crowd.NewLimit(4)
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

// TestLimitForgets: what is removed counts no more.
func TestLimitForgets(t *testing.T) {
	limit := crowd.NewLimit(1)
	for i := range 1000 {
		c := &conn{from: net.TCPAddr{IP: net.IPv4(10, 0, byte(i>>8), byte(i)), Port: 1}}
		limit.Add(c)
		if c.closed || !limit.Remove(c) || limit.Remove(c) {
			t.Fatal(fmt.Sprint(i, c.closed))
		}
	}
}
