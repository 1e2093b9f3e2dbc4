package disk_test

import (
	"testing"

	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/backend/backendtest/targets"
	"github.com/trivet-csi/trivet/backend/disk"
)

func TestMain(m *testing.M) { backendtest.Main(m, disk.Kind) }

func TestDisks(t *testing.T) { targets.Run(t, "disks") }
