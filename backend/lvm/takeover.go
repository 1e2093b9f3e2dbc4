package lvm

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/internal/crashpoint"
	"github.com/trivet-csi/trivet/internal/trace"
	"github.com/trivet-csi/trivet/linux/blockdev"
	"github.com/trivet-csi/trivet/linux/dm"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// A volume can take over an existing logical volume, with its name and its data. The durable record contains the UUID before
// the logical volume gets the tags of the volume. It never gets unusedTag, so the driver never formats it, and an
// interrupted takeover never removes it.

// paramLogicalVolume is the StorageClass parameter with the name of a logical volume to take over.
const paramLogicalVolume = "logicalVolume"

// refuse returns an error about a logical volume that cannot be taken over.
func refuse(kind error, name, format string, args ...any) error {
	return volume.Errorf(kind, "parameter %s=%q: %w", paramLogicalVolume, name, fmt.Errorf(format, args...))
}

// checkParameters implements backend.Kind.Check.
func checkParameters(p volume.Parameters) error {
	name := p.Get(paramLogicalVolume)
	switch {
	case name == "":
		return nil
	case p.Namespace != "":
		return refuse(volume.ErrInvalid, name, "every user who may create pods can set options of FlexVolume, and the logical volume could be that of another user: create the volume with a StorageClass")
	case p.Encryption() != volume.EncryptionNone:
		return refuse(volume.ErrInvalid, name, "the driver encrypts only logical volumes without data, but parameter %s is %q: remove one of the two", volume.ParamEncryption, p.Encryption())
	case len(p.MkfsOptions()) > 0:
		return refuse(volume.ErrInvalid, name, "the logical volume is not formatted, but parameter %s is %q: remove one of the two", volume.ParamMkfsOptions, p.Get(volume.ParamMkfsOptions))
	}
	return nil
}

// capacityOf returns the capacity for the volume that takes over the logical volume with a name; 0 if the group has none.
func (s *storage) capacityOf(name string) backend.Capacity {
	_, r := s.state()
	lv, _ := r.Named(name)
	return backend.Capacity{Available: lv.Size, Max: lv.Size}
}

// takeOver implements Create for a logical volume that exists.
func (b *Backend) takeOver(ctx context.Context, p *pool.Pool, spec volume.Spec) (v volume.Volume, err error) {
	s, name := storageOf(p), spec.Parameters.Get(paramLogicalVolume)
	if spec.Source != nil {
		return v, refuse(volume.ErrInvalid, name, "the volume gets the data of the logical volume, but volume_content_source is %v: use a class without the parameter", spec.Source)
	}
	if err := trace.Acquire(ctx, b.takingOver, "wait for takeover"); err != nil {
		return v, err
	}
	defer b.takingOver.Release(1)
	p.Trash.AwaitEmpty() // it contains the record of an interrupted takeover
	v = b.NewVolume(p, spec)
	v.Block, v.FSType, v.SectorSize = spec.Block(), spec.FSType(), s.sectorSize()
	sec := s.newSection(spec)
	v.Section = sec
	err = s.changeCurrent(ctx, func(g dm.Group, r *dm.Report) error {
		lv, err := s.findUsable(*r, name)
		if err == nil {
			err = b.checkUnowned(lv)
		}
		if err == nil && !spec.Capacity.Holds(lv.Size) {
			err = volume.Errorf(volume.ErrOutOfRange, "capacity_range has required_bytes %d and limit_bytes %d, but the logical volume %s/%s of parameter %s has %d bytes: request that size, or less without a limit", spec.Capacity.Required, spec.Capacity.Limit, s.name, name, paramLogicalVolume, lv.Size)
		}
		if err == nil {
			err = s.prepare(ctx, g, lv, v)
		}
		v.Capacity, sec.Volume = lv.Size, lv.ID.Volume
		return err
	})
	if err != nil {
		return v, err
	}
	return v, p.TakeOver(ctx, v, func(dir *os.Root) error { return s.tag(ctx, dir, v) })
}

// ordinaryRoles are the roles of logical volumes on which no others depend: thin snapshots are independent of their origin.
var ordinaryRoles = []string{"public", "origin", "thinorigin", "multithinorigin", "snapshot", "thinsnapshot"}

// findUsable finds the logical volume with a name, and refuses one that is not like those that the driver creates.
func (s *storage) findUsable(r dm.Report, name string) (dm.LogicalVolume, error) {
	lv, ok := r.Named(name)
	at := s.name + "/" + name
	driver := slices.IndexFunc(lv.Tags, func(tag string) bool {
		return tag == recordsTag || tag == growthTag || tag == unusedTag || strings.HasPrefix(tag, poolTag) && tag != poolTag+s.cfg.Name
	})
	special := slices.IndexFunc(lv.Roles, func(role string) bool { return !slices.Contains(ordinaryRoles, role) })
	var err error
	switch {
	case !ok:
		err = refuse(volume.ErrExhausted, name, "the volume group %s of this node has no such logical volume: correct the name (lvs %[1]s), or name the node that has it in allowedTopologies of the class", s.name)
	case lacksPhysical(r):
		err = refuse(volume.ErrPrecondition, name, "a physical volume of %s is missing: attach its disk", s.name)
	case driver >= 0:
		err = refuse(volume.ErrPrecondition, name, "%s has the tag %s, so it has no data of a volume of pool %q: if no driver uses it, remove the tag (lvchange --deltag %[2]s %[1]s)", at, lv.Tags[driver], s.cfg.Name)
	case lv.IsPool:
		err = refuse(volume.ErrInvalid, name, "%s is a thin pool: name a logical volume in it", at)
	case lv.Pool != "" && s.thin == "":
		err = refuse(volume.ErrInvalid, name, "%s is in the thin pool %s, but the volumes of pool %q are thick: use a pool with lvm.thinPool: %[2]s", at, lv.Pool, s.cfg.Name)
	case lv.Pool != s.thin:
		err = refuse(volume.ErrInvalid, name, "%s is not in the thin pool %s of pool %q: use a pool of the volume group with its thin pool, or without one if it is thick", at, s.thinPath(), s.cfg.Name)
	case lv.Pool == "" && lv.Layout != "linear":
		err = refuse(volume.ErrPrecondition, name, "%s is %s, but thick volumes are linear: convert it (lvconvert --type linear), or copy its data to a new volume", at, lv.Layout)
	case special >= 0:
		err = refuse(volume.ErrPrecondition, name, "%s has the role %s, so another logical volume depends on it: remove or merge the snapshots (lvs -a -o +lv_role,origin %s)", at, lv.Roles[special], s.name)
	case lv.ReadOnly:
		err = refuse(volume.ErrPrecondition, name, "%s is read-only: lvchange --permission rw %[1]s", at)
	}
	return lv, err
}

// checkUnowned refuses a logical volume that belongs to a volume or snapshot of an open pool.
func (b *Backend) checkUnowned(lv dm.LogicalVolume) error {
	for _, p := range b.OpenPools() {
		s := storageOf(p)
		if s.groupUUID() != lv.ID.Group {
			continue
		}
		known := s.recorded()
		if owner := known.owner(lv); owner != "" {
			return refuse(volume.ErrPrecondition, lv.Name, "%s/%s belongs to %s: name another logical volume", s.name, lv.Name, owner)
		}
		if !known.complete {
			return refuse(volume.ErrPrecondition, lv.Name, "%s/%s could belong to a volume of pool %q, of which not all records can be read: restore them from a backup (trivet doctor)", s.name, lv.Name, p.Name())
		}
	}
	return nil
}

// owner describes the volume or snapshot whose record has the UUID of a logical volume, or the GUID in its tag; empty if
// there is none.
func (known inventory) owner(lv dm.LogicalVolume) string {
	for guid, record := range known.volumes {
		if lv.HasTag(guidTag+guid) || sectionOf(record.Volume).id() == lv.ID {
			return "volume " + record.Volume.ID.String()
		}
	}
	for guid, id := range known.snapshots {
		if lv.HasTag(guidTag+guid) || id == lv.ID.Volume {
			return "a snapshot"
		}
	}
	return ""
}

// prepare verifies that nothing uses a logical volume, and that it has the filesystem of a volume. Then it deactivates the
// logical volume. If it refuses one, it does not change whether it is active.
func (s *storage) prepare(ctx context.Context, g dm.Group, lv dm.LogicalVolume, v volume.Volume) error {
	_, active, err := lv.ID.Device()
	if err == nil {
		_, err = g.Activate(ctx, lv.Name, lv.ID, lv.Size)
	}
	if err == nil {
		err = s.checkContent(lv, v)
	}
	if err == nil || !active {
		err = errors.Join(err, g.Deactivate(context.WithoutCancel(ctx), lv.Name, lv.ID))
	}
	if errors.Is(err, dm.ErrInUse) {
		return refuse(volume.ErrInUse, lv.Name, "%s/%s: %w: stop the program that has it open, or unmount it (lsblk, fuser)", s.name, lv.Name, err)
	}
	return err
}

// checkContent opens an active logical volume exclusively, and refuses one without the filesystem of a volume. A raw volume
// can have any content.
func (s *storage) checkContent(lv dm.LogicalVolume, v volume.Volume) error {
	device, err := lv.ID.Open(dm.Exclusive)
	if err != nil {
		return err
	}
	defer device.Close()
	if v.Block {
		return nil
	}
	ok, found, err := blockdev.HasFilesystem(device, v.FSType)
	switch {
	case err != nil || ok:
		return err
	case found == "":
		found = "no known data"
	}
	return refuse(volume.ErrInvalid, lv.Name, "%s/%s contains %s, but the class requests only %s (%s): correct the class, or copy the data to a new volume", s.name, lv.Name, found, v.FSType, volume.ParamFSType)
}

// tag adds the tags of a volume to the logical volume that it takes over, and replaces those of a lost volume. It records in
// the folder of the volume that the filesystem is complete.
func (s *storage) tag(ctx context.Context, dir *os.Root, v volume.Volume) error {
	tags := s.usedTags(v)
	err := s.changeCurrent(ctx, func(g dm.Group, r *dm.Report) error {
		lv, err := s.locate(v, *r)
		if err != nil {
			return err
		}
		stale := slices.DeleteFunc(ownTags(lv), func(tag string) bool { return slices.Contains(tags, tag) })
		if err := g.TakeOver(ctx, lv, stale, tags); err != nil {
			return err
		}
		crashpoint.Here(crashpoint.CreateImage)
		if *r, err = g.Report(ctx); err != nil {
			return err
		}
		if lv, err = s.locate(v, *r); err == nil && !lv.HasTag(guidTag+sectionOf(v).GUID) {
			err = refuse(volume.ErrUnavailable, sectionOf(v).name(), "another program has renamed the logical volume: retry")
		}
		return err
	})
	if err == nil && !v.Block {
		err = backend.CreateFlag(dir, string(pool.Formatted))
	}
	return err
}

// ownTags returns the tags of the driver that a logical volume has.
func ownTags(lv dm.LogicalVolume) []string {
	return slices.DeleteFunc(slices.Clone(lv.Tags), func(tag string) bool { return !strings.HasPrefix(tag, tagPrefix) })
}

// release removes the tags of a takeover that was not completed. The logical volume keeps its data.
func (s *storage) release(ctx context.Context, v volume.Volume) error {
	return s.changeCurrent(ctx, func(g dm.Group, r *dm.Report) error {
		lv, ok := r.Volume(sectionOf(v).id())
		if !ok || !lv.HasTag(guidTag+sectionOf(v).GUID) {
			return nil
		}
		return g.Release(ctx, lv, ownTags(lv))
	})
}
