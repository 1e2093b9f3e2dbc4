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

// world is a driver with the pools a and b, on one filesystem that shares blocks.
type world struct {
	*backendtest.Driver
	t   *testing.T
	dir string
}

func newWorld(t *testing.T) *world {
	t.Helper()
	w := &world{t: t, dir: testenv.Filesystem(t, "xfs", "16G")}
	w.Driver = backendtest.Start(t, w.dir, loop.Kind, local.Kind)
	w.Stop(t)
	w.Options.Config.Pools = nil
	for _, name := range []string{"a", "b"} {
		w.Options.Config.Pools = append(w.Options.Config.Pools, pool.Config{Name: name, Directory: pool.Directory{Path: filepath.Join(w.dir, name)}, Size: "4Gi"})
	}
	w.Restart(t)
	return w
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

// make creates a volume and returns its ID.
func (w *world) make(name string, change ...func(*csi.CreateVolumeRequest)) string {
	w.t.Helper()
	resp, err := w.Control.CreateVolume(w.t.Context(), request(name, change...))
	must(w.t, err)
	return resp.GetVolume().GetVolumeId()
}

// cut creates a snapshot of a volume.
func (w *world) cut(name, of string) *csi.Snapshot {
	w.t.Helper()
	resp, err := w.Control.CreateSnapshot(w.t.Context(), &csi.CreateSnapshotRequest{Name: name, SourceVolumeId: of})
	must(w.t, err)
	return resp.GetSnapshot()
}

// group creates a group of snapshots.
func (w *world) group(name string, of ...string) (*csi.VolumeGroupSnapshot, error) {
	resp, err := w.Control.CreateVolumeGroupSnapshot(w.t.Context(), &csi.CreateVolumeGroupSnapshotRequest{Name: name, SourceVolumeIds: of})
	return resp.GetGroupSnapshot(), err
}

// list lists snapshots by pages.
func (w *world) list(req *csi.ListSnapshotsRequest) (ids []string, err error) {
	for {
		resp, err := w.Control.ListSnapshots(w.t.Context(), req)
		if err != nil {
			return nil, err
		}
		if n := len(resp.GetEntries()); req.GetMaxEntries() > 0 && n > int(req.GetMaxEntries()) {
			w.t.Fatalf("a page of at most %d entries has %d", req.GetMaxEntries(), n)
		}
		for _, e := range resp.GetEntries() {
			ids = append(ids, e.GetSnapshot().GetSnapshotId())
		}
		if req.StartingToken = resp.GetNextToken(); req.GetStartingToken() == "" {
			return ids, nil
		}
	}
}

// image returns the path of the image of a volume.
func (w *world) image(id string) string {
	parts := strings.Split(id, ":")
	pool, _, _ := strings.Cut(parts[1], ".")
	return filepath.Join(w.dir, pool, "volumes", parts[2], "image")
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
		t.Errorf("got %v, want %v: %v", status.Code(err), want, err)
		return
	}
	for _, s := range says {
		if err != nil && !strings.Contains(err.Error(), s) {
			t.Errorf("%v\ndoes not contain %q", err, s)
		}
	}
}

// FuzzPoolToken: a token that parses is unchanged when it is formatted again; other tokens are stale.
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
			t.Errorf("%q parsed and became %q", token, again)
		}
	})
}
