package sys

import (
	"bytes"
	"encoding/binary"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// TestSizes: each structure has the size in the number of its ioctl. The packages that use the calls test them.
func TestSizes(t *testing.T) {
	for request, size := range map[uint]uintptr{
		fsIocFSGetXattr:     unsafe.Sizeof(Attributes{}),
		fsIocFSSetXattr:     unsafe.Sizeof(Attributes{}),
		fsIocFiemap:         unsafe.Offsetof(ExtentMap{}.extents),
		xfsIocFSGeometryV1:  unsafe.Sizeof(XFSGeometry{}),
		xfsIocGrowFSData:    unsafe.Sizeof(xfsGrowData{}),
		btrfsResize:         unsafe.Sizeof(volArgs{}),
		btrfsSubvolCreate:   unsafe.Sizeof(volArgs{}),
		btrfsSnapDestroy:    unsafe.Sizeof(volArgs{}),
		btrfsSnapCreateV2:   unsafe.Sizeof(volArgsV2{}),
		btrfsTreeSearch:     unsafe.Sizeof(searchArgs{}),
		btrfsInoLookup:      unsafe.Sizeof(inoLookup{}),
		btrfsInoLookupUser:  unsafe.Sizeof(lookupUser{}),
		btrfsDevInfo:        unsafe.Sizeof(devInfo{}),
		btrfsFSInfo:         unsafe.Sizeof(fsInfo{}),
		btrfsGetDevStats:    unsafe.Sizeof(devStats{}),
		btrfsSubvolInfo:     unsafe.Sizeof(subvolInfo{}),
		btrfsSubvolRootRef:  unsafe.Sizeof(rootRefs{}),
		btrfsSubvolSetFlags: 8,
		btrfsQgroupCreate:   unsafe.Sizeof([2]uint64{}),
		btrfsQgroupAssign:   unsafe.Sizeof([3]uint64{}),
		btrfsQgroupLimit:    unsafe.Sizeof([6]uint64{}),
	} {
		if want := uintptr(request >> 16 & 0x3fff); size != want {
			t.Errorf("ioctl %#x: %d bytes, want %d", request, size, want)
		}
	}
	for name, sizes := range map[string][2]uintptr{
		"struct fs_quota_statv":  {unsafe.Sizeof(quotaState{}), 160},
		"struct fs_disk_quota":   {unsafe.Sizeof(ProjectQuota{}), 112},
		"struct fiemap_extent":   {unsafe.Sizeof(Extent{}), 56},
		"struct blkpg_partition": {unsafe.Sizeof(blkpgPartition{}), 152},
	} {
		if sizes[0] != sizes[1] {
			t.Errorf("%s: %d bytes, want %d", name, sizes[0], sizes[1])
		}
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// TestScopes: each scope refuses the paths that leave it.
func TestScopes(t *testing.T) {
	path := t.TempDir()
	must(t, os.MkdirAll(path+"/a/b", 0o700))
	must(t, os.Symlink("b", path+"/a/inside"))
	must(t, os.Symlink("../..", path+"/a/outside"))
	must(t, os.Symlink(path, path+"/absolute"))
	dir, err := os.Open(path)
	must(t, err)
	defer dir.Close()
	for _, tc := range []struct {
		path            string
		beneath, narrow error
	}{
		{"a/b", nil, nil},
		{".", nil, nil},
		{"a/inside", nil, unix.ELOOP},
		{"a/outside", unix.EXDEV, unix.ELOOP},
		{"absolute", unix.EXDEV, unix.ELOOP},
		{"..", unix.EXDEV, unix.EXDEV},
		{"a/missing", unix.ENOENT, unix.ENOENT},
	} {
		for scope, want := range map[Scope]error{Beneath: tc.beneath, NoLinks: tc.narrow, OneMount: tc.narrow} {
			f, err := Open(dir, tc.path, scope, unix.O_RDONLY)
			if !errors.Is(err, want) {
				t.Errorf("%q in scope %#x: %v, want %v", tc.path, scope, err, want)
			}
			if err == nil {
				if got, want := f.Name(), filepath.Join(path, tc.path); got != want {
					t.Errorf("the name is %q, want %q", got, want)
				}
				f.Close()
			}
		}
	}
	link, err := Open(dir, "absolute", OneMount, unix.O_PATH|unix.O_NOFOLLOW)
	must(t, err)
	defer link.Close()
	if target, err := os.Readlink(path + "/absolute"); err != nil || target != path {
		t.Errorf("%q, %v", target, err)
	}
	if _, err := OpenDirectory(path + "/a/inside"); !errors.Is(err, unix.ELOOP) {
		t.Errorf("a link in an absolute path: %v", err)
	}
}

// TestErrors: an error has the call, the file and the errno.
func TestErrors(t *testing.T) {
	f, err := os.Open(os.DevNull)
	must(t, err)
	defer f.Close()
	if err := Freeze(f); !errors.Is(err, unix.EPERM) && !errors.Is(err, unix.EOPNOTSUPP) && !errors.Is(err, unix.ENOTTY) {
		t.Errorf("freezing %s: %v", os.DevNull, err)
	}
	if err := CreateSubvolume(f, "name"); !Unsupported(err) || err.Error() != "BTRFS_IOC_SUBVOL_CREATE /dev/null/name: inappropriate ioctl for device" {
		t.Errorf("a subvolume in %s: %v", os.DevNull, err)
	}
	if err := CreateSubvolume(f, string(bytes.Repeat([]byte{'n'}, 5000))); !errors.Is(err, unix.ENAMETOOLONG) {
		t.Errorf("a long name: %v", err)
	}
}

// TestItems: parseItems reads the number of items that the kernel returned, and never beyond the buffer.
func TestItems(t *testing.T) {
	b := append(searchItem(7, 0), searchItem(8, 5)...)
	if got, err := parseItems(b, 2); err != nil || len(got) != 2 || got[0].Offset != 7 || got[1].Offset != 8 || len(got[1].Data) != 5 {
		t.Errorf("items: %v, %v", got, err)
	}
	for _, cut := range [][]byte{nil, b[:31], b[:32], b[:len(b)-1]} {
		if got, err := parseItems(cut, 2); err == nil {
			t.Errorf("items of %d bytes: %v", len(cut), got)
		}
	}
}

func FuzzItems(f *testing.F) {
	f.Add(append(searchItem(7, 0), searchItem(8, 5)...), uint32(2))
	f.Add([]byte(nil), uint32(1))
	f.Fuzz(func(t *testing.T, b []byte, n uint32) {
		got, err := parseItems(b, n)
		if err == nil && len(got) != int(n) {
			t.Errorf("%d of %d", len(got), n)
		}
	})
}

// searchItem returns a struct btrfs_ioctl_search_header and size bytes.
func searchItem(offset uint64, size uint32) []byte {
	b := make([]byte, 16, 32+size)
	b = binary.NativeEndian.AppendUint64(b, offset)
	b = binary.NativeEndian.AppendUint32(b, 246)
	b = binary.NativeEndian.AppendUint32(b, size)
	return append(b, make([]byte, size)...)
}
