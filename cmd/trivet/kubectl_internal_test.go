package main

import (
	"bytes"
	"strings"
	"testing"

	"github.com/trivet-csi/trivet/cluster/kubectl"
	"github.com/trivet-csi/trivet/cluster/move"
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

// TestCanTransfer: volumes in pools of a node can be sent to another node. Every node reaches those on an export.
func TestCanTransfer(t *testing.T) {
	for kind, want := range map[string]bool{"loop": true, "local": true, "nfs": false, "none": false} {
		if got := kinds.Transfer(kind); got != want {
			t.Errorf("%s: got %t, want %t", kind, got, want)
		}
	}
}

// TestPlanText: the plan tells how long the pods are stopped.
func TestPlanText(t *testing.T) {
	p := move.Plan{From: "a", To: "b", SizeBytes: 1 << 30, UsedBytes: 1 << 20, SnapshotClass: "snap", Pods: []move.PlannedPod{{Name: "db-0", Controller: "StatefulSet/db"}}, Cordon: true}
	f := moveFlags{Options: move.Options{Namespace: "ns", ClaimName: "data"}}
	text := planText(p, f)
	for _, want := range []string{"ns/data", "1 GiB", "at most 1 MiB", "db-0 of StatefulSet/db", "node a, during the stop", "while the last changes are copied"} {
		if !strings.Contains(text, want) {
			t.Errorf("got\n%s\nwant %q", text, want)
		}
	}
	p.Single = true
	if text := planText(p, f); !strings.Contains(text, "everything is copied, about 1m at 100 MiB/s, because node b has no room for two copies") {
		t.Errorf("got\n%s\nwant the time and the reason of the long stop", text)
	}
	p.UsedBytes, p.NoSnapshots, p.SnapshotClass = 1<<40, "there is none", ""
	if text := planText(p, f); !strings.Contains(text, "about 2h55m at 100 MiB/s, because there is none") || strings.Contains(text, "Snapshot class") {
		t.Errorf("got\n%s\nwant the time of a stop without snapshots, and its reason", text)
	}
	p.Pods, p.Cordon = nil, false
	if text := planText(p, f); strings.Contains(text, "Stop") || strings.Contains(text, "Cordon") {
		t.Errorf("got\n%s\nwant no stop, because no pod uses the claim", text)
	}
}
