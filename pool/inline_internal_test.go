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

// TestInlineReadsNoOtherPool: a lookup of an inline volume does not read a pool whose ledger lacks the
// volume, because the disk of that pool may hang. The test closes the pool's folder of volumes, so that a
// read would fail.
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
	// Only the good pool is read, and it has a reservation of the volume but no record.
	if _, err := s.Inline("loop", inlineID); !errors.Is(err, volume.ErrNotFound) {
		t.Errorf("Inline: got %v, want ErrNotFound", err)
	}
	if ids, err := s.Inlines("loop"); err != nil || !slices.Equal(ids, []string{inlineID}) {
		t.Errorf("Inlines: got %q, %v; want %q", ids, err, inlineID)
	}
}
