package blockdev

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// blkpgPartition is struct blkpg_partition, blkpgArg struct blkpg_ioctl_arg
// (uapi/linux/blkpg.h).
type blkpgPartition struct {
	start, length int64
	number        int32
	_             [128]byte
	_             int32
}

type blkpgArg struct {
	op, flags, length int32
	data              *blkpgPartition
}

const (
	blkpg       = 0x1269 // BLKPG, _IO(0x12, 105)
	blkpgAdd    = 1
	blkpgDelete = 2
	blkpgResize = 3

	// partitionNumber is the number of the one partition of a claimed disk.
	partitionNumber = 1
)

func changePartition(disk *os.File, op int32, start, length int64) error {
	p := blkpgPartition{start: start, length: length, number: partitionNumber}
	arg := blkpgArg{op: op, length: int32(unsafe.Sizeof(p)), data: &p}
	return ioctl(int(disk.Fd()), blkpg, unsafe.Pointer(&arg))
}

// partition is what the kernel knows of the first partition of a disk.
type partition struct {
	name        string
	number      uint64 // of its device
	start, size int64
}

// partitions lists the partitions of a disk that the kernel knows.
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

// sysSector is what sysfs counts in, whatever the disk's sectors are.
const sysSector = 512

func readNumber(path string) (int64, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	return strconv.ParseInt(strings.TrimSpace(string(b)), 10, 64)
}

// readDev reads a device number as sysfs has it, major:minor.
func readDev(path string) (uint64, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	var major, minor uint32
	if _, err := fmt.Sscanf(string(b), "%d:%d", &major, &minor); err != nil {
		return 0, fmt.Errorf("%s: %w", path, err)
	}
	return unix.Mkdev(major, minor), nil
}

// showPartition makes the kernel know the partition of a claimed disk, in its full
// size. Kernels that read partition tables know it already, some do not.
func (d Disk) showPartition(disk *os.File, m Mark) (partition, error) {
	p, err := d.knownPartition(m)
	if errors.Is(err, fs.ErrNotExist) {
		if err = changePartition(disk, blkpgAdd, m.Start, m.Size); err != nil && !errors.Is(err, unix.EBUSY) {
			return p, fmt.Errorf("partition of %s: BLKPG_ADD_PARTITION: %w", d.Path, err)
		}
		p, err = d.knownPartition(m)
	}
	if err != nil || p.size >= m.Size {
		return p, err
	}
	if err := changePartition(disk, blkpgResize, m.Start, m.Size); err != nil {
		return p, fmt.Errorf("partition of %s: BLKPG_RESIZE_PARTITION: %w", d.Path, err)
	}
	return d.knownPartition(m)
}

// knownPartition is the partition of a claim as the kernel knows it; fs.ErrNotExist
// if it does not.
func (d Disk) knownPartition(m Mark) (partition, error) {
	all, err := d.partitions()
	if err != nil {
		return partition{}, err
	}
	if len(all) == 0 {
		return partition{}, fs.ErrNotExist
	}
	if len(all) > 1 || all[0].start != m.Start {
		return partition{}, fmt.Errorf("%s: the kernel knows other partitions than its table has: %w", d.Path, ErrDiskBusy)
	}
	return all[0], nil
}

// hidePartition makes the kernel forget the partition of a claimed disk. ErrDiskBusy
// while it is mounted, or a program has it open.
func (d Disk) hidePartition(disk *os.File) error {
	all, err := d.partitions()
	if err != nil || len(all) == 0 {
		return err
	}
	if len(all) > 1 || all[0].start != partitionAlign {
		return fmt.Errorf("%s: the kernel knows other partitions than a claim's: %w", d.Path, ErrDiskBusy)
	}
	err = changePartition(disk, blkpgDelete, 0, 0)
	switch {
	case errors.Is(err, unix.EBUSY):
		return fmt.Errorf("%s: %w", "/dev/"+all[0].name, ErrDiskBusy)
	case err != nil && !errors.Is(err, unix.ENXIO):
		return fmt.Errorf("partition of %s: BLKPG_DEL_PARTITION: %w", d.Path, err)
	}
	return nil
}

// nodesDir is where the device nodes of claimed disks in use are. They are made here,
// under names that the caller gives, because the kernel's name of a disk is another's
// when it was pulled and one was put in; and because they stay when it is pulled, so
// that what is mounted from it is still known. On devtmpfs they go with a reboot, as
// all that they stand for.
const nodesDir = "/dev/trivet"

// PartitionPath is the device node of a claimed disk's data, while it is in use.
func PartitionPath(node string) string { return filepath.Join(nodesDir, node) }

// makePartitionNode makes the node, or one that is still another's anew.
func makePartitionNode(node string, number uint64) error {
	path := PartitionPath(node)
	if have, err := nodeNumber(path); err == nil && have == number {
		return nil
	}
	if err := os.MkdirAll(nodesDir, 0o755); err != nil {
		return err
	}
	if err := removePartitionNode(node); err != nil {
		return err
	}
	if err := unix.Mknod(path, unix.S_IFBLK|0o600, int(number)); err != nil {
		return fmt.Errorf("mknod %s: %w: give the driver the host's /dev", path, err)
	}
	return nil
}

// removePartitionNode removes the node; it is no error if there is none.
func removePartitionNode(node string) error {
	if err := os.Remove(PartitionPath(node)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// nodeNumber is the device number of a block device's node; fs.ErrNotExist if there
// is none.
func nodeNumber(path string) (uint64, error) {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return 0, &fs.PathError{Op: "stat", Path: path, Err: err}
	}
	if st.Mode&unix.S_IFMT != unix.S_IFBLK {
		return 0, fmt.Errorf("%s: %w", path, unix.ENOTBLK)
	}
	return st.Rdev, nil
}

// OpenPartition opens an attached partition for reading.
func OpenPartition(node string) (*os.File, error) {
	path := PartitionPath(node)
	fd, err := open(path, os.O_RDONLY)
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: path, Err: err}
	}
	return os.NewFile(uintptr(fd), path), nil
}
