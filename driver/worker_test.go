package driver_test

import (
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/backend/loop"
	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/pool"
)

// TestServerThatIsNotThere: a pool on it keeps the driver from nothing else; its calls
// are refused with the reason, by a process of its own.
func TestServerThatIsNotThere(t *testing.T) {
	binary := filepath.Join(t.TempDir(), "trivet")
	testenv.Run(t, "go", "build", "-o", binary, "../cmd/trivet")
	o := options(t, loop.New)
	o.Worker = []string{binary, "worker"}
	o.HTTPAddress = backendtest.FreeAddress(t)
	_, port, _ := strings.Cut(backendtest.FreeAddress(t), ":")
	o.Config.Pools = append(o.Config.Pools, pool.Config{Name: "nas", NFS: &pool.NFS{Server: "127.0.0.1", Export: "/e", MountOptions: []string{"port=" + port}}})
	d := backendtest.StartWith(t, o)
	create := func(params map[string]string) error {
		_, err := d.Control.CreateVolume(t.Context(), &csi.CreateVolumeRequest{
			Name: "v", Parameters: params, VolumeCapabilities: []*csi.VolumeCapability{backendtest.Kind{}.Capability(csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER)},
		})
		return err
	}
	start := time.Now()
	err := create(map[string]string{"pool": "nas"})
	// Whichever is seen first: a kernel without a client, or a server that is silent.
	why := regexp.MustCompile("answer|no NFS client")
	if status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), `pool "nas"`) || !why.MatchString(err.Error()) {
		t.Errorf("a volume there: %v", err)
	}
	if took := time.Since(start); took > 20*time.Second {
		t.Errorf("it took %v", took)
	}
	must(t, create(nil))
	if code, body := get(t, o.HTTPAddress, "/readyz"); code != 200 {
		t.Errorf("/readyz: %d %s", code, body)
	}
	_, page := get(t, o.HTTPAddress, "/metrics")
	for _, want := range []string{`trivet_nfs_worker_starts_total{pool="nas",reason="first"} 1`, `trivet_nfs_server_up{pool="nas",server="127.0.0.1"}`} {
		if !strings.Contains(page, want) {
			t.Errorf("/metrics has no %s", want)
		}
	}
	if _, err := d.Node.NodeGetVolumeHealth(t.Context(), &csi.NodeGetVolumeHealthRequest{VolumeId: "loop:elsewhere:v"}); status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), "it has nas") {
		t.Errorf("a pool that is not configured: %v", err)
	}
}
