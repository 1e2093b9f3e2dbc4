package transfer

import (
	"context"
	"encoding/json"

	"google.golang.org/grpc/metadata"

	"github.com/trivet-csi/trivet/volume"
)

// Offer is what a node needs to receive a source from another node. The controller's driver adds it to CreateVolume.
type Offer struct {
	// Node is the node of the source, and Address the host:port of its forwarding port.
	Node    string `json:"node"`
	Address string `json:"address"`
	Ticket  []byte `json:"ticket"`
	// Problem is the reason why the source cannot be read now. The volume may exist nevertheless.
	Problem string `json:"problem,omitempty"`
}

// offerKey is the key of an offer in the metadata of a call.
const offerKey = "trivet-transfer-bin"

// Attach returns the context of a call that passes the offer to a node.
func (o Offer) Attach(ctx context.Context) (context.Context, error) {
	text, err := json.Marshal(o)
	return metadata.AppendToOutgoingContext(ctx, offerKey, string(text)), err
}

// offerIn returns the offer of a call; ok is false if it has none.
func offerIn(ctx context.Context) (o Offer, ok bool, err error) {
	values := metadata.ValueFromIncomingContext(ctx, offerKey)
	if len(values) == 0 {
		return o, false, nil
	}
	if err := json.Unmarshal([]byte(values[0]), &o); err != nil {
		return o, false, volume.Errorf(volume.ErrInvalid, "metadata %s: %w", offerKey, err)
	}
	return o, true, nil
}
