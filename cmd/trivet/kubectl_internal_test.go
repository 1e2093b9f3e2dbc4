package main

import (
	"bytes"
	"strings"
	"testing"

	"github.com/trivet-csi/trivet/cluster/kubectl"
	"github.com/trivet-csi/trivet/cluster/status"
	"github.com/trivet-csi/trivet/doctor"
)

// written returns the text of a table.
func written(t *testing.T, of table) string {
	t.Helper()
	var b bytes.Buffer
	check(t, writeTables(&b, []table{of}, false, false))
	return b.String()
}

// TestNodeCheckTable: a finding of both pods of the controller has one row, and the same finding of two nodes has two.
func TestNodeCheckTable(t *testing.T) {
	finding := doctor.Check{Name: "nodes", Result: doctor.Failure, Seen: "no answer"}
	out := written(t, nodeCheckTable([]nodeCheck{
		{"controller", "controller-1", finding}, {"controller", "controller-2", finding}, {"a", "node-a", finding}, {"b", "node-b", finding},
	}))
	if strings.Count(out, "no answer") != 3 || strings.Count(out, "controller") != 1 {
		t.Errorf("got %q, want one row for the controller and one for each node", out)
	}
}

// TestClusterVolumeTable: a PersistentVolume that is not bound has its phase beside the claim.
func TestClusterVolumeTable(t *testing.T) {
	for phase, want := range map[string]string{"Bound": "ns/data ", "Released": "ns/data (Released)"} {
		if out := written(t, clusterVolumeTable([]kubectl.Volume{{Volume: status.Volume{Claim: "ns/data", Phase: phase}}})); !strings.Contains(out, want) || phase == "Bound" && strings.Contains(out, phase) {
			t.Errorf("%s: got %q, want %q", phase, out, want)
		}
	}
}

// TestNoOrphans: without orphans the table is empty.
func TestNoOrphans(t *testing.T) {
	if out := written(t, orphanTable(nil)); strings.TrimSpace(out) != "" {
		t.Errorf("got %q, want no header", out)
	}
}
