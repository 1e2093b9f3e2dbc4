package sys

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// TestSizes: each structure has the size that its ioctl number contains. The packages that use the ioctls test
// the calls.
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
		btrfsInoPaths:       unsafe.Sizeof(inoPaths{}),
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
			t.Errorf("structure of ioctl %#x: got %d bytes, want %d", request, size, want)
		}
	}
	for name, sizes := range map[string][2]uintptr{
		"struct fs_quota_statv":  {unsafe.Sizeof(quotaState{}), 160},
		"struct fs_disk_quota":   {unsafe.Sizeof(ProjectQuota{}), 112},
		"struct fiemap_extent":   {unsafe.Sizeof(Extent{}), 56},
		"struct blkpg_partition": {unsafe.Sizeof(blkpgPartition{}), 152},
		"struct mnt_id_req":      {unsafe.Sizeof(mountIDRequest{}), 24},
		"struct statmount":       {unsafe.Sizeof(statmount{}), 512},
	} {
		if sizes[0] != sizes[1] {
			t.Errorf("%s: got %d bytes, want %d", name, sizes[0], sizes[1])
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
		path             string
		beneath, noLinks error
	}{
		{"a/b", nil, nil},
		{".", nil, nil},
		{"a/inside", nil, unix.ELOOP},
		{"a/outside", unix.EXDEV, unix.ELOOP},
		{"absolute", unix.EXDEV, unix.ELOOP},
		{"..", unix.EXDEV, unix.EXDEV},
		{"a/missing", unix.ENOENT, unix.ENOENT},
	} {
		for scope, want := range map[Scope]error{Beneath: tc.beneath, NoLinks: tc.noLinks, OneMount: tc.noLinks} {
			f, err := Open(dir, tc.path, scope, unix.O_RDONLY)
			if !errors.Is(err, want) {
				t.Errorf("opening %q in scope %#x: got %v, want %v", tc.path, scope, err, want)
			}
			if err == nil {
				if got, want := f.Name(), filepath.Join(path, tc.path); got != want {
					t.Errorf("the open file has the name %q, want %q", got, want)
				}
				f.Close()
			}
		}
	}
	link, err := Open(dir, "absolute", OneMount, unix.O_PATH|unix.O_NOFOLLOW)
	must(t, err)
	defer link.Close()
	if st, err := link.Stat(); err != nil || st.Mode().Type() != fs.ModeSymlink {
		t.Errorf("O_NOFOLLOW opened %v, %v, want the symbolic link", st, err)
	}
	if _, err := OpenDirectory(path + "/a/inside"); !errors.Is(err, unix.ELOOP) {
		t.Errorf("opening an absolute path with a symbolic link: got %v, want ELOOP", err)
	}
}

// TestErrors: an error contains the name of the call, the path of the file and the errno.
func TestErrors(t *testing.T) {
	f, err := os.Open(os.DevNull)
	must(t, err)
	defer f.Close()
	if err := Freeze(f); !errors.Is(err, unix.EPERM) && !errors.Is(err, unix.EOPNOTSUPP) && !errors.Is(err, unix.ENOTTY) {
		t.Errorf("freezing %s: got %v, want EPERM, EOPNOTSUPP or ENOTTY", os.DevNull, err)
	}
	if err := CreateSubvolume(f, "name"); !Unsupported(err) || err.Error() != "BTRFS_IOC_SUBVOL_CREATE /dev/null/name: inappropriate ioctl for device" {
		t.Errorf("creating a subvolume in %s: got %v, want ENOTTY", os.DevNull, err)
	}
	if err := CreateSubvolume(f, string(bytes.Repeat([]byte{'n'}, 5000))); !errors.Is(err, unix.ENAMETOOLONG) {
		t.Errorf("creating a subvolume with a long name: got %v, want ENAMETOOLONG", err)
	}
}

// TestItems: parseItems reads the number of items that the kernel returned, and never beyond the buffer.
func TestItems(t *testing.T) {
	b := append(searchItem(7, 0), searchItem(8, 5)...)
	if got, err := parseItems(b, 2); err != nil || len(got) != 2 || got[0].Offset != 7 || got[1].Offset != 8 || len(got[1].Data) != 5 {
		t.Errorf("got items %v, %v, want offsets 7 and 8 with 0 and 5 bytes", got, err)
	}
	for _, cut := range [][]byte{nil, b[:31], b[:32], b[:len(b)-1]} {
		if got, err := parseItems(cut, 2); err == nil {
			t.Errorf("a buffer of %d bytes: got items %v, want an error", len(cut), got)
		}
	}
}

// FuzzItems: parseItems returns all items or an error.
func FuzzItems(f *testing.F) {
	f.Add(append(searchItem(7, 0), searchItem(8, 5)...), uint32(2))
	f.Add([]byte(nil), uint32(1))
	f.Fuzz(func(t *testing.T, b []byte, n uint32) {
		got, err := parseItems(b, n)
		if err == nil && len(got) != int(n) {
			t.Errorf("got %d items, want %d", len(got), n)
		}
	})
}

// searchItem returns a struct btrfs_ioctl_search_header and a content of size bytes.
func searchItem(offset uint64, size uint32) []byte {
	b := make([]byte, 16, 32+size)
	b = binary.NativeEndian.AppendUint64(b, offset)
	b = binary.NativeEndian.AppendUint32(b, 246) // the type, which parseItems ignores
	b = binary.NativeEndian.AppendUint32(b, size)
	return append(b, make([]byte, size)...)
}
