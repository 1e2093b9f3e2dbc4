package sixthkind_test

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/backend/backendtest/targets"
	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/test/sixthkind"
)

func TestMain(m *testing.M) { backendtest.Main(m, targets.Backends...) }

// TestConformance runs the conformance tests of package backendtest for the kind.
func TestConformance(t *testing.T) { targets.Run(t, "sixth") }

// TestDemo runs the demo with a volume of the kind.
func TestDemo(t *testing.T) {
	testenv.RequireRoot(t)
	binary := filepath.Join(t.TempDir(), "trivet")
	if err := sixthkind.Build(binary); err != nil {
		t.Fatal(err)
	}
	out := testenv.Run(t, "env", "CGO_ENABLED=0", "go", "run", "../demo", "--binary", binary, "--backend", "sixth", "--fs-type", "")
	for _, want := range []string{"NodePublishVolume", "written by one pod, read by another", "Nothing is left"} {
		if !strings.Contains(out, want) {
			t.Errorf("got no %q in the output of the demo:\n%s", want, out)
		}
	}
}
