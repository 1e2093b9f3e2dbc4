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
)

// Disk is a whole disk of this node, as it was when it was looked for.
type Disk struct {
	// Path is a name that it was found by, Name the kernel's.
	Path, Name string
	// Size is in bytes, 0 without a medium; SectorSize is its logical block's.
	Size       int64
	SectorSize int
	// Identity is what the hardware says that it is, however it is reached and whatever
	// it is called; empty: it says nothing.
	Identity string

	number uint64
	seq    uint64 // 0 before Linux 5.15
}

func (d Disk) sys(file string) string { return filepath.Join("/sys/class/block", d.Name, file) }

// Same tells whether two finds are of one disk, that was not pulled in between.
func (d Disk) Same(other Disk) bool { return d.number == other.number && d.seq == other.seq }

// OneDisk tells whether two finds are of one disk, by whatever ways it is reached.
func (d Disk) OneDisk(other Disk) bool {
	return d.number == other.number || d.Identity != "" && d.Identity == other.Identity
}

// FindDisks finds the disks that globs of device nodes match, each once, in the order
// of the globs. Partitions, and what is no block device, are left out.
func FindDisks(globs []string) ([]Disk, error) {
	var disks []Disk
	for _, glob := range globs {
		paths, err := filepath.Glob(glob)
		if err != nil {
			return nil, fmt.Errorf("%q: %w", glob, err)
		}
		for _, path := range paths {
			d, ok, err := lookDisk(path)
			if err != nil {
				return nil, err
			}
			if ok && !slices.ContainsFunc(disks, d.OneDisk) {
				disks = append(disks, d)
			}
		}
	}
	return disks, nil
}

// notHardware begins the kernel's names of what is made of files, other disks and
// servers, and of what takes media. It is not looked at unasked: to open a loop device is
// to keep it, and to open a floppy drive is to start it.
var notHardware = regexp.MustCompile(`^(loop|ram|zram|dm-|md|bcache|drbd|zd|nbd|rbd|rnbd|ublkb|nullb|zloop|sr|fd)`)

// everyDisk lists all disks of this node by the kernel's names.
func everyDisk() ([]Disk, error) {
	entries, err := os.ReadDir("/sys/block")
	if err != nil {
		return nil, err
	}
	var disks []Disk
	for _, e := range entries {
		if notHardware.MatchString(e.Name()) {
			continue
		}
		// A slash in a disk's name is a ! in sysfs.
		d, ok, err := lookDisk("/dev/" + strings.ReplaceAll(e.Name(), "!", "/"))
		if err != nil {
			return nil, err
		}
		if ok && d.Size > 0 && !slices.ContainsFunc(disks, d.OneDisk) {
			disks = append(disks, d)
		}
	}
	return disks, nil
}

// lookDisk looks at what a path leads to; ok is false if that is no whole disk, or
// was pulled meanwhile.
func lookDisk(path string) (d Disk, ok bool, err error) {
	number, err := nodeNumber(path)
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

// measure reads what may change while the disk is there.
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

// identities are where sysfs has what a disk says that it is: NVMe, SCSI and ATA, MMC,
// virtio (kernel documentation, ABI/stable/sysfs-block, ABI/testing/sysfs-*).
var identities = []string{"wwid", "device/wwid", "device/cid", "serial"}

// identity is what the disk says that it is; a loop device is its file.
func (d *Disk) identity() string {
	read := func(file string) string {
		b, _ := os.ReadFile(d.sys(file)) // which some have and cannot tell
		return strings.TrimSpace(string(b))
	}
	for _, file := range identities {
		if said := read(file); said != "" {
			return said
		}
	}
	if file := read("loop/backing_file"); file != "" {
		return file + " from " + read("loop/offset")
	}
	return ""
}

// Room is the size in bytes of what the disk has for data when it is claimed.
func (d Disk) Room() int64 { return Room(d.Size, d.SectorSize) }

// ErrDiskBusy means: something has the disk, or a partition of it.
var ErrDiskBusy = errors.New("disk is in use")

// ErrDiskGone means: the disk was pulled, or is another now.
var ErrDiskGone = errors.New("disk is gone")

// open opens the disk, if it still is this one.
func (d Disk) open(flag int) (*os.File, error) {
	fd, err := open(d.Path, flag)
	switch {
	case errors.Is(err, unix.EBUSY):
		return nil, fmt.Errorf("%s: %w", d.Path, ErrDiskBusy)
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENXIO), errors.Is(err, unix.ENODEV):
		return nil, fmt.Errorf("%s: %w", d.Path, ErrDiskGone)
	case err != nil:
		return nil, &fs.PathError{Op: "open", Path: d.Path, Err: err}
	}
	f := os.NewFile(uintptr(fd), d.Path)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil || st.Rdev != d.number || !d.backs(f) {
		_ = f.Close()
		return nil, fmt.Errorf("%s: %w", d.Path, ErrDiskGone)
	}
	return f, nil
}

// backs tells whether an open device is this disk or its partition, and not one that has
// its device number since the disk was pulled. Kernels without sequence numbers tell by the
// hardware's identity alone; while the device is open, no other device gets its number.
func (d Disk) backs(f *os.File) bool {
	if d.seq == 0 {
		return d.identity() == d.Identity
	}
	seq, err := Sequence(f)
	return err == nil && seq == d.seq
}

// OpenExclusive opens the disk for writing and for nobody else, until it is closed:
// no other program mounts it, or a partition of it, or makes a RAID of it (open(2),
// O_EXCL), and udev does not look at it (systemd, BLOCK_DEVICE_LOCKING). What is read is
// the disk's, not what was cached of it before another way to it was written by.
// ErrDiskBusy if something has it for over a second.
func (d Disk) OpenExclusive(ctx context.Context) (*os.File, error) {
	f, err := d.openLocked(ctx, os.O_RDWR|os.O_EXCL)
	if err != nil {
		return nil, err
	}
	if err := ioctl(int(f.Fd()), unix.BLKFLSBUF, nil); err != nil {
		return nil, errors.Join(fmt.Errorf("%s: BLKFLSBUF: %w", d.Path, err), f.Close())
	}
	return f, nil
}

// openLocked opens the disk, and locks its node: what is mounted from it may stay.
func (d Disk) openLocked(ctx context.Context, flag int) (f *os.File, err error) {
	err = retry.For(ctx, patience, func() (bool, error) {
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

// Mark reads what the disk says of its claim (ReadMark). ErrDiskLate if it does not
// answer.
func (d Disk) Mark() (Mark, error) { return ask(d, d.readMark) }

func (d Disk) readMark() (Mark, error) {
	if d.Room() == 0 { // without a medium it cannot be opened
		return Mark{}, ErrNoMark
	}
	f, err := d.open(os.O_RDONLY)
	if err != nil {
		return Mark{}, err
	}
	defer f.Close()
	return ReadMark(f, d.Size, d.SectorSize)
}

// Probe reads the beginning of the disk, past the caches. The errors are those of
// read(2), such as EIO, and ErrDiskLate.
func (d Disk) Probe() error {
	_, err := ask(d, func() (struct{}, error) {
		f, err := d.open(os.O_RDONLY | unix.O_DIRECT)
		if err != nil {
			return struct{}{}, err
		}
		defer f.Close()
		return struct{}{}, probe(int(f.Fd()), d.Path)
	})
	return err
}
