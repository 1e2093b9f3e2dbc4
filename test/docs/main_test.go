package docs_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/trivet-csi/trivet/internal/testenv"
)

// program is the path of the trivet program.
var program string

func TestMain(m *testing.M) {
	// On the clean machine, a session runs this test binary as a CSI client.
	if os.Getenv("TRIVET_TEST_SNAPSHOTS") != "" {
		if err := takeSnapshots(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	testenv.Main(testenv.WithProgram{M: m, Path: &program, Flags: []string{"-trimpath", "-ldflags", "-s -w"}})
}

// takeSnapshots creates an image and a directory, and a snapshot of each.
func takeSnapshots() error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	conn, err := grpc.NewClient("unix:///run/trivet/csi.sock", grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithAuthority("localhost"))
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	return errors.Join(takeSnapshot(ctx, csi.NewControllerClient(conn), "loop"), takeSnapshot(ctx, csi.NewControllerClient(conn), "local"))
}

// takeSnapshot creates a volume of a kind and a snapshot of it.
func takeSnapshot(ctx context.Context, c csi.ControllerClient, backend string) error {
	v, err := c.CreateVolume(ctx, &csi.CreateVolumeRequest{
		Name: backend, CapacityRange: &csi.CapacityRange{RequiredBytes: 64 << 20}, Parameters: map[string]string{"backend": backend},
		VolumeCapabilities: []*csi.VolumeCapability{{
			AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER},
			AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{}},
		}},
	})
	if err != nil {
		return err
	}
	_, err = c.CreateSnapshot(ctx, &csi.CreateSnapshotRequest{Name: "of-" + backend, SourceVolumeId: v.GetVolume().GetVolumeId()})
	return err
}
