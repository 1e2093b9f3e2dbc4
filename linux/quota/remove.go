package quota

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/linux/sys"
)

// removeDir destroys a subvolume and the subvolumes in it. A tenant may have nested them deeper than PATH_MAX,
// and may have made them read-only or immutable. Therefore removeDir opens each by its ID and makes it
// writable.
func (s *subvolumes) removeDir(parent *os.File, name string) (done bool, err error) {
	dir, err := openDir(parent, name)
	if err != nil {
		return false, err
	}
	id, err := subvolume(dir)
	dir.Close() // the kernel frees no space of a subvolume that is open
	if err != nil || id == 0 {
		return false, err
	}
	parent, err = reopen(parent)
	if err != nil {
		return false, err
	}
	defer parent.Close()
	if err := s.destroyLimited(parent, id); err != nil {
		return false, fmt.Errorf("%s/%s: %w", parent.Name(), name, err)
	}
	return true, s.commit() // the kernel frees the space after the commit
}

// destroyLimited destroys a subvolume. If the limit prevents that, because making a subvolume writable needs
// space, destroyLimited clears the limit and tries again.
func (s *subvolumes) destroyLimited(parent *os.File, id uint64) error {
	err := s.destroy(parent, id)
	if !errors.Is(err, unix.EDQUOT) {
		return err
	}
	if err := sys.LimitQgroup(s.dir, group(id), sys.NoQgroupLimit); err != nil {
		return err
	}
	return s.destroy(parent, id)
}

// destroy destroys the subvolumes in the subvolume id, and then the subvolume itself.
func (s *subvolumes) destroy(parent *os.File, id uint64) error {
	name, err := s.empty(id)
	if err != nil {
		return err
	}
	return sys.DestroySubvolume(parent, name)
}

// empty destroys the subvolumes in the subvolume id, and returns the name of the subvolume id.
func (s *subvolumes) empty(id uint64) (name string, err error) {
	if name, err = s.unprotect(id); err != nil {
		return "", err
	}
	for {
		within, err := s.within(id)
		if err != nil || len(within) == 0 {
			return name, err
		}
		for _, ref := range within {
			if err := s.destroyWithin(id, ref); err != nil {
				return "", err
			}
		}
	}
}

// destroyWithin destroys the subvolume ref, which is in the subvolume id. It has no file open during the
// recursion, because a tenant decides how deep the subvolumes are nested.
func (s *subvolumes) destroyWithin(id uint64, ref sys.SubvolumeRef) error {
	name, err := s.empty(ref.Tree)
	if err != nil {
		return err
	}
	dir, err := s.open(id, ref.Dir)
	if err != nil {
		return err
	}
	defer dir.Close()
	if _, err := sys.MakeMutable(dir); err != nil {
		return err
	}
	return sys.DestroySubvolume(dir, name)
}

// within lists up to 255 subvolumes directly in the subvolume id.
func (s *subvolumes) within(id uint64) ([]sys.SubvolumeRef, error) {
	root, err := s.open(id, sys.BtrfsRootInode)
	if err != nil {
		return nil, err
	}
	defer root.Close()
	return sys.SubvolumesWithin(root)
}

// unprotect makes a subvolume writable and mutable, and returns its name.
func (s *subvolumes) unprotect(id uint64) (name string, err error) {
	root, err := s.open(id, sys.BtrfsRootInode)
	if err != nil {
		return "", err
	}
	defer root.Close()
	name, readOnly, err := sys.SubvolumeInfo(root)
	if err == nil && readOnly {
		err = sys.MakeSubvolumeWritable(root)
	}
	if err == nil {
		_, err = sys.MakeMutable(root)
	}
	return name, err
}

// open opens a directory of a subvolume by its inode, without its path. It builds the handle that
// name_to_handle_at(2) would return (struct btrfs_fid in the kernel).
func (s *subvolumes) open(id, inode uint64) (*os.File, error) {
	generation, err := s.generation(id, inode)
	if err != nil {
		return nil, err
	}
	fid := binary.NativeEndian.AppendUint64(nil, inode)
	fid = binary.NativeEndian.AppendUint64(fid, id)
	fid = binary.NativeEndian.AppendUint32(fid, generation)
	fd, err := unix.OpenByHandleAt(int(s.dir.Fd()), unix.NewFileHandle(fidRoot, fid), unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("directory %d of subvolume %d: %w", inode, id, os.NewSyscallError("open_by_handle_at", err))
	}
	return os.NewFile(uintptr(fd), "subvolume "+strconv.FormatUint(id, 10)), nil
}
