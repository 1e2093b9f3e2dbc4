package clone

import (
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// SetImmutable sets or takes FS_IMMUTABLE_FL of an open file (ioctl_iflags(2)), and
// tells whether it took: false where the filesystem has no such flag, as NFS. EPERM
// without CAP_LINUX_IMMUTABLE.
func SetImmutable(f *os.File, on bool) (bool, error) {
	var want uint32
	if on {
		want = xflagImmutable
	}
	err := setLocks(f, xflagImmutable, want)
	if hasNone(err) {
		return false, nil
	}
	return err == nil, err
}

// locks are the flags that keep a file from being changed, linked and moved; 0 where the
// filesystem has none. f may be open by O_PATH.
func locks(f *os.File) (uint32, error) {
	var st unix.Statx_t
	err := unix.Statx(int(f.Fd()), "", unix.AT_EMPTY_PATH|unix.AT_STATX_DONT_SYNC, 0, &st)
	var l uint32
	if st.Attributes&unix.STATX_ATTR_IMMUTABLE != 0 {
		l |= xflagImmutable
	}
	if st.Attributes&unix.STATX_ATTR_APPEND != 0 {
		l |= xflagAppend
	}
	return l, fail("statx", f, err)
}

// xflags are those of FS_IOC_FSGETXATTR (ioctl_fsgetxattr(2)).
func xflags(f *os.File) (uint32, error) {
	var x fsXattr
	err := ioctl(f, fsIocGetXattr, unsafe.Pointer(&x))
	if hasNone(err) {
		return 0, nil
	}
	return x.flags, fail("FS_IOC_FSGETXATTR", f, err)
}

// setLocks goes by FS_IOC_FSSETXATTR: FS_IOC_SETFLAGS makes btrfs forget by what a file
// is compressed.
func setLocks(f *os.File, mask, want uint32) error {
	var x fsXattr
	if err := ioctl(f, fsIocGetXattr, unsafe.Pointer(&x)); err != nil {
		return fail("FS_IOC_FSGETXATTR", f, err)
	}
	if x.flags&mask == want {
		return nil
	}
	x.flags = x.flags&^mask | want
	return fail("FS_IOC_FSSETXATTR", f, ioctl(f, fsIocSetXattr, unsafe.Pointer(&x)))
}

// flags are those of FS_IOC_GETFLAGS (ioctl_iflags(2)); 0 where the filesystem has none.
func flags(f *os.File) (int, error) {
	n, err := unix.IoctlGetInt(int(f.Fd()), unix.FS_IOC_GETFLAGS)
	if hasNone(err) {
		return 0, nil
	}
	return n, fail("FS_IOC_GETFLAGS", f, err)
}

// likeFlags gives dst those flags of mask that src has. They go before they come: btrfs
// makes nothing NOCOW that was compressed until then.
func likeFlags(dst, src *os.File, mask int) error {
	want, err := flags(src)
	if err != nil {
		return err
	}
	have, err := flags(dst)
	if err != nil || want&mask == have&mask {
		return err
	}
	rest := have &^ mask
	if want&mask&flagNoCOW != 0 {
		rest &^= flagCompress
	}
	if err := setFlags(dst, rest); err != nil {
		return err
	}
	return setFlags(dst, rest|want&mask)
}

func setFlags(f *os.File, flags int) error {
	return fail("FS_IOC_SETFLAGS", f, unix.IoctlSetPointerInt(int(f.Fd()), unix.FS_IOC_SETFLAGS, flags))
}
