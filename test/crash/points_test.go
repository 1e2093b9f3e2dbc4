package crash

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/internal/crashpoint"
	"github.com/trivet-csi/trivet/volume"
)

// row describes a call during which the driver reaches a crash point, for some kinds of volume.
type row struct {
	point crashpoint.Point
	call  call
	// used means that the volume was staged and written before.
	used bool
	// readOnly means that the volume is published read-only.
	readOnly bool
	// thick means that all blocks of the image are allocated when the volume is created.
	thick bool
	// frozen means that snapshots are taken with consistency frozen, and group that each snapshot is
	// a group snapshot of two volumes.
	frozen, group bool
	// size is the requested size of the volume in bytes; 0 means the size of the kind.
	size int64
	// restored means that the volume is restored from a snapshot.
	restored bool
	// pool is the filesystem of the pool; if it is empty, the pool is that of the kind's target.
	pool string
	// class contains additional parameters of the StorageClass.
	class map[string]string
	kinds []kind
}

// inSubDir is a class whose volumes are directories in a subDir.
var inSubDir = map[string]string{"subDir": "team/claim"}

// at returns a copy of a row for each point.
func at(r row, points ...crashpoint.Point) (rows []row) {
	for _, r.point = range points {
		rows = append(rows, r)
	}
	return rows
}

// formattedLate returns rows for the images of each filesystem that are formatted when they are staged, because their class has
// options of mkfs.
func formattedLate(r row, points ...crashpoint.Point) (rows []row) {
	for fsType, options := range map[string]string{"ext4": "-m 1", "xfs": "-i maxpct=20", "btrfs": "-d single"} {
		r.kinds, r.class = images(fsType), map[string]string{volume.ParamMkfsOptions: options}
		if fsType == "btrfs" { // the smallest size for options (blockdev.CheckOptions)
			r.size = 512 << 20
		}
		rows = append(rows, at(r, points...)...)
	}
	return rows
}

// rows contains the rows without snapshots.
var rows = slices.Concat(
	at(row{call: create, kinds: onePerTarget}, crashpoint.CreateReserved, crashpoint.CreateBuilt, crashpoint.CreateCommitted),
	at(row{call: create, kinds: ext4}, crashpoint.CreateImage, crashpoint.CreateDone),
	at(row{call: create, kinds: raw}, crashpoint.CreateCommitted),
	at(row{call: create, kinds: filesystemImages}, crashpoint.CreateHalfFormat),
	at(row{call: create, kinds: images("xfs", "btrfs")}, crashpoint.CreateImage, crashpoint.CreateBuilt, crashpoint.CreateCommitted),
	at(row{call: create, kinds: ext4, thick: true}, crashpoint.CreateHalfFormat, crashpoint.CreateImage),
	at(row{call: create, kinds: limited}, crashpoint.CreateLimited),
	at(row{call: create, kinds: limited, class: inSubDir},
		crashpoint.CreateLimited, crashpoint.CreatePlaced, crashpoint.CreateBuilt, crashpoint.CreateCommitted),
	at(row{call: create, kinds: disks}, crashpoint.ClaimEntry, crashpoint.ClaimMarked),

	at(row{call: controllerPublish, kinds: ext4}, crashpoint.AttachWritten, crashpoint.AttachLinked),
	at(row{call: controllerUnpublish, kinds: ext4}, crashpoint.DetachRemoved),

	at(row{call: stage, kinds: ext4AndRaw}, crashpoint.StageLocked, crashpoint.StageBound),
	at(row{call: stage, kinds: ext4AndRaw, thick: true}, crashpoint.StageBound),
	at(row{call: stage, kinds: filesystemImages}, crashpoint.StageMounted),
	formattedLate(row{call: stage}, crashpoint.StageFormatting, crashpoint.StageHalfFormat, crashpoint.StageFormatted, crashpoint.StageMarked, crashpoint.StageMounted),
	at(row{call: stage, kinds: images("ext4", "xfs", rawDevice)}, crashpoint.StageAttached, crashpoint.StageDone),
	formattedLate(row{call: stage, thick: true}, crashpoint.StageHalfFormat, crashpoint.StageFormatted),
	at(row{call: stage, kinds: images("xfs"), used: true}, crashpoint.StageLocked, crashpoint.StageMounted),
	at(row{call: stage, kinds: ext4AndRaw, used: true}, crashpoint.StageAttached, crashpoint.StageDone),
	at(row{call: stage, kinds: onePerTarget, used: true}, crashpoint.StageMounted),
	at(row{call: stage, kinds: local}, crashpoint.StageDone),
	at(row{call: stage, kinds: disks},
		crashpoint.StageAttached, crashpoint.StageFormatting, crashpoint.StageFormatted, crashpoint.StageNoted, crashpoint.StageMarked),

	at(row{call: publish, kinds: slices.Concat(local, ext4AndRaw), used: true}, crashpoint.PublishTarget),
	at(row{call: publish, kinds: raw, used: true, readOnly: true}, crashpoint.PublishTarget, crashpoint.PublishReadOnly),
	at(row{call: publish, kinds: images("btrfs", rawDevice), used: true}, crashpoint.PublishDone),
	at(row{call: publish, kinds: ext4AndRaw, used: true, readOnly: true}, crashpoint.PublishDone),

	at(row{call: expand, kinds: slices.Concat(growable, local)}, crashpoint.GrowImage, crashpoint.GrowRecord),
	at(row{call: expand, kinds: raw, thick: true}, crashpoint.GrowImage),
	at(row{call: expand, kinds: disks}, crashpoint.GrowBackup, crashpoint.GrowImage),
	at(row{call: nodeExpand, kinds: slices.Concat(growable, disks)}, crashpoint.GrowDevice),
	at(row{call: nodeExpand, kinds: images("xfs", "btrfs", rawDevice)}, crashpoint.GrowDone),

	at(row{call: modify, kinds: ext4AndRaw}, crashpoint.ModifyRecorded),

	at(row{call: check, kinds: images("ext4", "xfs", "btrfs"), pool: "xfs"}, crashpoint.CheckAttached),
	at(row{call: check, kinds: images("xfs"), pool: "btrfs"}, crashpoint.CheckAttached),

	at(row{call: unpublish, kinds: ext4AndRaw}, crashpoint.UnpublishGone, crashpoint.UnpublishTarget),
	at(row{call: unpublish, kinds: growable}, crashpoint.UnpublishDone),
	at(row{call: unpublish, kinds: raw, readOnly: true},
		crashpoint.UnpublishGone, crashpoint.UnpublishTarget, crashpoint.UnpublishDone),
	at(row{call: unstage, kinds: slices.Concat(onePerTarget, growable)}, crashpoint.UnstageMount),
	at(row{call: unstage, kinds: ext4AndRaw}, crashpoint.UnstageGone),

	at(row{call: remove, kinds: onePerTarget}, crashpoint.DeleteRenamed),
	at(row{call: remove, kinds: limited, class: inSubDir}, crashpoint.DeleteRenamed),
	at(row{call: remove, kinds: ext4}, crashpoint.DeleteDone),
	at(row{call: remove, kinds: disks}, crashpoint.ReapZeroed, crashpoint.ReapErasing),
	at(row{call: remove, kinds: limited}, crashpoint.ReapRemoved),
	at(row{call: remove, kinds: slices.Concat(local, ext4AndRaw)}, crashpoint.ReapStarted),
)

// before lists the calls that precede a call. The volume is not used before them.
var before = map[call][]call{
	create:              nil,
	controllerPublish:   {create},
	stage:               {create, controllerPublish},
	publish:             {create, controllerPublish, stage},
	expand:              {create, controllerPublish, stage, publish, write},
	nodeExpand:          {create, controllerPublish, stage, publish, write, expand},
	modify:              {create, controllerPublish, stage, publish, write},
	unpublish:           {create, controllerPublish, stage, publish, write},
	unstage:             {create, controllerPublish, stage, publish, write, unpublish},
	controllerUnpublish: {create, controllerPublish, stage, publish, write, unpublish, unstage},
	remove:              {create, controllerPublish, stage, publish, write, unpublish, unstage, controllerUnpublish},
	snapshot:            {create, controllerPublish, stage, publish, write},
	check:               {create, controllerPublish, stage, publish, write},
	deleteSnapshot:      {create, controllerPublish, stage, publish, write, unpublish, unstage, controllerUnpublish, snapshot},
}

// beforeUsed lists the calls that precede a call of a row with used.
var beforeUsed = map[call][]call{
	stage:    {create, controllerPublish, stage, publish, write, unpublish, unstage},
	expand:   {create, controllerPublish, stage, publish, write, unpublish, unstage},
	publish:  {create, controllerPublish, stage, publish, write, unpublish},
	snapshot: {create, controllerPublish, stage, publish, write, unpublish, unstage, controllerUnpublish},
}

// undo lists the calls that undo a call.
var undo = map[call][]call{
	create:              {remove},
	controllerPublish:   {controllerUnpublish},
	stage:               {unstage},
	publish:             {unpublish},
	expand:              {unpublish, unstage},
	nodeExpand:          {unpublish, unstage},
	modify:              {unpublish, unstage},
	unpublish:           {publish},
	unstage:             {stage},
	controllerUnpublish: {controllerPublish},
	remove:              {create},
	snapshot:            {deleteSnapshot},
	deleteSnapshot:      {snapshot},
	check:               nil,
}

// path returns the calls that precede the row's call.
func (r row) path() []call {
	if r.used {
		return beforeUsed[r.call]
	}
	return before[r.call]
}

// name returns the name of the subtest that runs the row for a kind.
func (r row) name(k kind) string {
	name := fmt.Sprintf("%s/%s", r.point, k)
	for _, one := range []struct {
		is   bool
		name string
	}{
		{r.used, "-used"},
		{r.readOnly, "-ro"},
		{r.thick, "-thick"},
		{r.frozen, "-frozen"},
		{r.group, "-group"},
		{r.restored, "-restored"},
		{r.call == deleteSnapshot, "-dropped"}, // without it, two rows would have the same name
		{r.pool != "", "-on-" + r.pool},
	} {
		if one.is {
			name += one.name
		}
	}
	for _, key := range slices.Sorted(maps.Keys(r.class)) {
		name += "-" + r.class[key]
	}
	return name
}

func allRows() []row { return slices.Concat(rows, snapshotRows) }

// TestEveryPointAndKindHasARow checks that the rows contain each crash point and each kind of volume in
// pools of a node.
func TestEveryPointAndKindHasARow(t *testing.T) {
	for _, p := range crashpoint.All {
		inRow := slices.ContainsFunc(slices.Concat(allRows(), groupRows, encryptedRows), func(r row) bool { return r.point == p })
		if !inRow && !slices.Contains(directoryPoints, p) {
			t.Errorf("no row reaches %s", p)
		}
	}
	for _, k := range kindsWith(backendtest.NodeLocal) {
		if !slices.ContainsFunc(allRows(), func(r row) bool {
			return slices.ContainsFunc(r.kinds, func(one kind) bool { return one.name == k.name })
		}) {
			t.Errorf("no row has kind %s", k)
		}
	}
}

// TestRetry repeats the interrupted call after the crash.
func TestRetry(t *testing.T) {
	t.Parallel()
	eachRow(t, 0, retryCall)
}

// retryCall repeats the row's call, and makes the call that follows an expansion.
func retryCall(t *testing.T, c *co, r row) {
	t.Helper()
	must(t, c.do(r.call))
	if r.call == expand {
		must(t, c.do(nodeExpand))
	}
}

// TestUndo undoes the interrupted call after the crash.
func TestUndo(t *testing.T) {
	t.Parallel()
	eachRow(t, 1, undoCall)
}

// undoCall makes the calls that undo the row's call.
func undoCall(t *testing.T, c *co, r row) {
	t.Helper()
	must(t, c.do(undo[r.call]...))
}

// eachRow runs each row for each of its kinds, in parallel. With -short it runs each row for one of its kinds. shift selects
// another one, so that TestRetry and TestUndo use different kinds.
func eachRow(t *testing.T, shift int, after func(*testing.T, *co, row)) {
	t.Helper()
	for i, r := range allRows() {
		kinds := r.kinds
		if testing.Short() {
			kinds = []kind{r.kinds[(i+shift)%len(r.kinds)]}
		}
		for _, k := range kinds {
			t.Run(r.name(k), func(t *testing.T) {
				t.Parallel()
				r.run(t, r.host(t, k), k, after)
			})
		}
	}
}

// run crashes the driver of the host during the row's call, restarts it, calls after, and checks that the
// volume can be used and deleted.
func (r row) run(t *testing.T, h *host, k kind, after func(*testing.T, *co, row)) *co {
	t.Helper()
	c := r.crash(t, h, k)
	must(t, h.start(""))
	after(t, c, r)
	c.finish(t)
	return c
}

// host starts a driver with the pool of the row, or with a pool for the kind.
func (r row) host(t *testing.T, k kind) *host {
	t.Helper()
	if r.pool != "" {
		return newHost(t, r.pool, crashing, "")
	}
	return k.host(t)
}

// crash makes the calls that precede the row's call. Then it arms the driver and makes the row's call,
// during which the driver must crash.
func (r row) crash(t *testing.T, h *host, k kind) *co {
	t.Helper()
	c := r.begin(t, h, k)
	// The volume is written before it is published read-only.
	path := r.path()
	written := slices.Index(path, write) + 1
	must(t, c.do(path[:written]...))
	if r.readOnly && r.call == unpublish {
		must(t, c.do(unpublish))
		c.readOnly = true
		must(t, c.do(publish))
	}
	must(t, c.do(path[written:]...))
	c.readOnly = r.readOnly
	if c.host.armed != r.point {
		must(t, c.host.stop())
		must(t, c.host.start(r.point))
	}
	r.reach(t, c)
	return c
}

// begin returns the orchestrator of the row's volume. If the row needs a snapshot or a second volume,
// it creates them.
func (r row) begin(t *testing.T, h *host, k kind) *co {
	t.Helper()
	c, err := newCO(h, "pvc-1", k)
	if r.restored {
		c, err = newRestored(h, "pvc-1", k)
	}
	must(t, err)
	c.thick, c.class, c.frozen, c.size = r.thick, r.class, r.frozen, cmp.Or(r.size, c.size)
	if !r.group {
		return c
	}
	c.partner, err = newCO(h, "pvc-2", k)
	must(t, err)
	must(t, c.partner.do(before[snapshot]...))
	return c
}

// armedAtFirst returns the point with which the first driver may be armed: the row's point, unless an
// earlier call reaches it.
func (r row) armedAtFirst() crashpoint.Point {
	if r.used || r.readOnly || r.restored {
		return ""
	}
	return r.point
}

// afterResponse contains the points that the driver reaches after the response.
var afterResponse = []crashpoint.Point{
	crashpoint.ReapStarted, crashpoint.ReapRemoved, crashpoint.ReapZeroed, crashpoint.ReapErasing,
}

// reach makes the row's call, during which the driver must crash.
func (r row) reach(t *testing.T, c *co) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), waitTimeout)
	defer cancel()
	c.host.wantCrash(t, r.call, r.point, c.attempt(ctx, r.call))
}

// wantCrash fails the test unless the driver crashed at a point during a call. err is the result of
// the call.
func (h *host) wantCrash(t *testing.T, what call, point crashpoint.Point, err error) {
	t.Helper()
	if err == nil && !slices.Contains(afterResponse, point) {
		t.Fatalf("got success of %s, want a crash at %s", what, point)
	}
	if h.shared() {
		h.awaitCrash(t, err)
		return
	}
	if err != nil && status.Code(err) != codes.Unavailable || !h.process.ended() {
		t.Fatalf("got error %v from %s, want UNAVAILABLE because of a crash at %s", err, what, point)
	}
	if !h.process.killed() {
		t.Fatalf("got %v from the driver, want SIGKILL", h.process.cmd.ProcessState)
	}
}

// use checks that an existing volume can be used and has the expected content. Then it deletes the volume.
func (c *co) use() error {
	if err := c.do(controllerPublish, stage, publish); err != nil {
		return err
	}
	if err := c.verify(); err != nil {
		return err
	}
	return c.do(unpublish, unstage, controllerUnpublish, remove)
}

// finish checks that the volume can be used and has the expected content. Then it deletes the volume
// and the snapshots, ends the driver, and checks that nothing is left.
func (c *co) finish(t *testing.T) {
	t.Helper()
	if c.created {
		must(t, c.use())
	}
	if c.partner != nil {
		must(t, c.partner.do(unpublish, unstage, controllerUnpublish, remove))
	}
	must(t, c.finishSnapshots())
	must(t, c.host.awaitEmpty())
	if c.kind.Has(backendtest.Limited) {
		must(t, c.host.wantNoLimits())
	}
	if c.kind.Has(backendtest.WholeDisk) {
		must(t, wantBlank(c.host.disk))
	}
	if c.kind.Has(backendtest.Logical) {
		must(t, backendtest.CheckOnlyRecords(c.host.group))
	}
	must(t, c.host.stop())
	must(t, c.host.wantNothingOwned())
}
