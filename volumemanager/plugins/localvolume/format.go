package localvolume

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/trivet-csi/trivet/internal/atomicfile"
	"github.com/trivet-csi/trivet/linux/blockdev"
	"github.com/trivet-csi/trivet/linux/sys"
	"github.com/trivet-csi/trivet/volume"
	"github.com/trivet-csi/trivet/volumemanager/plugins"
)

// known contains the filesystem types that the plugin can create and recognize.
var known = []string{"ext4", "xfs", "btrfs"}

// prepare requires that a device is not in use, checks its filesystem or creates one if the device
// is blank, and returns the type of the filesystem.
func (p *Plugin) prepare(ctx context.Context, spec *plugins.Spec, path string) (fsType string, err error) {
	exclusive, err := os.OpenFile(path, os.O_RDWR|syscall.O_EXCL, 0)
	if errors.Is(err, syscall.EBUSY) {
		return "", fmt.Errorf("local.path %s: the device is in use: see lsblk, and unmount or release it", path)
	}
	if err != nil {
		return "", fmt.Errorf("local.path: %w", err)
	}
	device, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return "", fmt.Errorf("local.path: %w", errors.Join(err, exclusive.Close()))
	}
	defer device.Close()
	f := &formatting{p: p, spec: spec, device: device}
	blank, err := f.inspect()
	// mkfs and fsck need to open the device exclusively.
	if err := errors.Join(err, exclusive.Close()); err != nil {
		return "", err
	}
	if !blank {
		return f.fsType, f.check(ctx)
	}
	commit, err := p.formatter.FormatPrepared(ctx, device, f.formatSpec(), f.journal())
	if err == nil {
		err = commit()
	}
	if err != nil {
		return "", fmt.Errorf("creating a filesystem on %s: %w", path, err)
	}
	return f.fsType, nil
}

// formatting is a device whose filesystem is checked, or created if the device is blank.
type formatting struct {
	p      *Plugin
	spec   *plugins.Spec
	device *os.File
	fsType string
	// interrupted is true if the record shows that mkfs was interrupted on this device.
	interrupted bool
}

// formatSpec describes the filesystem to create. A device without signatures may still contain old data.
func (f *formatting) formatSpec() blockdev.FormatSpec {
	return blockdev.FormatSpec{FSType: f.fsType, SectorSize: 4096, Stale: true}
}

// journal returns the functions that write and remove the record.
func (f *formatting) journal() blockdev.FormatJournal {
	return blockdev.FormatJournal{Interrupted: f.interrupted, Begin: f.begin, End: f.end}
}

// inspect sets fsType to the type of the device's filesystem, or of the filesystem to create if the
// device is blank. For a blank device it writes the record.
func (f *formatting) inspect() (blank bool, err error) {
	requested := ""
	if t := f.spec.PersistentVolume.Spec.Local.FSType; t != nil {
		requested = *t
	}
	if f.interrupted, err = f.readRecord(); err != nil {
		return false, err
	}
	existing := f.filesystem()
	f.fsType = cmp.Or(existing, requested, known[0])
	switch {
	case existing != "" && requested != "" && existing != requested:
		return false, plugins.Invalidf("local.fsType %q: %s has %s: correct local.fsType, or clear the device by hand (wipefs -a) if its data is not needed", requested, f.device.Name(), existing)
	case existing != "" && f.interrupted:
		return false, f.end()
	case existing != "":
		return false, nil
	}
	err = f.journal().Prepare(f.device, f.formatSpec())
	switch {
	case errors.Is(err, blockdev.ErrNotBlank) && blockdev.MinSize(f.fsType) == 0: // the requested type is not in known, but the kernel may support it
		return false, nil
	case errors.Is(err, blockdev.ErrNotBlank):
		return false, fmt.Errorf("local.path: %w, and has none of %s; nothing was changed: clear the device by hand (wipefs -a) if its data is not needed", err, strings.Join(known, ", "))
	}
	return true, err
}

// filesystem returns the type of the device's filesystem; empty if it is unknown or incomplete.
// mkfs writes the superblock last, except mkfs.xfs, which sets the flag sb_inprogress in the
// superblock until it is done.
func (f *formatting) filesystem() string {
	for _, fsType := range known {
		if _, err := blockdev.ReadSuperblock(f.device, fsType); err != nil {
			continue
		}
		const inProgress = 126 // offset of sb_inprogress in bytes
		flag := make([]byte, 1)
		if _, err := f.device.ReadAt(flag, inProgress); fsType != "xfs" || err == nil && flag[0] == 0 {
			return fsType
		}
	}
	return ""
}

// checkFit returns an error if the filesystem cannot be created on a device of this size.
func (f *formatting) checkFit() error {
	size, err := blockdev.Size(f.device)
	if err != nil {
		return err
	}
	minSize := blockdev.MinSize(f.fsType)
	if minSize == 0 {
		return plugins.Invalidf("local.fsType %q: the device is blank, and only %s can be created: correct local.fsType, or create the filesystem by hand", f.fsType, strings.Join(known, ", "))
	}
	if size < minSize {
		return plugins.Invalidf("local.fsType %q: the device has %s, the filesystem needs %s: use another filesystem or a larger device", f.fsType, volume.ExactSize(size), volume.ExactSize(minSize))
	}
	return nil
}

// check checks the filesystem if it was not unmounted, and makes only safe repairs.
func (f *formatting) check(ctx context.Context) error {
	if blockdev.MinSize(f.fsType) == 0 {
		return nil
	}
	// A check may take long, and after an interruption it would start from the beginning.
	err := blockdev.Check(context.WithoutCancel(ctx), f.device, f.fsType)
	if errors.Is(err, blockdev.ErrUnclean) {
		return fmt.Errorf("local.path %s: %w: examine it with the tools of %s", f.device.Name(), err, f.fsType)
	}
	return err
}

const recordVersion = 1

// record identifies the device on which a filesystem is being created, because an incomplete
// filesystem is erased only on that device. A record is valid until the machine reboots.
type record struct {
	Version  int    `json:"version"`
	Boot     string `json:"boot"`
	Device   uint64 `json:"device"`
	Sequence uint64 `json:"sequence"`
}

// record returns the record of the device.
func (f *formatting) record() (r record, err error) {
	info, err := f.device.Stat()
	if err != nil {
		return r, err
	}
	r.Version = recordVersion
	r.Device = info.Sys().(*syscall.Stat_t).Rdev
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return r, err
	}
	r.Boot = strings.TrimSpace(string(boot))
	r.Sequence, err = sys.DiskSequence(f.device)
	return r, err
}

// records returns the directory of the records. Each record has the name of its PersistentVolume.
func (f *formatting) records() string {
	return filepath.Join(f.p.host.Paths().Plugin(Name), "formatting")
}

// begin checks that the filesystem can be created, and writes the record durably.
func (f *formatting) begin() error {
	if err := f.checkFit(); err != nil {
		return err
	}
	r, err := f.record()
	if err != nil {
		return err
	}
	if err := os.MkdirAll(f.records(), 0o750); err != nil {
		return err
	}
	return atomicfile.WriteJSON(f.records(), f.spec.Name(), r)
}

// end removes the record durably, because a record that outlives a reboot prevents the use of the
// volume.
func (f *formatting) end() error {
	root, err := os.OpenRoot(f.records())
	if err != nil {
		return err
	}
	defer root.Close()
	if err := root.Remove(f.spec.Name()); err != nil {
		return err
	}
	return atomicfile.Sync(root, ".")
}

// readRecord reports whether a filesystem was being created on this device. A record from before a
// reboot does not identify the device. With such a record, readRecord returns an error if the device
// has a signature of a filesystem.
func (f *formatting) readRecord() (interrupted bool, err error) {
	path := filepath.Join(f.records(), f.spec.Name())
	var recorded record
	err = plugins.ReadRecord(path, &recorded, &recorded.Version, recordVersion)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("%w: correct the file, or remove it", err)
	}
	current, err := f.record()
	if err != nil || current == recorded {
		return err == nil, err
	}
	if err := blockdev.RequireNoSignature(f.device); err != nil {
		return false, fmt.Errorf("a filesystem was being created for the volume when the machine went down, perhaps on %s: %w: check whether the filesystem is complete, or run wipefs -a on the device if its data is not needed; then remove %s", f.device.Name(), err, path)
	}
	return false, nil
}
