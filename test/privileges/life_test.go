package privileges

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/uuid"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/driver"
	"github.com/trivet-csi/trivet/internal/retry"
	"github.com/trivet-csi/trivet/internal/treetest"
)

// life is the life of a volume, its snapshot, and two volumes that are created from both.
type life struct {
	*instance
	n    *node
	s    *subject
	t    *testing.T
	name string
	pod  string // the UID of the pod
	// created contains the requests of the volumes, the first of which is the volume itself.
	created []*csi.CreateVolumeRequest
	// snapshot is the request of the snapshot; nil before it.
	snapshot   *csi.CreateSnapshotRequest
	ids        map[string]string // of volumes and the snapshot, by name
	staged     bool
	publishing map[string]string
}

// newLife returns the life of a volume with a new name.
func (n *node) newLife(t *testing.T, s *subject, d *instance) *life {
	t.Helper()
	n.volumes++
	l := &life{instance: d, n: n, s: s, t: t, name: fmt.Sprintf("v%d", n.volumes), pod: uuid.NewString(), ids: map[string]string{}}
	cgroup := filepath.Join(n.cgroups, burstable, "kubepods-burstable-pod"+strings.ReplaceAll(l.pod, "-", "_")+".slice")
	for _, dir := range []string{l.staging(), l.dir(), cgroup} {
		must(t, os.MkdirAll(dir, 0o755))
	}
	must(t, os.WriteFile(filepath.Join(cgroup, "io.max"), nil, 0o644))
	return l
}

func (l *life) staging() string { return filepath.Join(l.n.kubelet, "plugins", l.name) }
func (l *life) target() string  { return filepath.Join(l.dir(), "mount") }

// dir is the directory of the volume in the pod.
func (l *life) dir() string {
	return filepath.Join(l.n.kubelet, "pods", l.pod, "volumes/kubernetes.io~csi", l.name)
}

func (l *life) capability() *csi.VolumeCapability {
	return l.s.kind.Capability(csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER)
}

// step is a step of a life. call is its name in the table.
type step struct {
	call string
	do   func(context.Context) error
}

// steps returns the steps of a life. Volumes that can be copied while they are in use are copied then.
func (l *life) steps() []step {
	k := l.s.kind
	live := k.Has(backendtest.LiveCopies)
	var copies []step
	if k.Has(backendtest.Snapshots) {
		copies = append(copies, step{"CreateSnapshot", l.createSnapshot}, step{"CreateVolume from a snapshot", l.restore})
	}
	if k.Has(backendtest.Clones) {
		copies = append(copies, step{"CreateVolume from a volume", l.clone})
	}
	steps := []step{
		{"CreateVolume", func(ctx context.Context) error { return l.create(ctx, l.name, nil) }},
		{"ControllerPublishVolume", l.controllerPublish},
		{"NodeStageVolume", l.stage},
		{"NodePublishVolume", l.publish},
		{"access of the pod", l.write},
		{"NodeGetVolumeStats", l.stats},
	}
	if k.Has(backendtest.Expand | backendtest.Divisible) {
		steps = append(steps, step{"ControllerExpandVolume", l.expand}, step{"NodeExpandVolume", l.expandOnNode})
	}
	if live {
		steps = append(steps, copies...)
	}
	if k.Has(backendtest.Filesystem|backendtest.NodeLocal) && !k.Has(backendtest.Encrypted) && live {
		steps = append(steps, step{"kubectl trivet check", l.check})
	}
	steps = append(steps, step{"NodeUnpublishVolume", l.unpublish}, step{"NodeUnstageVolume", l.unstage}, step{"ControllerUnpublishVolume", l.controllerUnpublish})
	if !live {
		steps = append(steps, copies...)
	}
	return append(steps, step{"DeleteSnapshot", l.deleteSnapshot}, step{"DeleteVolume", l.delete}, step{"removal of the deleted data", l.awaitEmpty})
}

// run takes the steps until one fails, and returns its call. It returns an empty string if none fails.
func (l *life) run() (call string, err error) {
	for _, s := range l.steps() {
		if err := l.take(s); err != nil {
			return s.call, err
		}
	}
	return "", nil
}

// take takes one step.
func (l *life) take(s step) error {
	ctx, cancel := context.WithTimeout(l.t.Context(), stepTimeout)
	defer cancel()
	return s.do(ctx)
}

// mode is the mode of directories. Without FSETID, chmod(2) omits the set-group-ID bit, and does not fail.
const mode = 0o2750

// create creates a volume. Directories get an owner, as in a class with uid, gid and mode.
func (l *life) create(ctx context.Context, name string, source *csi.VolumeContentSource) error {
	req := &csi.CreateVolumeRequest{
		Name: name, CapacityRange: &csi.CapacityRange{RequiredBytes: l.s.kind.Size()}, VolumeContentSource: source,
		Parameters: l.s.kind.Parameters("pool", l.s.target), VolumeCapabilities: []*csi.VolumeCapability{l.capability()},
	}
	if l.s.kind.Has(backendtest.Placed) {
		maps.Copy(req.Parameters, map[string]string{"uid": "1000", "gid": "2000", "mode": strconv.FormatInt(mode, 8)})
	}
	if l.s.limited() {
		req.Parameters["iopsRead"] = "100"
	}
	if source != nil && l.s.kind.Has(backendtest.Divisible) { // the source may have grown
		req.CapacityRange.RequiredBytes += growth
	}
	l.created = append(l.created, req)
	return l.createAs(ctx, req)
}

// createAs makes a request of create until the pool is open, and keeps the volume's ID.
func (l *life) createAs(ctx context.Context, req *csi.CreateVolumeRequest) error {
	return retry.For(ctx, waitTimeout, func() (bool, error) {
		resp, err := l.control.CreateVolume(ctx, req)
		if err == nil {
			l.ids[req.GetName()] = resp.GetVolume().GetVolumeId()
		}
		return l.s.kind.Has(backendtest.Shared) && status.Code(err) == codes.Unavailable, err
	})
}

func (l *life) controllerPublish(ctx context.Context) error {
	resp, err := l.control.ControllerPublishVolume(ctx, &csi.ControllerPublishVolumeRequest{VolumeId: l.ids[l.name], NodeId: nodeID, VolumeCapability: l.capability()})
	l.publishing = resp.GetPublishContext()
	return err
}

func (l *life) stage(ctx context.Context) error {
	l.staged = true
	_, err := l.node.NodeStageVolume(ctx, &csi.NodeStageVolumeRequest{
		VolumeId: l.ids[l.name], StagingTargetPath: l.staging(), VolumeCapability: l.capability(), PublishContext: l.publishing,
	})
	return err
}

func (l *life) publish(ctx context.Context) error {
	_, err := l.node.NodePublishVolume(ctx, &csi.NodePublishVolumeRequest{
		VolumeId: l.ids[l.name], StagingTargetPath: l.staging(), TargetPath: l.target(), VolumeCapability: l.capability(), PublishContext: l.publishing,
	})
	return err
}

// write writes to the volume: to a directory, files of all types, owners, modes and attributes, because the driver copies
// them. It fails if the mount is not visible on the node, or if a directory has another mode.
func (l *life) write(context.Context) error {
	if l.s.kind.Block() {
		info, err := os.Stat(l.target())
		if err != nil {
			return err
		}
		if info.Mode()&os.ModeDevice == 0 {
			return fmt.Errorf("%s is not a device", l.target())
		}
		f, err := os.OpenFile(l.target(), os.O_WRONLY, 0)
		if err != nil {
			return err
		}
		_, err = f.Write(make([]byte, 4096))
		return errors.Join(err, f.Close())
	}
	var above, at syscall.Stat_t
	if err := errors.Join(syscall.Stat(l.dir(), &above), syscall.Stat(l.target(), &at)); err != nil {
		return err
	}
	if above.Dev == at.Dev {
		return fmt.Errorf("%s is not a mount point", l.target())
	}
	if got := at.Mode & 0o7777; l.s.kind.Has(backendtest.Placed) && got != mode {
		return fmt.Errorf("%s: got mode %o, want %o", l.target(), got, mode)
	}
	if !l.s.kind.Has(backendtest.Directory) {
		return os.WriteFile(filepath.Join(l.target(), "file"), []byte("content"), 0o600)
	}
	tree := filepath.Join(l.target(), "tree")
	must(l.t, os.Mkdir(tree, 0o755))
	treetest.Make(l.t, tree, 1)
	return nil
}

func (l *life) stats(ctx context.Context) error {
	_, err := l.node.NodeGetVolumeStats(ctx, &csi.NodeGetVolumeStatsRequest{VolumeId: l.ids[l.name], VolumePath: l.target(), StagingTargetPath: l.staging()})
	return err
}

// growth is the number of bytes by which volumes are expanded.
const growth = 32 << 20

func (l *life) largerSize() *csi.CapacityRange {
	return &csi.CapacityRange{RequiredBytes: l.s.kind.Size() + growth}
}

func (l *life) expand(ctx context.Context) error {
	_, err := l.control.ControllerExpandVolume(ctx, &csi.ControllerExpandVolumeRequest{VolumeId: l.ids[l.name], VolumeCapability: l.capability(), CapacityRange: l.largerSize()})
	return err
}

func (l *life) expandOnNode(ctx context.Context) error {
	_, err := l.node.NodeExpandVolume(ctx, &csi.NodeExpandVolumeRequest{
		VolumeId: l.ids[l.name], VolumePath: l.target(), StagingTargetPath: l.staging(), VolumeCapability: l.capability(), CapacityRange: l.largerSize(),
	})
	return err
}

func (l *life) createSnapshot(ctx context.Context) error {
	l.snapshot = &csi.CreateSnapshotRequest{Name: "snapshot-" + l.name, SourceVolumeId: l.ids[l.name]}
	resp, err := l.control.CreateSnapshot(ctx, l.snapshot)
	if err == nil {
		l.ids[l.snapshot.GetName()] = resp.GetSnapshot().GetSnapshotId()
	}
	return err
}

func (l *life) restore(ctx context.Context) error {
	return l.create(ctx, l.name+"-restored", &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Snapshot{
		Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: l.ids[l.snapshot.GetName()]},
	}})
}

func (l *life) clone(ctx context.Context) error {
	return l.create(ctx, l.name+"-clone", &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Volume{
		Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: l.ids[l.name]},
	}})
}

// check requests the driver to check the filesystem in a temporary snapshot.
func (l *life) check(ctx context.Context) error {
	results, err := driver.Check(ctx, l.conn, driver.CheckRequest{Volumes: []string{l.ids[l.name]}})
	if err == nil && (len(results) != 1 || results[0].Result != driver.CheckClean) {
		err = fmt.Errorf("got the results %+v, want one that is %s", results, driver.CheckClean)
	}
	return err
}

func (l *life) unpublish(ctx context.Context) error {
	_, err := l.node.NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{VolumeId: l.ids[l.name], TargetPath: l.target()})
	return err
}

func (l *life) unstage(ctx context.Context) error {
	_, err := l.node.NodeUnstageVolume(ctx, &csi.NodeUnstageVolumeRequest{VolumeId: l.ids[l.name], StagingTargetPath: l.staging()})
	l.staged = l.staged && err != nil
	return err
}

func (l *life) controllerUnpublish(ctx context.Context) error {
	_, err := l.control.ControllerUnpublishVolume(ctx, &csi.ControllerUnpublishVolumeRequest{VolumeId: l.ids[l.name], NodeId: nodeID})
	return err
}

func (l *life) deleteSnapshot(ctx context.Context) error {
	if l.snapshot == nil {
		return nil
	}
	_, err := l.control.DeleteSnapshot(ctx, &csi.DeleteSnapshotRequest{SnapshotId: l.ids[l.snapshot.GetName()]})
	return err
}

func (l *life) delete(ctx context.Context) error {
	for _, req := range l.created {
		if _, err := l.control.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: l.ids[req.GetName()]}); err != nil {
			return err
		}
	}
	return nil
}

func (l *life) awaitEmpty(ctx context.Context) error { return l.n.awaitEmpty(ctx, l.s, l.instance) }

// remove removes what a life has left, with a driver that is not in a container. Like an orchestrator, it repeats the
// calls that may have created something, because it needs the IDs. It omits the limits, which this machine may not support.
func (l *life) remove(all *instance) error {
	ctx, cancel := context.WithTimeout(context.Background(), stepTimeout)
	defer cancel()
	l.instance = all
	if l.staged {
		if err := errors.Join(l.unpublish(ctx), l.unstage(ctx)); err != nil {
			return err
		}
	}
	for _, req := range l.created {
		if l.ids[req.GetName()] == "" {
			delete(req.GetParameters(), "iopsRead")
			if err := l.createAs(ctx, req); err != nil {
				return err
			}
		}
	}
	if l.snapshot != nil && l.ids[l.snapshot.GetName()] == "" {
		if err := l.createSnapshot(ctx); err != nil {
			return err
		}
	}
	return errors.Join(l.controllerUnpublish(ctx), l.deleteSnapshot(ctx), l.delete(ctx), l.awaitEmpty(ctx))
}
