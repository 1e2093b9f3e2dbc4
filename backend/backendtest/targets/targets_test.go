package targets_test

import (
	"testing"

	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/backend/backendtest/targets"
)

// TestTable: each row of the conformance table has a unique name and runs for some target, and the description of
// each target agrees with its backend.
func TestTable(t *testing.T) { backendtest.CheckTable(t, targets.All) }
