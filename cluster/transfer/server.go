package transfer

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"net"
	"slices"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/cluster/pki"
	"github.com/trivet-csi/trivet/volume"
)

const (
	// requestTimeout bounds the wait for a ticket. startTimeout bounds that for the receiver to reserve the space. stallTimeout
	// bounds the time in which no write ends and the receiver does not show that it is alive: it may sync 320 MiB to a slow disk
	// meanwhile.
	requestTimeout = 10 * time.Second
	startTimeout   = 2 * time.Minute
	stallTimeout   = 5 * time.Minute
	// maxSessions bounds the connections of nodes, most of which wait for one of Limit's streams.
	maxSessions = 256
)

// ServerOptions configure a Server.
type ServerOptions struct {
	// Driver is the name of the driver, Node the name of this node.
	Driver, Node string
	Certificates *pki.Directory
	Limit        *Limit
	// Open opens a source on this node.
	Open func(ctx context.Context, source volume.Source) (backend.Outgoing, error)
}

// Server sends sources of this node to the nodes that have a ticket.
type Server struct {
	ServerOptions
	tickets *tickets
	ctx     context.Context //nolint:containedctx // the lifetime of the server
	stop    context.CancelFunc

	mu       sync.Mutex
	closed   bool
	count    int
	sessions sync.WaitGroup
	// sending are the tickets whose sources are open.
	sending map[Ticket]bool
}

// NewServer returns a server that serves until Close.
func NewServer(o ServerOptions) *Server {
	s := &Server{ServerOptions: o, tickets: newTickets(o.Driver, o.Node, o.Certificates), sending: map[Ticket]bool{}}
	s.ctx, s.stop = context.WithCancel(context.Background())
	return s
}

// TLS returns the configuration of the connections that Serve serves.
func (s *Server) TLS() *tls.Config { return s.Certificates.PeerServer(s.Driver, Protocol) }

// Close ends all transfers, and waits for their end.
func (s *Server) Close() {
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	s.stop()
	s.sessions.Wait()
}

// record records until end is called that the source in a ticket is open.
func (s *Server) record(t Ticket) (end func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.sending[t] = true
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.sending, t)
	}
}

// SentAs returns the names of the new volumes for which a volume of this node is open.
func (s *Server) SentAs(id volume.ID) (names []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for t := range s.sending {
		if !t.Snapshot && t.Source == id {
			names = append(names, t.Volume)
		}
	}
	slices.Sort(names)
	return names
}

// Serve serves a connection whose handshake used the configuration of TLS. It returns immediately.
func (s *Server) Serve(conn net.Conn, state tls.ConnectionState) {
	s.mu.Lock()
	defer s.mu.Unlock()
	node, ok := pki.PeerNode(s.Driver, state)
	if s.closed || s.count >= maxSessions || !ok || state.NegotiatedProtocol != Protocol {
		_ = conn.Close()
		return
	}
	s.count++
	s.sessions.Go(func() {
		defer func() {
			_ = conn.Close()
			s.mu.Lock()
			defer s.mu.Unlock()
			s.count--
		}()
		defer context.AfterFunc(s.ctx, func() { _ = conn.Close() })()
		s.serve(conn, node)
	})
}

// serve serves one connection of a node, and tells the node why it ends.
func (s *Server) serve(conn net.Conn, node string) {
	err := s.session(&watched{conn: conn, timeout: requestTimeout}, node)
	if err == nil || s.ctx.Err() != nil {
		return
	}
	klog.Background().Info("A transfer to another node has ended early", "node", node, "reason", err.Error())
	_ = writeFrame(&watched{conn: conn, timeout: requestTimeout}, failureFrame(err)) // fails if the node has ended the connection
}

// session redeems the ticket, and sends the source in it.
func (s *Server) session(conn *watched, node string) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("panic: %v", r)
		}
	}()
	f, err := readFrame(conn, make([]byte, maxTicket))
	if err != nil || f.kind != kindTicket {
		return refused("no ticket was presented (%v)", err)
	}
	t, err := s.tickets.redeem(f.payload, node)
	if err != nil {
		return err
	}
	conn.timeout = stallTimeout
	release, err := s.Limit.acquire(s.ctx, func() error { return writeFrame(conn, frame{kind: kindWait}) })
	if err != nil {
		return err
	}
	defer release()
	ctx, end := context.WithCancel(s.ctx) // of the source until it is closed
	defer end()
	source, err := s.open(ctx, end, conn, volume.Source{Snapshot: t.Snapshot, ID: t.Source})
	if err != nil {
		return err
	}
	defer source.Close()
	defer s.record(t)()
	from, bases, err := s.start(conn, source.Manifest())
	if err != nil {
		return err
	}
	stop := keepAlive(conn, end)
	base := selectBase(source, bases)
	if err := stop(); err != nil {
		return err
	}
	to := newReceiver(conn.conn, stallTimeout)
	defer to.timer.Stop()
	s.sessions.Go(to.read)
	if err := writeFrame(to, frame{kind: kindBase, payload: []byte(base)}); err != nil {
		return err
	}
	log := klog.LoggerWithValues(klog.Background(), "source", t.Source, "node", node, "volume", t.Volume)
	log.Info("Sending to another node", "from", from, "base", base)
	o := &outgoing{source: source, to: to, limit: s.Limit, differences: base != ""}
	if err := o.send(s.ctx, from); err != nil {
		return err
	}
	log.Info("Sent to another node")
	return to.awaitEnd()
}

// open opens the source, and keeps the connection alive meanwhile, because all entries of a directory are read.
// end ends ctx if the connection is lost.
func (s *Server) open(ctx context.Context, end func(), conn *watched, from volume.Source) (backend.Outgoing, error) {
	stop := keepAlive(conn, end)
	source, err := s.Open(ctx, from)
	if failed := stop(); failed != nil {
		if err == nil {
			_ = source.Close()
		}
		return nil, failed
	}
	return source, err
}

// keepAlive sends frames without content until stop is called. If that fails, it calls failed, and stop returns the error.
func keepAlive(conn *watched, failed func()) (stop func() error) {
	done, ended := make(chan struct{}), make(chan error, 1)
	go func() {
		tick := time.NewTicker(waitInterval)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
			case <-done:
				ended <- nil
				return
			}
			if err := writeFrame(conn, frame{kind: kindWait}); err != nil {
				failed()
				ended <- err
				return
			}
		}
	}()
	return func() error {
		close(done)
		return <-ended
	}
}

// start sends the manifest. It returns the offset from which on the node requests the content, and the bases that the node has.
func (s *Server) start(conn *watched, m volume.Manifest) (from int64, bases []string, err error) {
	payload, err := json.Marshal(m)
	if err != nil {
		return 0, nil, err
	}
	if err := writeFrame(conn, frame{kind: kindManifest, payload: payload}); err != nil {
		return 0, nil, err
	}
	f, err := readFrame(&watched{conn: conn.conn, timeout: startTimeout}, make([]byte, maxText))
	if err != nil {
		return 0, nil, err
	}
	if f.kind != kindStart || f.offset > m.StorageSize() || json.Unmarshal(f.payload, &bases) != nil {
		return 0, nil, volume.Errorf(volume.ErrInvalid, "invalid request of kind %d for the content from offset %d on, with bases %q", f.kind, f.offset, f.payload)
	}
	return f.offset, bases, nil
}

// selectBase selects the first base that this node has, too; empty for none.
func selectBase(source backend.Outgoing, bases []string) string {
	for _, base := range bases {
		if source.Since(base) {
			return base
		}
	}
	return ""
}
