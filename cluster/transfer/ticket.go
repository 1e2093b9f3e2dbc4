package transfer

import (
	"crypto/rand"
	"crypto/x509"
	"encoding/json"
	"maps"
	"sync"
	"time"

	"github.com/trivet-csi/trivet/cluster/pki"
	"github.com/trivet-csi/trivet/volume"
)

const (
	// ticketPurpose separates tickets from other statements that the controller may sign.
	ticketPurpose = "transfer ticket v1"
	// lifetime is how long a ticket is valid. A transfer can take longer, because only its beginning needs the ticket.
	lifetime = 5 * time.Minute
	// maxTicket bounds the size of a signed ticket in bytes.
	maxTicket = 32 << 10
)

// Ticket is the permission of the controller to send a source to a node, once.
type Ticket struct {
	// ID is unique. A node accepts each ID once.
	ID string `json:"id"`
	// Snapshot is true if Source is a snapshot, and false if it is a volume.
	Snapshot bool      `json:"snapshot"`
	Source   volume.ID `json:"source"`
	// From is the node of the source, and To the node that receives it.
	From string `json:"from"`
	To   string `json:"to"`
	// Volume is the name of the new volume.
	Volume  string    `json:"volume"`
	Issued  time.Time `json:"issued"`
	Expires time.Time `json:"expires"`
}

// NewTicket returns a ticket that is valid from now on.
func NewTicket(source volume.Source, from, to, name string) Ticket {
	now := time.Now().UTC()
	return Ticket{
		ID: rand.Text(), Snapshot: source.Snapshot, Source: source.ID, From: from, To: to, Volume: name,
		Issued: now, Expires: now.Add(lifetime),
	}
}

// Sign signs the ticket with the certificate of the controller's driver.
func (t Ticket) Sign(certificates *pki.Directory) ([]byte, error) {
	statement, err := json.Marshal(t)
	if err != nil {
		return nil, err
	}
	return certificates.Sign(ticketPurpose, statement)
}

// tickets verifies the tickets that are presented to a node.
type tickets struct {
	driver, node string
	certificates *pki.Directory
	// started is the time from which on used is complete.
	started time.Time

	mu   sync.Mutex
	used map[string]time.Time // the end of the validity of used tickets, by their IDs
}

func newTickets(driver, node string, certificates *pki.Directory) *tickets {
	return &tickets{driver: driver, node: node, certificates: certificates, started: time.Now(), used: map[string]time.Time{}}
}

// redeem returns the ticket in text, which the node presenter has sent. It accepts each ticket once. It refuses a ticket that
// the controller did not sign, that names other nodes, or that is not valid now. The refusals are ErrUnavailable, because a
// retry gets a new ticket.
func (ts *tickets) redeem(text []byte, presenter string) (Ticket, error) {
	var t Ticket
	statement, err := ts.certificates.VerifySigned(ticketPurpose, text, pki.ControllerURI(ts.driver), x509.ExtKeyUsageClientAuth)
	if err != nil {
		return t, refused("the ticket was not signed by the controller: %w", err)
	}
	if err := json.Unmarshal(statement, &t); err != nil {
		return t, refused("the ticket: %w", err)
	}
	now := time.Now()
	switch {
	case t.From != ts.node:
		return t, refused("the ticket is for a source on node %q, this is node %q", t.From, ts.node)
	case t.To != presenter:
		return t, refused("the ticket is for node %q, node %q has presented it", t.To, presenter)
	case now.After(t.Expires), t.Expires.Sub(t.Issued) > lifetime, t.Issued.Sub(now) > lifetime:
		return t, refused("the ticket is valid from %s to %s, the clock of node %q says %s: retry, and check the clocks", t.Issued.Format(time.RFC3339), t.Expires.Format(time.RFC3339), ts.node, now.UTC().Format(time.RFC3339))
	case t.Issued.Before(ts.started): // it may have been used before
		return t, refused("the ticket was issued before the driver of node %q started: retry", ts.node)
	}
	ts.mu.Lock()
	defer ts.mu.Unlock()
	maps.DeleteFunc(ts.used, func(_ string, expires time.Time) bool { return now.After(expires) })
	if _, again := ts.used[t.ID]; again {
		return t, refused("the ticket was used before: retry")
	}
	ts.used[t.ID] = t.Expires
	return t, nil
}

func refused(format string, args ...any) error {
	return volume.Errorf(volume.ErrUnavailable, format, args...)
}
