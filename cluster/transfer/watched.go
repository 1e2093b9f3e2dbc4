package transfer

import (
	"io"
	"time"
)

// watched is a connection that is closed if a read or write takes longer than a timeout. A deadline of net.Conn cannot be
// used, because gRPC clears it when it passes on a connection.
type watched struct {
	conn    io.ReadWriteCloser
	timeout time.Duration
}

func (w *watched) Read(b []byte) (int, error) {
	defer w.watch()()
	return w.conn.Read(b)
}

func (w *watched) Write(b []byte) (int, error) {
	defer w.watch()()
	return w.conn.Write(b)
}

// watch closes the connection after the timeout, unless stop is called before.
func (w *watched) watch() (stop func() bool) {
	return time.AfterFunc(w.timeout, func() { _ = w.conn.Close() }).Stop
}
