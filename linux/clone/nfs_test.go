//go:build vm

package clone_test

import (
	"errors"
	"math/rand/v2"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/internal/testenv/nfsd"
	"github.com/trivet-csi/trivet/internal/treetest"
	"github.com/trivet-csi/trivet/linux/clone"
)

// TestNFS: the copies are correct if the server shares blocks, if it copies the data itself, and if the client
// must send the data.
func TestNFS(t *testing.T) {
	for _, tc := range []struct {
		name, version, reflink string
		shared                 bool
	}{{"server shares blocks", "4.2", "1", true}, {"server copies", "4.2", "0", false}, {"client writes", "3,nolock", "1", false}} {
		t.Run(tc.name, func(t *testing.T) {
			// noatime, because reading changes access times on the server, independent of the flags of the
			// client.
			s := nfsd.Start(t, nfsd.Options{MkfsOptions: []string{"-m", "reflink=" + tc.reflink}, MountOptions: []string{"noatime"}})
			at := t.TempDir()
			testenv.Run(t, "mount", "-t", "nfs", "-o", "vers="+tc.version, s.Address()+":"+s.Export(t, "tank"), at)
			t.Cleanup(func() { testenv.Run(t, "umount", at) })
			t.Run("File", func(t *testing.T) { testFileNFS(t, at, tc.shared, tc.version == "4.2") })
			t.Run("Tree", func(t *testing.T) { testTreeNFS(t, at, tc.shared) })
			t.Run("Delta", func(t *testing.T) { testDeltaNFS(t, at) })
		})
	}
}

// testFileNFS tests File. shared means that the server shares blocks. holes means that the client can find the holes
// of a file, as with NFS 4.2.
func testFileNFS(t *testing.T, dir string, shared, holes bool) {
	src := create(t, filepath.Join(dir, "src"))
	for at := range int64(4) {
		write(t, src, at*4*mib, random(mib))
	}
	must(t, src.Truncate(20*mib))
	for name, o := range map[string]clone.Options{"copy": {}, "unshared": {Unshared: true}} {
		dst := create(t, filepath.Join(dir, name))
		got, err := clone.File(t.Context(), dst, src, o)
		must(t, err)
		requireSame(t, src, dst)
		if got.Shared != (shared && !o.Unshared) || holes && (got.Bytes < 4*mib || got.Bytes > 8*mib) {
			t.Errorf("%s: got %+v, want shared %t and 4 to 8 MiB", name, got, shared && !o.Unshared)
		}
	}
	if ok, err := clone.SetImmutable(src, true); ok || err != nil {
		t.Errorf("SetImmutable: got %t, %v, want false", ok, err)
	}
	if _, ok, err := clone.Unshared(src); ok || err != nil {
		t.Errorf("Unshared: got %t, %v, want false", ok, err)
	}
}

// testTreeNFS tests Tree. shared means that the server shares blocks.
func testTreeNFS(t *testing.T, dir string, shared bool) {
	src := mkdir(t, dir, "tree")
	treetest.Make(t, src, 1)
	to, got, err := copyTree(t, src, clone.Options{})
	must(t, err)
	if got.Shared != shared {
		t.Errorf("got %+v, want shared %t", got, shared)
	}
	treetest.Compare(t, src, to)
}

// testDeltaNFS tests Delta, which compares the content on NFS.
func testDeltaNFS(t *testing.T, dir string) {
	h := &history{Rand: rand.New(rand.NewPCG(1, 1)), size: 8 * mib, image: create(t, filepath.Join(dir, "image"))}
	must(t, h.image.Truncate(h.size))
	for range 30 {
		if err := h.step(); !errors.Is(err, unix.EOPNOTSUPP) {
			must(t, err)
		}
	}
	older := h.snapshot(t, filepath.Join(dir, "older"))
	write(t, h.image, 3*mib, random(4*kib))
	newer := h.snapshot(t, filepath.Join(dir, "newer"))
	testFilesystems[0].compare(t, 0, older, newer)
	if n := total(collect(t, clone.Delta(t.Context(), older, newer, 0, nil), 0, h.size)); n == 0 || n > 128*kib {
		t.Errorf("Delta: got %d bytes, want 1 to %d", n, 128*kib)
	}
}
