package controllerserver_test

import (
	"errors"
	"path/filepath"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/backend/local"
	"github.com/trivet-csi/trivet/backend/loop"
	"github.com/trivet-csi/trivet/controllerserver"
	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

func TestMain(m *testing.M) { testenv.Main(m) }

const mib = int64(1) << 20

// testDriver is a driver with the pools a and b, on one filesystem that shares blocks.
type testDriver struct {
	*backendtest.Driver
	t   *testing.T
	dir string
}

func newTestDriver(t *testing.T) *testDriver {
	t.Helper()
	d := &testDriver{t: t, dir: testenv.Filesystem(t, "xfs", "16G")}
	d.Driver = backendtest.Start(t, d.dir, loop.Kind, local.Kind)
	d.Stop(t)
	d.Options.Config.Pools = nil
	for _, name := range []string{"a", "b"} {
		d.Options.Config.Pools = append(d.Options.Config.Pools, pool.Config{Name: name, Directory: pool.Directory{Path: filepath.Join(d.dir, name)}, Size: "4Gi"})
	}
	d.Restart(t)
	return d
}

// request returns a request for a raw volume.
func request(name string, change ...func(*csi.CreateVolumeRequest)) *csi.CreateVolumeRequest {
	req := &csi.CreateVolumeRequest{
		Name: name, CapacityRange: &csi.CapacityRange{RequiredBytes: 32 * mib},
		VolumeCapabilities: []*csi.VolumeCapability{backendtest.Kind{}.Capability(csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER)},
	}
	for _, c := range change {
		c(req)
	}
	return req
}

// in returns a change of the pool of a request.
func in(pool string) func(*csi.CreateVolumeRequest) {
	return func(req *csi.CreateVolumeRequest) { req.Parameters = map[string]string{"pool": pool} }
}

func ofSnapshot(id string) func(*csi.CreateVolumeRequest) {
	return from(&csi.VolumeContentSource{Type: &csi.VolumeContentSource_Snapshot{Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: id}}})
}

func ofVolume(id string) func(*csi.CreateVolumeRequest) {
	return from(&csi.VolumeContentSource{Type: &csi.VolumeContentSource_Volume{Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: id}}})
}

func from(source *csi.VolumeContentSource) func(*csi.CreateVolumeRequest) {
	return func(req *csi.CreateVolumeRequest) { req.VolumeContentSource = source }
}

// createVolume creates a volume and returns its ID.
func (d *testDriver) createVolume(name string, change ...func(*csi.CreateVolumeRequest)) string {
	d.t.Helper()
	resp, err := d.Control.CreateVolume(d.t.Context(), request(name, change...))
	must(d.t, err)
	return resp.GetVolume().GetVolumeId()
}

// createSnapshot creates a snapshot of a volume.
func (d *testDriver) createSnapshot(name, of string) *csi.Snapshot {
	d.t.Helper()
	resp, err := d.Control.CreateSnapshot(d.t.Context(), &csi.CreateSnapshotRequest{Name: name, SourceVolumeId: of})
	must(d.t, err)
	return resp.GetSnapshot()
}

// createGroup creates a group of snapshots of volumes.
func (d *testDriver) createGroup(name string, of ...string) (*csi.VolumeGroupSnapshot, error) {
	resp, err := d.Control.CreateVolumeGroupSnapshot(d.t.Context(), &csi.CreateVolumeGroupSnapshotRequest{Name: name, SourceVolumeIds: of})
	return resp.GetGroupSnapshot(), err
}

// listSnapshots returns the IDs of all pages of a list of snapshots.
func (d *testDriver) listSnapshots(req *csi.ListSnapshotsRequest) (ids []string, err error) {
	for {
		resp, err := d.Control.ListSnapshots(d.t.Context(), req)
		if err != nil {
			return nil, err
		}
		if n := len(resp.GetEntries()); req.GetMaxEntries() > 0 && n > int(req.GetMaxEntries()) {
			d.t.Fatalf("got a page of %d entries, want at most %d", n, req.GetMaxEntries())
		}
		for _, e := range resp.GetEntries() {
			ids = append(ids, e.GetSnapshot().GetSnapshotId())
		}
		if req.StartingToken = resp.GetNextToken(); req.GetStartingToken() == "" {
			return ids, nil
		}
	}
}

// imagePath returns the path of the image of a volume.
func (d *testDriver) imagePath(id string) string {
	parts := strings.Split(id, ":")
	pool, _, _ := strings.Cut(parts[1], ".")
	return filepath.Join(d.dir, pool, "volumes", parts[2], "image")
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// wantCode fails the test unless err has the code and contains the texts.
func wantCode(t *testing.T, err error, want codes.Code, says ...string) {
	t.Helper()
	if status.Code(err) != want {
		t.Errorf("got code %v, want %v: %v", status.Code(err), want, err)
		return
	}
	for _, s := range says {
		if err != nil && !strings.Contains(err.Error(), s) {
			t.Errorf("got %v, want %q in the error", err, s)
		}
	}
}

// FuzzPoolToken: a token is refused as stale, or is parsed and formatted to the same token.
func FuzzPoolToken(f *testing.F) {
	for _, s := range []string{"", "pool ", "pool loop:default.0a1b2c3d:", "pool nfs:nas:pvc-1", "pool nfs:nas:s.001", "loop:default:x", "pool loop:a::", "pool nfs:=nas=/t:"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, token string) {
		after, err := controllerserver.ParsePoolToken(token)
		if err != nil {
			if !errors.Is(err, volume.ErrStaleToken) {
				t.Errorf("%q: %v is not ErrStaleToken", token, err)
			}
			return
		}
		if again := controllerserver.PoolToken(after); again != token {
			t.Errorf("token %q was parsed and formatted to %q, want the same token", token, again)
		}
	})
}
