package quota

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/trivet-csi/trivet/internal/testenv"
)

// TestNone: a filesystem that cannot limit directories, or whose quotas are switched off, has no kind, and Why
// contains the remedy.
func TestNone(t *testing.T) {
	testenv.RequireRoot(t)
	t.Run("tmpfs", func(t *testing.T) {
		at := t.TempDir()
		testenv.Run(t, "mount", "-t", "tmpfs", "none", at)
		t.Cleanup(func() { testenv.Run(t, "umount", at) })
		requireNone(t, at, "use XFS, ext4 or btrfs")
		t.Run("overlay", func(t *testing.T) {
			for _, d := range []string{"lower", "upper", "work", "merged"} {
				must(t, os.Mkdir(filepath.Join(at, d), 0o755))
			}
			merged := filepath.Join(at, "merged")
			testenv.Run(t, "mount", "-t", "overlay", "-o", "lowerdir="+at+"/lower,upperdir="+at+"/upper,workdir="+at+"/work", "none", merged)
			t.Cleanup(func() { testenv.Run(t, "umount", merged) })
			requireNone(t, merged, "use XFS, ext4 or btrfs")
		})
	})
	t.Run("ext4", func(t *testing.T) { requireNone(t, testenv.Filesystem(t, "ext4", "64M"), "tune2fs -O project,quota") })
	t.Run("xfs", func(t *testing.T) { requireNone(t, testenv.Filesystem(t, "xfs", "512M"), "with the option prjquota") })
}

// TestLimits: values that the kernel would treat as no limit are refused.
func TestLimits(t *testing.T) {
	fsys := openFS(t, t.TempDir())
	for _, l := range []Limit{{}, {Bytes: -1}, {Bytes: 1, Inodes: -1}} {
		if err := l.check(); err == nil {
			t.Errorf("check of %+v: got no error, want one", l)
		}
		if err := fsys.fs.Set(minProject, l); err == nil {
			t.Errorf("Set of %+v: got no error, want one", l)
		}
	}
}
