// Package location finds the location of a directory on its filesystem. The location is the same for all
// paths, bind mounts and containers through which the directory is visible.
package location

import (
	"fmt"
	"os"
	"path"
	"slices"
	"strings"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

// Location is the location of a directory.
type Location struct {
	// Major and Minor are the device number of the filesystem in the mount table. Unlike st_dev, it is
	// the same in all subvolumes of a btrfs.
	Major, Minor int
	// Path is relative to the root of the filesystem.
	Path string
}

// Of returns the location of an open directory. It fails with ENOENT if the directory's mount is not in the
// mount table, because it was unmounted or is outside the root of this process.
func Of(dir *os.File) (Location, error) {
	table, err := mountinfo.GetMounts(nil)
	if err != nil {
		return Location{}, err
	}
	_, location, err := In(table, dir)
	return location, err
}

// In does the same as Of with a given mount table. It also returns the mount that contains the directory.
func In(table []*mountinfo.Info, dir *os.File) (*mountinfo.Info, Location, error) {
	var st unix.Statx_t
	if err := unix.Statx(int(dir.Fd()), "", unix.AT_EMPTY_PATH, unix.STATX_MNT_ID, &st); err != nil {
		return nil, Location{}, &os.PathError{Op: "statx", Path: dir.Name(), Err: err}
	}
	dirPath, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", dir.Fd()))
	if err != nil {
		return nil, Location{}, err
	}
	i := slices.IndexFunc(table, func(e *mountinfo.Info) bool { return uint64(e.ID) == st.Mnt_id })
	if i < 0 {
		return nil, Location{}, &os.PathError{Op: "finding the mount of", Path: dir.Name(), Err: unix.ENOENT}
	}
	mount := table[i]
	relative := strings.TrimPrefix(dirPath, strings.TrimSuffix(mount.Mountpoint, "/"))
	return mount, Location{Major: mount.Major, Minor: mount.Minor, Path: path.Join(mount.Root, relative)}, nil
}

// Below reports whether l is dir or below dir.
func (l Location) Below(dir Location) bool {
	return l.Major == dir.Major && l.Minor == dir.Minor && IsBelow(l.Path, dir.Path)
}

// IsBelow reports whether the path p is dir or below dir.
func IsBelow(p, dir string) bool {
	return strings.HasPrefix(p+"/", strings.TrimSuffix(dir, "/")+"/")
}
