package clone

import (
	"os"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/linux/sys"
)

// protectionMask contains the attributes that prevent a file from being changed, linked and moved.
const protectionMask = sys.AttrImmutable | sys.AttrAppend

// SetImmutable sets or clears the attribute immutable of an open file. ok is false if the filesystem,
// such as NFS, does not support the attribute. Without CAP_LINUX_IMMUTABLE the error is EPERM.
func SetImmutable(f *os.File, on bool) (ok bool, err error) {
	var attributes uint32
	if on {
		attributes = sys.AttrImmutable
	}
	err = setAttributes(f, sys.AttrImmutable, attributes)
	if sys.Unsupported(err) {
		return false, nil
	}
	return err == nil, err
}

// setAttributes sets the attributes of a file that are in mask to those in attributes.
func setAttributes(f *os.File, mask, attributes uint32) error {
	_, err := sys.ChangeAttributes(f, func(a *sys.Attributes) { a.Flags = a.Flags&^mask | attributes })
	return err
}

// protectionOf reads the attributes in protectionMask of a file, which may be opened with O_PATH. It returns 0
// if the filesystem has no such attributes.
func protectionOf(f *os.File) (uint32, error) {
	var st unix.Statx_t
	err := unix.Statx(int(f.Fd()), "", unix.AT_EMPTY_PATH|unix.AT_STATX_DONT_SYNC, 0, &st)
	var protection uint32
	if st.Attributes&unix.STATX_ATTR_IMMUTABLE != 0 {
		protection |= sys.AttrImmutable
	}
	if st.Attributes&unix.STATX_ATTR_APPEND != 0 {
		protection |= sys.AttrAppend
	}
	return protection, fail("statx", f, err)
}

// inodeFlags reads the flags of chattr(1). It returns 0 if the filesystem has no flags.
func inodeFlags(f *os.File) (int, error) {
	n, err := sys.InodeFlags(f)
	if sys.Unsupported(err) {
		return 0, nil
	}
	return n, err
}

// copyFlags copies the flags in mask from src to dst. It clears flags before it sets others, because btrfs
// refuses NOCOW for a compressed file.
func copyFlags(dst, src *os.File, mask int) error {
	srcFlags, err := inodeFlags(src)
	if err != nil {
		return err
	}
	dstFlags, err := inodeFlags(dst)
	if err != nil || srcFlags&mask == dstFlags&mask {
		return err
	}
	rest := dstFlags &^ mask
	if srcFlags&mask&sys.FlagNoCOW != 0 {
		rest &^= sys.FlagCompress
	}
	if err := sys.SetInodeFlags(dst, rest); err != nil {
		return err
	}
	return sys.SetInodeFlags(dst, rest|srcFlags&mask)
}
