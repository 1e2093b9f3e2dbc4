package pool

import (
	"os"
	"testing"
	"time"

	"github.com/trivet-csi/trivet/volume"
)

// Forms are the record formats of the backends that the tests of this package use.
var Forms = volume.Forms{
	{Name: "loop", OnNodes: true, OnExports: true},
	{Name: "nfs", OnExports: true, Directory: true},
	{Name: "local", OnNodes: true, Directory: true},
}

// The helpers of the external tests.
var (
	Must, Await  = must, await
	StateRoot    = stateRoot
	SharedVolume = sharedVolume
)

// stateRoot opens an empty state directory.
func stateRoot(t *testing.T) *os.Root {
	t.Helper()
	state, err := os.OpenRoot(t.TempDir())
	must(t, err)
	t.Cleanup(func() { must(t, state.Close()) })
	return state
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// await waits until a condition holds.
func await(t *testing.T, what string, holds func() bool) {
	t.Helper()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(10 * time.Second); !holds(); <-tick.C {
		if time.Now().After(deadline) {
			t.Fatalf("timed out waiting for %s", what)
		}
	}
}
