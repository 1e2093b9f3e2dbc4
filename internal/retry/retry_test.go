package retry_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/trivet-csi/trivet/internal/retry"
)

var errBusy = errors.New("busy")

// TestFor: the step is repeated until it succeeds, patience has passed, or the context ends.
func TestFor(t *testing.T) {
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	for name, tc := range map[string]struct {
		ctx      context.Context
		patience time.Duration
		busy     int // the number of failures before the step succeeds
		want     error
		steps    int
	}{
		"first step succeeds": {t.Context(), time.Minute, 0, nil, 1},
		"third step succeeds": {t.Context(), time.Minute, 2, nil, 3},
		"patience is 0":       {t.Context(), 0, 9, errBusy, 1},
		"context ended":       {ended, time.Minute, 9, context.Canceled, 1},
	} {
		t.Run(name, func(t *testing.T) {
			steps := 0
			err := retry.For(tc.ctx, tc.patience, func() (bool, error) {
				if steps++; steps <= tc.busy {
					return true, errBusy
				}
				return false, nil
			})
			if !errors.Is(err, tc.want) || steps != tc.steps {
				t.Errorf("got %d steps and %v, want %d and %v", steps, err, tc.steps, tc.want)
			}
		})
	}
}

// TestForFails: an error that must not be retried is returned unchanged.
func TestForFails(t *testing.T) {
	if err := retry.For(t.Context(), time.Minute, func() (bool, error) { return false, errBusy }); !errors.Is(err, errBusy) {
		t.Errorf("got %v, want %v", err, errBusy)
	}
}
