package controllerserver

import (
	"errors"
	"io"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
)

// Services are all services of a controller: for volumes and snapshots, for groups of snapshots,
// and for the blocks of a snapshot.
type Services interface {
	csi.ControllerServer
	csi.GroupControllerServer
	csi.SnapshotMetadataServer
}

// Clients call Services.
type Clients interface {
	csi.ControllerClient
	csi.GroupControllerClient
	csi.SnapshotMetadataClient
}

// NewClients returns the clients of a connection.
func NewClients(conn grpc.ClientConnInterface) Clients {
	return struct {
		csi.ControllerClient
		csi.GroupControllerClient
		csi.SnapshotMetadataClient
	}{csi.NewControllerClient(conn), csi.NewGroupControllerClient(conn), csi.NewSnapshotMetadataClient(conn)}
}

// Pass sends all messages that it receives, until the stream ends.
func Pass[M any](receive func() (M, error), send func(M) error) error {
	for {
		m, err := receive()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if err := send(m); err != nil {
			return err
		}
	}
}
