package localvolume

import (
	"context"
	"encoding/json"
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
	"github.com/trivet-csi/trivet/volumemanager/plugins"
)

// known are the filesystems that can be made, and be told apart.
var known = []string{"ext4", "xfs", "btrfs"}

// prepare makes sure that nobody has a device, and that it has a filesystem, and returns
// the type of that.
func (p *Plugin) prepare(ctx context.Context, spec *plugins.Spec, path string) (fsType string, err error) {
	device, err := os.OpenFile(path, os.O_RDWR|syscall.O_EXCL, 0)
	if errors.Is(err, syscall.EBUSY) {
		return "", fmt.Errorf("local.path %s: something has the device: see lsblk, and unmount or release it", path)
	}
	if err != nil {
		return "", fmt.Errorf("local.path: %w", err)
	}
	f := &formatting{p: p, spec: spec, device: device}
	fsType, blank, err := f.look()
	// Programs that make and check filesystems want the device for themselves.
	if err := errors.Join(err, device.Close()); err != nil {
		return "", err
	}
	if f.device, err = os.OpenFile(path, os.O_RDWR, 0); err != nil {
		return "", err
	}
	defer f.device.Close()
	if blank {
		return fsType, f.format(ctx, fsType)
	}
	return fsType, f.check(ctx, fsType)
}

// formatting is a device that is to have a filesystem.
type formatting struct {
	p      *Plugin
	spec   *plugins.Spec
	device *os.File
}

// look finds out what filesystem a device has, or if it is blank is to have.
func (f *formatting) look() (fsType string, blank bool, err error) {
	want := ""
	if t := f.spec.PersistentVolume.Spec.Local.FSType; t != nil {
		want = *t
	}
	cutOff, err := f.cutOff()
	if err != nil {
		return "", false, err
	}
	have := f.filesystem()
	switch {
	case have != "" && want != "" && have != want:
		return "", false, plugins.Invalidf("local.fsType %q: %s has %s: correct it, or clear the device by hand (wipefs -a) if nobody needs what is on it", want, f.device.Name(), have)
	case have != "" && cutOff:
		return have, false, f.end()
	case have != "":
		return have, false, nil
	case cutOff:
		err = blockdev.EraseHalfMade(f.device)
	default:
		err = blockdev.RequireNoSignature(f.device)
	}
	switch {
	case errors.Is(err, blockdev.ErrNotBlank) && want != "" && blockdev.MinSize(want) == 0: // the kernel may know it
		return want, false, nil
	case errors.Is(err, blockdev.ErrNotBlank):
		return "", false, fmt.Errorf("local.path: %w, and has no %s: nothing was changed; clear it by hand (wipefs -a) if nobody needs what is on it", err, strings.Join(known, ", "))
	case err != nil:
		return "", false, err
	}
	if want == "" {
		want = known[0]
	}
	return want, true, f.fits(want)
}

// filesystem is what the device has; empty if it is none of those known, or half made.
// The programs that make them write the superblock last, but for xfs, where it says that
// they are at it (sb_inprogress).
func (f *formatting) filesystem() string {
	for _, fsType := range known {
		if _, err := blockdev.ReadSuperblock(f.device, fsType); err != nil {
			continue
		}
		const inProgress = 126
		flag := make([]byte, 1)
		if _, err := f.device.ReadAt(flag, inProgress); fsType != "xfs" || err == nil && flag[0] == 0 {
			return fsType
		}
	}
	return ""
}

func (f *formatting) fits(fsType string) error {
	size, err := blockdev.Size(f.device)
	if err != nil {
		return err
	}
	least := blockdev.MinSize(fsType)
	if least == 0 {
		return plugins.Invalidf("local.fsType %q: the device is blank, and only %s can be made: correct it, or make the filesystem by hand", fsType, strings.Join(known, ", "))
	}
	if size < least {
		return plugins.Invalidf("local.fsType %q: the device has %d bytes, the filesystem needs %d: use another", fsType, size, least)
	}
	return nil
}

// format makes the filesystem. Before the first byte is written a mark says on which
// device that is: only there is wiped what is half made.
func (f *formatting) format(ctx context.Context, fsType string) error {
	if err := f.begin(); err != nil {
		return err
	}
	err := f.p.formatter.Format(ctx, f.device, blockdev.FormatSpec{FSType: fsType, SectorSize: 4096, Stale: true})
	if err == nil {
		err = f.device.Sync()
	}
	if err != nil {
		return fmt.Errorf("making a filesystem on %s: %w", f.device.Name(), err)
	}
	return f.end()
}

// check repairs what is safe to repair of a filesystem that was not unmounted.
func (f *formatting) check(ctx context.Context, fsType string) error {
	if blockdev.MinSize(fsType) == 0 {
		return nil
	}
	// It may take long, and a half-done one is worth nothing.
	err := blockdev.Check(context.WithoutCancel(ctx), f.device, fsType)
	if errors.Is(err, blockdev.ErrUnclean) {
		return fmt.Errorf("local.path %s: %w: look at it with the tools of %s", f.device.Name(), err, fsType)
	}
	return err
}

// mark tells a device from all others, until the machine is booted anew.
type mark struct {
	Boot     string `json:"boot"`
	Device   uint64 `json:"device"`
	Sequence uint64 `json:"sequence"`
}

func (f *formatting) mark() (m mark, err error) {
	info, err := f.device.Stat()
	if err != nil {
		return m, err
	}
	m.Device = info.Sys().(*syscall.Stat_t).Rdev
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return m, err
	}
	m.Boot = strings.TrimSpace(string(boot))
	m.Sequence, err = sys.DiskSequence(f.device)
	return m, err
}

func (f *formatting) marks() string {
	return filepath.Join(f.p.host.Paths().Plugin(Name), "formatting")
}

func (f *formatting) markPath() string { return filepath.Join(f.marks(), f.spec.Name()) }

func (f *formatting) begin() error {
	m, err := f.mark()
	if err != nil {
		return err
	}
	if err := os.MkdirAll(f.marks(), 0o750); err != nil {
		return err
	}
	return atomicfile.WriteJSON(f.marks(), f.spec.Name(), m)
}

// end removes the mark durably: if it came back it would keep the volume from being used.
func (f *formatting) end() error {
	root, err := os.OpenRoot(f.marks())
	if err != nil {
		return err
	}
	defer root.Close()
	if err := root.Remove(f.spec.Name()); err != nil {
		return err
	}
	return atomicfile.Sync(root, ".")
}

// cutOff tells whether a filesystem was being made on this very device. If that was before
// the machine was booted, nothing tells that it is the same: then it has to be blank.
func (f *formatting) cutOff() (bool, error) {
	b, err := os.ReadFile(f.markPath())
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	var was mark
	if err := json.Unmarshal(b, &was); err != nil {
		return false, fmt.Errorf("%s: %w: remove it", f.markPath(), err)
	}
	is, err := f.mark()
	if err != nil || is == was {
		return err == nil, err
	}
	if err := blockdev.RequireNoSignature(f.device); err != nil {
		return false, fmt.Errorf("a filesystem was being made for the volume when the machine went down, perhaps on %s: %w: look whether that is whole, or run wipefs -a on it if nobody needs what is on it; then remove %s", f.device.Name(), err, f.markPath())
	}
	return false, nil
}
