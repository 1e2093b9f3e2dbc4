package crash

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/internal/crashpoint"
)

// row is a way to reach a point.
type row struct {
	point crashpoint.Point
	call  call
	// used: the volume was staged and written to before.
	used bool
	// readOnly: the volume is published read-only.
	readOnly bool
	thick    bool
	// frozen: snapshots are taken with consistency frozen. group: they are of two volumes.
	frozen, group bool
	// restored: the volume is made of a snapshot.
	restored bool
	// pool is the type of the pool's filesystem; empty: that of the kind's target.
	pool string
	// class has parameters of the StorageClass.
	class map[string]string
	kinds []kind
}

// nested is a class whose directories are in a subDir.
var nested = map[string]string{"subDir": "team/claim"}

// at returns rows for several points.
func at(r row, points ...crashpoint.Point) (rows []row) {
	for _, r.point = range points {
		rows = append(rows, r)
	}
	return rows
}

// rows and snapshotRows have at least one row for each point.
var rows = slices.Concat(
	at(row{call: create, kinds: each}, crashpoint.CreateReserved, crashpoint.CreateBuilt, crashpoint.CreateCommitted),
	at(row{call: create, kinds: one}, crashpoint.CreateImage, crashpoint.CreateDone),
	at(row{call: create, kinds: raw}, crashpoint.CreateCommitted),
	at(row{call: create, kinds: one, thick: true}, crashpoint.CreateImage),
	at(row{call: create, kinds: limited}, crashpoint.CreateLimited),
	at(row{call: create, kinds: limited, class: nested},
		crashpoint.CreateLimited, crashpoint.CreatePlaced, crashpoint.CreateBuilt, crashpoint.CreateCommitted),
	at(row{call: create, kinds: disks}, crashpoint.ClaimEntry, crashpoint.ClaimMarked),

	at(row{call: attach, kinds: one}, crashpoint.AttachWritten, crashpoint.AttachLinked),
	at(row{call: detached, kinds: one}, crashpoint.DetachRemoved),

	at(row{call: stage, kinds: both}, crashpoint.StageLocked, crashpoint.StageBound),
	at(row{call: stage, kinds: both, thick: true}, crashpoint.StageBound),
	at(row{call: stage, kinds: formatted},
		crashpoint.StageFormatting, crashpoint.StageHalfFormat, crashpoint.StageFormatted, crashpoint.StageMarked, crashpoint.StageMounted),
	at(row{call: stage, kinds: images("ext4", "xfs", rawDevice)}, crashpoint.StageAttached, crashpoint.StageDone),
	at(row{call: stage, kinds: one, thick: true}, crashpoint.StageHalfFormat),
	at(row{call: stage, kinds: images("xfs"), thick: true}, crashpoint.StageFormatted),
	at(row{call: stage, kinds: images("xfs"), used: true}, crashpoint.StageLocked, crashpoint.StageMounted),
	at(row{call: stage, kinds: both, used: true}, crashpoint.StageAttached, crashpoint.StageDone),
	at(row{call: stage, kinds: each, used: true}, crashpoint.StageMounted),
	at(row{call: stage, kinds: local}, crashpoint.StageDone),
	at(row{call: stage, kinds: disks},
		crashpoint.StageAttached, crashpoint.StageFormatting, crashpoint.StageFormatted, crashpoint.StageNoted, crashpoint.StageMarked),

	at(row{call: publish, kinds: slices.Concat(local, both), used: true}, crashpoint.PublishTarget),
	at(row{call: publish, kinds: raw, used: true, readOnly: true}, crashpoint.PublishTarget, crashpoint.PublishReadOnly),
	at(row{call: publish, kinds: images("btrfs", rawDevice), used: true}, crashpoint.PublishDone),
	at(row{call: publish, kinds: both, used: true, readOnly: true}, crashpoint.PublishDone),

	at(row{call: expand, kinds: slices.Concat(growable, local)}, crashpoint.GrowImage, crashpoint.GrowRecord),
	at(row{call: expand, kinds: raw, thick: true}, crashpoint.GrowImage),
	at(row{call: expand, kinds: disks}, crashpoint.GrowBackup, crashpoint.GrowImage),
	at(row{call: nodeExpand, kinds: slices.Concat(growable, disks)}, crashpoint.GrowDevice),
	at(row{call: nodeExpand, kinds: images("xfs", "btrfs", rawDevice)}, crashpoint.GrowDone),

	at(row{call: unpublish, kinds: both}, crashpoint.UnpublishGone, crashpoint.UnpublishTarget),
	at(row{call: unpublish, kinds: growable}, crashpoint.UnpublishDone),
	at(row{call: unpublish, kinds: raw, readOnly: true},
		crashpoint.UnpublishGone, crashpoint.UnpublishTarget, crashpoint.UnpublishDone),
	at(row{call: unstage, kinds: slices.Concat(each, growable)}, crashpoint.UnstageMount),
	at(row{call: unstage, kinds: both}, crashpoint.UnstageGone),

	at(row{call: remove, kinds: each}, crashpoint.DeleteRenamed),
	at(row{call: remove, kinds: limited, class: nested}, crashpoint.DeleteRenamed),
	at(row{call: remove, kinds: one}, crashpoint.DeleteDone),
	at(row{call: remove, kinds: disks}, crashpoint.ReapZeroed, crashpoint.ReapErasing),
	at(row{call: remove, kinds: limited}, crashpoint.ReapRemoved),
	at(row{call: remove, kinds: slices.Concat(local, both)}, crashpoint.ReapStarted),
)

// before lists the calls before a call, for a volume that was not staged before it.
var before = map[call][]call{
	create:     nil,
	attach:     {create},
	stage:      {create, attach},
	publish:    {create, attach, stage},
	expand:     {create, attach, stage, publish, write},
	nodeExpand: {create, attach, stage, publish, write, expand},
	unpublish:  {create, attach, stage, publish, write},
	unstage:    {create, attach, stage, publish, write, unpublish},
	detached:   {create, attach, stage, publish, write, unpublish, unstage},
	remove:     {create, attach, stage, publish, write, unpublish, unstage, detached},
	cut:        {create, attach, stage, publish, write},
	drop:       {create, attach, stage, publish, write, unpublish, unstage, detached, cut},
}

// beforeUsed is before for a volume that has data.
var beforeUsed = map[call][]call{
	stage:   {create, attach, stage, publish, write, unpublish, unstage},
	publish: {create, attach, stage, publish, write, unpublish},
	cut:     {create, attach, stage, publish, write, unpublish, unstage, detached},
}

// instead lists the calls that undo a call.
var instead = map[call][]call{
	create:     {remove},
	attach:     {detached},
	stage:      {unstage},
	publish:    {unpublish},
	expand:     {unpublish, unstage},
	nodeExpand: {unpublish, unstage},
	unpublish:  {publish},
	unstage:    {stage},
	detached:   {attach},
	remove:     {create},
	cut:        {drop},
	drop:       {cut},
}

func (r row) path() []call {
	if r.used {
		return beforeUsed[r.call]
	}
	return before[r.call]
}

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
		{r.call == drop, "-dropped"}, // two rows of one name would have a # in it, which ends a socket's address
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

func TestEveryPointAndKindHasARow(t *testing.T) {
	for _, p := range crashpoint.All {
		if !slices.ContainsFunc(allRows(), func(r row) bool { return r.point == p }) {
			t.Errorf("no row reaches %s", p)
		}
	}
	for _, k := range with(backendtest.NodeLocal) {
		if !slices.ContainsFunc(allRows(), func(r row) bool {
			return slices.ContainsFunc(r.kinds, func(one kind) bool { return one.name == k.name })
		}) {
			t.Errorf("no row has kind %s", k)
		}
	}
}

// TestAgain makes the interrupted call again.
func TestAgain(t *testing.T) {
	t.Parallel()
	eachRow(t, callAgain)
}

func callAgain(t *testing.T, c *co, r row) {
	t.Helper()
	must(t, c.do(r.call))
	if r.call == expand {
		must(t, c.do(nodeExpand))
	}
}

// TestInstead undoes the interrupted call.
func TestInstead(t *testing.T) {
	t.Parallel()
	eachRow(t, callInstead)
}

func callInstead(t *testing.T, c *co, r row) {
	t.Helper()
	must(t, c.do(instead[r.call]...))
}

// eachRow kills the driver at each point, calls after, and checks that the volume works and
// can be deleted.
func eachRow(t *testing.T, after func(*testing.T, *co, row)) {
	t.Helper()
	for _, r := range allRows() {
		for _, k := range r.kinds {
			t.Run(r.name(k), func(t *testing.T) {
				t.Parallel()
				r.run(t, r.host(t, k), k, after)
			})
		}
	}
}

func (r row) run(t *testing.T, h *host, k kind, after func(*testing.T, *co, row)) *co {
	t.Helper()
	c := r.crash(t, h, k)
	must(t, h.start(""))
	after(t, c, r)
	c.finish(t)
	return c
}

// host starts a driver with a pool for a kind of volume.
func (r row) host(t *testing.T, k kind) *host {
	t.Helper()
	if r.pool != "" {
		return newHost(t, r.pool, crashing, "")
	}
	return k.host(t, "")
}

// crash makes the calls before the row's call, makes that call to an armed driver, and checks
// that the driver dies.
func (r row) crash(t *testing.T, h *host, k kind) *co {
	t.Helper()
	c := r.begin(t, h, k)
	// A volume is written before it is published read-only.
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

// begin makes the calls before the row's path.
func (r row) begin(t *testing.T, h *host, k kind) *co {
	t.Helper()
	c, err := newCO(h, "pvc-1", k)
	if r.restored {
		c, err = newRestored(h, "pvc-1", k)
	}
	must(t, err)
	c.thick, c.class, c.frozen = r.thick, r.class, r.frozen
	if !r.group {
		return c
	}
	c.partner, err = newCO(h, "pvc-2", k)
	must(t, err)
	must(t, c.partner.do(before[cut]...))
	return c
}

// armedAtFirst is the row's point, if no earlier call passes it.
func (r row) armedAtFirst() crashpoint.Point {
	if r.used || r.readOnly || r.restored {
		return ""
	}
	return r.point
}

// behindAnswer are the points that are reached after the response.
var behindAnswer = []crashpoint.Point{
	crashpoint.ReapStarted, crashpoint.ReapRemoved, crashpoint.ReapZeroed, crashpoint.ReapErasing,
}

func (r row) reach(t *testing.T, c *co) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	c.host.wantCrash(t, r.call, r.point, c.attempt(ctx, r.call))
}

// wantCrash fails the test unless a call killed the armed driver. err is the result of the
// call.
func (h *host) wantCrash(t *testing.T, what call, point crashpoint.Point, err error) {
	t.Helper()
	if err == nil && !slices.Contains(behindAnswer, point) {
		t.Fatalf("%s succeeded without a crash at %s", what, point)
	}
	if h.shared() {
		h.awaitCrash(t, err)
		return
	}
	if err != nil && status.Code(err) != codes.Unavailable || !h.process.ended() {
		t.Fatalf("%s did not reach %s; it returned %v", what, point, err)
	}
	if !h.process.killed() {
		t.Fatalf("the driver ended with %v, want SIGKILL", h.process.cmd.ProcessState)
	}
}

// finish checks that the volume can be used and has its content, deletes it, and checks that
// nothing is left.
func (c *co) finish(t *testing.T) {
	t.Helper()
	if c.created {
		must(t, c.do(attach, stage, publish))
		must(t, c.verify())
		must(t, c.do(unpublish, unstage, detached, remove))
	}
	if c.partner != nil {
		must(t, c.partner.do(unpublish, unstage, detached, remove))
	}
	must(t, c.finishSnapshots())
	must(t, c.host.empty())
	if c.kind.Has(backendtest.Limited) {
		must(t, c.host.limitsNothing())
	}
	if c.kind.Has(backendtest.WholeDisk) {
		must(t, c.host.blank())
	}
	must(t, c.host.stop())
	must(t, c.host.ownsNothing())
}
