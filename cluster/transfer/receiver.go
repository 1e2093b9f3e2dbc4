package transfer

import (
	"errors"
	"fmt"
	"io"
	"time"
)

// receiver is a connection to the node that receives. It is closed if, for a time, no write ends and the node does not show
// that it is alive.
type receiver struct {
	conn    io.ReadWriteCloser
	timeout time.Duration
	timer   *time.Timer
	// ended has the reason for which the node sends nothing more; nil if it has ended the connection.
	ended chan error
}

func newReceiver(conn io.ReadWriteCloser, timeout time.Duration) *receiver {
	return &receiver{conn, timeout, time.AfterFunc(timeout, func() { _ = conn.Close() }), make(chan error, 1)}
}

// read reads what the node sends, until the connection ends.
func (r *receiver) read() {
	for {
		f, err := readFrame(r.conn, nil)
		if err == nil && f.kind != kindWait {
			err = fmt.Errorf("unexpected frame of kind %d", f.kind)
		}
		if err != nil {
			_ = r.conn.Close() // ends a write
			if errors.Is(err, io.EOF) {
				err = nil
			}
			r.ended <- err
			return
		}
		r.timer.Reset(r.timeout)
	}
}

// Write implements io.Writer.
func (r *receiver) Write(b []byte) (int, error) {
	n, err := r.conn.Write(b)
	r.timer.Reset(r.timeout)
	return n, err
}

// awaitEnd waits until the node ends the connection. Otherwise the end of this side could discard what the node has not read.
func (r *receiver) awaitEnd() error { return <-r.ended }
