package transfer

import (
	"net"
	"testing"
	"testing/synctest"
	"time"
)

// TestReceiver: a connection stays open while the receiver shows that it is alive, even if it reads nothing. Otherwise it is
// closed after the timeout.
func TestReceiver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sender, node := net.Pipe()
		r := newReceiver(sender, stallTimeout)
		go r.read()
		written := make(chan error)
		begin := time.Now()
		go func() {
			_, err := r.Write([]byte("content"))
			written <- err
		}()
		for range 10 {
			time.Sleep(stallTimeout - time.Second)
			if err := writeFrame(node, frame{kind: kindWait}); err != nil {
				t.Fatalf("after %v: got error %v, want an open connection", time.Since(begin), err)
			}
		}
		alive := time.Now()
		if err := <-written; err == nil {
			t.Error("got no error of a write that nothing reads")
		}
		if silent := time.Since(alive); silent != stallTimeout {
			t.Errorf("the connection was closed after a silence of %v, want %v", silent, stallTimeout)
		}
		if err := r.awaitEnd(); err == nil {
			t.Error("got no reason for the end of the connection")
		}
	})
}

// TestReceiverEnds: the end of the connection by the receiver ends a write at once, and is no error at the end of a transfer. The
// receiver may send nothing but signs of life.
func TestReceiverEnds(t *testing.T) {
	for name, row := range map[string]struct {
		act    func(node net.Conn) error
		failed bool
	}{
		"end":              {net.Conn.Close, false},
		"unexpected frame": {func(node net.Conn) error { return writeFrame(node, frame{kind: kindStart}) }, true},
	} {
		synctest.Test(t, func(t *testing.T) {
			sender, node := net.Pipe()
			r := newReceiver(sender, stallTimeout)
			defer r.timer.Stop()
			go r.read()
			begin, written := time.Now(), make(chan error)
			go func() {
				_, err := r.Write([]byte("content"))
				written <- err
			}()
			if err := row.act(node); err != nil {
				t.Fatal(err)
			}
			if err := <-written; err == nil || time.Since(begin) > 0 {
				t.Errorf("%s: got error %v of a write after %v, want one at once", name, err, time.Since(begin))
			}
			if err := r.awaitEnd(); (err != nil) != row.failed {
				t.Errorf("%s: got error %v at the end, want one: %t", name, err, row.failed)
			}
		})
	}
}

// TestAlive: the receiver shows that it is alive at most once in each waitInterval.
func TestAlive(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		conn, sender := net.Pipe()
		s := &stream{conn: &watched{conn: conn, timeout: silenceTimeout}}
		frames := 0
		go func() {
			for {
				if f, err := readFrame(sender, nil); err != nil || f.kind != kindWait {
					return
				}
				frames++
			}
		}()
		for range 30 {
			s.Alive()
			time.Sleep(time.Second)
		}
		synctest.Wait()
		if frames != 3 {
			t.Errorf("got %d frames in 30 seconds, want one every %v", frames, waitInterval)
		}
		_ = conn.Close()
		s.Alive() // of a lost connection
	})
}
