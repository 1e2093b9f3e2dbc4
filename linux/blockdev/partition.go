package blockdev

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/linux/sys"
)

// partitionNumber is the number of the one partition of a claimed disk.
const partitionNumber = 1

// partition is a partition that the kernel has registered.
type partition struct {
	name        string
	number      uint64 // the device number
	start, size int64
}

// partitions lists the partitions of a disk that the kernel has registered.
func (d Disk) partitions() ([]partition, error) {
	entries, err := os.ReadDir(d.sys(""))
	if err != nil {
		return nil, err
	}
	var out []partition
	for _, e := range entries {
		if _, err := os.Stat(d.sys(e.Name() + "/partition")); err != nil {
			continue
		}
		p := partition{name: e.Name()}
		start, err1 := readNumber(d.sys(e.Name() + "/start"))
		size, err2 := readNumber(d.sys(e.Name() + "/size"))
		number, err3 := readDev(d.sys(e.Name() + "/dev"))
		if err := cmp.Or(err1, err2, err3); err != nil {
			return nil, err
		}
		p.start, p.size, p.number = start*sysSector, size*sysSector, number
		out = append(out, p)
	}
	return out, nil
}

// sysSector is the unit of sizes in sysfs, in bytes. It does not depend on the sector size of the disk.
const sysSector = 512

// readText reads an attribute in sysfs. One read(2) returns all of it, because it has at most one page
// (kernel documentation, filesystems/sysfs).
func readText(path string) (string, error) {
	f, err := sys.OpenFile(path, os.O_RDONLY)
	if err != nil {
		return "", err
	}
	defer f.Close()
	b := make([]byte, os.Getpagesize())
	n, err := f.Read(b)
	if err != nil && !errors.Is(err, io.EOF) { // EOF: the attribute is empty
		return "", err
	}
	return strings.TrimSpace(string(b[:n])), nil
}

// readNumber reads an attribute in sysfs that is a decimal number.
func readNumber(path string) (int64, error) {
	text, err := readText(path)
	if err != nil {
		return 0, err
	}
	return strconv.ParseInt(text, 10, 64)
}

// readDev reads a device number in the format of sysfs, major:minor.
func readDev(path string) (uint64, error) {
	text, err := readText(path)
	if err != nil {
		return 0, err
	}
	var major, minor uint32
	if _, err := fmt.Sscanf(text, "%d:%d", &major, &minor); err != nil {
		return 0, fmt.Errorf("%s: %w", path, err)
	}
	return unix.Mkdev(major, minor), nil
}

// showPartition registers the partition of a claimed disk with the kernel, in its full size. Kernels that read
// partition tables have already registered it.
func (d Disk) showPartition(disk *os.File, m Mark) (partition, error) {
	p, err := d.knownPartition(m)
	if errors.Is(err, fs.ErrNotExist) {
		if err = sys.AddPartition(disk, partitionNumber, m.Start, m.Size); err != nil && !errors.Is(err, unix.EBUSY) {
			return p, fmt.Errorf("adding the partition of a claimed disk: %w", err)
		}
		p, err = d.knownPartition(m)
	}
	if err != nil || p.size >= m.Size {
		return p, err
	}
	if err := sys.ResizePartition(disk, partitionNumber, m.Start, m.Size); err != nil {
		return p, fmt.Errorf("resizing the partition of a claimed disk: %w", err)
	}
	return d.knownPartition(m)
}

// knownPartition returns the registered partition of a disk with the mark m. The error is fs.ErrNotExist if no
// partition is registered.
func (d Disk) knownPartition(m Mark) (partition, error) {
	all, err := d.partitions()
	if err != nil {
		return partition{}, err
	}
	if len(all) == 0 {
		return partition{}, fs.ErrNotExist
	}
	if len(all) > 1 || all[0].start != m.Start {
		return partition{}, fmt.Errorf("%s: the kernel has registered other partitions than those in the partition table of the disk: %w", d.Path, ErrDiskBusy)
	}
	return all[0], nil
}

// hidePartition makes the kernel forget the partition of a claimed disk. The error is ErrDiskBusy while the partition
// is mounted or a program has it open.
func (d Disk) hidePartition(disk *os.File) error {
	all, err := d.partitions()
	if err != nil || len(all) == 0 {
		return err
	}
	if len(all) > 1 || all[0].start != partitionAlign {
		return fmt.Errorf("%s: the kernel has registered other partitions than the one of a claim: %w", d.Path, ErrDiskBusy)
	}
	err = sys.DeletePartition(disk, partitionNumber)
	switch {
	case errors.Is(err, unix.EBUSY):
		return fmt.Errorf("%s: %w", "/dev/"+all[0].name, ErrDiskBusy)
	case err != nil && !errors.Is(err, unix.ENXIO):
		return fmt.Errorf("removing the partition of a claimed disk: %w", err)
	}
	return nil
}
