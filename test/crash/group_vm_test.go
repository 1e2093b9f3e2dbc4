//go:build vm

package crash

import (
	"slices"
	"strings"
	"testing"

	"github.com/trivet-csi/trivet/backend/backendtest/targets"
	"github.com/trivet-csi/trivet/internal/crashpoint"
)

// The kinds of rows for volume groups.
var (
	groupXFS = []kind{{targets.Volume("group", "xfs"), "group"}}
	groupRaw = []kind{{targets.Volume("group", "block"), "group-raw"}}
	inGroup  = slices.Concat(groupXFS, groupRaw)
)

// groupRows contains the rows for logical volumes.
var groupRows = slices.Concat(
	at(row{call: create, kinds: groupXFS}, crashpoint.CreateReserved, crashpoint.CreateBuilt, crashpoint.CreateCommitted, crashpoint.CreateDone),
	at(row{call: create, kinds: inGroup}, crashpoint.CreateImage),
	at(row{call: stage, kinds: inGroup}, crashpoint.StageAttached, crashpoint.StageNoted, crashpoint.StageDone),
	at(row{call: stage, kinds: groupXFS}, crashpoint.StageFormatting, crashpoint.StageHalfFormat, crashpoint.StageFormatted, crashpoint.StageMarked, crashpoint.StageMounted),
	at(row{call: stage, kinds: inGroup, used: true}, crashpoint.StageAttached),
	at(row{call: publish, kinds: groupRaw, used: true, readOnly: true}, crashpoint.PublishReadOnly),
	at(row{call: expand, kinds: inGroup}, crashpoint.GrowImage),
	at(row{call: expand, kinds: groupXFS}, crashpoint.GrowRecord),
	at(row{call: nodeExpand, kinds: inGroup}, crashpoint.GrowDevice),
	at(row{call: unpublish, kinds: groupRaw, readOnly: true}, crashpoint.UnpublishTarget),
	at(row{call: unstage, kinds: inGroup}, crashpoint.UnstageMount, crashpoint.UnstageGone),
	at(row{call: remove, kinds: inGroup}, crashpoint.DeleteRenamed),
	at(row{call: remove, kinds: groupXFS}, crashpoint.ReapZeroed, crashpoint.ReapErasing, crashpoint.ReapStarted),
)

// TestGroup kills the driver at crash points and at random moments, for logical volumes. A program that the driver has
// started is killed with it. Half of the rows repeat the interrupted call, and the others undo it.
func TestGroup(t *testing.T) {
	t.Run("random", func(t *testing.T) {
		newGroupHost(t, groupXFS[0], "").randomMoments(t, groupXFS[0], groupRaw[0], groupXFS[0])
	})
	t.Run("rows", func(t *testing.T) {
		for i, r := range groupRows {
			for j, k := range r.kinds {
				how, after := "retry", retryCall
				if (i+j)%2 == 1 {
					how, after = "undo", undoCall
				}
				if name := r.name(k) + "/" + how; strings.Contains(name, *only) {
					t.Run(name, func(t *testing.T) {
						t.Parallel()
						r.run(t, newGroupHost(t, k, ""), k, after)
					})
				}
			}
		}
	})
}
