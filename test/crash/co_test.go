package crash

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/moby/sys/mountinfo"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/driver"
	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/volume"
)

// call is a CSI call for a volume, or the write of a pod.
type call string

const (
	create              call = "CreateVolume"
	controllerPublish   call = "ControllerPublishVolume"
	stage               call = "NodeStageVolume"
	publish             call = "NodePublishVolume"
	write               call = "write"
	expand              call = "ControllerExpandVolume"
	nodeExpand          call = "NodeExpandVolume"
	modify              call = "ControllerModifyVolume"
	unpublish           call = "NodeUnpublishVolume"
	unstage             call = "NodeUnstageVolume"
	controllerUnpublish call = "ControllerUnpublishVolume"
	remove              call = "DeleteVolume"
	snapshot            call = "CreateSnapshot"
	deleteSnapshot      call = "DeleteSnapshot"
	check               call = "check"
)

// co is a container orchestrator with one volume, and the state that it expects. It repeats each call
// with the same arguments.
type co struct {
	host     *host
	name     string
	kind     kind
	readOnly bool // the volume is published read-only
	thick    bool // all blocks of the image are allocated when the volume is created
	// class contains StorageClass parameters in addition to those of the kind.
	class map[string]string
	// size is the requested size in bytes before any expansion; 0 means the size of the kind.
	size int64
	data []byte // the content that write writes
	// frozen is true if snapshots are taken with consistency frozen.
	frozen bool
	// partner is the second volume of a group snapshot; nil if snapshots are of one volume.
	partner *co
	// source is the ID of the snapshot from which the volume is restored.
	source string
	// cloned is the ID of the volume of which the volume is a copy.
	cloned string
	// origin is the orchestrator of the source. It deletes the source after the volume. It is nil
	// if the test deletes the source itself.
	origin *co

	id      string            // empty until a call has returned it or volumeID has built it
	context map[string]string // the publish_context that ControllerPublishVolume returned

	created, staged, published bool
	// snapshots contains the IDs of the existing snapshots, in the order of sources.
	snapshots []string
	// hadSnapshot is true after the first attempt to take a snapshot.
	hadSnapshot bool
	// formatted is true if the volume has a filesystem.
	formatted bool
	// resized is true if the device must have the size that the driver has recorded.
	resized bool
	// written is true if the volume contains data.
	written bool
	// initialSize is the size of the filesystem in bytes when it was first checked.
	initialSize int64
}

// isLocal reports whether the volume is a directory in a pool of the node.
func (c *co) isLocal() bool {
	return c.kind.Has(backendtest.Directory | backendtest.NodeLocal)
}

// firstSize returns the requested size of the volume before any expansion.
func (c *co) firstSize() int64 { return cmp.Or(c.size, c.kind.Size()) }

// newCO returns an orchestrator of a volume that does not exist yet.
func newCO(h *host, name string, k kind) (*co, error) {
	c := &co{host: h, name: name, kind: k, data: make([]byte, 1<<20)}
	_, _ = rand.NewChaCha8([32]byte([]byte(fmt.Sprintf("%-32.32s", name)))).Read(c.data) // never fails
	return c, c.makePaths()
}

// makePaths creates the paths that the CSI specification requires of an orchestrator: the
// staging path, and the parent of the target.
func (c *co) makePaths() error {
	if err := os.MkdirAll(c.staging(), 0o750); err != nil {
		return err
	}
	return os.MkdirAll(filepath.Dir(c.target()), 0o750)
}

// staging and target return the staging path and the target path of the volume.
func (c *co) staging() string { return c.host.path(c.name + "/staging") }
func (c *co) target() string  { return c.host.path(c.name + "/pod/target") }

// image returns the path of the image on the node, or on the NFS server of the pool.
func (c *co) image() string { return filepath.Join(c.host.pool, "volumes", c.name, "image") }

// attachedImage returns the path at which the driver opens the image. For a pool on an export, it is
// empty while the folder of the image is not mounted.
func (c *co) attachedImage() (string, error) {
	if !c.host.shared() {
		return c.image(), nil
	}
	source := c.host.source("volumes/" + c.name)
	mounts, err := mounts(func(i *mountinfo.Info) bool { return i.Source == source })
	if err != nil || len(mounts) == 0 {
		return "", err
	}
	return filepath.Join(mounts[0], "image"), wantCount("mounts of the image's folder", mounts, 1)
}

func (c *co) capability() *csi.VolumeCapability {
	return c.kind.Capability(csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER)
}

// parameters returns the parameters of the volume's StorageClass.
func (c *co) parameters() map[string]string {
	p := c.kind.Parameters("pool", c.host.poolName())
	if c.thick && c.kind.Has(backendtest.Image) {
		p["allocation"] = "thick"
	}
	maps.Copy(p, c.class)
	return p
}

// retryable returns err as a finalError unless the CSI specification tells the CO to retry the call.
func retryable(err error) error {
	switch status.Code(err) {
	case codes.OK, codes.Unavailable, codes.Aborted:
		return err
	default:
		return finalError{err}
	}
}

// do repeats each call until it succeeds, and then compares the actual state with the expected one.
func (c *co) do(calls ...call) error {
	for _, one := range calls {
		err := c.insist(one)
		if err == nil {
			err = c.check()
		}
		if err != nil {
			return fmt.Errorf("volume %s (%s), %s: %w", c.name, c.kind, one, err)
		}
	}
	return nil
}

// insist repeats a call until it succeeds. It also retries after FAILED_PRECONDITION, but if the retry
// succeeds, the test fails at its end: FAILED_PRECONDITION means that another call must come first.
func (c *co) insist(one call) error {
	var refused error
	var since time.Time
	err := poll(func(ctx context.Context) error {
		err := c.attempt(ctx, one)
		if status.Code(err) != codes.FailedPrecondition {
			return retryable(err)
		}
		if refused == nil {
			refused, since = err, time.Now()
		}
		return err
	})
	if err == nil && refused != nil {
		c.host.addError(fmt.Errorf("volume %s (%s): %s failed for %v and then succeeded without another call: %w", c.name, c.kind, one, time.Since(since), refused))
	}
	return err
}

// attempt makes a call once.
func (c *co) attempt(ctx context.Context, what call) error { return attempts[what](c, ctx) }

// attempts contains, for each call, the method that makes it once and updates the expected state.
var attempts = map[call]func(*co, context.Context) error{
	create: (*co).create, remove: (*co).remove, expand: (*co).expand, nodeExpand: (*co).nodeExpand, modify: (*co).modify,
	controllerPublish: (*co).controllerPublish, controllerUnpublish: (*co).controllerUnpublish, stage: (*co).stage, unstage: (*co).unstage,
	publish: (*co).publish, unpublish: (*co).unpublish, snapshot: (*co).snapshot, deleteSnapshot: (*co).deleteSnapshot,
	write: func(c *co, _ context.Context) error { return c.write() }, check: (*co).checkFilesystem,
}

func (c *co) create(ctx context.Context) error {
	resp, err := c.host.control.CreateVolume(ctx, &csi.CreateVolumeRequest{
		Name:                c.name,
		CapacityRange:       &csi.CapacityRange{RequiredBytes: c.firstSize()},
		VolumeCapabilities:  []*csi.VolumeCapability{c.capability()},
		Parameters:          c.parameters(),
		VolumeContentSource: c.contentSource(),
	})
	if err == nil {
		c.created, c.id = true, resp.GetVolume().GetVolumeId()
		c.written = c.written || c.source != ""
	}
	return err
}

// volumeID returns the volume's ID. It builds the ID if no call has returned it yet.
func (c *co) volumeID() (string, error) {
	if c.id != "" {
		return c.id, nil
	}
	id := volume.ID{Backend: c.kind.Backend(), Pool: c.host.poolName(), Name: c.name}
	if !c.host.shared() {
		uuid, err := testenv.PoolUUID(c.host.pool)
		if err != nil {
			return "", err
		}
		id.PoolUUID = uuid[:8]
	}
	c.id = id.String()
	return c.id, nil
}

// checkFilesystem requests the driver to check the volume, which must have no errors.
func (c *co) checkFilesystem(ctx context.Context) error {
	results, err := driver.Check(ctx, c.host.conn, driver.CheckRequest{Volumes: []string{c.id}})
	if err != nil { // without a gRPC code
		return status.Error(codes.Unavailable, err.Error())
	}
	if len(results) != 1 || results[0].Result != driver.CheckClean {
		return fmt.Errorf("got the results %+v, want one that is %s", results, driver.CheckClean)
	}
	return nil
}

func (c *co) controllerPublish(ctx context.Context) error {
	resp, err := c.host.control.ControllerPublishVolume(ctx, &csi.ControllerPublishVolumeRequest{
		VolumeId: c.id, NodeId: nodeID, VolumeCapability: c.capability(),
	})
	if err == nil {
		c.context = resp.GetPublishContext()
	}
	return err
}

func (c *co) stage(ctx context.Context) error {
	_, err := c.host.node.NodeStageVolume(ctx, &csi.NodeStageVolumeRequest{
		VolumeId: c.id, StagingTargetPath: c.staging(), VolumeCapability: c.capability(), PublishContext: c.context, Secrets: secrets,
	})
	if err == nil && !c.staged {
		c.staged, c.resized, c.formatted = true, true, c.kind.Has(backendtest.Filesystem)
	}
	return err
}

func (c *co) publish(ctx context.Context) error {
	_, err := c.host.node.NodePublishVolume(ctx, &csi.NodePublishVolumeRequest{
		VolumeId: c.id, StagingTargetPath: c.staging(), TargetPath: c.target(),
		VolumeCapability: c.capability(), PublishContext: c.context, Readonly: c.readOnly,
	})
	c.published = c.published || err == nil
	return err
}

func (c *co) expand(ctx context.Context) error {
	c.resized = false
	if c.kind.Has(backendtest.WholeDisk) {
		if err := c.host.enlarge(); err != nil {
			return finalError{err}
		}
	}
	_, err := c.host.control.ControllerExpandVolume(ctx, &csi.ControllerExpandVolumeRequest{
		VolumeId: c.id, VolumeCapability: c.capability(), CapacityRange: &csi.CapacityRange{RequiredBytes: c.kind.Size() + growth},
	})
	return err
}

func (c *co) nodeExpand(ctx context.Context) error {
	_, err := c.host.node.NodeExpandVolume(ctx, &csi.NodeExpandVolumeRequest{
		VolumeId: c.id, VolumePath: c.target(), StagingTargetPath: c.staging(), VolumeCapability: c.capability(),
		CapacityRange: &csi.CapacityRange{RequiredBytes: c.kind.Size() + growth}, Secrets: secrets,
	})
	c.resized = c.resized || err == nil
	return err
}

// modify removes a limit of the volume's I/O, which a machine with cgroup v1 also accepts. The record contains limits afterwards.
func (c *co) modify(ctx context.Context) error {
	_, err := c.host.control.ControllerModifyVolume(ctx, &csi.ControllerModifyVolumeRequest{
		VolumeId: c.id, MutableParameters: map[string]string{"iopsRead": volume.NoIOLimit},
	})
	if err != nil {
		return err
	}
	record, err := os.ReadFile(filepath.Join(c.host.pool, "volumes", c.name, "volume.json"))
	if err == nil && !strings.Contains(string(record), `"ioLimits"`) {
		err = finalError{fmt.Errorf("the record has no limits: %s", record)}
	}
	return err
}

func (c *co) unpublish(ctx context.Context) error {
	_, err := c.host.node.NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{VolumeId: c.id, TargetPath: c.target()})
	c.published = c.published && err != nil
	return err
}

func (c *co) unstage(ctx context.Context) error {
	_, err := c.host.node.NodeUnstageVolume(ctx, &csi.NodeUnstageVolumeRequest{VolumeId: c.id, StagingTargetPath: c.staging()})
	if err != nil {
		return err
	}
	c.staged = false
	if !c.formatted || c.kind.Has(backendtest.Encrypted) || c.kind.Has(backendtest.WholeDisk) || c.kind.Has(backendtest.Logical) { // they have no device while they are not staged
		return nil
	}
	return testenv.Fsck(c.kind.FSType, c.image())
}

func (c *co) controllerUnpublish(ctx context.Context) error {
	_, err := c.host.control.ControllerUnpublishVolume(ctx, &csi.ControllerUnpublishVolumeRequest{VolumeId: c.id, NodeId: nodeID})
	return err
}

// remove deletes the volume. It expects that the data is deleted even if the driver crashes, because
// the volume is already deleted at each crash point of DeleteVolume.
func (c *co) remove(ctx context.Context) error {
	id, err := c.volumeID()
	if err != nil {
		return err
	}
	c.created, c.written, c.formatted, c.initialSize = false, false, false, 0
	_, err = c.host.control.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: id})
	return err
}

// capacity returns the size that the driver has recorded.
func (c *co) capacity() (int64, error) {
	var bytes int64
	err := poll(func(ctx context.Context) error {
		resp, err := c.host.control.ControllerGetVolume(ctx, &csi.ControllerGetVolumeRequest{VolumeId: c.id})
		bytes = resp.GetVolume().GetCapacityBytes()
		return retryable(err)
	})
	return bytes, err
}

// file returns the path to which the pod writes: a file in the volume, or a raw device.
func (c *co) file() string {
	if c.kind.Block() {
		return c.target()
	}
	return filepath.Join(c.target(), "data")
}

// write writes the content and syncs it. It holds ForkLock, because a process that starts at the same
// time would inherit the open file for a moment and keep the mount busy.
func (c *co) write() error {
	syscall.ForkLock.RLock()
	defer syscall.ForkLock.RUnlock()
	f, err := os.OpenFile(c.file(), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	if _, err := f.Write(c.data); err != nil {
		return err
	}
	c.written = true
	return f.Sync()
}

// read returns as many bytes of the volume's file or device as write writes.
func (c *co) read() ([]byte, error) {
	syscall.ForkLock.RLock() // as in write
	defer syscall.ForkLock.RUnlock()
	f, err := os.Open(c.file())
	if err != nil {
		return nil, err
	}
	defer f.Close()
	have := make([]byte, len(c.data))
	_, err = f.ReadAt(have, 0)
	return have, err
}

// verify reads a published volume and fails unless it has the written content. A volume to which
// nothing was written must have no file, or zeros if it is a raw device.
func (c *co) verify() error {
	have, err := c.read()
	if !c.kind.Block() && !c.written && os.IsNotExist(err) {
		return nil
	}
	if err != nil {
		return err
	}
	want := c.data
	if !c.written {
		want = make([]byte, len(c.data))
	}
	if !bytes.Equal(have, want) {
		return fmt.Errorf("volume %s (%s): got wrong content in %s, want the written content: %t, zeros: %t", c.name, c.kind, c.file(), c.written, !c.written)
	}
	return nil
}
