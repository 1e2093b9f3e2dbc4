package backendtest

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

const gib = int64(1) << 30

// Access modes for one node.
const (
	multiWriter  = csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER
	singleWriter = csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER
	writer       = csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER
	readerOnly   = csi.VolumeCapability_AccessMode_SINGLE_NODE_READER_ONLY
)

var nextName atomic.Int64

// newName returns a new name for a volume or snapshot of the test.
func newName(t *testing.T) string {
	t.Helper()
	words := strings.FieldsFunc(strings.ToLower(t.Name()), func(r rune) bool { return (r < 'a' || r > 'z') && (r < '0' || r > '9') })
	name := strings.Join(words, "-")
	return name[max(0, len(name)-40):] + "-" + strconv.FormatInt(nextName.Add(1), 10)
}

// testVolume is a volume with its paths on a node, and the arguments of its calls.
type testVolume struct {
	d       *Driver
	kind    Kind
	cap     *csi.VolumeCapability
	id      string
	staging string
	target  string
	secrets map[string]string
}

// newVolume creates a volume of 1 GiB, which is removed when the test ends.
func newVolume(t *testing.T, d *Driver, kind Kind, mode csi.VolumeCapability_AccessMode_Mode) *testVolume {
	t.Helper()
	return newVolumeOfClass(t, d, kind, mode, kind.Parameters())
}

// newVolumeOfClass is newVolume for a class with given parameters.
func newVolumeOfClass(t *testing.T, d *Driver, kind Kind, mode csi.VolumeCapability_AccessMode_Mode, parameters map[string]string) *testVolume {
	t.Helper()
	l, _ := newVolumeFor(t, d, kind, &csi.CreateVolumeRequest{
		CapacityRange: &csi.CapacityRange{RequiredBytes: gib}, VolumeCapabilities: []*csi.VolumeCapability{kind.Capability(mode)}, Parameters: parameters,
	})
	return l
}

// newVolumeOfSize is newVolume for a size and more parameters.
func newVolumeOfSize(t *testing.T, d *Driver, kind Kind, size int64, more ...string) *testVolume {
	t.Helper()
	req := kind.request(t, more...)
	req.CapacityRange = &csi.CapacityRange{RequiredBytes: size}
	l, _ := newVolumeFor(t, d, kind, req)
	return l
}

// newVolumeFor is newVolume for a request. It sets a new name in the request.
func newVolumeFor(t *testing.T, d *Driver, kind Kind, req *csi.CreateVolumeRequest) (*testVolume, *csi.Volume) {
	t.Helper()
	dir := t.TempDir()
	l := &testVolume{
		d: d, kind: kind, cap: req.GetVolumeCapabilities()[0],
		staging: filepath.Join(dir, "staging"), target: filepath.Join(dir, "target"),
	}
	must(t, os.Mkdir(l.staging, 0o755))
	req.Name = newName(t)
	resp, err := d.Control.CreateVolume(t.Context(), req)
	must(t, err)
	l.id = resp.GetVolume().GetVolumeId()
	t.Cleanup(func() { l.cleanUp(t) })
	return l, resp.GetVolume()
}

// request returns a request for a new volume of the kind.
func (k Kind) request(t *testing.T, more ...string) *csi.CreateVolumeRequest {
	t.Helper()
	return &csi.CreateVolumeRequest{
		Name: newName(t), VolumeCapabilities: []*csi.VolumeCapability{k.Capability(multiWriter)}, Parameters: k.Parameters(more...),
	}
}

// cleanUp unpublishes, unstages and deletes the volume, whatever its state.
func (l *testVolume) cleanUp(t *testing.T) {
	t.Helper()
	ctx := context.Background()
	_, unpublish := l.d.Node.NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{VolumeId: l.id, TargetPath: l.target})
	_, unstage := l.d.Node.NodeUnstageVolume(ctx, &csi.NodeUnstageVolumeRequest{VolumeId: l.id, StagingTargetPath: l.staging})
	_, detach := l.d.Control.ControllerUnpublishVolume(ctx, &csi.ControllerUnpublishVolumeRequest{VolumeId: l.id})
	if err := errors.Join(unpublish, unstage, detach, l.delete(ctx)); err != nil {
		t.Errorf("removing the volume: %v", err)
	}
}

func (l *testVolume) delete(ctx context.Context) error {
	_, err := l.d.Control.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: l.id})
	return err
}

// publishTo controller-publishes the volume to a node.
func (l *testVolume) publishTo(ctx context.Context, node string) error {
	_, err := l.d.Control.ControllerPublishVolume(ctx, &csi.ControllerPublishVolumeRequest{
		VolumeId: l.id, NodeId: node, VolumeCapability: l.cap, Secrets: l.secrets,
	})
	return err
}

func (l *testVolume) unpublishFrom(ctx context.Context, node string) error {
	_, err := l.d.Control.ControllerUnpublishVolume(ctx, &csi.ControllerUnpublishVolumeRequest{VolumeId: l.id, NodeId: node})
	return err
}

func (l *testVolume) stage(ctx context.Context) error {
	_, err := l.d.Node.NodeStageVolume(ctx, &csi.NodeStageVolumeRequest{
		VolumeId: l.id, StagingTargetPath: l.staging, VolumeCapability: l.cap, Secrets: l.secrets,
	})
	return err
}

// publishAt publishes the volume at target. readOnly is the argument readonly of the call.
func (l *testVolume) publishAt(ctx context.Context, target string, readOnly bool) error {
	_, err := l.d.Node.NodePublishVolume(ctx, &csi.NodePublishVolumeRequest{
		VolumeId: l.id, StagingTargetPath: l.staging, TargetPath: target, VolumeCapability: l.cap, Readonly: readOnly, Secrets: l.secrets,
	})
	return err
}

func (l *testVolume) publish(ctx context.Context) error { return l.publishAt(ctx, l.target, false) }

func (l *testVolume) unpublishAt(ctx context.Context, target string) error {
	_, err := l.d.Node.NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{VolumeId: l.id, TargetPath: target})
	return err
}

func (l *testVolume) unstage(ctx context.Context) error {
	_, err := l.d.Node.NodeUnstageVolume(ctx, &csi.NodeUnstageVolumeRequest{VolumeId: l.id, StagingTargetPath: l.staging})
	return err
}

// stageAndPublish stages and publishes the volume.
func (l *testVolume) stageAndPublish(t *testing.T) {
	t.Helper()
	must(t, l.stage(t.Context()))
	must(t, l.publish(t.Context()))
}

// unpublishAndUnstage unpublishes and unstages the volume.
func (l *testVolume) unpublishAndUnstage(t *testing.T) {
	t.Helper()
	must(t, l.unpublishAt(t.Context(), l.target))
	must(t, l.unstage(t.Context()))
}

func (l *testVolume) expand(ctx context.Context, size int64) (*csi.ControllerExpandVolumeResponse, error) {
	return l.d.Control.ControllerExpandVolume(ctx, &csi.ControllerExpandVolumeRequest{
		VolumeId: l.id, CapacityRange: &csi.CapacityRange{RequiredBytes: size}, VolumeCapability: l.cap, Secrets: l.secrets,
	})
}

// data returns the path to which a test writes: a file in the filesystem, or the device itself.
func (l *testVolume) data(target string) string {
	if l.kind.Block() {
		return target
	}
	return filepath.Join(target, "data")
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// wantCode fails the test unless err has the code, and its message contains all texts of says.
func wantCode(t testing.TB, err error, code codes.Code, says ...string) {
	t.Helper()
	if status.Code(err) != code {
		t.Errorf("got %v, want %v", err, code)
		return
	}
	for _, s := range says {
		if !strings.Contains(status.Convert(err).Message(), s) {
			t.Errorf("got message %q, want %q in it", status.Convert(err).Message(), s)
		}
	}
}
