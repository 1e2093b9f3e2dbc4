package driver_test

import (
	"context"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/trivet-csi/trivet/backend/disk"
	"github.com/trivet-csi/trivet/driver"
	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/pool"
)

// TestFirstCall: a call that comes while the pool is still being opened waits for it.
func TestFirstCall(t *testing.T) {
	disks := &disk.Disks{}
	for range 8 {
		device, _, _ := testenv.Disk(t, 16<<20)
		disks.Match = append(disks.Match, device)
	}
	o := options(t, disk.Kind)
	o.Config.Pools = []pool.Config{{Name: "disks", Section: disks}}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- driver.Run(ctx, o) }()
	defer func() { cancel(); must(t, <-ended) }()

	soon := grpc.ConnectParams{Backoff: backoff.Config{BaseDelay: time.Millisecond, Multiplier: 1, MaxDelay: time.Millisecond}}
	conn, err := grpc.NewClient(o.Endpoint, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithAuthority("localhost"), grpc.WithConnectParams(soon))
	must(t, err)
	defer conn.Close()
	_, err = csi.NewControllerClient(conn).CreateVolume(t.Context(), &csi.CreateVolumeRequest{
		Name: "first", Parameters: map[string]string{"backend": "disk"},
		VolumeCapabilities: []*csi.VolumeCapability{{
			AccessType: &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}},
			AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER},
		}},
	}, grpc.WaitForReady(true))
	must(t, err)
}
