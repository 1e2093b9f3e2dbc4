package driver

import (
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/stats"
)

// TestIdle: the time without a connection begins at the start and after each last
// connection, and a connection that begins as it ends does not matter any more.
func TestIdle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		i := newIdle(3 * time.Second)
		time.Sleep(2 * time.Second)
		i.HandleConn(t.Context(), &stats.ConnBegin{})
		i.HandleConn(t.Context(), &stats.ConnBegin{})
		time.Sleep(10 * time.Second)
		i.HandleConn(t.Context(), &stats.ConnEnd{})
		time.Sleep(10 * time.Second)
		i.HandleConn(t.Context(), &stats.ConnEnd{})
		time.Sleep(2 * time.Second)
		i.HandleConn(t.Context(), &stats.ConnBegin{})
		i.HandleConn(t.Context(), &stats.ConnEnd{})
		<-i.ended()
		if took := time.Since(began); took != 27*time.Second {
			t.Errorf("it ended after %v", took)
		}
		i.HandleConn(t.Context(), &stats.ConnBegin{})
		i.HandleConn(t.Context(), &stats.ConnEnd{})
		time.Sleep(4 * time.Second)
	})
	var none *idle
	if none.ended() != nil {
		t.Error("a driver without an idle time ends")
	}
}
