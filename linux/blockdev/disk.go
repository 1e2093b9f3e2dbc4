package blockdev

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/internal/retry"
	"github.com/trivet-csi/trivet/linux/sys"
)

// Disk is a whole disk of this node, with the properties that it had when FindDisks found it.
type Disk struct {
	// Path is the device node by which the disk was found. Name is the name in the kernel, such as sda.
	Path, Name string
	// Size is in bytes, 0 without a medium. SectorSize is the size of a logical block in bytes.
	Size       int64
	SectorSize int
	// Identity is the identity that the hardware reports. It is empty if the hardware reports
	// none. It does not depend on the path or the name.
	Identity string

	number uint64 // the device number (st_rdev)
	seq    uint64 // the result of sys.DiskSequence, or 0 before Linux 5.15
}

// sys returns the path of a file in the sysfs directory of the disk.
func (d Disk) sys(file string) string { return filepath.Join("/sys/class/block", d.Name, file) }

// Same reports whether d and other are the same disk, and the disk was not removed between the calls of FindDisks
// that found them.
func (d Disk) Same(other Disk) bool { return d.number == other.number && d.seq == other.seq }

// OneDisk reports whether d and other are the same disk, possibly with a different device for each path to it
// (multipath).
func (d Disk) OneDisk(other Disk) bool {
	return d.number == other.number || d.Identity != "" && d.Identity == other.Identity
}

// FindDisks finds the disks whose device nodes match globs, each once, in the order of the globs. It skips
// partitions and files that are not block devices.
func FindDisks(globs []string) ([]Disk, error) {
	var paths []string
	for _, glob := range globs {
		found, err := filepath.Glob(glob)
		if err != nil {
			return nil, fmt.Errorf("%q: %w", glob, err)
		}
		paths = append(paths, found...)
	}
	return readDisks(paths, 0)
}

// BrokenLinks returns the symbolic links that match globs and lead to no file. In a container these include links
// to files outside the directories of the host that the container has.
func BrokenLinks(globs []string) (links []string) {
	for _, glob := range globs {
		found, _ := filepath.Glob(glob) // fails only if FindDisks fails, too
		for _, path := range found {
			if _, err := os.Stat(path); errors.Is(err, fs.ErrNotExist) {
				links = append(links, path)
			}
		}
	}
	return links
}

// readDisks examines the devices at paths, and returns each disk of at least minBytes once.
func readDisks(paths []string, minBytes int64) ([]Disk, error) {
	var disks []Disk
	for _, path := range paths {
		d, ok, err := readDisk(path)
		if err != nil {
			return nil, err
		}
		if ok && d.Size >= minBytes && !slices.ContainsFunc(disks, d.OneDisk) {
			disks = append(disks, d)
		}
	}
	return disks, nil
}

// notHardware matches the kernel's names of devices that are backed by files, other disks or servers, and of
// drives with removable media. Such devices are examined only if a glob matches them, because opening a loop device
// keeps it bound, and opening a floppy drive starts it.
var notHardware = regexp.MustCompile(`^(loop|ram|zram|dm-|md|bcache|drbd|zd|nbd|rbd|rnbd|ublkb|nullb|zloop|sr|fd)`)

// everyDisk lists all disks of this node.
func everyDisk() ([]Disk, error) {
	entries, err := os.ReadDir("/sys/block")
	if err != nil {
		return nil, err
	}
	var paths []string
	for _, e := range entries {
		if !notHardware.MatchString(e.Name()) {
			paths = append(paths, devicePath(e.Name()))
		}
	}
	return readDisks(paths, 1) // without drives that have no medium
}

// devicePath returns the device node of a name in sysfs, which has "!" for each slash.
func devicePath(name string) string { return "/dev/" + strings.ReplaceAll(name, "!", "/") }

// readDisk examines the device at a path. ok is false if the device is not a whole disk, or does not exist any
// more.
func readDisk(path string) (d Disk, ok bool, err error) {
	number, err := NodeNumber(path)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTBLK) || errors.Is(err, unix.ELOOP) {
		return d, false, nil
	}
	if err != nil {
		return d, false, err
	}
	dir, err := filepath.EvalSymlinks(fmt.Sprintf("/sys/dev/block/%d:%d", unix.Major(number), unix.Minor(number)))
	if errors.Is(err, fs.ErrNotExist) {
		return d, false, nil
	}
	if err != nil {
		return d, false, err
	}
	if _, err := os.Stat(dir + "/partition"); err == nil {
		return d, false, nil
	}
	d = Disk{Path: path, Name: filepath.Base(dir), number: number}
	err = d.measure()
	if errors.Is(err, fs.ErrNotExist) {
		return d, false, nil
	}
	return d, err == nil, err
}

// measure reads the size, the sector size, the sequence number and the identity.
func (d *Disk) measure() error {
	size, err := readNumber(d.sys("size"))
	if err != nil {
		return err
	}
	sector, err := readNumber(d.sys("queue/logical_block_size"))
	if err != nil {
		return err
	}
	seq, _ := readNumber(d.sys("diskseq"))
	d.Size, d.SectorSize, d.seq = size*sysSector, int(sector), uint64(seq)
	d.Identity = d.identity()
	return nil
}

// identityFiles are the files in sysfs with the identity of a disk: NVMe, SCSI and ATA, MMC, virtio (kernel
// documentation, ABI/stable/sysfs-block, ABI/testing/sysfs-*).
var identityFiles = []string{"wwid", "device/wwid", "device/cid", "serial"}

// identity returns the identity that the hardware reports, or the backing file of a loop device.
func (d *Disk) identity() string {
	for _, file := range identityFiles {
		identity, _ := readText(d.sys(file)) // some disks have the file, but reading it fails
		if identity != "" {
			return identity
		}
	}
	if file, _ := readText(d.sys("loop/backing_file")); file != "" {
		offset, _ := readText(d.sys("loop/offset"))
		return file + " from " + offset
	}
	return ""
}

// Room returns the size in bytes of the partition that a claim creates on the disk.
func (d Disk) Room() int64 { return Room(d.Size, d.SectorSize) }

// ErrDiskBusy means that a program or the kernel has the disk or a partition of it open.
var ErrDiskBusy = errors.New("disk is in use")

// ErrDiskGone means that the disk was removed, or that another disk has its device number now.
var ErrDiskGone = errors.New("disk was removed or replaced")

// open opens the disk. The error is ErrDiskGone if the disk was removed or replaced.
func (d Disk) open(flag int) (*os.File, error) {
	f, err := os.OpenFile(d.Path, flag, 0)
	switch {
	case errors.Is(err, unix.EBUSY):
		return nil, fmt.Errorf("%s: %w", d.Path, ErrDiskBusy)
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENXIO), errors.Is(err, unix.ENODEV):
		return nil, fmt.Errorf("%s: %w", d.Path, ErrDiskGone)
	case err != nil:
		return nil, err
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil || st.Rdev != d.number || !d.backs(f) {
		_ = f.Close()
		return nil, fmt.Errorf("%s: %w", d.Path, ErrDiskGone)
	}
	return f, nil
}

// backs reports whether an open device is this disk or its partition, and not another disk that got the device
// number after this disk was removed. If the kernel has no sequence numbers, it compares the identity of the
// hardware. While the device is open, no other device gets its number.
func (d Disk) backs(f *os.File) bool {
	if d.seq == 0 {
		return d.identity() == d.Identity
	}
	seq, err := sys.DiskSequence(f)
	return err == nil && seq == d.seq
}

// OpenExclusive opens the disk for exclusive writing. Until the file is closed, no other program can mount the
// disk or a partition of it, or add it to a RAID (open(2), O_EXCL), and udev does not probe it (systemd,
// BLOCK_DEVICE_LOCKING). OpenExclusive drops the page cache, which may be stale after writes on another path
// to the disk. The error is ErrDiskBusy if another program has the disk open exclusively, or locked, for
// over a second.
func (d Disk) OpenExclusive(ctx context.Context) (*os.File, error) {
	f, err := d.openLocked(ctx, os.O_RDWR|os.O_EXCL)
	if err != nil {
		return nil, err
	}
	if err := sys.FlushBuffers(f); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// openLocked opens the disk and locks it with flock(2), which does not affect mounts.
func (d Disk) openLocked(ctx context.Context, flag int) (f *os.File, err error) {
	err = retry.For(ctx, busyTimeout, func() (bool, error) {
		if f, err = d.open(flag); err != nil {
			return errors.Is(err, ErrDiskBusy), err
		}
		err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return false, nil
		}
		_ = f.Close()
		if errors.Is(err, unix.EWOULDBLOCK) {
			err = fmt.Errorf("%s is locked by another program: %w", d.Path, ErrDiskBusy)
		}
		return errors.Is(err, ErrDiskBusy), err
	})
	return f, err
}

// Mark reads the mark of the disk (ReadMark). The error is ErrDiskLate if the disk does not answer.
func (d Disk) Mark() (Mark, error) { return request(d, d.readMark) }

// readMark does the same as Mark, but waits for a disk that does not respond.
func (d Disk) readMark() (Mark, error) {
	if d.Room() == 0 { // a drive without a medium cannot be opened
		return Mark{}, ErrNoMark
	}
	f, err := d.open(os.O_RDONLY)
	if err != nil {
		return Mark{}, err
	}
	defer f.Close()
	return ReadMark(f, d.Size, d.SectorSize)
}

// Probe reads the beginning of the disk with direct I/O. The errors are those of read(2), such as EIO, and
// ErrDiskLate.
func (d Disk) Probe() error {
	_, err := request(d, func() (struct{}, error) {
		f, err := d.open(os.O_RDONLY | unix.O_DIRECT)
		if err != nil {
			return struct{}{}, err
		}
		defer f.Close()
		return struct{}{}, ProbeFile(f)
	})
	return err
}
