package lvm

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/google/uuid"
	"k8s.io/klog/v2"

	"github.com/trivet-csi/trivet/internal/atomicfile"
	"github.com/trivet-csi/trivet/linux/blockdev"
	"github.com/trivet-csi/trivet/linux/dm"
	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// recordsSize is the size in bytes of the logical volume with the records, which is enough for several thousand
// volumes, each of which needs up to six files.
const recordsSize = 128 * volume.MiB

// recordsFS is the type of its filesystem. It has an inode for each 4 KiB.
const recordsFS = "ext4"

var recordsOptions = []string{"-i", "4096"}

// recordsName returns the name of the logical volume with the records of a pool.
func recordsName(pool string) string { return "trivet.records." + pool }

// recordsFlags are the mount flags of the records.
var recordsFlags = []string{"noatime", "nosuid", "nodev", "noexec", "errors=remount-ro"}

// pin is the content of a file in the state directory, beside the mount point of the records. It prevents a pool from
// using another group of the same name. If the file is lost, as on another host, the group is found by its name.
type pin struct {
	Version int `json:"version"`
	// Group and Records are the UUIDs of the volume group and of the logical volume with the records.
	Group   string `json:"groupUUID"`
	Records string `json:"recordsUUID,omitempty"`
	// Creating is the GUID in the tags of a logical volume for the records that is being created.
	Creating string `json:"creating,omitempty"`
}

// pinVersion is the version of pins that this driver reads and writes.
const pinVersion = 1

func pinName(c pool.Config) string { return filepath.Base(c.Directory.Path) + ".json" }

// readPin reads the pin of a pool; it is empty if there is none.
func readPin(c pool.Config) (p pin, err error) {
	file := filepath.Join(filepath.Dir(c.Directory.Path), pinName(c))
	b, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) {
		return p, nil
	}
	if err != nil {
		return p, err
	}
	return parsePin(b, file)
}

// parsePin parses the content of a file with a pin.
func parsePin(b []byte, file string) (p pin, err error) {
	if err := json.Unmarshal(b, &p); err != nil {
		return p, volume.Errorf(volume.ErrDamaged, "%s: %w: restore it, or remove it, and the volume group is found by its name", file, err)
	}
	if p.Version != pinVersion {
		return p, volume.Errorf(volume.ErrPrecondition, "%s has version %d, this driver reads version %d: run a driver that reads it", file, p.Version, pinVersion)
	}
	return p, nil
}

// write durably replaces the pin of a pool.
func (p pin) write(c pool.Config) error {
	return atomicfile.WriteJSON(filepath.Dir(c.Directory.Path), pinName(c), p)
}

// MountRecords implements pool.RecordMounter.
func (g *Group) MountRecords(ctx context.Context, c pool.Config) (unmount func(), err error) {
	if err := os.MkdirAll(c.Directory.Path, 0o700); err != nil {
		return nil, err
	}
	known, err := readPin(c)
	if err != nil {
		return nil, err
	}
	s := g.open(c)
	group, err := findGroup(g.VolumeGroup, known.Group)
	if err != nil {
		if known.Group != "" && errors.Is(err, dm.ErrNoGroup) {
			return nil, volume.Errorf(volume.ErrPrecondition, "%w (UUID %s): attach its disks; if the pool is lost and a new one is needed, remove %s.json", err, known.Group, c.Directory.Path)
		}
		return nil, s.explain(err)
	}
	report, err := group.Report(ctx)
	if err != nil {
		return nil, err
	}
	if report.Exported {
		return nil, volume.Errorf(volume.ErrPrecondition, "volume group %s is exported: import it (vgimport %[1]s)", group.Name)
	}
	r := &records{config: c, group: group, pin: known}
	if err := g.openThin(ctx, c, group, report); err != nil {
		return nil, err
	}
	if err := r.locate(ctx, report); err != nil {
		return nil, err
	}
	if err := r.mount(ctx); err != nil {
		r.unmount() //nolint:contextcheck // the records are unmounted even if the call has ended
		return nil, err
	}
	g.mounted = true
	return r.unmount, nil
}

// CheckMounted implements pool.RecordMounter.
func (g *Group) CheckMounted(c pool.Config) error {
	at, err := mount.Inspect(c.Directory.Path)
	if err != nil || at.IsMount {
		return err
	}
	known, err := readPin(c)
	if err == nil {
		_, err = findGroup(g.VolumeGroup, known.Group)
	}
	if err != nil {
		return g.open(c).explain(err)
	}
	return volume.Errorf(volume.ErrUnavailable, "the records in volume group %s are not mounted at %s: the driver mounts them when it starts; if it runs in a container, run this command there", g.VolumeGroup, c.Directory.Path)
}

// records is the logical volume with the records of a pool.
type records struct {
	config pool.Config
	group  dm.Group
	pin    pin
	id     dm.VolumeID
}

func (r *records) name() string { return recordsName(r.config.Name) }

// node returns the name of the device node.
func (r *records) node() string { return "records." + r.config.Name + "." + r.id.Volume }

func (r *records) source() *blockdev.DeviceSource {
	return &blockdev.DeviceSource{Path: blockdev.NodePath(r.node()), FSType: recordsFS}
}

// locate finds the logical volume, and creates it if the pool has none. It refuses a logical volume with its name that
// the driver has not completed.
func (r *records) locate(ctx context.Context, report dm.Report) error {
	at := r.group.Name + "/" + r.name()
	lv, exists := report.Named(r.name())
	r.id = lv.ID
	switch {
	case !exists && r.pin.Records != "":
		return volume.Errorf(volume.ErrPrecondition, "the logical volume %s, which had the records of the pool, is missing: restore the group's metadata (vgcfgrestore); if the pool is lost and a new one is needed, remove %s.json", at, r.config.Directory.Path)
	case !exists:
		return r.create(ctx)
	case !lv.HasTag(recordsTag) || !lv.HasTag(poolTag+r.config.Name):
		return volume.Errorf(volume.ErrPrecondition, "%s has the name of the logical volume with the records of the pool, but not its tags: rename it (lvrename)", at)
	case r.pin.Records != "" && r.pin.Records != lv.ID.Volume:
		return volume.Errorf(volume.ErrPrecondition, "%s has the UUID %s, but the records of the pool were on %s: restore that logical volume; or if the records were moved on purpose, remove %s.json", at, lv.ID.Volume, r.pin.Records, r.config.Directory.Path)
	case lv.HasTag(unusedTag) && (r.pin.Creating == "" || !lv.HasTag(guidTag+r.pin.Creating)):
		return volume.Errorf(volume.ErrPrecondition, "%s was not completed, and not by this node: make sure that no driver is creating it, and remove it: lvremove %[1]s", at)
	case lv.HasTag(unusedTag):
		return r.complete(ctx)
	}
	return r.remember()
}

// remember records the UUIDs of the group and of the records.
func (r *records) remember() error {
	current := pin{Version: pinVersion, Group: r.group.UUID, Records: r.id.Volume}
	if r.pin == current {
		return nil
	}
	r.pin = current
	return current.write(r.config)
}

// create creates the logical volume. The state directory contains its GUID before it exists, so that only a logical
// volume that this function has created is formatted.
func (r *records) create(ctx context.Context) (err error) {
	r.pin = pin{Version: pinVersion, Group: r.group.UUID, Creating: uuid.NewString()}
	if err := r.pin.write(r.config); err != nil {
		return err
	}
	tags := []string{recordsTag, poolTag + r.config.Name, guidTag + r.pin.Creating, unusedTag}
	if r.id, err = r.group.Create(ctx, r.name(), recordsSize, tags, true); err != nil {
		err = fmt.Errorf("creating the logical volume for the records, which needs %s of free extents: %w", volume.FormatSize(recordsSize), err)
		if errors.Is(err, dm.ErrNoRoom) {
			err = volume.Errorf(volume.ErrPrecondition, "%w: extend the volume group (vgextend), or make a logical volume of it smaller", err)
		}
		return err
	}
	return r.complete(ctx)
}

// complete formats a new logical volume.
func (r *records) complete(ctx context.Context) error {
	if _, err := r.group.Activate(ctx, r.name(), r.id, recordsSize); err != nil {
		return err
	}
	device, err := r.id.Open(dm.Shared)
	if err != nil {
		return err
	}
	defer device.Close()
	if err := blockdev.EraseSignatures(device); err != nil {
		return err
	}
	spec := blockdev.FormatSpec{FSType: recordsFS, SectorSize: r.group.SectorSize, Options: recordsOptions, Stale: true}
	if err := blockdev.NewFormatter().Format(ctx, device, spec); err != nil {
		return err
	}
	if err := device.Sync(); err != nil {
		return err
	}
	if err := r.group.RemoveTag(ctx, r.name(), r.id, unusedTag); err != nil {
		return err
	}
	return r.remember()
}

// mount mounts the records at the pool's directory, unless they are mounted there.
func (r *records) mount(ctx context.Context) error {
	d, err := r.group.Activate(ctx, r.name(), r.id, 0)
	if err != nil {
		return err
	}
	if err := blockdev.MakeNode(r.node(), d.Number); err != nil {
		return err
	}
	dir := r.config.Directory.Path
	if mounted, err := r.source().Shows(dir); err != nil || mounted {
		return err
	}
	at, err := mount.Inspect(dir)
	if err != nil {
		return err
	}
	if at.IsMount {
		return volume.Errorf(volume.ErrPrecondition, "%s shows another filesystem than the records of the pool: unmount it", dir)
	}
	options, err := mount.ParseFlags(recordsFlags)
	if err != nil {
		return err
	}
	if err := r.check(ctx); err != nil {
		return err
	}
	fs, err := mount.Filesystem(r.source().Path, recordsFS, options)
	if err != nil {
		return err
	}
	defer fs.Close() //nolint:errcheck // MoveTo has moved the mount, or the error of MoveTo is returned
	return fs.MoveTo(dir)
}

// check checks the filesystem, unless a driver that is ending still has it mounted in another mount namespace.
func (r *records) check(ctx context.Context) error {
	exclusive, err := r.id.Open(dm.Exclusive)
	if errors.Is(err, dm.ErrInUse) {
		return nil
	}
	if err != nil {
		return err
	}
	exclusive.Close() // e2fsck opens the device exclusively
	device, err := r.id.Open(dm.Shared)
	if err != nil {
		return err
	}
	defer device.Close()
	if err := blockdev.Check(ctx, device, recordsFS); err != nil {
		return volume.Errorf(volume.ErrDamaged, "the filesystem with the records on %s/%s: %w: repair it with e2fsck", r.group.Name, r.name(), err)
	}
	return nil
}

// unmount unmounts the records and deactivates their logical volume, so that the group can be exported.
func (r *records) unmount() {
	ctx := context.Background()
	var err error
	if mounted, _ := r.source().Shows(r.config.Directory.Path); mounted {
		err = mount.UnmountIdle(ctx, r.config.Directory.Path)
	}
	if err == nil {
		err = r.group.Deactivate(ctx, r.name(), r.id)
	}
	if err == nil {
		err = blockdev.RemoveNode(r.node())
	}
	if err != nil && !errors.Is(err, dm.ErrInUse) { // another process may have the pool open
		klog.ErrorS(err, "Unmounting the records of a pool failed", "pool", r.config.Name)
	}
}
