//go:build vm

package loop_test

import (
	"testing"

	"github.com/trivet-csi/trivet/backend/backendtest/targets"
)

func TestNFSConformance(t *testing.T) { targets.Run(t, "images-nfs") }
