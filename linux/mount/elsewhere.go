package mount

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/linux/sys"
)

// Elsewhere returns the mount points of a source, except those at the same place as the mount with the given
// ID. If the ID is 0, the source is a raw device, and Elsewhere returns all. Mounts are at the same place if they have
// the same path on the same parent filesystem. A place has several paths if a directory above it is mounted twice.
func Elsewhere(source Source, mountID uint64) ([]string, error) {
	table, err := listed(source, mountID)
	if err != nil { // Linux before 6.8, or a seccomp profile that does not know the calls
		table, err = wholeTable()
	}
	if err != nil {
		return nil, err
	}
	shows, err := source.Matcher(table)
	if err != nil {
		return nil, err
	}
	return elsewhere(table, shows, mountID), nil
}

// Beside returns the mount points of the filesystem (major:minor) of a mount, except those at the same
// place as that mount, as Elsewhere does.
func Beside(e *Entry) ([]string, error) {
	table, err := wholeTable()
	if err != nil {
		return nil, err
	}
	same := func(o *Entry) bool { return o.Major == e.Major && o.Minor == e.Minor }
	return elsewhere(table, same, uint64(e.ID)), nil
}

// elsewhere returns the mount points of the entries that shows accepts, except those at the same place as the mount with
// the ID.
func elsewhere(table []*Entry, shows func(*Entry) bool, mountID uint64) []string {
	byID := map[int]*Entry{}
	for _, e := range table {
		byID[e.ID] = e
	}
	own := place(byID[int(mountID)], byID)
	var paths []string
	for _, e := range table {
		if shows(e) && place(e, byID) != own {
			paths = append(paths, e.Mountpoint)
		}
	}
	return paths
}

// place returns a text that identifies the parent filesystem of a mount and the path of the mount point on it.
// It is empty for nil.
func place(e *Entry, byID map[int]*Entry) string {
	if e == nil {
		return ""
	}
	parent := byID[e.Parent]
	if parent == nil {
		return e.Mountpoint
	}
	below := strings.TrimPrefix(e.Mountpoint, parent.Mountpoint)
	return fmt.Sprintf("%d:%d %s", parent.Major, parent.Minor, filepath.Join(parent.Root, below))
}

// listed returns the entries of the mounts that may be of a source, and of their parents. mountID is as in Elsewhere. It is faster
// than the mount table, because it reads few entries. An error means that the mount table is needed.
func listed(source Source, mountID uint64) ([]*Entry, error) {
	mounts, err := listMounts()
	if err != nil {
		return nil, err
	}
	may, err := candidates(source, mountID, mounts)
	if err != nil {
		return nil, err
	}
	lines, err := readLines(mounts, may)
	if err != nil {
		return nil, err
	}
	parents := map[uint64]bool{}
	for _, l := range lines {
		parents[l.Parent] = true
	}
	others, err := readLines(mounts, func(m sys.Mount) bool { return parents[m.ID] && !may(m) })
	if err != nil {
		return nil, err
	}
	var table []*Entry
	for _, l := range slices.Concat(lines, others) {
		table = append(table, &Entry{
			ID: int(l.TableID), Parent: int(l.TableParent), Major: int(l.Major), Minor: int(l.Minor),
			Root: l.Root, Mountpoint: l.Point, FSType: l.FSType, Source: l.Source,
		})
	}
	return table, nil
}

// readLines reads the fields of the mount table of the mounts for which keep returns true.
func readLines(mounts []sys.Mount, keep func(sys.Mount) bool) ([]sys.MountLine, error) {
	var lines []sys.MountLine
	for _, m := range mounts {
		if !keep(m) {
			continue
		}
		l, err := sys.StatMountLine(m.ID)
		if errors.Is(err, unix.ENOENT) { // it was unmounted
			continue
		}
		if err == nil && l.Source == "" && m.Magic == unix.BTRFS_SUPER_MAGIC { // Linux before 6.13
			err = unix.EOPNOTSUPP // the device of a btrfs is known only by its source
		}
		if err != nil {
			return nil, err
		}
		lines = append(lines, l)
	}
	return lines, nil
}

// candidates returns a function that reports whether a mount may be of a source. mounts are all mounts. mountID is as in Elsewhere.
func candidates(source Source, mountID uint64, mounts []sys.Mount) (func(sys.Mount) bool, error) {
	switch s := source.(type) {
	case BlockDevice: // its filesystem, or a bind mount of its node from the /dev of this process, which is that of the host
		node, err := Inspect(s.Node())
		if err != nil || !node.IsBlock() {
			return nil, errors.Join(err, unix.ENOTBLK)
		}
		return func(m sys.Mount) bool {
			dev := unix.Mkdev(m.Major, m.Minor)
			return dev == node.Rdev || dev == node.Dev || m.Magic == unix.BTRFS_SUPER_MAGIC
		}, nil
	case *DirectorySource:
		i := slices.IndexFunc(mounts, func(m sys.Mount) bool { return uint64(m.TableID) == mountID })
		if i < 0 {
			return nil, unix.ENOENT
		}
		staged := mounts[i]
		return func(m sys.Mount) bool { return m.Major == staged.Major && m.Minor == staged.Minor }, nil
	}
	return nil, errors.ErrUnsupported
}

// lastMounts are the mounts that the last call of listMounts has found.
var lastMounts atomic.Pointer[[]sys.Mount]

// listMounts returns the mounts of this process, in the order of their IDs. It makes a call for each mount that the last call
// did not find.
func listMounts() ([]sys.Mount, error) {
	ids, err := sys.ListMounts()
	if err != nil {
		return nil, err
	}
	var known []sys.Mount
	if last := lastMounts.Load(); last != nil {
		known = *last
	}
	mounts := make([]sys.Mount, 0, len(ids))
	for _, id := range ids {
		for len(known) > 0 && known[0].ID < id {
			known = known[1:]
		}
		if len(known) > 0 && known[0].ID == id {
			mounts = append(mounts, known[0])
			continue
		}
		m, err := sys.StatMount(id)
		if errors.Is(err, unix.ENOENT) { // it was unmounted
			continue
		}
		if err != nil {
			return nil, err
		}
		mounts = append(mounts, m)
	}
	lastMounts.Store(&mounts)
	return mounts, nil
}
