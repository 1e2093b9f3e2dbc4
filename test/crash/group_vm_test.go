//go:build vm

package crash

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/trivet-csi/trivet/backend/backendtest/targets"
	"github.com/trivet-csi/trivet/internal/crashpoint"
	"github.com/trivet-csi/trivet/internal/testenv"
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
	at(row{call: check, kinds: thinXFS}, crashpoint.CheckAttached),
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

// takenOver is a class whose volume takes over a logical volume.
var takenOver = map[string]string{"logicalVolume": "existing"}

// takeoverRows contains the points of a call that takes over a logical volume.
var takeoverRows = slices.Concat(
	at(row{call: create, kinds: groupXFS, class: takenOver}, crashpoint.CreateReserved, crashpoint.CreateImage, crashpoint.CreateBuilt, crashpoint.CreateCommitted),
	at(row{call: create, kinds: thinXFS, class: takenOver}, crashpoint.CreateImage),
)

// TestTakeover kills the driver while it takes over a logical volume. Then the call is repeated, or the volume is deleted.
func TestTakeover(t *testing.T) {
	for _, r := range takeoverRows {
		for how, after := range map[string]func(*testing.T, *co, row){"retry": retryCall, "undo": undoTakeover} {
			t.Run(r.name(r.kinds[0])+"/"+how, func(t *testing.T) {
				k := r.kinds[0]
				h := k.host(t)
				h.newLogicalVolume(t, k)
				c := r.crash(t, h, k)
				c.written = true
				must(t, h.start(""))
				after(t, c, r)
				c.finish(t)
			})
		}
	}
}

// undoTakeover deletes the volume. If it was not committed before, the logical volume keeps its data and has no tags.
func undoTakeover(t *testing.T, c *co, r row) {
	t.Helper()
	must(t, c.do(remove))
	if r.point == crashpoint.CreateCommitted {
		return
	}
	must(t, poll(func(context.Context) error { return c.host.wantUntagged() }))
	c.host.withLogicalVolume(t, func(file string) {
		if got, err := os.ReadFile(file); err != nil || !bytes.Equal(got, c.data) {
			t.Errorf("the logical volume does not have its data: %v", err)
		}
	})
	testenv.Run(t, "lvm", "lvremove", "--yes", c.host.existing())
	must(t, c.host.stop()) // so that the driver reads the capacity again
	must(t, c.host.start(""))
}

// existing is the path of the logical volume of takenOver, in the notation of lvm(8).
func (h *host) existing() string { return h.group.VolumeGroup + "/existing" }

// newLogicalVolume creates the logical volume of takenOver, with a filesystem and the data of the row's volume.
func (h *host) newLogicalVolume(t *testing.T, k kind) {
	t.Helper()
	c, err := newCO(h, "pvc-1", k)
	must(t, err)
	size := []string{"--size", fmt.Sprintf("%db", k.Size()), h.group.VolumeGroup}
	if h.group.ThinPool != "" {
		size = []string{"--virtualsize", fmt.Sprintf("%db", k.Size()), "--thin", h.group.VolumeGroup + "/" + h.group.ThinPool}
	}
	testenv.Run(t, "lvm", append([]string{"lvcreate", "--yes", "--name", "existing"}, size...)...)
	testenv.Run(t, "mkfs."+k.FSType, "-q", "/dev/"+h.existing())
	h.withLogicalVolume(t, func(file string) { must(t, os.WriteFile(file, c.data, 0o600)) })
}

// withLogicalVolume calls f with the path of the file on the logical volume of takenOver.
func (h *host) withLogicalVolume(t *testing.T, f func(file string)) {
	t.Helper()
	dir := t.TempDir()
	testenv.Run(t, "lvm", "lvchange", "--activate", "y", h.existing())
	testenv.Run(t, "mount", "/dev/"+h.existing(), dir)
	f(filepath.Join(dir, "data"))
	testenv.Run(t, "umount", dir)
}

// wantUntagged fails if the logical volume of takenOver has tags.
func (h *host) wantUntagged() error {
	out, err := exec.Command("lvm", "lvs", "--noheadings", "-o", "lv_tags", h.existing()).Output()
	if tags := strings.TrimSpace(string(out)); err == nil && tags != "" {
		err = fmt.Errorf("got tags %q of the logical volume, want none", tags)
	}
	return err
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
