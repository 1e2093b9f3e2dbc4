package driver

import (
	"cmp"
	"context"
	"crypto/tls"
	"net"
	"slices"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/cluster/kube"
	"github.com/trivet-csi/trivet/cluster/pki"
	"github.com/trivet-csi/trivet/cluster/router"
	"github.com/trivet-csi/trivet/cluster/transfer"
	"github.com/trivet-csi/trivet/volume"
)

// TransferLimit limits the transfers of volumes between this node and others.
type TransferLimit struct {
	// BytesPerSecond is the largest rate of all transfers together, in each direction. If it is empty, the rate is
	// not limited.
	BytesPerSecond string `yaml:"bytesPerSecond"`
	// Streams is the number of transfers that the node sends at a time. 0 means transfer.DefaultStreams.
	Streams int `yaml:"streams"`
}

// minTransferRate is the smallest BytesPerSecond: with a lower rate, the other node could take the connection for lost.
const minTransferRate = 128 << 10

// bytesPerSecond returns BytesPerSecond, or 0 if the rate is not limited. It returns ErrInvalid for an invalid value.
func (l TransferLimit) bytesPerSecond() (int64, error) {
	if l.BytesPerSecond == "" {
		return 0, nil
	}
	n, err := volume.ParseSize(l.BytesPerSecond)
	if err != nil || n < minTransferRate {
		return 0, volume.Errorf(volume.ErrInvalid, "transferLimit.bytesPerSecond %q: must be a size of at least %s, such as 100Mi, or empty", l.BytesPerSecond, volume.FormatSize(minTransferRate))
	}
	return n, nil
}

// limit returns the limit of one direction.
func (l TransferLimit) limit() *transfer.Limit {
	n, _ := l.bytesPerSecond() // validated
	return transfer.NewLimit(n, cmp.Or(l.Streams, transfer.DefaultStreams))
}

// newSender returns the server that sends sources of this node to other nodes.
func (d *Driver) newSender() *transfer.Server {
	return transfer.NewServer(transfer.ServerOptions{
		Driver: d.options.Name, Node: d.options.NodeID, Certificates: d.certificates, Limit: d.config.TransferLimit.limit(),
		Open: func(ctx context.Context, source volume.Source) (backend.Outgoing, error) {
			b, err := d.backends.ByName(source.ID.Backend)
			if err != nil {
				return nil, err
			}
			t, can := b.(backend.Transferrer)
			if !can {
				return nil, volume.Errorf(volume.ErrInvalid, "%v: backend %s cannot send it to another node", &source, b.Name())
			}
			return t.Send(ctx, source)
		},
	})
}

// forwardingTLS returns the TLS configuration of the forwarding port: the controller's driver makes calls, and other nodes request
// transfers. A client that offers the protocol of transfers gets no other.
func (d *Driver) forwardingTLS() *tls.Config {
	config, peers := d.certificates.Server(pki.ControllerURI(d.options.Name)), d.sender.TLS()
	config.GetConfigForClient = func(hello *tls.ClientHelloInfo) (*tls.Config, error) {
		if slices.Contains(hello.SupportedProtos, transfer.Protocol) {
			return peers, nil
		}
		return nil, nil //nolint:nilnil // the configuration itself
	}
	return config
}

// dispatch passes a connection that negotiated the protocol of transfers to the sender. It reports whether it did.
func dispatch(sender *transfer.Server, conn net.Conn, info credentials.AuthInfo) bool {
	t, ok := info.(credentials.TLSInfo)
	if !ok || t.State.NegotiatedProtocol != transfer.Protocol {
		return false
	}
	sender.Serve(conn, t.State)
	return true
}

// recordTransfer records the events about a transfer on the claim of its volume.
func (d *Driver) recordTransfer(ctx context.Context, t router.Transfer) {
	event := kube.Transfer{Namespace: t.Namespace, Claim: t.Claim, Volume: t.Volume, Source: t.Source.String(), From: t.From, To: t.To, Size: t.Size}
	switch code := status.Code(t.Err); {
	case t.Running:
		event.State = kube.TransferRuns
	case code == codes.OK:
		event.State = kube.TransferCompleted
	case code == codes.Aborted, code == codes.Canceled, code == codes.DeadlineExceeded:
		event.State, event.Detail = kube.TransferContinues, status.Convert(t.Err).Message()
	case code == codes.ResourceExhausted: // another node gets the volume, or the provisioner reports it
		return
	default:
		event.State, event.Detail = kube.TransferFailed, status.Convert(t.Err).Message()
	}
	d.transferEvents.Record(ctx, event)
}
