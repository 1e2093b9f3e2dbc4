package pool

import (
	"context"
	"errors"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/pool/ledger"
	"github.com/trivet-csi/trivet/volume"
)

var inlineID = "csi-" + strings.Repeat("0", 64)

// TestInlineReadsNoOtherPool: a pool that lacks an inline volume is not read for it, because its
// disk may hang. Here its folder of volumes is closed, so that a read fails.
func TestInlineReadsNoOtherPool(t *testing.T) {
	base := testenv.Filesystem(t, "ext4", "64M")
	for _, dir := range []string{"/stalled", "/good"} {
		must(t, os.Mkdir(base+dir, 0o700))
	}
	s := NewSet(Forms, []Config{
		{Name: "stalled", Directory: Directory{Path: base + "/stalled"}, Ephemeral: true},
		{Name: "good", Directory: Directory{Path: base + "/good"}, Ephemeral: true},
	}, stateRoot(t))
	ctx, cancel := context.WithCancel(t.Context())
	var closed sync.WaitGroup
	defer closed.Wait()
	defer cancel()
	closed.Go(func() { s.Run(ctx) })
	must(t, s.AwaitReady(t.Context()))
	stalled, err := s.Named("stalled")
	must(t, err)
	good, err := s.Named("good")
	must(t, err)
	good.ledger.Set(FolderPath(inlineID), ledger.Reservation{Backend: "loop"})
	must(t, stalled.volumes.Close())
	// The good pool alone is read, and has no record of it.
	if _, err := s.Inline("loop", inlineID); !errors.Is(err, volume.ErrNotFound) {
		t.Errorf("Inline: %v", err)
	}
	if ids, err := s.Inlines("loop"); err != nil || !slices.Equal(ids, []string{inlineID}) {
		t.Errorf("Inlines: %q, %v", ids, err)
	}
}
