package crash

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/trivet-csi/trivet/internal/crashpoint"
	"github.com/trivet-csi/trivet/volume"
)

// snapshotRows contains the rows of snapshots and of restored volumes.
var snapshotRows = slices.Concat(
	at(row{call: snapshot, kinds: images("ext4", "xfs"), pool: "ext4"}, crashpoint.FreezeFrozen),
	at(row{call: snapshot, kinds: images("btrfs"), frozen: true}, crashpoint.FreezeFrozen),
	at(row{call: snapshot, kinds: slices.Concat(ext4AndRaw, limited)}, crashpoint.SnapshotData),
	at(row{call: snapshot, kinds: unlimited, used: true, pool: "xfs"}, crashpoint.SnapshotData),
	at(row{call: snapshot, kinds: ext4, pool: "ext4"}, crashpoint.SnapshotData),
	at(row{call: snapshot, kinds: images("xfs"), pool: "btrfs"}, crashpoint.SnapshotData),
	at(row{call: snapshot, kinds: ext4}, crashpoint.SnapshotBuilt),
	at(row{call: snapshot, kinds: ext4, pool: "ext4", group: true}, crashpoint.SnapshotBuilt),
	at(row{call: snapshot, kinds: raw, used: true, pool: "ext4"}, crashpoint.SnapshotBuilt),
	at(row{call: snapshot, kinds: slices.Concat(ext4, limited)}, crashpoint.SnapshotCommitted),
	at(row{call: snapshot, kinds: ext4, group: true}, crashpoint.FreezeFrozen, crashpoint.SnapshotCommitted),
	at(row{call: snapshot, kinds: raw}, crashpoint.SnapshotDone),
	at(row{call: deleteSnapshot, kinds: slices.Concat(ext4, limited)}, crashpoint.SnapshotDeleted),
	at(row{call: deleteSnapshot, kinds: ext4, group: true}, crashpoint.SnapshotDeleted),
	at(row{call: deleteSnapshot, kinds: ext4}, crashpoint.ReapStarted),
	at(row{call: deleteSnapshot, kinds: limited}, crashpoint.ReapRemoved),

	at(row{call: create, kinds: ext4, restored: true}, crashpoint.CreateReserved, crashpoint.CreateCommitted),
	at(row{call: create, kinds: limited, restored: true}, crashpoint.CreateLimited, crashpoint.CreateBuilt),
	at(row{call: create, kinds: ext4, restored: true, pool: "ext4"}, crashpoint.CreateBuilt),
	at(row{call: create, kinds: unlimited, restored: true, pool: "xfs"}, crashpoint.CreateBuilt),
	at(row{call: stage, kinds: filesystemImages, restored: true}, crashpoint.StageIdentified),
	at(row{call: stage, kinds: images("btrfs"), restored: true}, crashpoint.StageMounted),
)

// sources returns the volumes of which the snapshot is taken: two for a group snapshot.
func (c *co) sources() []*co {
	if c.partner != nil {
		return []*co{c, c.partner}
	}
	return []*co{c}
}

func (c *co) snapshotName() string { return "snap-" + c.name }

// snapshotFolder returns the name of the folder in which the driver stores the snapshot, or all
// snapshots of the group.
func (c *co) snapshotFolder() string {
	if c.partner != nil {
		return volume.GroupName(c.snapshotName())
	}
	return c.snapshotName()
}

// snapshotFolderID returns the ID of the snapshot or the group snapshot. It builds the ID, because the
// interrupted call has not returned it.
func (c *co) snapshotFolderID() (string, error) {
	text, err := c.volumeID()
	if err != nil {
		return "", err
	}
	id, err := volume.ParseID(text)
	id.Name = c.snapshotFolder()
	return id.String(), err
}

// snapshotClass returns the parameters of the VolumeSnapshotClass.
func (c *co) snapshotClass() map[string]string {
	if c.frozen {
		return map[string]string{volume.ParamConsistency: string(volume.ConsistencyFrozen)}
	}
	return nil
}

// snapshot takes a snapshot of the volume, or a group snapshot of the volume and its partner.
func (c *co) snapshot(ctx context.Context) error {
	c.hadSnapshot = true
	if c.partner != nil {
		return c.snapshotGroup(ctx)
	}
	resp, err := c.host.control.CreateSnapshot(ctx, &csi.CreateSnapshotRequest{
		Name: c.snapshotName(), SourceVolumeId: c.id, Parameters: c.snapshotClass(),
	})
	if err == nil {
		c.snapshots = []string{resp.GetSnapshot().GetSnapshotId()}
	}
	return err
}

// snapshotGroup takes a group snapshot of the volume and its partner.
func (c *co) snapshotGroup(ctx context.Context) error {
	resp, err := c.host.groups.CreateVolumeGroupSnapshot(ctx, &csi.CreateVolumeGroupSnapshotRequest{
		Name: c.snapshotName(), SourceVolumeIds: []string{c.id, c.partner.id}, Parameters: c.snapshotClass(),
	})
	if err != nil {
		return err
	}
	c.snapshots = nil
	for _, source := range c.sources() {
		for _, s := range resp.GetGroupSnapshot().GetSnapshots() {
			if s.GetSourceVolumeId() == source.id {
				c.snapshots = append(c.snapshots, s.GetSnapshotId())
			}
		}
	}
	return wantCount("snapshots of the group's volumes", c.snapshots, len(c.sources()))
}

// deleteSnapshot deletes the snapshot or the group snapshot.
func (c *co) deleteSnapshot(ctx context.Context) error {
	id, err := c.snapshotFolderID()
	if err != nil {
		return err
	}
	c.snapshots = nil
	if c.partner != nil {
		_, err = c.host.groups.DeleteVolumeGroupSnapshot(ctx, &csi.DeleteVolumeGroupSnapshotRequest{GroupSnapshotId: id})
	} else {
		_, err = c.host.control.DeleteSnapshot(ctx, &csi.DeleteSnapshotRequest{SnapshotId: id})
	}
	return err
}

// checkSnapshots fails if snapshots are expected and their folder is missing, or if the folder exists and
// none are expected.
func (c *co) checkSnapshots() error {
	dir := filepath.Join(c.host.pool, "snapshots", c.snapshotFolder())
	_, err := os.Stat(dir)
	if exists := err == nil; exists != (len(c.snapshots) > 0) {
		return fmt.Errorf("got %s exists: %t, want the snapshots %q", dir, exists, c.snapshots)
	}
	return nil
}

// contentSource returns the volume_content_source of the volume, or nil if it has none.
func (c *co) contentSource() *csi.VolumeContentSource {
	if c.cloned != "" {
		return &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Volume{
			Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: c.cloned},
		}}
	}
	if c.source == "" {
		return nil
	}
	return &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Snapshot{
		Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: c.source},
	}}
}

// restored returns the orchestrator of a volume to be restored from c.snapshots[i].
func (c *co) restored(i int, name string) (*co, error) {
	r, err := newCO(c.host, name, c.kind)
	r.source, r.size, r.data, r.thick = c.snapshots[i], c.size, c.sources()[i].data, c.thick
	return r, err
}

// newRestored takes a snapshot of a volume, deletes the volume, and returns the orchestrator of a
// volume to be restored from the snapshot.
func newRestored(h *host, name string, k kind) (*co, error) {
	origin, err := newCO(h, "pvc-0", k)
	if err != nil {
		return nil, err
	}
	if err := origin.do(create, controllerPublish, stage, publish, write, unpublish, unstage, controllerUnpublish, snapshot, remove); err != nil {
		return nil, err
	}
	c, err := origin.restored(0, name)
	c.origin = origin
	return c, err
}

// finishSnapshots restores a volume from each snapshot, checks its content, and deletes the snapshots.
// If c is itself restored, it only deletes its source.
func (c *co) finishSnapshots() error {
	if c.origin != nil {
		return c.origin.do(deleteSnapshot)
	}
	for i := range c.snapshots {
		r, err := c.restored(i, fmt.Sprintf("%s-restored-%d", c.name, i))
		if err != nil {
			return err
		}
		if err := r.do(create); err != nil {
			return err
		}
		if err := r.use(); err != nil {
			return err
		}
	}
	if len(c.snapshots) == 0 {
		return nil
	}
	return c.do(deleteSnapshot)
}
