package transfer

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"net"
	"time"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/cluster/pki"
	"github.com/trivet-csi/trivet/internal/trace"
	"github.com/trivet-csi/trivet/volume"
)

const (
	dialTimeout = 10 * time.Second
	// silenceTimeout is how long the client waits for a frame. The server sends one every waitInterval.
	silenceTimeout = time.Minute
)

// Client receives sources from other nodes.
type Client struct {
	// Driver is the name of the driver.
	Driver       string
	Certificates *pki.Directory
	Limit        *Limit
}

// Incoming returns the permission in the offer of a call; nil if the call has none.
func (c *Client) Incoming(ctx context.Context) (backend.Incoming, error) {
	o, ok, err := offerIn(ctx)
	if !ok || err != nil {
		return nil, err
	}
	return &permission{c, o}, nil
}

// permission implements backend.Incoming.
type permission struct {
	client *Client
	offer  Offer
}

// Connect implements backend.Incoming. The connection ends with ctx.
func (p *permission) Connect(ctx context.Context) (_ backend.Stream, err error) {
	_, span := trace.Start(ctx, "connect to source")
	span.Set("trivet.node", p.offer.Node)
	defer span.End(&err)
	if p.offer.Problem != "" {
		return nil, volume.Errorf(volume.ErrUnavailable, "%s", p.offer.Problem)
	}
	c, node := p.client, p.offer.Node
	dialing, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	dialer := &tls.Dialer{Config: c.Certificates.PeerClient(pki.NodeURI(c.Driver, node), Protocol)}
	conn, err := dialer.DialContext(dialing, "tcp", p.offer.Address)
	if err != nil {
		return nil, volume.Errorf(volume.ErrUnavailable, "node %q, which has the source, cannot be reached at %s: %w: check the driver's pod there, and that the nodes may connect to each other's forwarding port", node, p.offer.Address, err)
	}
	s := &stream{
		conn: &watched{conn: conn, timeout: silenceTimeout}, raw: conn, node: node, limit: c.Limit,
		ended: context.AfterFunc(ctx, func() { _ = conn.Close() }),
	}
	if err := s.request(p.offer.Ticket); err != nil {
		_ = s.Close()
		if ctx.Err() != nil {
			err = ctx.Err()
		}
		return nil, err
	}
	return s, nil
}

// stream implements backend.Stream.
type stream struct {
	conn     *watched
	raw      net.Conn
	node     string
	limit    *Limit
	manifest volume.Manifest
	ended    func() bool
	// alive is the time of the last call of Alive that has sent a frame.
	alive time.Time
}

// request presents the ticket, and waits for the manifest.
func (s *stream) request(ticket []byte) error {
	err := writeFrame(s.conn, frame{kind: kindTicket, payload: ticket})
	for buf := make([]byte, maxText); err == nil; {
		var f frame
		if f, err = readFrame(s.conn, buf); err != nil {
			break
		}
		switch f.kind {
		case kindManifest:
			err := json.Unmarshal(f.payload, &s.manifest)
			if err != nil {
				err = volume.Errorf(volume.ErrDamaged, "node %q describes the source in an unknown format: %w", s.node, err)
			}
			return err
		case kindFailure:
			return failureIn(f.payload, s.node)
		case kindWait:
		default:
			return volume.Errorf(volume.ErrUnavailable, "node %q answers with an unexpected frame of kind %d: check which driver runs there", s.node, f.kind)
		}
	}
	return volume.Errorf(volume.ErrUnavailable, "node %q does not send the source: %w: retry", s.node, err)
}

// Manifest implements backend.Stream.
func (s *stream) Manifest() volume.Manifest { return s.manifest }

// Copy implements backend.Stream.
func (s *stream) Copy(ctx context.Context, from int64, bases []string, to backend.Target) (err error) {
	ctx, span := trace.Start(ctx, "transfer")
	span.Set("trivet.node", s.node)
	defer span.End(&err)
	i := &incoming{from: s.conn, to: to, limit: s.limit, node: s.node, end: s.manifest.StorageSize(), at: from, bases: bases}
	list, err := json.Marshal(bases)
	if err == nil {
		err = writeFrame(s.conn, frame{kind: kindStart, offset: from, payload: list})
	}
	if err != nil {
		err = i.interrupted(err)
	} else {
		err = i.receive(ctx, from)
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return err
}

// Alive implements backend.Stream. If the connection is lost, the next read of Copy fails.
func (s *stream) Alive() {
	if time.Since(s.alive) >= waitInterval {
		s.alive = time.Now()
		_ = writeFrame(s.conn, frame{kind: kindWait})
	}
}

// Close implements backend.Stream.
func (s *stream) Close() error {
	s.ended()
	return s.raw.Close()
}
