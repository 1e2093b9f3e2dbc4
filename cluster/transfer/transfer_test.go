package transfer_test

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"iter"
	"net/url"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc/metadata"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/cluster/pki"
	"github.com/trivet-csi/trivet/cluster/transfer"
	"github.com/trivet-csi/trivet/linux/background"
	"github.com/trivet-csi/trivet/linux/clone"
	"github.com/trivet-csi/trivet/volume"
)

const driverName = backendtest.DriverName

var source = volume.Source{Snapshot: true, ID: volume.ID{Backend: "any", Pool: "p", PoolUUID: "01234567", Name: "s"}}

// content is a source and a target in memory.
type content struct {
	bytes    []byte
	manifest volume.Manifest
	ranges   []clone.Range
	// base is the content that a source has, too, and changes are the differences from it.
	base    string
	changes []clone.Range
	// begun is the base with which a target began.
	begun    string
	opened   atomic.Int32
	fail     error
	verified int64
}

func (c *content) Manifest() volume.Manifest { return c.manifest }

func (c *content) ReadAt(b []byte, at int64) (int, error) { return copy(b, c.bytes[at:]), c.fail }

func (c *content) Budget() *background.Budget { return nil }

func (c *content) Since(identity string) bool {
	if identity != c.base {
		return false
	}
	c.ranges = c.changes
	return true
}

func (c *content) Begin(_ context.Context, base string) error {
	c.begun = base
	return nil
}

func (c *content) WriteZeros(r clone.Range) error {
	clear(c.bytes[r.Offset:][:r.Length])
	return nil
}

func (c *content) WriteAt(b []byte, at int64) (int, error) { return copy(c.bytes[at:], b), nil }

func (c *content) Verified(upTo int64) error {
	c.verified = upTo
	return nil
}

func (c *content) Ranges(_ context.Context, from int64) iter.Seq2[clone.Range, error] {
	return func(yield func(clone.Range, error) bool) {
		for _, r := range c.ranges {
			if r.Offset >= from && !yield(r, nil) {
				return
			}
		}
	}
}

func (c *content) Close() error { return nil }

// newContent returns 4 MiB with some ranges of data.
func newContent() *content {
	c := &content{bytes: make([]byte, 4<<20), ranges: []clone.Range{{Offset: 0, Length: 4096}, {Offset: 1 << 20, Length: 5 << 19}}}
	for _, r := range c.ranges {
		for i := range r.Length {
			c.bytes[r.Offset+i] = byte(i>>12) + 1
		}
	}
	c.manifest = volume.Manifest{Identity: "x", Size: 4 << 20, Bytes: 3 << 20, Block: true, SectorSize: 512}
	return c
}

// world is a node "a" with a source, and the certificates of the installation.
type world struct {
	*backendtest.Cluster
	t       *testing.T
	source  *content
	address string
	server  *transfer.Server
	// received is the limit of the last connection.
	received *transfer.Limit
	// controller, b and c are the certificates of the controller and of two other nodes.
	controller, b, c *pki.Directory
}

func newWorld(t *testing.T) *world {
	t.Helper()
	w := &world{Cluster: backendtest.NewCluster(t), t: t, source: newContent()}
	w.controller = w.certificates(w.Cluster, pki.ControllerURI(driverName), x509.ExtKeyUsageClientAuth)
	w.b = w.certificates(w.Cluster, pki.NodeURI(driverName, "b"), x509.ExtKeyUsageServerAuth)
	w.c = w.certificates(w.Cluster, pki.NodeURI(driverName, "c"), x509.ExtKeyUsageServerAuth)
	w.server = transfer.NewServer(transfer.ServerOptions{
		Driver: driverName, Node: "a", Limit: transfer.NewLimit(0, 1),
		Certificates: w.certificates(w.Cluster, pki.NodeURI(driverName, "a"), x509.ExtKeyUsageServerAuth),
		Open: func(_ context.Context, s volume.Source) (backend.Outgoing, error) {
			if s.ID != source.ID {
				return nil, volume.Errorf(volume.ErrNotFound, "%v does not exist", &s)
			}
			w.source.opened.Add(1)
			return w.source, nil
		},
	})
	l, err := tls.Listen("tcp", "127.0.0.1:0", w.server.TLS())
	must(t, err)
	w.address = l.Addr().String()
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			c := conn.(*tls.Conn)
			if c.Handshake() != nil {
				_ = c.Close()
				continue
			}
			w.server.Serve(c, c.ConnectionState())
		}
	}()
	t.Cleanup(func() {
		_ = l.Close()
		w.server.Close()
	})
	return w
}

// certificates returns a directory with a certificate of a cluster's CA.
func (w *world) certificates(of *backendtest.Cluster, who *url.URL, usage x509.ExtKeyUsage) *pki.Directory {
	w.t.Helper()
	dir := w.t.TempDir()
	of.Certify(w.t, dir, who, usage)
	return pki.OpenDirectory(dir)
}

// connect presents a ticket to node a.
func (w *world) connect(as *pki.Directory, ticket []byte) (backend.Stream, error) {
	w.received = transfer.NewLimit(0, 1)
	client := &transfer.Client{Driver: driverName, Certificates: as, Limit: w.received}
	out, err := transfer.Offer{Node: "a", Address: w.address, Ticket: ticket}.Attach(w.t.Context())
	must(w.t, err)
	md, _ := metadata.FromOutgoingContext(out)
	in, err := client.Incoming(metadata.NewIncomingContext(w.t.Context(), md))
	must(w.t, err)
	s, err := in.Connect(w.t.Context())
	if err == nil {
		w.t.Cleanup(func() { _ = s.Close() })
	}
	return s, err
}

// ticket returns a valid ticket for node b, with some changes, that a directory's key signs.
func (w *world) ticket(signer *pki.Directory, changes ...func(*transfer.Ticket)) []byte {
	t := transfer.NewTicket(source, "a", "b", "v")
	for _, change := range changes {
		change(&t)
	}
	signed, err := t.Sign(signer)
	must(w.t, err)
	return signed
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// TestTransfer: all content is received, also from an offset on.
func TestTransfer(t *testing.T) {
	w := newWorld(t)
	for _, from := range []int64{0, 1 << 20, 4 << 20} {
		s, err := w.connect(w.b, w.ticket(w.controller))
		must(t, err)
		if s.Manifest() != w.source.manifest {
			t.Errorf("got %+v, want %+v", s.Manifest(), w.source.manifest)
		}
		to := &content{bytes: make([]byte, 4<<20)}
		copy(to.bytes, w.source.bytes[:from])
		if err := s.Copy(t.Context(), from, nil, to); err != nil || to.verified != 4<<20 || !bytes.Equal(to.bytes, w.source.bytes) {
			t.Errorf("from %d: got %v, verified up to %d, want the content of the source", from, err, to.verified)
		}
		must(t, s.Close())
	}
	s, err := w.connect(w.b, w.ticket(w.controller))
	must(t, err)
	w.source.fail = errors.New("the disk is gone")
	err = s.Copy(t.Context(), 0, nil, &content{bytes: make([]byte, 4<<20)})
	if !errors.Is(err, volume.ErrUnavailable) || !strings.Contains(err.Error(), `node "a": the disk is gone`) {
		t.Errorf("got %v, want the error of the source", err)
	}
}

// TestSentAs: while a volume is open, the names of the new volumes are known. A snapshot is not a volume.
func TestSentAs(t *testing.T) {
	w := newWorld(t)
	ofVolume := func(t *transfer.Ticket) { t.Snapshot = false }
	for name, change := range map[string]func(*transfer.Ticket){"v": ofVolume, "": func(*transfer.Ticket) {}} {
		s, err := w.connect(w.b, w.ticket(w.controller, change))
		must(t, err)
		if got := strings.Join(w.server.SentAs(source.ID), " "); got != name {
			t.Errorf("got %q, want %q", got, name)
		}
		must(t, s.Copy(t.Context(), 0, nil, &content{bytes: make([]byte, 4<<20)}))
		must(t, s.Close())
		for begin := time.Now(); len(w.server.SentAs(source.ID)) > 0; time.Sleep(time.Millisecond) {
			if time.Since(begin) > 10*time.Second {
				t.Fatalf("got %q after the transfer, want none", w.server.SentAs(source.ID))
			}
		}
	}
}

// TestDifferences: if both nodes have the same content, only the changes are sent, also those to zeros.
func TestDifferences(t *testing.T) {
	w := newWorld(t)
	older := bytes.Clone(w.source.bytes)
	clear(w.source.bytes[1<<20 : 2<<20])
	w.source.bytes[4095] = 77
	w.source.base, w.source.changes = "S1", []clone.Range{{Offset: 0, Length: 4096}, {Offset: 1 << 20, Length: 1 << 20}}
	s, err := w.connect(w.b, w.ticket(w.controller))
	must(t, err)
	to := &content{bytes: older}
	to.bytes[3<<20] = 99 // outside of the changes
	w.source.bytes[3<<20] = 98
	must(t, s.Copy(t.Context(), 0, []string{"unknown", "S1"}, to))
	w.source.bytes[3<<20] = 99
	if changed := int64(1<<20 + 4096); w.received.Bytes() > changed*12/10 {
		t.Errorf("%d bytes were received for %d changed ones", w.received.Bytes(), changed)
	}
	if to.begun != "S1" || to.verified != 4<<20 || !bytes.Equal(to.bytes, w.source.bytes) {
		t.Errorf("the target began with %q, and is verified up to %d: want the changes since S1, and no other byte", to.begun, to.verified)
	}
}

// TestTickets: only the node in a ticket of the controller gets the source in it, once.
func TestTickets(t *testing.T) {
	w := newWorld(t)
	other := backendtest.NewCluster(t)
	good := w.ticket(w.controller)
	first, err := w.connect(w.b, good)
	must(t, err)
	must(t, first.Close())
	before := w.source.opened.Load()
	for name, tc := range map[string]struct {
		as     *pki.Directory
		ticket []byte
		says   string
	}{
		"replayed":                  {w.b, good, "was used before"},
		"of another node":           {w.c, w.ticket(w.controller), `is for node "b", node "c" has presented it`},
		"for another node's source": {w.b, w.ticket(w.controller, func(t *transfer.Ticket) { t.From = "c" }), `is for a source on node "c"`},
		"expired": {w.b, w.ticket(w.controller, func(t *transfer.Ticket) {
			t.Issued, t.Expires = t.Issued.Add(-time.Hour), t.Expires.Add(-time.Hour)
		}), "is valid from"},
		"valid for too long": {w.b, w.ticket(w.controller, func(t *transfer.Ticket) { t.Expires = t.Expires.Add(time.Hour) }), "is valid from"},
		"of the future":      {w.b, w.ticket(w.controller, func(t *transfer.Ticket) { t.Issued = t.Issued.Add(time.Hour); t.Expires = t.Expires.Add(time.Hour) }), "is valid from"},
		"of an earlier process": {w.b, w.ticket(w.controller, func(t *transfer.Ticket) {
			t.Issued = t.Issued.Add(-time.Minute)
			t.Expires = t.Expires.Add(-time.Minute)
		}), "before the driver"},
		"signed by a node":         {w.b, w.ticket(w.b), "not signed by the controller"},
		"signed by a foreign CA":   {w.b, w.ticket(w.certificates(other, pki.ControllerURI(driverName), x509.ExtKeyUsageClientAuth)), "not signed by the controller"},
		"signed by another driver": {w.b, w.ticket(w.certificates(w.Cluster, pki.ControllerURI("other.example"), x509.ExtKeyUsageClientAuth)), "not signed by the controller"},
		"signed by a server":       {w.b, w.ticket(w.certificates(w.Cluster, pki.ControllerURI(driverName), x509.ExtKeyUsageServerAuth)), "not signed by the controller"},
		"changed":                  {w.b, changed(t, w.ticket(w.controller)), "not signed by the controller"},
		"for another purpose":      {w.b, signedFor(t, w.controller, "another purpose"), "not signed by the controller"},
		"no ticket":                {w.b, []byte("{}"), "not signed by the controller"},
		"empty":                    {w.b, nil, "not signed by the controller"},
		"too large":                {w.b, make([]byte, 1<<20), `node "a"`},
		"of another source":        {w.b, w.ticket(w.controller, func(t *transfer.Ticket) { t.Source.Name = "t" }), "does not exist"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := w.connect(tc.as, tc.ticket)
			if err == nil || !strings.Contains(err.Error(), tc.says) {
				t.Errorf("got %v, want an error with %q", err, tc.says)
			}
		})
	}
	if n := w.source.opened.Load(); n != before {
		t.Errorf("%d refused tickets opened the source", n-before)
	}
}

// changed returns a ticket for another node with the signature of a ticket.
func changed(t *testing.T, ticket []byte) []byte {
	t.Helper()
	var parts map[string]any
	must(t, json.Unmarshal(ticket, &parts))
	forged := transfer.NewTicket(source, "a", "c", "v")
	statement, err := json.Marshal(forged)
	must(t, err)
	parts["statement"] = statement
	b, err := json.Marshal(parts)
	must(t, err)
	return b
}

// signedFor returns a ticket that the controller has signed as a statement of another kind.
func signedFor(t *testing.T, signer *pki.Directory, purpose string) []byte {
	t.Helper()
	statement, err := json.Marshal(transfer.NewTicket(source, "a", "b", "v"))
	must(t, err)
	b, err := signer.Sign(purpose, statement)
	must(t, err)
	return b
}

// TestPeers: a process that is not a node of the driver cannot connect, and a client connects only to the node in the offer.
func TestPeers(t *testing.T) {
	w := newWorld(t)
	other := backendtest.NewCluster(t)
	for name, as := range map[string]*pki.Directory{
		"the controller":         w.controller,
		"a node of a foreign CA": w.certificates(other, pki.NodeURI(driverName, "b"), x509.ExtKeyUsageServerAuth),
		"a node of a driver":     w.certificates(w.Cluster, pki.NodeURI("other.example", "b"), x509.ExtKeyUsageServerAuth),
		"a client as a node":     w.certificates(w.Cluster, pki.NodeURI(driverName, "b"), x509.ExtKeyUsageClientAuth),
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := w.connect(as, w.ticket(w.controller)); !errors.Is(err, volume.ErrUnavailable) {
				t.Errorf("got %v, want ErrUnavailable", err)
			}
		})
	}
	if n := w.source.opened.Load(); n != 0 {
		t.Errorf("the source was opened %d times, want none", n)
	}
	client := w.b.PeerClient(pki.NodeURI(driverName, "c"), transfer.Protocol)
	if conn, err := tls.Dial("tcp", w.address, client); err == nil {
		_ = conn.Close()
		t.Error("a client that expects node c has connected to node a")
	}
	plain := w.b.Client(pki.NodeURI(driverName, "a"))
	plain.NextProtos = []string{"h2"}
	if conn, err := tls.Dial("tcp", w.address, plain); err == nil {
		_ = conn.Close()
		t.Error("a client has connected with the protocol h2")
	}
}

// TestManyReceivers: more transfers than streams wait for each other.
func TestManyReceivers(t *testing.T) {
	w := newWorld(t)
	first, err := w.connect(w.b, w.ticket(w.controller))
	must(t, err)
	second := make(chan error, 1)
	go func() {
		s, err := w.connect(w.b, w.ticket(w.controller))
		if err == nil {
			err = s.Copy(t.Context(), 0, nil, &content{bytes: make([]byte, 4<<20)})
		}
		second <- err
	}()
	must(t, first.Copy(t.Context(), 0, nil, &content{bytes: make([]byte, 4<<20)}))
	select {
	case err := <-second:
		t.Errorf("the second transfer has ended before the first: %v", err)
	default:
	}
	must(t, first.Close())
	must(t, <-second)
}
