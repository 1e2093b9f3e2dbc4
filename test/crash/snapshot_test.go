package crash

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/trivet-csi/trivet/internal/crashpoint"
	"github.com/trivet-csi/trivet/volume"
)

// snapshotRows are the rows of snapshots and of volumes made of them.
var snapshotRows = slices.Concat(
	at(row{call: cut, kinds: images("ext4", "xfs"), pool: "ext4"}, crashpoint.FreezeFrozen),
	at(row{call: cut, kinds: images("btrfs"), frozen: true}, crashpoint.FreezeFrozen),
	at(row{call: cut, kinds: slices.Concat(both, limited)}, crashpoint.SnapshotData),
	at(row{call: cut, kinds: unlimited, used: true, pool: "xfs"}, crashpoint.SnapshotData),
	at(row{call: cut, kinds: one, pool: "ext4"}, crashpoint.SnapshotData),
	at(row{call: cut, kinds: images("xfs"), pool: "btrfs"}, crashpoint.SnapshotData),
	at(row{call: cut, kinds: one}, crashpoint.SnapshotBuilt),
	at(row{call: cut, kinds: one, pool: "ext4", group: true}, crashpoint.SnapshotBuilt),
	at(row{call: cut, kinds: raw, used: true, pool: "ext4"}, crashpoint.SnapshotBuilt),
	at(row{call: cut, kinds: slices.Concat(one, limited)}, crashpoint.SnapshotCommitted),
	at(row{call: cut, kinds: one, group: true}, crashpoint.FreezeFrozen, crashpoint.SnapshotCommitted),
	at(row{call: cut, kinds: raw}, crashpoint.SnapshotDone),
	at(row{call: drop, kinds: slices.Concat(one, limited)}, crashpoint.SnapshotDeleted),
	at(row{call: drop, kinds: one, group: true}, crashpoint.SnapshotDeleted),
	at(row{call: drop, kinds: one}, crashpoint.ReapStarted),
	at(row{call: drop, kinds: limited}, crashpoint.ReapRemoved),

	at(row{call: create, kinds: one, restored: true}, crashpoint.CreateReserved, crashpoint.CreateCommitted),
	at(row{call: create, kinds: limited, restored: true}, crashpoint.CreateLimited, crashpoint.CreateBuilt),
	at(row{call: create, kinds: one, restored: true, pool: "ext4"}, crashpoint.CreateBuilt),
	at(row{call: create, kinds: unlimited, restored: true, pool: "xfs"}, crashpoint.CreateBuilt),
	at(row{call: stage, kinds: formatted, restored: true}, crashpoint.StageIdentified),
	at(row{call: stage, kinds: images("btrfs"), restored: true}, crashpoint.StageMounted),
)

// sources are the volumes of which c takes snapshots at one moment.
func (c *co) sources() []*co {
	if c.partner != nil {
		return []*co{c, c.partner}
	}
	return []*co{c}
}

func (c *co) snapshotName() string { return "snap-" + c.name }

// set is the driver's name of the snapshots that cut takes.
func (c *co) set() string {
	if c.partner != nil {
		return volume.GroupName(c.snapshotName())
	}
	return c.snapshotName()
}

// setID is the ID of the set, even if no call has returned it.
func (c *co) setID() (string, error) {
	text, err := c.volumeID()
	if err != nil {
		return "", err
	}
	id, err := volume.ParseID(text)
	id.Name = c.set()
	return id.String(), err
}

func (c *co) snapshotClass() map[string]string {
	if c.frozen {
		return map[string]string{volume.ParamConsistency: string(volume.ConsistencyFrozen)}
	}
	return nil
}

func (c *co) cut(ctx context.Context) error {
	c.cutBefore = true
	if c.partner != nil {
		return c.cutGroup(ctx)
	}
	resp, err := c.host.control.CreateSnapshot(ctx, &csi.CreateSnapshotRequest{
		Name: c.snapshotName(), SourceVolumeId: c.id, Parameters: c.snapshotClass(),
	})
	if err == nil {
		c.snapshots = []string{resp.GetSnapshot().GetSnapshotId()}
	}
	return err
}

func (c *co) cutGroup(ctx context.Context) error {
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

// drop deletes the snapshots. A snapshot of the same name is a new one.
func (c *co) drop(ctx context.Context) error {
	id, err := c.setID()
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

// checkSnapshots fails unless the snapshots exist exactly if they are expected.
func (c *co) checkSnapshots() error {
	dir := filepath.Join(c.host.pool, "snapshots", c.set())
	_, err := os.Stat(dir)
	if there := err == nil; there != (len(c.snapshots) > 0) {
		return fmt.Errorf("%s exists: %t, expected are %q", dir, there, c.snapshots)
	}
	return nil
}

// contentSource is the source of the volume; nil if it is empty.
func (c *co) contentSource() *csi.VolumeContentSource {
	if c.source == "" {
		return nil
	}
	return &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Snapshot{
		Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: c.source},
	}}
}

// restored is the orchestrator of a volume of a snapshot. i is the snapshot's place in the
// set.
func (c *co) restored(i int, name string) (*co, error) {
	r, err := newCO(c.host, name, c.kind)
	r.source, r.size, r.data, r.thick = c.snapshots[i], c.size, c.sources()[i].data, c.thick
	return r, err
}

// newRestored is restored for a snapshot of a deleted volume.
func newRestored(h *host, name string, k kind) (*co, error) {
	origin, err := newCO(h, "pvc-0", k)
	if err != nil {
		return nil, err
	}
	if err := origin.do(create, attach, stage, publish, write, unpublish, unstage, detached, cut, remove); err != nil {
		return nil, err
	}
	c, err := origin.restored(0, name)
	c.origin = origin
	return c, err
}

// finishSnapshots checks that volumes can be made of the snapshots of deleted volumes, and
// that they have the content.
func (c *co) finishSnapshots() error {
	if c.origin != nil {
		return c.origin.do(drop)
	}
	for i := range c.snapshots {
		r, err := c.restored(i, fmt.Sprintf("%s-restored-%d", c.name, i))
		if err != nil {
			return err
		}
		if err := errors.Join(r.do(create, attach, stage, publish), r.verify()); err != nil {
			return err
		}
		if err := r.do(unpublish, unstage, detached, remove); err != nil {
			return err
		}
	}
	if len(c.snapshots) == 0 {
		return nil
	}
	return c.do(drop)
}
