package transfer

import (
	"net"
	"testing"
	"testing/synctest"
	"time"
)

// TestKeepAlive: the receiver gets a frame in each waitInterval while a source is opened. If it has ended the connection, opening is
// ended.
func TestKeepAlive(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sender, receiver := net.Pipe()
		ended := false
		stop := keepAlive(&watched{conn: sender, timeout: stallTimeout}, func() { ended = true })
		begin := time.Now()
		for range 3 {
			if f, err := readFrame(receiver, nil); err != nil || f.kind != kindWait {
				t.Fatalf("got frame %+v and error %v, want one of kind %d", f, err, kindWait)
			}
		}
		if took := time.Since(begin); took != 3*waitInterval {
			t.Errorf("got 3 frames in %v, want %v", took, 3*waitInterval)
		}
		_ = receiver.Close()
		time.Sleep(waitInterval)
		synctest.Wait()
		if err := stop(); err == nil || !ended {
			t.Errorf("the connection is lost: got error %v and opening ended %t, want an error and true", err, ended)
		}

		sender, receiver = net.Pipe()
		defer func() { _ = receiver.Close() }()
		if err := keepAlive(&watched{conn: sender, timeout: stallTimeout}, func() {})(); err != nil {
			t.Errorf("stopped before the first frame: got error %v", err)
		}
	})
}
