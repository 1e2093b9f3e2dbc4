package loop_test

import (
	"bytes"
	"crypto/rand"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/backend/loop"
	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/linux/clone"
)

// TestDifferences: only the changes since an earlier snapshot are received if a volume with its content was not used yet.
func TestDifferences(t *testing.T) {
	const size, changed = 512 << 20, 4 << 20
	dirs := []string{testenv.Filesystem(t, "xfs", "4G"), testenv.Filesystem(t, "btrfs", "4G"), testenv.Filesystem(t, "ext4", "4G"), testenv.Filesystem(t, "xfs", "4G")}
	c := backendtest.StartCluster(t, dirs, loop.Kind)
	tr := &backendtest.Transfers{Cluster: c, Capability: backendtest.CapabilityOf("")}
	source := tr.Create(t, 0, "v", size, nil)
	source.Publish(t)
	content := make([]byte, 64<<20)
	_, _ = rand.Read(content)
	source.Write(t, content, 0)
	first := tr.Snapshot(t, source, "s1")
	var older []*backendtest.NodeVolume
	for node := range dirs {
		older = append(older, tr.Create(t, node, fmt.Sprintf("older-%d", node), size, first))
	}

	_, _ = rand.Read(content[:changed/2])
	source.Write(t, content[:changed/2], 0)
	clear(content[32<<20:][:changed/2])
	source.Write(t, content[32<<20:][:changed/2], 32<<20)
	second := tr.Snapshot(t, source, "s2")
	image := func(node int, name string) string { return filepath.Join(dirs[node], "volumes", name, "image") }
	wantImage := func(node int, name string, copied int64) {
		t.Helper()
		got, err := os.Open(image(node, name))
		must(t, err)
		defer got.Close()
		b := make([]byte, len(content)+1<<20)
		_, err = got.ReadAt(b, 0)
		must(t, err)
		if !bytes.Equal(b[:len(content)], content) || !bytes.Equal(b[len(content):], make([]byte, 1<<20)) {
			t.Errorf("node %d: %s differs from its source", node, name)
		}
		own, shares, err := clone.Unshared(got)
		must(t, err)
		if shares && own > copied || !shares && copied < int64(len(content)) {
			t.Errorf("node %d: %s has %d bytes of its own, %t, want at most %d", node, name, own, shares, copied)
		}
	}
	const more = changed + 1<<20 // the filesystem may copy whole blocks of its own
	newer := map[int]*backendtest.NodeVolume{}
	for node, copied := range map[int]int64{1: more, 2: int64(len(content)), 3: more} {
		name := fmt.Sprintf("newer-%d", node)
		newer[node] = tr.Create(t, node, name, size, second)
		wantImage(node, name, copied)
	}

	// A volume that was used is no base any more, nor is one whose image was replaced.
	older[3].Publish(t)
	older[3].Write(t, []byte("changed"), 0)
	older[3].Unpublish(t)
	now := time.Now().Add(time.Second)
	must(t, os.Chtimes(image(1, "older-1"), now, now))
	for _, node := range []int{1, 3} {
		newer[node].Delete(t)
		name := fmt.Sprintf("again-%d", node)
		tr.Create(t, node, name, size, second)
		wantImage(node, name, int64(len(content)))
	}
}
