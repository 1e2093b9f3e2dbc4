package driver_test

import (
	"context"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/backend/loop"
	"github.com/trivet-csi/trivet/backend/nfs"
	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/nodeserver"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// TestMissingServer: a pool on a server that does not exist affects no other pool. Calls for the pool fail
// with the reason. A worker process is started for it.
func TestMissingServer(t *testing.T) {
	testenv.RequireRoot(t)
	binary := filepath.Join(t.TempDir(), "trivet")
	must(t, testenv.Build(binary))
	o := options(t, loop.Kind)
	o.Worker = binary
	o.HTTPAddress = backendtest.FreeAddress(t)
	_, port, _ := strings.Cut(backendtest.FreeAddress(t), ":")
	o.Config.Pools = append(o.Config.Pools, pool.Config{Name: "nas", NFS: &pool.NFS{Server: "127.0.0.1", Export: "/e", MountOptions: []string{"port=" + port}}})
	d := backendtest.StartWith(t, o)
	// Without an answer of the server, the kernel would wait for minutes.
	const hang = 2 * time.Minute
	limited, cancel := context.WithTimeout(t.Context(), hang)
	defer cancel()
	create := func(params map[string]string) error {
		_, err := d.Control.CreateVolume(limited, &csi.CreateVolumeRequest{
			Name: "v", Parameters: params, VolumeCapabilities: []*csi.VolumeCapability{backendtest.Kind{}.Capability(csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER)},
		})
		return err
	}
	err := create(map[string]string{"pool": "nas"})
	// The reason is a kernel without an NFS client, or a server that does not answer.
	why := regexp.MustCompile("answer|no NFS client")
	if status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), `pool "nas"`) || !why.MatchString(err.Error()) {
		t.Errorf("CreateVolume in pool nas: got error %v, want Unavailable with the reason", err)
	}
	must(t, create(nil))
	if code, body := get(t, o.HTTPAddress, "/readyz"); code != 200 {
		t.Errorf("/readyz: got %d %s, want 200", code, body)
	}
	wantMetrics(t, o.HTTPAddress, `trivet_nfs_worker_starts_total{pool="nas",reason="first"} 1`, `trivet_nfs_server_up{pool="nas",server="127.0.0.1"}`)
	_, err = d.Node.NodeGetVolumeHealth(t.Context(), &csi.NodeGetVolumeHealthRequest{VolumeId: "loop:elsewhere:v"})
	wantCode(t, err, codes.Unavailable, "it has nas")
}

// TestNoPoolOfANode: a class without a pool uses a directory pool. If all pools are nfs pools, the error
// names them.
func TestNoPoolOfANode(t *testing.T) {
	o := options(t, loop.Kind)
	o.Config.Pools = []pool.Config{
		{Name: "nas", NFS: &pool.NFS{Server: "127.0.0.1", Export: "/e"}},
		{Name: "nas2", NFS: &pool.NFS{Server: "127.0.0.1", Export: "/f"}},
	}
	d := backendtest.StartWith(t, o)
	for says, params := range map[string]map[string]string{"its pools (nas, nas2)": nil, "it has nas, nas2": {"pool": "typo"}} {
		_, err := d.Control.CreateVolume(t.Context(), &csi.CreateVolumeRequest{
			Name: "v", Parameters: params,
			VolumeCapabilities: []*csi.VolumeCapability{backendtest.Kind{}.Capability(csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER)},
		})
		wantCode(t, err, codes.InvalidArgument, says)
	}
	if room, err := d.Control.GetCapacity(t.Context(), &csi.GetCapacityRequest{}); err != nil || room.GetAvailableCapacity() != 0 {
		t.Errorf("GetCapacity: got %v, error %v, want 0", room, err)
	}
}

// TestStorageHealth: NodeGetStorageHealth reports a condition of a pool once, although two backends use the pool.
func TestStorageHealth(t *testing.T) {
	for name, tc := range map[string]struct {
		reserve string
		mount   error
		want    string
		says    string
	}{
		"healthy":     {"1Mi", nil, "", ""},
		"almost full": {"99%", nil, "PoolAlmostFull", `pool "nas" has`},
		"unavailable": {"1Mi", volume.Errorf(volume.ErrUnavailable, "no route"), "PoolUnavailable", "no route"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			c := pool.Config{Name: "nas", Reserve: tc.reserve, NFS: &pool.NFS{Server: "nas.lan", Export: "/e", Init: true}}
			kinds := backend.Kinds{loop.Kind, nfs.Kind}
			set := pool.NewSharedSet(kinds.Forms(), c, nil, pool.Shared{Maintains: true, Mount: func(context.Context, pool.Config) (*os.File, string, error) {
				if tc.mount != nil {
					return nil, "", tc.mount
				}
				root, err := os.Open(dir)
				return root, "4.2", err
			}})
			ctx, stop := context.WithCancel(context.WithoutCancel(t.Context()))
			ended := make(chan struct{})
			go func() { defer close(ended); set.Run(ctx) }()
			t.Cleanup(func() { stop(); <-ended })
			must(t, set.AwaitReady(ctx))
			s := nodeserver.New(kinds.Registry(set), "node", 10)
			resp, err := s.NodeGetStorageHealth(ctx, nil)
			must(t, err)
			var found []string
			for _, h := range resp.GetBackendHealth() {
				found = append(found, h.GetReason())
				if n := strings.Count(h.GetMessage(), tc.says); n != 1 {
					t.Errorf("%v contains %q %d times, want once", h, tc.says, n)
				}
			}
			if got := strings.Join(found, " "); got != tc.want {
				t.Errorf("got reasons %q, want %q", got, tc.want)
			}
		})
	}
}
