package blockdev

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/linux/mount"
)

// Reason is the state of a disk that was inspected.
type Reason string

// The reasons. Only a free disk may be claimed.
const (
	DiskFree        Reason = "free"
	DiskClaimed     Reason = "claimed"     // it has the mark of a claim
	DiskEmpty       Reason = "no-medium"   // it has no medium, or is too small
	DiskReadOnly    Reason = "read-only"   // it does not accept writes
	DiskUnsupported Reason = "unsupported" // it cannot have partitions
	DiskSwap        Reason = "swap"
	DiskMounted     Reason = "mounted"
	DiskHeld        Reason = "held"        // another block device uses it, such as LVM, RAID or dm-crypt
	DiskPartitioned Reason = "partitioned" // it has partitions that are not of a claim
	DiskBusy        Reason = "busy"        // a program has it open exclusively
	DiskNotBlank    Reason = "not-blank"
	DiskUnreadable  Reason = "unreadable"
)

// Finding is the result of Inspect.
type Finding struct {
	Reason Reason
	// Detail describes the reason. It is empty for a free disk.
	Detail string
	// Mark is the mark of a claimed disk.
	Mark Mark
}

// Inspect determines whether the disk is free: it has no known format, and no program or device uses it. It
// changes nothing. A disk that does not respond is unreadable.
func (d Disk) Inspect() Finding {
	f, err := request(d, func() (Finding, error) { return d.inspect(), nil })
	if err != nil {
		return unreadable(err)
	}
	return f
}

// inspect does the same as Inspect, but waits for a disk that does not respond.
func (d Disk) inspect() Finding {
	if f := d.inspectKernel(); f.Reason != "" {
		return f
	}
	disk, err := d.open(os.O_RDONLY)
	if err != nil {
		return cmp.Or(d.inspectUsersAndOpen(), unreadable(err)) // a user of the disk explains the error better
	}
	defer disk.Close()
	mark, err := ReadMark(disk, d.Size, d.SectorSize)
	switch {
	case err == nil:
		return Finding{Reason: DiskClaimed, Detail: "claimed as " + mark.GUID.String(), Mark: mark}
	case !errors.Is(err, ErrNoMark):
		return unreadable(err)
	}
	if f := d.inspectUsersAndOpen(); f.Reason != "" {
		return f
	}
	return d.inspectContent(disk)
}

// unreadable returns the finding for a disk whose state could not be read.
func unreadable(err error) Finding { return Finding{Reason: DiskUnreadable, Detail: err.Error()} }

// inspectKernel checks in sysfs whether the disk can be claimed.
func (d Disk) inspectKernel() Finding {
	readOnly, err := readNumber(d.sys("ro"))
	if err != nil {
		return unreadable(err)
	}
	// A value of 1 means that the kernel supports no partitions on the disk (kernel documentation,
	// ABI/testing/sysfs-block).
	minors, err := readNumber(d.sys("ext_range"))
	if err != nil {
		return unreadable(err)
	}
	switch {
	case d.Room() == 0:
		return Finding{Reason: DiskEmpty, Detail: fmt.Sprintf("it has %d bytes: no medium, or too small", d.Size)}
	case readOnly != 0:
		return Finding{Reason: DiskReadOnly, Detail: "it is read-only"}
	case minors <= 1:
		return Finding{Reason: DiskUnsupported, Detail: "the kernel supports no partitions on disks of this kind"}
	}
	// Zones can only be written sequentially (kernel documentation, ABI/stable/sysfs-block).
	if zoned, err := readText(d.sys("queue/zoned")); err == nil && zoned != "none" {
		return Finding{Reason: DiskUnsupported, Detail: "it is zoned, so most of it accepts only sequential writes"}
	}
	return Finding{}
}

// inspectUsersAndOpen does the same as inspectUsers, and also opens the disk exclusively to detect users that
// inspectUsers does not find.
func (d Disk) inspectUsersAndOpen() Finding {
	if f := d.inspectUsers(); f.Reason != "" {
		return f
	}
	f, err := d.open(os.O_RDONLY | os.O_EXCL)
	switch {
	case errors.Is(err, ErrDiskBusy):
		return Finding{Reason: DiskBusy, Detail: "some program or filesystem has it open exclusively"}
	case err != nil:
		return unreadable(err)
	}
	_ = f.Close()
	return Finding{}
}

// inspectUsers finds a user of a disk that is not claimed. The caller may have the disk open exclusively.
func (d Disk) inspectUsers() Finding {
	parts, err := d.partitions()
	if err != nil {
		return unreadable(err)
	}
	for _, name := range append([]string{d.Name}, names(parts)...) {
		if f := inspectDevice(name, d.sys("")); f.Reason != "" {
			return f
		}
	}
	if len(parts) > 0 {
		return Finding{Reason: DiskPartitioned, Detail: "it has partitions: " + strings.Join(names(parts), ", ")}
	}
	return Finding{}
}

// names returns the names of partitions.
func names(parts []partition) []string {
	var out []string
	for _, p := range parts {
		out = append(out, p.name)
	}
	return out
}

// inspectDevice finds a user of a disk or a partition. diskDir is the directory of the disk in sysfs.
func inspectDevice(name, diskDir string) Finding {
	dir := diskDir
	if filepath.Base(diskDir) != name {
		dir = filepath.Join(diskDir, name)
	}
	if holders, err := os.ReadDir(filepath.Join(dir, "holders")); err != nil || len(holders) > 0 {
		if err != nil {
			return unreadable(err)
		}
		return Finding{Reason: DiskHeld, Detail: name + " is a part of " + holders[0].Name()}
	}
	if of, err := filepath.Glob("/sys/fs/btrfs/*/devices/" + name); err != nil || len(of) > 0 {
		return Finding{Reason: DiskMounted, Detail: name + " is a device of a mounted btrfs"}
	}
	number, err := readDev(filepath.Join(dir, "dev"))
	if err != nil {
		return unreadable(err)
	}
	if at, err := mountedAt(number); err != nil || at != "" {
		if err != nil {
			return unreadable(err)
		}
		return Finding{Reason: DiskMounted, Detail: name + " is mounted at " + at}
	}
	if loop, err := loopOn(number); err != nil || loop != "" {
		if err != nil {
			return unreadable(err)
		}
		return Finding{Reason: DiskHeld, Detail: name + " is the backing file of " + loop}
	}
	return inspectSwap(name, number)
}

// mountedAt returns the path of a mount of the filesystem on a device, or of a bind mount of the device node,
// such as the raw device of a pod. It is empty if the mount namespace of this process has neither.
func mountedAt(number uint64) (string, error) {
	found, err := mount.Table(func(e *mount.Entry) bool {
		return unix.Mkdev(uint32(e.Major), uint32(e.Minor)) == number || showsNode(e, number)
	})
	if err != nil || len(found) == 0 {
		return "", err
	}
	return found[0].Mountpoint, nil
}

// showsNode reports whether a mount is a bind mount of a node of the device. It is false for a mount of the
// filesystem that contains the node.
func showsNode(e *mount.Entry, number uint64) bool {
	if e.Root == "/" || e.FSType != "devtmpfs" && e.FSType != "tmpfs" {
		return false
	}
	at, err := NodeNumber(e.Mountpoint)
	return err == nil && at == number
}

// loopOn returns the path of the loop device whose backing file is a device, or "". It examines only backing
// files below /dev, because others may be on a server that does not respond. A kubelet attaches loop devices
// to bind mounts of device nodes elsewhere, and mountedAt finds those mounts.
func loopOn(number uint64) (string, error) {
	loops, err := BoundLoops(func(file string) bool {
		if !strings.HasPrefix(file, "/dev/") {
			return false
		}
		at, err := NodeNumber(file)
		return err == nil && at == number
	})
	if err != nil || len(loops) == 0 {
		return "", err
	}
	return LoopPath(loops[0].Number), nil
}

// inspectSwap reports whether a disk or a partition is swap space.
func inspectSwap(name string, number uint64) Finding {
	swaps, err := os.ReadFile("/proc/swaps") // proc(5); the first line is a header
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return unreadable(err)
	}
	for line := range strings.Lines(string(swaps)) {
		path, _, _ := strings.Cut(line, " ")
		if at, err := NodeNumber(path); err == nil && at == number {
			return Finding{Reason: DiskSwap, Detail: name + " is swap space"}
		}
	}
	return Finding{}
}

// inspectContent determines whether an unused disk is blank.
func (d Disk) inspectContent(disk *os.File) Finding {
	err := requireZerosIn(disk, diskPlaces(d.Size, d.SectorSize))
	switch {
	case errors.Is(err, ErrNotBlank):
		return Finding{Reason: DiskNotBlank, Detail: "it is not blank: " + contentName(disk, d.Size) + " (" + err.Error() + ")"}
	case err != nil:
		return unreadable(err)
	}
	return Finding{Reason: DiskFree}
}
