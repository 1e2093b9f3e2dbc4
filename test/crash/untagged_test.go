package crash

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"github.com/trivet-csi/trivet/internal/crashpoint"
	"github.com/trivet-csi/trivet/internal/testenv"
)

// TestNormalBinary arms a driver that is built like a release. The driver must not contain the name of
// the environment variable, and must ignore the crash points.
func TestNormalBinary(t *testing.T) {
	testenv.RequireRoot(t)
	t.Parallel()
	normal := filepath.Join(t.TempDir(), "trivet")
	must(t, testenv.Build(normal))
	for binary, want := range map[string]bool{normal: false, crashing: true} {
		b, err := os.ReadFile(binary)
		must(t, err)
		if has := bytes.Contains(b, []byte("TRIVET_CRASH_AT")); has != want {
			t.Errorf("got TRIVET_CRASH_AT in %s: %t, want %t", binary, has, want)
		}
	}
	for _, p := range []crashpoint.Point{
		crashpoint.CreateCommitted, crashpoint.AttachLinked, crashpoint.StageMounted,
		crashpoint.PublishDone, crashpoint.UnstageGone, crashpoint.DeleteRenamed,
	} {
		t.Run(string(p), func(t *testing.T) {
			t.Parallel()
			c, err := newCO(newHost(t, "xfs", normal, p), "pvc-1", ext4[0])
			must(t, err)
			must(t, c.do(create, controllerPublish, stage, publish, write))
			c.finish(t)
		})
	}
}
