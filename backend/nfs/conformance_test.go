//go:build vm

package nfs_test

import (
	"testing"

	"github.com/trivet-csi/trivet/backend/backendtest/targets"
)

func TestConformance(t *testing.T) { targets.Run(t, "nfs") }
