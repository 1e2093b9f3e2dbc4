package clone

import (
	"os"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/linux/sys"
)

// locks are the attributes that keep a file from being changed, linked and moved.
const locks = sys.AttrImmutable | sys.AttrAppend

// SetImmutable sets or clears the attribute immutable of an open file. ok is false where
// the filesystem has no such attribute, as NFS. EPERM without CAP_LINUX_IMMUTABLE.
func SetImmutable(f *os.File, on bool) (ok bool, err error) {
	var want uint32
	if on {
		want = sys.AttrImmutable
	}
	err = setAttributes(f, sys.AttrImmutable, want)
	if sys.Unsupported(err) {
		return false, nil
	}
	return err == nil, err
}

// setAttributes sets those attributes of mask that are in want, and clears the others.
func setAttributes(f *os.File, mask, want uint32) error {
	_, err := sys.ChangeAttributes(f, func(a *sys.Attributes) { a.Flags = a.Flags&^mask | want })
	return err
}

// locksOf reads the locks of a file that may be open by O_PATH; 0 where the filesystem has
// none.
func locksOf(f *os.File) (uint32, error) {
	var st unix.Statx_t
	err := unix.Statx(int(f.Fd()), "", unix.AT_EMPTY_PATH|unix.AT_STATX_DONT_SYNC, 0, &st)
	var l uint32
	if st.Attributes&unix.STATX_ATTR_IMMUTABLE != 0 {
		l |= sys.AttrImmutable
	}
	if st.Attributes&unix.STATX_ATTR_APPEND != 0 {
		l |= sys.AttrAppend
	}
	return l, fail("statx", f, err)
}

// inodeFlags are the flags of chattr(1); 0 where the filesystem has none.
func inodeFlags(f *os.File) (int, error) {
	n, err := sys.InodeFlags(f)
	if sys.Unsupported(err) {
		return 0, nil
	}
	return n, err
}

// copyFlags gives dst the flags of mask that src has. It clears flags before it sets
// others: btrfs sets NOCOW on no file that is compressed.
func copyFlags(dst, src *os.File, mask int) error {
	want, err := inodeFlags(src)
	if err != nil {
		return err
	}
	have, err := inodeFlags(dst)
	if err != nil || want&mask == have&mask {
		return err
	}
	rest := have &^ mask
	if want&mask&sys.FlagNoCOW != 0 {
		rest &^= sys.FlagCompress
	}
	if err := sys.SetInodeFlags(dst, rest); err != nil {
		return err
	}
	return sys.SetInodeFlags(dst, rest|want&mask)
}
