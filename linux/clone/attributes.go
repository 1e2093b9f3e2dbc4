package clone

import (
	"errors"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/linux/sys"
)

// plainFlags are the flags of chattr(1) that are copied and do not prevent changes. The filesystem sets the
// other flags itself, or they are part of features that cannot be copied: verity, encryption, project IDs.
const plainFlags = sys.FlagCompress | sys.FlagSync | sys.FlagNoDump | sys.FlagNoAtime |
	sys.FlagNoCompress | sys.FlagDirSync | sys.FlagTopDir | sys.FlagNoCOW

// copyAttributes copies owner, extended attributes, mode and times.
func (c *treeCopy) copyAttributes(dst, src *os.File, st *unix.Stat_t) error {
	if err := setOwner(dst, st); err != nil {
		return err
	}
	if err := c.xattrs.copy(sys.Path(dst), sys.Path(src)); err != nil {
		return err
	}
	return setModeAndTimes(dst, st)
}

// setOwner sets the owner of st. It precedes extended attributes and setModeAndTimes, because chown(2) clears
// set-user-ID and capabilities, an ACL changes the mode, and each step may change the times.
func setOwner(dst *os.File, st *unix.Stat_t) error {
	return fail("fchownat", dst, unix.Fchownat(int(dst.Fd()), "", int(st.Uid), int(st.Gid), unix.AT_EMPTY_PATH))
}

// setModeAndTimes sets the mode and the times of st.
func setModeAndTimes(dst *os.File, st *unix.Stat_t) error {
	if st.Mode&unix.S_IFMT != unix.S_IFLNK {
		if err := unix.Chmod(sys.Path(dst), st.Mode&0o7777); err != nil {
			return fail("chmod", dst, err)
		}
	}
	times := []unix.Timespec{st.Atim, st.Mtim}
	return fail("utimensat", dst, unix.UtimesNanoAt(int(dst.Fd()), "", times, unix.AT_EMPTY_PATH))
}

// xattrMax is the maximum size in bytes of all names together, and of one value (xattr(7)).
const xattrMax = 64 << 10

// xfsACL is the prefix of the names by which xfs lists ACLs a second time, in its own format
// (fs/xfs/xfs_xattr.c).
const xfsACL = "trusted.SGI_ACL_"

// xattrCopy reads extended attributes. Its fields are buffers, which its calls share.
type xattrCopy struct{ names, value []byte }

// copy copies the extended attributes of src that the filesystem of dst supports.
func (x *xattrCopy) copy(dst, src string) error {
	return x.each(src, func(name string, value []byte) error { return setXattr(dst, name, value) })
}

// each calls f with each extended attribute of src. The value is valid until f returns.
func (x *xattrCopy) each(src string, f func(name string, value []byte) error) error {
	if x.names == nil {
		x.names, x.value = make([]byte, xattrMax), make([]byte, xattrMax)
	}
	n, err := unix.Listxattr(src, x.names)
	if sys.Unsupported(err) {
		return nil
	}
	if err != nil {
		return os.NewSyscallError("listxattr", err)
	}
	for name := range strings.SplitSeq(string(x.names[:n]), "\x00") {
		if name == "" || strings.HasPrefix(name, xfsACL) {
			continue
		}
		n, err := unix.Getxattr(src, name, x.value)
		if errors.Is(err, unix.ENODATA) { // the attribute is listed, but this process may not read it
			continue
		}
		if err != nil {
			return os.NewSyscallError("getxattr "+name, err)
		}
		if err := f(name, x.value[:n]); err != nil {
			return err
		}
	}
	return nil
}

// setXattr sets an extended attribute, unless the filesystem does not support it.
func setXattr(dst, name string, value []byte) error {
	err := unix.Setxattr(dst, name, value, 0)
	if errors.Is(err, unix.EOPNOTSUPP) {
		return nil
	}
	return os.NewSyscallError("setxattr "+name, err)
}
