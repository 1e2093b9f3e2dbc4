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

// readText reads an attribute in sysfs.
func readText(path string) (string, error) {
	b, err := os.ReadFile(path)
	return strings.TrimSpace(string(b)), err
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

// nodesDir contains the device nodes of the partitions of claimed disks in use. The caller chooses their
// names, because the kernel reuses the name of a removed disk for the next one. The nodes stay when a disk is
// removed, so that its mounts can be found. A reboot removes the nodes, which are on devtmpfs, and the mounts.
const nodesDir = "/dev/trivet"

// PartitionPath returns the path of a device node in nodesDir.
func PartitionPath(node string) string { return filepath.Join(nodesDir, node) }

// IsPartitionPath reports whether a path can be a result of PartitionPath, possibly in another mount
// namespace.
func IsPartitionPath(path string) bool {
	return filepath.Base(filepath.Dir(path)) == filepath.Base(nodesDir)
}

// makePartitionNode creates the node. It replaces an existing node of another device.
func makePartitionNode(node string, number uint64) error {
	path := PartitionPath(node)
	if current, err := nodeNumber(path); err == nil && current == number {
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

// removePartitionNode removes the node. It is no error if the node does not exist.
func removePartitionNode(node string) error {
	if err := os.Remove(PartitionPath(node)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// nodeNumber returns the device number of the node of a block device. The error is fs.ErrNotExist if the node does
// not exist, and unix.ENOTBLK if path is another file.
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
func OpenPartition(node string) (*os.File, error) { return os.Open(PartitionPath(node)) }
