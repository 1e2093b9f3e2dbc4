package flexvolume_test

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/trivet-csi/trivet/flexvolume"
)

// TestStartPause: while another process has the lock of the on-demand driver and does not
// serve, a call starts few of them.
func TestStartPause(t *testing.T) {
	starts := filepath.Join(t.TempDir(), "starts")
	e := flexvolume.Executable{
		StateDir: t.TempDir(), Socket: filepath.Join(t.TempDir(), "csi.sock"),
		OnDemand: flexvolume.OnDemand{Command: []string{"sh", "-c", "echo >> " + starts}, Socket: "driver.sock"},
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	a := e.Answer(ctx, []string{"unmount", t.TempDir()})
	if a.Status != flexvolume.Failure || !strings.Contains(a.Message, "the on-demand driver does not answer") {
		t.Errorf("%+v", a)
	}
	b, err := os.ReadFile(starts)
	must(t, err)
	if n := len(b); n < 2 || n > 3 { // after 0, 0.5 and 1.5 seconds
		t.Errorf("%d drivers were started", n)
	}
}
