//go:build vm

package loop_test

import (
	"testing"

	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/backend/backendtest/targets"
)

func TestIOLimits(t *testing.T) {
	for _, name := range []string{"images-xfs", "images-encrypted"} {
		t.Run(name, func(t *testing.T) { backendtest.IOLimitsEnforced(t, targets.ByName(t, name)) })
	}
}

func TestNoisyNeighbour(t *testing.T) { backendtest.NoisyNeighbour(t, targets.ByName(t, "images-xfs")) }
