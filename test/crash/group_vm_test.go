//go:build vm

package crash

import (
	"slices"
	"strings"
	"testing"

	"github.com/trivet-csi/trivet/backend/backendtest/targets"
	"github.com/trivet-csi/trivet/internal/crashpoint"
)

// The kinds of rows for thin pools.
var (
	thinXFS = []kind{{targets.Volume("thin", "xfs"), "thin"}}
	thinRaw = []kind{{targets.Volume("thin", "block"), "thin-raw"}}
	inThin  = slices.Concat(thinXFS, thinRaw)
)

// thinRows contains the rows for volumes in a thin pool. The points of a stage are those of groupRows.
var thinRows = slices.Concat(
	at(row{call: create, kinds: thinXFS}, crashpoint.CreateReserved, crashpoint.CreateImage, crashpoint.CreateCommitted),
	at(row{call: stage, kinds: inThin}, crashpoint.StageNoted),
	at(row{call: expand, kinds: thinXFS}, crashpoint.GrowImage),
	at(row{call: remove, kinds: thinXFS}, crashpoint.DeleteRenamed, crashpoint.ReapStarted),
	at(row{call: snapshot, kinds: inThin}, crashpoint.CreateImage, crashpoint.SnapshotData, crashpoint.SnapshotBuilt),
	at(row{call: snapshot, kinds: thinXFS, used: true}, crashpoint.SnapshotCommitted),
	at(row{call: snapshot, kinds: thinXFS, group: true}, crashpoint.FreezeFrozen, crashpoint.CreateImage, crashpoint.SnapshotCommitted),
	at(row{call: deleteSnapshot, kinds: thinXFS}, crashpoint.SnapshotDeleted, crashpoint.ReapStarted),
	at(row{call: deleteSnapshot, kinds: thinXFS, group: true}, crashpoint.SnapshotDeleted),
	at(row{call: create, kinds: thinXFS, restored: true}, crashpoint.CreateReserved, crashpoint.CreateCommitted),
	at(row{call: create, kinds: inThin, restored: true}, crashpoint.CreateImage),
	at(row{call: stage, kinds: thinXFS, restored: true}, crashpoint.StageNoted, crashpoint.StageIdentified),
)

// The kinds of rows for encrypted logical volumes.
var (
	cryptGroupExt4 = []kind{{targets.Volume("group-encrypted", "ext4"), "gcrypt"}}
	cryptGroupRaw  = []kind{{targets.Volume("group-encrypted", "block"), "gcrypt-raw"}}
	cryptGroup     = slices.Concat(cryptGroupExt4, cryptGroupRaw)
	cryptThinExt4  = []kind{{targets.Volume("thin-encrypted", "ext4"), "tcrypt"}}
)

// encryptedGroupRows contains the rows for encrypted logical volumes.
var encryptedGroupRows = slices.Concat(
	at(row{call: stage, kinds: cryptGroup},
		crashpoint.StageAttached, crashpoint.StageFormatting, crashpoint.StageEncrypted, crashpoint.StageOpened, crashpoint.StageErased, crashpoint.StageNoted, crashpoint.StageDone),
	at(row{call: stage, kinds: cryptGroupExt4}, crashpoint.StageFormatted, crashpoint.StageMarked, crashpoint.StageMounted),
	at(row{call: stage, kinds: cryptGroup, used: true}, crashpoint.StageOpened),
	at(row{call: publish, kinds: cryptGroupRaw, used: true, readOnly: true}, crashpoint.PublishReadOnly),
	at(row{call: expand, kinds: cryptGroup}, crashpoint.GrowImage, crashpoint.GrowRecord),
	at(row{call: nodeExpand, kinds: cryptGroup}, crashpoint.GrowDevice),
	at(row{call: unstage, kinds: cryptGroup}, crashpoint.UnstageMount),
	at(row{call: remove, kinds: cryptGroup}, crashpoint.DeleteErased, crashpoint.DeleteRenamed),
)

// encryptedThinRows contains the rows for encrypted volumes in a thin pool, beside encryptedGroupRows.
var encryptedThinRows = slices.Concat(
	at(row{call: snapshot, kinds: cryptThinExt4}, crashpoint.FreezeFrozen),
	at(row{call: snapshot, kinds: cryptThinExt4, used: true}, crashpoint.SnapshotCommitted),
	at(row{call: snapshot, kinds: cryptThinExt4, group: true}, crashpoint.FreezeFrozen),
	at(row{call: create, kinds: cryptThinExt4, restored: true}, crashpoint.CreateImage),
	at(row{call: stage, kinds: cryptThinExt4, restored: true}, crashpoint.StageNoted, crashpoint.StageIdentified),
	at(row{call: remove, kinds: cryptThinExt4}, crashpoint.DeleteErased),
)

// TestEncryptedGroup is TestGroup for encrypted volumes.
func TestEncryptedGroup(t *testing.T) {
	testRows(t, encryptedGroupRows, cryptGroupExt4[0], cryptGroupRaw[0], cryptGroupExt4[0])
}

// TestEncryptedThin is TestGroup for encrypted volumes in thin pools.
func TestEncryptedThin(t *testing.T) {
	testRows(t, encryptedThinRows, slices.Repeat(cryptThinExt4, 3)...)
}

// TestGroup kills the driver at crash points and at random moments, for logical volumes. A program that the driver has
// started is killed with it. Half of the rows repeat the interrupted call, and the others undo it.
func TestGroup(t *testing.T) { testRows(t, groupRows, groupXFS[0], groupRaw[0], groupXFS[0]) }

// TestThin is TestGroup for volumes in thin pools.
func TestThin(t *testing.T) { testRows(t, thinRows, thinXFS[0], thinRaw[0], thinXFS[0]) }

// testRows runs rows, and kills the driver at random moments while it serves a volume of each element of kinds.
func testRows(t *testing.T, rows []row, kinds ...kind) {
	t.Run("random", func(t *testing.T) { kinds[0].host(t).randomMoments(t, kinds...) })
	t.Run("rows", func(t *testing.T) {
		for i, r := range rows {
			for j, k := range r.kinds {
				how, after := "retry", retryCall
				if (i+j)%2 == 1 {
					how, after = "undo", undoCall
				}
				if name := r.name(k) + "/" + how; strings.Contains(name, *only) {
					t.Run(name, func(t *testing.T) {
						t.Parallel()
						r.run(t, k.host(t), k, after)
					})
				}
			}
		}
	})
}
