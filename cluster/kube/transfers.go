package kube

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/trivet-csi/trivet/volume"
)

// The reasons of the events about transfers.
const (
	reasonTransferring   = "Transferring"
	reasonTransferred    = "Transferred"
	reasonTransferFailed = "TransferFailed"
)

// progressInterval is the shortest time between two events about the progress or the failures of a transfer.
const progressInterval = time.Minute

// TransferState is the state of a transfer after, or during, a call that creates its volume.
type TransferState int

const (
	// TransferRuns means that the transfer has begun.
	TransferRuns TransferState = iota
	// TransferContinues means that the call has ended before the transfer. Detail is the progress.
	TransferContinues
	// TransferCompleted means that the volume exists, possibly since an earlier call.
	TransferCompleted
	// TransferFailed means that Detail is the reason of a failure.
	TransferFailed
)

// Transfer is a volume that is created from a source on another node.
type Transfer struct {
	Namespace, Claim string
	// Volume is the name that the provisioner gave the volume. From and To are nodes.
	Volume, Source, From, To string
	Size                     int64 // of the volume; 0 if it is unknown
	State                    TransferState
	Detail                   string
}

// TransferEvents creates the events about transfers on the claims of the new volumes. The API server has their state: a
// progress of the last minute is not repeated, and a completion is only recorded for a transfer whose begin is.
type TransferEvents struct {
	driver string
	client atomic.Pointer[Client] // nil until Run has connected
	errs   rareErrors
}

// NewTransferEvents returns a TransferEvents that creates no events before Run has connected.
func NewTransferEvents(driver string) *TransferEvents { return &TransferEvents{driver: driver} }

// Run connects to the API server.
func (e *TransferEvents) Run(ctx context.Context, connect func() (*Client, error)) {
	if c := dial(ctx, connect); c != nil {
		e.client.Store(c)
	}
}

// Record creates or repeats the event about a transfer. An error is only logged.
func (e *TransferEvents) Record(ctx context.Context, t Transfer) {
	c := e.client.Load()
	if c == nil || t.Claim == "" {
		return
	}
	if err := e.record(ctx, c, t); err != nil {
		e.errs.log(ctx, err, "Recording an event about a transfer failed", "namespace", t.Namespace, "claim", t.Claim)
	}
}

func (e *TransferEvents) record(ctx context.Context, c *Client, t Transfer) error {
	claim, err := c.Claim(ctx, t.Namespace, t.Claim)
	if err != nil || claim.Metadata.DeletionTimestamp != "" {
		return absent(err)
	}
	about := func(reason, message string) notice {
		return notice{
			name: eventName("trivet-transfer", claim.Metadata.UID, t.Volume, reason), kind: "PersistentVolumeClaim", of: claim.Metadata,
			reason: reason, message: message,
		}
	}
	begun := about(reasonTransferring, t.String())
	switch t.State {
	case TransferRuns:
		if err := c.createEvent(ctx, e.driver, begun); !apierrors.IsAlreadyExists(err) {
			return err
		}
		return nil
	case TransferContinues:
		begun.message += ": " + t.Detail
		return c.recordEvent(ctx, e.driver, begun, progressInterval)
	case TransferFailed:
		failed := about(reasonTransferFailed, t.String()+" failed, and is retried: "+t.Detail)
		failed.warning = true
		return c.recordEvent(ctx, e.driver, failed, progressInterval)
	case TransferCompleted:
	}
	if _, err := get[event](ctx, c.api.Resource(events).Namespace(t.Namespace), begun.name); err != nil {
		return absent(err) // the volume existed before the call, or the transfer took less time than is reported
	}
	return c.recordEvent(ctx, e.driver, about(reasonTransferred, t.String()+" is complete"), time.Hour)
}

// String returns what is transferred.
func (t Transfer) String() string {
	text := fmt.Sprintf("Transfer of %s from node %q to node %q", t.Source, t.From, t.To)
	if t.Size > 0 {
		text += ", for a volume of " + volume.FormatSize(t.Size)
	}
	return text
}
