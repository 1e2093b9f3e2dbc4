package blockdev

import (
	"errors"
	"io/fs"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/internal/testenv"
)

// TestNode creates a device node in nodesDir, replaces it, and removes it.
func TestNode(t *testing.T) {
	testenv.RequireRoot(t)
	node := "test." + NewGUID().String()
	path := NodePath(node)
	t.Cleanup(func() {
		if err := errors.Join(RemoveNode(node), RemoveNode(node)); err != nil {
			t.Error(err)
		}
		if _, err := OpenNode(node); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("opening a removed node: got %v, want %v", err, fs.ErrNotExist)
		}
	})
	if !IsNodePath(path) || IsNodePath("/dev/"+node) {
		t.Errorf("IsNodePath: want true only for %s", path)
	}
	first, second := unix.Mkdev(loopMajor, 250), unix.Mkdev(loopMajor, 251)
	for _, number := range []uint64{first, first, second} {
		if err := MakeNode(node, number); err != nil {
			t.Fatal(err)
		}
		if current, err := NodeNumber(path); current != number || err != nil {
			t.Errorf("got device number %#x, %v, want %#x", current, err, number)
		}
	}
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("got node %v, %v, want mode 0600", info, err)
	}
	if err := errors.Join(os.Remove(path), os.WriteFile(path, nil, 0o600), MakeNode(node, first)); err != nil {
		t.Errorf("replacing a regular file by a node: got %v, want no error", err)
	}
}

// TestWholeNumber: the number of a partition is that of its disk.
func TestWholeNumber(t *testing.T) {
	device, _, _ := testenv.Disk(t, 16<<20)
	testenv.Run(t, "addpart", device, "1", "2048", "8192")
	disk, err := NodeNumber(device)
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{device, device + "p1"} {
		if number, err := WholeNumber(path); number != disk || err != nil {
			t.Errorf("%s: got device number %#x, %v, want %#x", path, number, err, disk)
		}
	}
	if _, err := WholeNumber("/dev/null"); !errors.Is(err, unix.ENOTBLK) {
		t.Errorf("got %v for a character device, want %v", err, unix.ENOTBLK)
	}
}
