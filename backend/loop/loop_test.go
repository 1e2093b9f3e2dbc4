package loop_test

import (
	"testing"

	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/backend/backendtest/targets"
)

func TestMain(m *testing.M) { backendtest.Main(m, targets.Backends...) }

func TestConformance(t *testing.T) { targets.Run(t, "images-xfs", "images-ext4", "images-btrfs") }
