package blockdev

import (
	"errors"
	"io/fs"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/internal/testenv"
)

// TestPartitionNode creates a node below /dev/trivet, replaces it, and removes it.
func TestPartitionNode(t *testing.T) {
	testenv.RequireRoot(t)
	node := "test." + NewGUID().String()
	path := PartitionPath(node)
	t.Cleanup(func() {
		if err := errors.Join(removePartitionNode(node), removePartitionNode(node)); err != nil {
			t.Error(err)
		}
		if _, err := OpenPartition(node); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("opening a removed node: %v", err)
		}
	})
	if !IsPartitionPath(path) || IsPartitionPath("/dev/"+node) {
		t.Errorf("%s is not recognized", path)
	}
	first, second := unix.Mkdev(loopMajor, 250), unix.Mkdev(loopMajor, 251)
	for _, number := range []uint64{first, first, second} {
		if err := makePartitionNode(node, number); err != nil {
			t.Fatal(err)
		}
		if current, err := nodeNumber(path); current != number || err != nil {
			t.Errorf("the node has number %#x: %v, want %#x", current, err, number)
		}
	}
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the node is %v: %v", info, err)
	}
	if err := errors.Join(os.Remove(path), os.WriteFile(path, nil, 0o600), makePartitionNode(node, first)); err != nil {
		t.Errorf("replacing a file: %v", err)
	}
}
