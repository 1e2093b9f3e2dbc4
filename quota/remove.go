package quota

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"strconv"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/internal/btrfs"
)

// removeDir destroys a subvolume with all within it. Its tenant may have made others in
// it, deeper than a path goes, and have done everything to keep them: so they are opened
// by their numbers, and what keeps them is taken away.
func (s *subvolumes) removeDir(parent *os.File, name string) (done bool, err error) {
	dir, err := openDir(parent, name)
	if err != nil {
		return false, err
	}
	id, err := subvolume(dir)
	dir.Close() // while it is open, the kernel frees nothing
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
	return true, s.commit() // with which the kernel begins to free the space
}

// destroyLimited takes the limit away if it is in the way: to change a flag takes room.
func (s *subvolumes) destroyLimited(parent *os.File, id uint64) error {
	err := s.destroy(parent, id)
	if !errors.Is(err, unix.EDQUOT) {
		return err
	}
	if err := s.limit(id, noLimit); err != nil {
		return err
	}
	return s.destroy(parent, id)
}

// destroy destroys a subvolume that is in a directory, those within it first.
func (s *subvolumes) destroy(parent *os.File, id uint64) error {
	name, err := s.empty(id)
	if err != nil {
		return err
	}
	return btrfs.Destroy(parent, name)
}

// empty destroys the subvolumes within one, and returns its name.
func (s *subvolumes) empty(id uint64) (name string, err error) {
	if name, err = s.unlock(id); err != nil {
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

// destroyWithin has no file open while it goes deeper.
func (s *subvolumes) destroyWithin(id uint64, ref btrfs.Ref) error {
	name, err := s.empty(ref.Tree)
	if err != nil {
		return err
	}
	dir, err := s.open(id, ref.Dir)
	if err != nil {
		return err
	}
	defer dir.Close()
	if err := clearLocks(dir); err != nil {
		return err
	}
	return btrfs.Destroy(dir, name)
}

// within lists subvolumes that are in one, up to 255.
func (s *subvolumes) within(id uint64) ([]btrfs.Ref, error) {
	root, err := s.open(id, btrfs.RootInode)
	if err != nil {
		return nil, err
	}
	defer root.Close()
	return btrfs.Within(root)
}

// unlock takes from a subvolume what keeps it, or those in it, and returns its name.
func (s *subvolumes) unlock(id uint64) (name string, err error) {
	root, err := s.open(id, btrfs.RootInode)
	if err != nil {
		return "", err
	}
	defer root.Close()
	var info subvolInfo
	if err := ioctl(root, btrfsIocSubvolInfo, unsafe.Pointer(&info)); err != nil {
		return "", os.NewSyscallError("BTRFS_IOC_GET_SUBVOL_INFO", err)
	}
	if info.flags&rootReadOnly != 0 {
		var writable uint64
		if err := ioctl(root, btrfsIocSubvolSetFlags, unsafe.Pointer(&writable)); err != nil {
			return "", os.NewSyscallError("BTRFS_IOC_SUBVOL_SETFLAGS", err)
		}
	}
	return unix.ByteSliceToString(info.name[:]), clearLocks(root)
}

func clearLocks(dir *os.File) error {
	return changeXattr(dir, func(x *fsXattr) { x.flags &^= flagImmutable | flagAppend })
}

// open opens a directory of a subvolume by its inode, wherever it is: by a handle such
// as name_to_handle_at(2) gives (struct btrfs_fid in the kernel).
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
