package relay_test

import (
	"context"
	"errors"
	"net"
	"path/filepath"
	"slices"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/trivet-csi/trivet/internal/relay"
)

// services is a controller. Its calls return the ID or the token of the request, and err.
type services struct {
	csi.UnimplementedControllerServer
	csi.UnimplementedGroupControllerServer
	csi.UnimplementedSnapshotMetadataServer
	err   error
	ended chan error // receives the error of a stream that the receiver ended
}

func (s *services) ControllerGetVolume(_ context.Context, req *csi.ControllerGetVolumeRequest) (*csi.ControllerGetVolumeResponse, error) {
	return &csi.ControllerGetVolumeResponse{Volume: &csi.Volume{VolumeId: req.GetVolumeId()}}, s.err
}

func (s *services) ListVolumes(_ context.Context, req *csi.ListVolumesRequest) (*csi.ListVolumesResponse, error) {
	return &csi.ListVolumesResponse{
		Entries: []*csi.ListVolumesResponse_Entry{{Volume: &csi.Volume{VolumeId: "after " + req.GetStartingToken()}}}, NextToken: "next",
	}, s.err
}

// GetMetadataAllocated sends three messages and returns err. If the offset is negative, it sends until the
// call ends.
func (s *services) GetMetadataAllocated(req *csi.GetMetadataAllocatedRequest, stream csi.SnapshotMetadata_GetMetadataAllocatedServer) error {
	for i := int64(0); i < 3 || req.GetStartingOffset() < 0; i++ {
		if err := stream.Send(&csi.GetMetadataAllocatedResponse{VolumeCapacityBytes: i}); err != nil {
			s.ended <- err
			return err
		}
	}
	return s.err
}

// listen starts a gRPC server for a Service, and returns its address.
func listen(t *testing.T, s relay.Service) (string, *grpc.Server) {
	t.Helper()
	server := grpc.NewServer()
	relay.Register(server, s, relay.ControllerServices...)
	address := filepath.Join(t.TempDir(), "s")
	socket, err := (&net.ListenConfig{}).Listen(t.Context(), "unix", address)
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- server.Serve(socket) }()
	t.Cleanup(func() {
		server.Stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	return address, server
}

// dial connects to the server at address.
func dial(t *testing.T, address string) *grpc.ClientConn {
	t.Helper()
	conn, err := grpc.NewClient("unix:"+address, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}

// The methods that the tests call.
const (
	get       = csi.Controller_ControllerGetVolume_FullMethodName
	allocated = csi.SnapshotMetadata_GetMetadataAllocated_FullMethodName
)

var errStop = errors.New("the receiver stopped")

// TestService: a Service behaves the same in this process, over one connection, and over two connections.
func TestService(t *testing.T) {
	s := &services{ended: make(chan error, 1)}
	local := relay.Controller(s)
	first, _ := listen(t, local)
	remote := relay.Remote(dial(t, first))
	second, _ := listen(t, remote)
	for name, service := range map[string]relay.Service{"local": local, "remote": remote, "two hops": relay.Remote(dial(t, second))} {
		t.Run(name, func(t *testing.T) {
			s.err = nil
			ctx := t.Context()
			resp, err := relay.Call[*csi.ControllerGetVolumeResponse](ctx, service, get, &csi.ControllerGetVolumeRequest{VolumeId: "v"})
			if err != nil || resp.GetVolume().GetVolumeId() != "v" {
				t.Errorf("Call: got %v, %v, want volume v", resp, err)
			}
			entries, next, err := relay.Volumes.Page(ctx, service, "v", 1)
			if err != nil || next != "next" || len(entries) != 1 || relay.Volumes.ID(entries[0]) != "after v" {
				t.Errorf("Page: got %v, %q, %v, want volume \"after v\" and token \"next\"", entries, next, err)
			}
			var got []int64
			receive := func(m any) error {
				got = append(got, m.(*csi.GetMetadataAllocatedResponse).GetVolumeCapacityBytes())
				return nil
			}
			want := []int64{0, 1, 2}
			if err := service.Stream(ctx, allocated, &csi.GetMetadataAllocatedRequest{}, receive); err != nil || !slices.Equal(got, want) {
				t.Errorf("Stream: got %v, %v, want %v", got, err, want)
			}

			s.err = status.Error(codes.DataLoss, "the reason")
			if resp, err := service.Call(ctx, get, &csi.ControllerGetVolumeRequest{}); resp != nil || status.Code(err) != codes.DataLoss || status.Convert(err).Message() != "the reason" {
				t.Errorf("failing Call: got %v, %v, want DataLoss", resp, err)
			}
			if _, _, err := relay.Volumes.Page(ctx, service, "", 1); status.Code(err) != codes.DataLoss {
				t.Errorf("failing Page: got %v, want DataLoss", err)
			}
			got = nil
			if err := service.Stream(ctx, allocated, &csi.GetMetadataAllocatedRequest{}, receive); status.Code(err) != codes.DataLoss || !slices.Equal(got, want) {
				t.Errorf("failing Stream: got %v, %v, want %v and DataLoss", got, err, want)
			}

			// The sender ends when the receiver returns an error.
			err = service.Stream(ctx, allocated, &csi.GetMetadataAllocatedRequest{StartingOffset: -1}, func(any) error { return errStop })
			if !errors.Is(err, errStop) {
				t.Errorf("Stream with a receiver that stops: got %v, want %v", err, errStop)
			}
			wantEnded(t, s)
			canceled, cancel := context.WithCancel(ctx)
			err = service.Stream(canceled, allocated, &csi.GetMetadataAllocatedRequest{StartingOffset: -1}, func(any) error {
				cancel()
				return canceled.Err()
			})
			if err == nil {
				t.Error("the canceled Stream: got no error, want one")
			}
			wantEnded(t, s)

			for _, method := range []string{csi.Controller_DeleteVolume_FullMethodName, "/csi.v1.Controller/Unknown", "nonsense", ""} {
				if _, err := service.Call(ctx, method, &csi.DeleteVolumeRequest{}); status.Code(err) != codes.Unimplemented {
					t.Errorf("Call of %q: got %v, want Unimplemented", method, err)
				}
			}
			for _, method := range []string{csi.SnapshotMetadata_GetMetadataDelta_FullMethodName, "/csi.v1.Controller/Unknown"} {
				if err := service.Stream(ctx, method, &csi.GetMetadataDeltaRequest{}, receive); status.Code(err) != codes.Unimplemented {
					t.Errorf("Stream of %q: got %v, want Unimplemented", method, err)
				}
			}
		})
	}
}

// TestUnreachable: calls fail with UNAVAILABLE if the server stops, and if no server listens at the address.
func TestUnreachable(t *testing.T) {
	s := &services{ended: make(chan error, 1)}
	address, server := listen(t, relay.Controller(s))
	service := relay.Remote(dial(t, address))
	err := service.Stream(t.Context(), allocated, &csi.GetMetadataAllocatedRequest{StartingOffset: -1}, func(any) error {
		server.Stop()
		return nil
	})
	if status.Code(err) != codes.Unavailable {
		t.Errorf("Stream from a server that stops: got %v, want Unavailable", err)
	}
	wantEnded(t, s)
	for name, service := range map[string]relay.Service{"stopped server": service, "no server": relay.Remote(dial(t, address+"x"))} {
		if _, err := service.Call(t.Context(), get, &csi.ControllerGetVolumeRequest{}); status.Code(err) != codes.Unavailable {
			t.Errorf("%s: Call: got %v, want Unavailable", name, err)
		}
		if err := service.Stream(t.Context(), allocated, &csi.GetMetadataAllocatedRequest{}, func(any) error { return nil }); status.Code(err) != codes.Unavailable {
			t.Errorf("%s: Stream: got %v, want Unavailable", name, err)
		}
	}
}

// TestInvalidRequest: a server refuses a request that is not a message of the method.
func TestInvalidRequest(t *testing.T) {
	address, _ := listen(t, relay.Controller(&services{}))
	conn := dial(t, address)
	invalid := wrapperspb.Bytes([]byte{0xff}) // field 1 of the request is a string, and 0xff is not UTF-8
	if err := conn.Invoke(t.Context(), get, invalid, &csi.ControllerGetVolumeResponse{}); status.Code(err) != codes.Internal {
		t.Errorf("Call: got %v, want Internal", err)
	}
	stream, err := conn.NewStream(t.Context(), &grpc.StreamDesc{ServerStreams: true}, allocated)
	if err == nil {
		err = errors.Join(stream.SendMsg(invalid), stream.CloseSend())
	}
	if err != nil {
		t.Fatal(err)
	}
	if err := stream.RecvMsg(&csi.GetMetadataAllocatedResponse{}); status.Code(err) != codes.Internal {
		t.Errorf("Stream: got %v, want Internal", err)
	}
}

// wantEnded waits until the sender of a stream has failed.
func wantEnded(t *testing.T, s *services) {
	t.Helper()
	if err := <-s.ended; err == nil {
		t.Error("the sender did not fail")
	}
}
