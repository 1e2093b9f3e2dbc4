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

	"github.com/trivet-csi/trivet/internal/crashpoint"
	"github.com/trivet-csi/trivet/internal/testenv/nfsd"
)

var (
	onExport = []kind{directory, ext4}
	images   = []kind{ext4, block}
)

// nodeLocal are points that volumes on an export do not pass: those of limits and disks.
var nodeLocal = []crashpoint.Point{
	crashpoint.CreateLimited, crashpoint.ReapRemoved,
	crashpoint.ClaimEntry, crashpoint.ClaimMarked, crashpoint.StageNoted, crashpoint.GrowBackup, crashpoint.ReapZeroed, crashpoint.ReapErasing,
}

// exportRows has at least one row for each point. They cover what only volumes on an export
// leave behind.
var exportRows = []row{
	{point: crashpoint.CreateReserved, call: create, kinds: onExport},
	{point: crashpoint.CreateImage, call: create, kinds: []kind{block}},
	{point: crashpoint.CreateImage, call: create, thick: true, kinds: []kind{ext4}},
	{point: crashpoint.CreateBuilt, call: create, kinds: onExport},
	{point: crashpoint.CreatePlaced, call: create, class: nested, kinds: []kind{directory}},
	{point: crashpoint.CreateBuilt, call: create, class: nested, kinds: []kind{directory}},
	{point: crashpoint.CreateCommitted, call: create, kinds: onExport},
	{point: crashpoint.CreateCommitted, call: create, class: nested, kinds: []kind{directory}},
	{point: crashpoint.CreateDone, call: create, kinds: onExport},

	{point: crashpoint.AttachWritten, call: attach, kinds: onExport},
	{point: crashpoint.AttachLinked, call: attach, kinds: onExport},
	{point: crashpoint.DetachRemoved, call: detached, kinds: onExport},

	{point: crashpoint.StageLocked, call: stage, kinds: images},
	{point: crashpoint.StageFormatting, call: stage, kinds: []kind{ext4, xfs}},
	{point: crashpoint.StageHalfFormat, call: stage, kinds: []kind{ext4, xfs}},
	{point: crashpoint.StageFormatted, call: stage, kinds: []kind{ext4}},
	{point: crashpoint.StageMarked, call: stage, kinds: []kind{ext4}},
	{point: crashpoint.StageBound, call: stage, kinds: images},
	{point: crashpoint.StageAttached, call: stage, kinds: images},
	{point: crashpoint.StageAttached, call: stage, used: true, kinds: images},
	{point: crashpoint.StageMounted, call: stage, kinds: onExport},
	{point: crashpoint.StageMounted, call: stage, used: true, kinds: onExport},
	{point: crashpoint.StageDone, call: stage, kinds: []kind{directory, xfs, block}},

	{point: crashpoint.PublishTarget, call: publish, used: true, kinds: []kind{directory, block}},
	{point: crashpoint.PublishReadOnly, call: publish, used: true, readOnly: true, kinds: raw},
	{point: crashpoint.PublishDone, call: publish, used: true, readOnly: true, kinds: []kind{directory, block}},

	{point: crashpoint.GrowImage, call: expand, kinds: []kind{directory, xfs}},
	{point: crashpoint.GrowRecord, call: expand, kinds: []kind{directory, ext4}},
	{point: crashpoint.GrowDevice, call: nodeExpand, kinds: images},
	{point: crashpoint.GrowDone, call: nodeExpand, kinds: []kind{ext4}},

	{point: crashpoint.UnpublishGone, call: unpublish, kinds: []kind{directory, block}},
	{point: crashpoint.UnpublishTarget, call: unpublish, readOnly: true, kinds: []kind{directory, block}},
	{point: crashpoint.UnpublishDone, call: unpublish, kinds: []kind{directory}},
	{point: crashpoint.UnstageMount, call: unstage, kinds: []kind{directory, ext4, block}},
	{point: crashpoint.UnstageGone, call: unstage, kinds: []kind{directory, ext4, block}},

	{point: crashpoint.DeleteRenamed, call: remove, kinds: onExport},
	{point: crashpoint.DeleteRenamed, call: remove, class: nested, kinds: []kind{directory}},
	{point: crashpoint.DeleteDone, call: remove, kinds: onExport},
	{point: crashpoint.ReapStarted, call: remove, kinds: onExport},

	{point: crashpoint.FreezeFrozen, call: cut, frozen: true, kinds: []kind{ext4}},
	{point: crashpoint.SnapshotData, call: cut, used: true, kinds: onExport},
	{point: crashpoint.SnapshotBuilt, call: cut, kinds: []kind{ext4}},
	{point: crashpoint.SnapshotBuilt, call: cut, group: true, kinds: []kind{ext4}},
	{point: crashpoint.SnapshotCommitted, call: cut, used: true, kinds: onExport},
	{point: crashpoint.SnapshotDone, call: cut, used: true, kinds: onExport},
	{point: crashpoint.SnapshotDeleted, call: drop, kinds: onExport},
	{point: crashpoint.CreateBuilt, call: create, restored: true, kinds: onExport},
	{point: crashpoint.StageIdentified, call: stage, restored: true, kinds: []kind{ext4}},
}

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
					how, after = "instead", goBack
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
