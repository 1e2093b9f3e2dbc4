package measure_test

import (
	"errors"
	"os"
	"path/filepath"
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
