package measure_test

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/test/measure"
)

func TestMain(m *testing.M) { testenv.Main(m) }

var errStep = errors.New("a step failed")

// TestOnFilesystem checks that OnFilesystem returns the error of a measurement, ends its processes, and
// reports a mount that it has left.
func TestOnFilesystem(t *testing.T) {
	testenv.RequireRoot(t)
	for name, tc := range map[string]struct {
		run  func(t *testing.T, g *measure.Testbed)
		want string
	}{
		"success": {func(t *testing.T, g *measure.Testbed) {
			t.Helper()
			measure.Must(os.WriteFile(filepath.Join(g.Disk, "file"), nil, 0o600))
			g.Settle()
			g.Remount(t.Context())
			_ = measure.Get(os.Stat(filepath.Join(g.Disk, "file")))
		}, ""},
		"failure while a process runs": {func(t *testing.T, g *measure.Testbed) {
			t.Helper()
			g.Launch("sleep", "sleep", "1000")
			measure.Must(errStep)
		}, errStep.Error()},
		"left mount": {func(t *testing.T, g *measure.Testbed) {
			t.Helper()
			at := filepath.Join(g.Dir, "left")
			measure.Must(os.Mkdir(at, 0o700))
			measure.Must(unix.Mount(g.Disk, at, "", unix.MS_BIND, ""))
		}, "cleaning up: the measurement left 1 mounts, the last at "},
	} {
		t.Run(name, func(t *testing.T) {
			err := measure.OnFilesystem(t.Context(), "ext4", 64<<20, func(g *measure.Testbed) { tc.run(t, g) })
			if tc.want == "" && err != nil || tc.want != "" && (err == nil || !strings.Contains(err.Error(), tc.want)) {
				t.Errorf("got error %v, want %q", err, tc.want)
			}
		})
	}
}

// TestInDirectory checks that InDirectory unmounts and reports what a measurement has left, and removes its directory.
func TestInDirectory(t *testing.T) {
	testenv.RequireRoot(t)
	dir := t.TempDir()
	err := measure.InDirectory(t.Context(), dir, func(g *measure.Testbed) {
		g.Settle()
		at := filepath.Join(g.Dir, "left")
		measure.Must(os.Mkdir(at, 0o700))
		measure.Must(unix.Mount(g.Disk, at, "", unix.MS_BIND, ""))
	})
	if err == nil || !strings.Contains(err.Error(), "cleaning up: the measurement left 1 mounts, the last at ") {
		t.Errorf("got error %v, want the left mount", err)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("left files %v, %v", left, err)
	}
}

// TestOnFullImage checks for each filesystem that the loop device does not use the page cache, and that all blocks of the
// image are allocated.
func TestOnFullImage(t *testing.T) {
	testenv.RequireRoot(t)
	for _, fsType := range []string{"ext4", "xfs", "btrfs"} {
		t.Run(fsType, func(t *testing.T) {
			const size = 320 << 20
			err := measure.OnFullImage(t.Context(), fsType, size, func(g *measure.Testbed) {
				image := filepath.Join(g.Dir, fsType)
				var st unix.Stat_t
				measure.Must(unix.Stat(image, &st))
				if st.Blocks*512 < size {
					t.Errorf("%d bytes of the image are allocated, want %d", st.Blocks*512, size)
				}
				loops := measure.Get(filepath.Glob("/sys/block/loop*"))
				i := slices.IndexFunc(loops, func(loop string) bool { return measure.BackingFile(filepath.Base(loop)) == image })
				if direct := measure.Get(os.ReadFile(loops[i] + "/loop/dio")); string(direct) != "1\n" {
					t.Errorf("%s/loop/dio is %q", loops[i], direct)
				}
			})
			if err != nil {
				t.Error(err)
			}
		})
	}
}
