package dm

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// Group is a volume group, with the devices on which its physical volumes were found.
type Group struct {
	Name, UUID string
	// Devices are the device nodes of the physical volumes.
	Devices []string
	// SectorSize is the largest logical block size of the devices, in bytes.
	SectorSize int
}

// ErrNoGroup means that no device of this node has a physical volume of the group.
var ErrNoGroup = errors.New("no device of this node has a physical volume of the volume group")

// ErrAmbiguous means that several volume groups have the same name, or several devices the same physical volume.
var ErrAmbiguous = errors.New("ambiguous")

// notPhysical matches the kernel's names of devices that are never searched for physical volumes: their content is
// that of files or images, which users write, or they are drives with removable media.
var notPhysical = regexp.MustCompile(`^(loop|ram|zram|nbd|rbd|sr|fd)`)

// FindGroup finds a volume group by its name, and by its UUID unless uuid is empty. It reads the labels of the
// disks, partitions, RAIDs and mapped devices of this node, but never those of logical volumes and of devices for
// which skip returns true. skip gets the path of a device node.
func FindGroup(name, uuid string, skip func(path string) bool) (Group, error) {
	entries, err := os.ReadDir("/sys/class/block")
	if err != nil {
		return Group{}, err
	}
	var found []physicalVolume
	for _, e := range entries {
		kernelName := e.Name()
		path := "/dev/" + strings.ReplaceAll(kernelName, "!", "/")
		if notPhysical.MatchString(kernelName) || isLogicalVolume(kernelName) || skip(path) {
			continue
		}
		p, err := readLabel(path)
		if err != nil { // the device has no label, or cannot be read
			continue
		}
		p.path, p.kernelName = path, kernelName
		found = append(found, p)
	}
	return chooseGroup(name, uuid, found)
}

// chooseGroup selects the physical volumes of a group.
func chooseGroup(name, uuid string, found []physicalVolume) (Group, error) {
	g := Group{Name: name, UUID: uuid}
	metadata := ""
	for _, p := range found {
		if p.group != name || uuid != "" && p.groupUUID != uuid {
			continue
		}
		if g.UUID != "" && g.UUID != p.groupUUID {
			return Group{}, fmt.Errorf("%w: the volume groups with the UUIDs %s and %s both have the name %q (the latter on %s)", ErrAmbiguous, g.UUID, p.groupUUID, name, p.path)
		}
		g.UUID, metadata = p.groupUUID, p.metadata
	}
	if metadata == "" {
		return Group{}, fmt.Errorf("%q: %w", name, ErrNoGroup)
	}
	devices := map[string]string{} // by the UUID of the physical volume
	for _, p := range found {
		if !strings.Contains(metadata, p.uuid) || isHeld(p, found) {
			continue
		}
		if other := devices[p.uuid]; other != "" {
			return Group{}, fmt.Errorf("%w: %s and %s are the same physical volume %s, so one is a copy", ErrAmbiguous, other, p.path, p.uuid)
		}
		devices[p.uuid] = p.path
		g.Devices = append(g.Devices, p.path)
		g.SectorSize = max(g.SectorSize, logicalBlockSize(p.kernelName))
	}
	slices.Sort(g.Devices)
	return g, nil
}

// isHeld reports whether a device is a path or a member of another found device with the same physical volume, such as
// a multipath device.
func isHeld(p physicalVolume, found []physicalVolume) bool {
	return slices.ContainsFunc(found, func(other physicalVolume) bool {
		_, err := os.Lstat(filepath.Join("/sys/class/block", p.kernelName, "holders", other.kernelName))
		return other.uuid == p.uuid && err == nil
	})
}

// isLogicalVolume reports whether a device with a kernel name is a logical volume, or a part of one.
func isLogicalVolume(kernelName string) bool {
	b, err := os.ReadFile(filepath.Join("/sys/class/block", kernelName, "dm/uuid"))
	if errors.Is(err, fs.ErrNotExist) {
		return false
	}
	return err != nil || strings.HasPrefix(string(b), kernelUUIDPrefix)
}

// logicalBlockSize returns the logical block size of a disk or partition in bytes, at least 512.
func logicalBlockSize(kernelName string) int {
	dir, err := filepath.EvalSymlinks("/sys/class/block/" + kernelName)
	if err != nil {
		return 512
	}
	if _, err := os.Stat(dir + "/partition"); err == nil {
		dir = filepath.Dir(dir)
	}
	b, _ := os.ReadFile(dir + "/queue/logical_block_size")
	n, _ := strconv.Atoi(strings.TrimSpace(string(b)))
	return max(n, 512)
}
