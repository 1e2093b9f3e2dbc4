//go:build vm

package lvm_test

import (
	"testing"

	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/backend/backendtest/targets"
	"github.com/trivet-csi/trivet/backend/lvm"
)

func TestMain(m *testing.M) { backendtest.Main(m, lvm.Kind) }

func TestGroup(t *testing.T) { targets.Run(t, "group") }

func TestEncryptedGroup(t *testing.T) { targets.Run(t, "group-encrypted") }

func TestThin(t *testing.T) { targets.Run(t, "thin") }

func TestEncryptedThin(t *testing.T) { targets.Run(t, "thin-encrypted") }

func TestIOLimits(t *testing.T) {
	for _, name := range []string{"group", "thin"} {
		t.Run(name, func(t *testing.T) { backendtest.IOLimitsEnforced(t, targets.ByName(t, name)) })
	}
}
