package targets_test

import (
	"testing"

	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/backend/backendtest/targets"
)

// TestTable: every row of the conformance table is for some target, and has a name of its
// own; every descriptor agrees with its backend.
func TestTable(t *testing.T) { backendtest.CheckTable(t, targets.All) }
