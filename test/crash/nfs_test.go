//go:build vm

package crash

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/internal/crashpoint"
	"github.com/trivet-csi/trivet/internal/testenv/nfsd"
)

var (
	directory = with(backendtest.Directory | backendtest.Shared)
	onExport  = slices.Concat(directory, one)
	withRaw   = slices.Concat(directory, raw)
	formats   = images("ext4", "xfs")
)

// nodeLocal are points that volumes on an export do not reach: those of limits and disks.
var nodeLocal = []crashpoint.Point{
	crashpoint.CreateLimited, crashpoint.ReapRemoved,
	crashpoint.ClaimEntry, crashpoint.ClaimMarked, crashpoint.StageNoted, crashpoint.GrowBackup, crashpoint.ReapZeroed, crashpoint.ReapErasing,
}

// exportRows has at least one row for each point. The rows check what only volumes on an export
// leave behind.
var exportRows = slices.Concat(
	at(row{call: create, kinds: onExport}, crashpoint.CreateReserved, crashpoint.CreateBuilt, crashpoint.CreateCommitted, crashpoint.CreateDone),
	at(row{call: create, kinds: raw}, crashpoint.CreateImage),
	at(row{call: create, kinds: one, thick: true}, crashpoint.CreateImage),
	at(row{call: create, kinds: directory, class: nested}, crashpoint.CreatePlaced, crashpoint.CreateBuilt, crashpoint.CreateCommitted),

	at(row{call: attach, kinds: onExport}, crashpoint.AttachWritten, crashpoint.AttachLinked),
	at(row{call: detached, kinds: onExport}, crashpoint.DetachRemoved),

	at(row{call: stage, kinds: both}, crashpoint.StageLocked, crashpoint.StageBound, crashpoint.StageAttached),
	at(row{call: stage, kinds: both, used: true}, crashpoint.StageAttached),
	at(row{call: stage, kinds: formats}, crashpoint.StageFormatting, crashpoint.StageHalfFormat),
	at(row{call: stage, kinds: one}, crashpoint.StageFormatted, crashpoint.StageMarked),
	at(row{call: stage, kinds: onExport}, crashpoint.StageMounted),
	at(row{call: stage, kinds: onExport, used: true}, crashpoint.StageMounted),
	at(row{call: stage, kinds: slices.Concat(directory, growable)}, crashpoint.StageDone),

	at(row{call: publish, kinds: withRaw, used: true}, crashpoint.PublishTarget),
	at(row{call: publish, kinds: raw, used: true, readOnly: true}, crashpoint.PublishReadOnly),
	at(row{call: publish, kinds: withRaw, used: true, readOnly: true}, crashpoint.PublishDone),

	at(row{call: expand, kinds: slices.Concat(directory, images("xfs"))}, crashpoint.GrowImage),
	at(row{call: expand, kinds: onExport}, crashpoint.GrowRecord),
	at(row{call: nodeExpand, kinds: both}, crashpoint.GrowDevice),
	at(row{call: nodeExpand, kinds: one}, crashpoint.GrowDone),

	at(row{call: unpublish, kinds: withRaw}, crashpoint.UnpublishGone),
	at(row{call: unpublish, kinds: withRaw, readOnly: true}, crashpoint.UnpublishTarget),
	at(row{call: unpublish, kinds: directory}, crashpoint.UnpublishDone),
	at(row{call: unstage, kinds: slices.Concat(directory, both)}, crashpoint.UnstageMount, crashpoint.UnstageGone),

	at(row{call: remove, kinds: onExport}, crashpoint.DeleteRenamed, crashpoint.DeleteDone, crashpoint.ReapStarted),
	at(row{call: remove, kinds: directory, class: nested}, crashpoint.DeleteRenamed),

	at(row{call: cut, kinds: one, frozen: true}, crashpoint.FreezeFrozen),
	at(row{call: cut, kinds: onExport, used: true}, crashpoint.SnapshotData, crashpoint.SnapshotCommitted, crashpoint.SnapshotDone),
	at(row{call: cut, kinds: one}, crashpoint.SnapshotBuilt),
	at(row{call: cut, kinds: one, group: true}, crashpoint.SnapshotBuilt),
	at(row{call: drop, kinds: onExport}, crashpoint.SnapshotDeleted),
	at(row{call: create, kinds: onExport, restored: true}, crashpoint.CreateBuilt),
	at(row{call: stage, kinds: one, restored: true}, crashpoint.StageIdentified),
)

var only = flag.String("rows", "", "rows of TestNFS and TestProject to run, by a part of their names; default all")

// TestNFS kills the process that serves a pool on an export, and then the driver. Every other
// row makes the opposite call instead of the interrupted one.
func TestNFS(t *testing.T) {
	for _, p := range crashpoint.All {
		if !slices.Contains(nodeLocal, p) && !slices.ContainsFunc(exportRows, func(r row) bool { return r.point == p }) {
			t.Errorf("no row reaches %s", p)
		}
	}
	server := nfsd.Start(t, nfsd.Options{})
	t.Run("rows", func(t *testing.T) {
		for i, r := range exportRows {
			for j, k := range r.kinds {
				how, after := "again", callAgain
				if (i+j)%2 == 1 {
					how, after = "instead", callInstead
				}
				if name := r.name(k) + "/" + how; strings.Contains(name, *only) {
					t.Run(name, func(t *testing.T) {
						t.Parallel()
						r.onExport(t, server, k, after)
					})
				}
			}
		}
	})
}

func (r row) onExport(t *testing.T, server *nfsd.Server, k kind, after func(*testing.T, *co, row)) {
	t.Helper()
	h := newExportHost(t, server, strings.ReplaceAll(r.name(k), "/", "-"), r.armedAtFirst())
	must(t, h.leftNoDirectory(r.run(t, h, k, after)))
}

// newExportHost makes a node with an empty pool on a new export.
func newExportHost(t *testing.T, server *nfsd.Server, name string, armed crashpoint.Point) *host {
	t.Helper()
	path := server.Export(t, name)
	h := &host{binary: crashing, dir: t.TempDir(), pool: server.Dir(path), export: &export{server.Address(), path, name}}
	h.begin(t, fmt.Sprintf("nfs: {server: %s, export: %s, init: true}", h.export.server, h.export.path), armed)
	return h
}

// leftNoDirectory fails if the subDir of a deleted volume is left.
func (h *host) leftNoDirectory(c *co) error {
	if c.class["subDir"] == "" {
		return nil
	}
	if _, err := os.Lstat(filepath.Join(h.pool, c.class["subDir"])); !os.IsNotExist(err) {
		return fmt.Errorf("%s is left of the volume: %w", c.class["subDir"], err)
	}
	return nil
}
