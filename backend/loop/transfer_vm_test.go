//go:build vm

package loop_test

import (
	"bytes"
	"cmp"
	"crypto/rand"
	"io"
	"os"
	"path/filepath"
	"testing"

	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/backend/loop"
	"github.com/trivet-csi/trivet/internal/testenv"
)

// TestTransfer: a volume that is restored from a snapshot on another node has the content of its source, and grows. An encrypted volume has the passphrase of its source.
func TestTransfer(t *testing.T) {
	dir := testenv.Filesystem(t, "xfs", "24G")
	c := backendtest.StartCluster(t, []string{filepath.Join(dir, "a"), filepath.Join(dir, "b")}, loop.Kind)
	for _, encryption := range []string{"none", "luks2"} {
		for _, fsType := range []string{"ext4", "xfs", "btrfs", ""} {
			name := encryption + "-" + cmp.Or(fsType, "block")
			t.Run(name, func(t *testing.T) {
				testTransfer(t, &backendtest.Transfers{Cluster: c, Capability: backendtest.CapabilityOf(fsType), Class: map[string]string{"encryption": encryption}}, name)
			})
		}
	}
}

func testTransfer(t *testing.T, tr *backendtest.Transfers, name string) {
	const size, larger = 512 << 20, 640 << 20
	content := make([]byte, 20<<20)
	_, _ = rand.Read(content)
	source := tr.Create(t, 0, name, size, nil)
	source.Publish(t)
	source.Write(t, content, 0)
	restored := tr.Create(t, 1, name+"-restored", larger, tr.Snapshot(t, source, name))
	restored.Publish(t)
	if got := restored.Read(t, len(content)); !bytes.Equal(got, content) {
		t.Error("the restored volume differs from its source")
	}
	if got := restored.Size(t); got <= larger*8/10 {
		t.Errorf("the restored volume has %d bytes, want that it has grown to %d", got, larger)
	}
	if plain := contains(t, filepath.Join(tr.Nodes[1].Pool(), "volumes", name+"-restored", "image"), content[:4096]); plain != (tr.Class["encryption"] == "none") {
		t.Errorf("the image contains the plain text: %t, want %t", plain, tr.Class["encryption"] == "none")
	}
	restored.Unpublish(t)
	source.Unpublish(t)
	restored.Delete(t)
	source.Delete(t)
}

// contains reports whether a file contains a block of 4096 bytes.
func contains(t *testing.T, path string, block []byte) bool {
	t.Helper()
	f, err := os.Open(path)
	must(t, err)
	defer f.Close()
	for b := make([]byte, 1<<20); ; {
		n, err := io.ReadFull(f, b)
		if bytes.Contains(b[:n], block) {
			return true
		}
		if err != nil {
			return false
		}
	}
}
