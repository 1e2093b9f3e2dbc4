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

// The kinds of rows for pools on exports.
var (
	directory = kindsWith(backendtest.Directory | backendtest.Shared)
	onExport  = slices.Concat(directory, ext4)
	withRaw   = slices.Concat(directory, raw)
	formats   = images("ext4", "xfs")
)

// nodeLocal contains the points of quotas, disks, volume groups and images that are formatted when they are created, which volumes on
// an export do not reach.
var nodeLocal = []crashpoint.Point{
	crashpoint.CreateHalfFormat, crashpoint.CreateZeroed, crashpoint.GrowZeroed, crashpoint.GrowFreed, crashpoint.CreateLimited, crashpoint.ReapRemoved,
	crashpoint.ClaimEntry, crashpoint.ClaimMarked, crashpoint.StageNoted, crashpoint.GrowBackup, crashpoint.ReapZeroed, crashpoint.ReapErasing,
	crashpoint.ReceiveSynced, crashpoint.ReceiveRecorded, crashpoint.ReceiveMade, crashpoint.ReceiveMoved, crashpoint.ReceiveAbandoned,
}

// exportRows contains the rows for volumes on an export. Each point except those of nodeLocal has at
// least one row.
var exportRows = slices.Concat(
	at(row{call: create, kinds: onExport}, crashpoint.CreateReserved, crashpoint.CreateBuilt, crashpoint.CreateCommitted, crashpoint.CreateDone),
	at(row{call: create, kinds: raw}, crashpoint.CreateImage),
	at(row{call: create, kinds: ext4, thick: true}, crashpoint.CreateImage),
	at(row{call: create, kinds: directory, class: inSubDir}, crashpoint.CreatePlaced, crashpoint.CreateBuilt, crashpoint.CreateCommitted),

	at(row{call: controllerPublish, kinds: onExport}, crashpoint.AttachWritten, crashpoint.AttachLinked),
	at(row{call: controllerUnpublish, kinds: onExport}, crashpoint.DetachRemoved),

	at(row{call: stage, kinds: ext4AndRaw}, crashpoint.StageLocked, crashpoint.StageBound, crashpoint.StageAttached),
	at(row{call: stage, kinds: ext4AndRaw, used: true}, crashpoint.StageAttached),
	at(row{call: stage, kinds: formats}, crashpoint.StageFormatting, crashpoint.StageHalfFormat),
	at(row{call: stage, kinds: ext4}, crashpoint.StageFormatted, crashpoint.StageMarked),
	at(row{call: stage, kinds: onExport}, crashpoint.StageMounted),
	at(row{call: stage, kinds: onExport, used: true}, crashpoint.StageMounted),
	at(row{call: stage, kinds: slices.Concat(directory, growable)}, crashpoint.StageDone),

	at(row{call: publish, kinds: withRaw, used: true}, crashpoint.PublishTarget),
	at(row{call: publish, kinds: raw, used: true, readOnly: true}, crashpoint.PublishReadOnly),
	at(row{call: publish, kinds: withRaw, used: true, readOnly: true}, crashpoint.PublishDone),

	at(row{call: expand, kinds: slices.Concat(directory, images("xfs"))}, crashpoint.GrowImage),
	at(row{call: expand, kinds: onExport}, crashpoint.GrowRecord),
	at(row{call: nodeExpand, kinds: ext4AndRaw}, crashpoint.GrowDevice),
	at(row{call: nodeExpand, kinds: ext4}, crashpoint.GrowDone),

	at(row{call: unpublish, kinds: withRaw}, crashpoint.UnpublishGone),
	at(row{call: unpublish, kinds: withRaw, readOnly: true}, crashpoint.UnpublishTarget),
	at(row{call: unpublish, kinds: directory}, crashpoint.UnpublishDone),
	at(row{call: unstage, kinds: slices.Concat(directory, ext4AndRaw)}, crashpoint.UnstageMount, crashpoint.UnstageGone),

	at(row{call: remove, kinds: onExport}, crashpoint.DeleteRenamed, crashpoint.DeleteDone, crashpoint.ReapStarted),
	at(row{call: remove, kinds: directory, class: inSubDir}, crashpoint.DeleteRenamed),

	at(row{call: snapshot, kinds: ext4, frozen: true}, crashpoint.FreezeFrozen),
	at(row{call: snapshot, kinds: onExport, used: true}, crashpoint.SnapshotData, crashpoint.SnapshotCommitted, crashpoint.SnapshotDone),
	at(row{call: snapshot, kinds: ext4}, crashpoint.SnapshotBuilt),
	at(row{call: snapshot, kinds: ext4, group: true}, crashpoint.SnapshotBuilt),
	at(row{call: deleteSnapshot, kinds: onExport}, crashpoint.SnapshotDeleted),
	at(row{call: create, kinds: onExport, restored: true}, crashpoint.CreateBuilt),
	at(row{call: stage, kinds: ext4, restored: true}, crashpoint.StageIdentified),
	exportEncryptedRows,
)

var only = flag.String("rows", "", "run only the rows of TestNFS and TestProject whose names contain this `text`; default all")

// TestNFS kills the process that serves a pool on an export, and then the driver. After the crash, half
// of the rows repeat the interrupted call, and the others undo it.
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
				how, after := "retry", retryCall
				if (i+j)%2 == 1 {
					how, after = "undo", undoCall
				}
				if name := r.name(k) + "/" + how; strings.Contains(name, *only) {
					t.Run(name, func(t *testing.T) {
						t.Parallel()
						r.runOnExport(t, server, k, after)
					})
				}
			}
		}
	})
}

// runOnExport runs a row with a new export.
func (r row) runOnExport(t *testing.T, server *nfsd.Server, k kind, after func(*testing.T, *co, row)) {
	t.Helper()
	h := newExportHost(t, server, strings.ReplaceAll(r.name(k), "/", "-"), r.armedAtFirst())
	must(t, h.wantNoSubDir(r.run(t, h, k, after)))
}

// newExportHost returns a node with an empty pool on a new export and a running driver.
func newExportHost(t *testing.T, server *nfsd.Server, name string, armed crashpoint.Point) *host {
	t.Helper()
	path := server.Export(t, name)
	h := &host{binary: crashing, dir: newDir(t), pool: server.Dir(path), export: &export{server.Address(), path, name}}
	h.begin(t, fmt.Sprintf("nfs: {server: %s, export: %s, init: true}", h.export.server, h.export.path), armed)
	return h
}

// wantNoSubDir fails if the directory of a deleted volume with a subDir is left.
func (h *host) wantNoSubDir(c *co) error {
	if c.class["subDir"] == "" {
		return nil
	}
	if _, err := os.Lstat(filepath.Join(h.pool, c.class["subDir"])); !os.IsNotExist(err) {
		return fmt.Errorf("got error %w for the subDir %s of a deleted volume, want %w", err, c.class["subDir"], os.ErrNotExist)
	}
	return nil
}
