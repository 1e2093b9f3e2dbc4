package errtext_test

import (
	"errors"
	"testing"

	"github.com/trivet-csi/trivet/internal/errtext"
)

// TestKind: errors that differ only in digits have the same kind.
func TestKind(t *testing.T) {
	first := errors.New("read tcp 10.0.0.1:52344->10.0.0.2:9811: expired on 2026-01-01")
	again := errors.New("read tcp 10.0.0.1:52346->10.0.0.2:9811: expired on 2026-01-02")
	other := errors.New("read tcp 10.0.0.1:52344->10.0.0.2:9811: refused")
	if errtext.Kind(first) != errtext.Kind(again) || errtext.Kind(first) == errtext.Kind(other) || errtext.Kind(nil) != "" {
		t.Errorf("got kinds %q, %q, %q, want the first two equal and the third different", errtext.Kind(first), errtext.Kind(again), errtext.Kind(other))
	}
}
