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

var (
	raw       = []kind{block}
	formatted = []kind{ext4, xfs, btrfs}
	growable  = []kind{xfs, block} // growing ext4 needs a capability that some machines lack
	onNode    = []kind{local, sixth}
)

// nested is a class whose directories are in a subDir.
var nested = map[string]string{"subDir": "team/claim"}

// rows and snapshotRows have at least one row for each point.
var rows = []row{
	{point: crashpoint.CreateReserved, call: create, kinds: []kind{ext4}},
	{point: crashpoint.CreateImage, call: create, kinds: []kind{ext4}},
	{point: crashpoint.CreateImage, call: create, thick: true, kinds: []kind{ext4}},
	{point: crashpoint.CreateBuilt, call: create, kinds: []kind{ext4}},
	{point: crashpoint.CreateCommitted, call: create, kinds: []kind{ext4, block}},
	{point: crashpoint.CreateDone, call: create, kinds: []kind{ext4}},

	{point: crashpoint.CreateReserved, call: create, kinds: []kind{sixth}},
	{point: crashpoint.CreateBuilt, call: create, kinds: []kind{sixth}},
	{point: crashpoint.CreateCommitted, call: create, kinds: []kind{sixth}},
	{point: crashpoint.CreateLimited, call: create, kinds: []kind{local}},
	{point: crashpoint.CreateLimited, call: create, class: nested, kinds: []kind{local}},
	{point: crashpoint.CreatePlaced, call: create, class: nested, kinds: []kind{local}},
	{point: crashpoint.CreateBuilt, call: create, class: nested, kinds: []kind{local}},
	{point: crashpoint.CreateCommitted, call: create, class: nested, kinds: []kind{local}},

	{point: crashpoint.CreateReserved, call: create, kinds: []kind{disk}},
	{point: crashpoint.ClaimEntry, call: create, kinds: []kind{disk}},
	{point: crashpoint.ClaimMarked, call: create, kinds: []kind{disk}},
	{point: crashpoint.CreateBuilt, call: create, kinds: []kind{disk}},
	{point: crashpoint.CreateCommitted, call: create, kinds: []kind{disk}},

	{point: crashpoint.AttachWritten, call: attach, kinds: []kind{ext4}},
	{point: crashpoint.AttachLinked, call: attach, kinds: []kind{ext4}},
	{point: crashpoint.DetachRemoved, call: detached, kinds: []kind{ext4}},

	{point: crashpoint.StageLocked, call: stage, kinds: []kind{ext4, block}},
	{point: crashpoint.StageFormatting, call: stage, kinds: formatted},
	{point: crashpoint.StageHalfFormat, call: stage, kinds: formatted},
	{point: crashpoint.StageFormatted, call: stage, kinds: formatted},
	{point: crashpoint.StageMarked, call: stage, kinds: formatted},
	{point: crashpoint.StageBound, call: stage, kinds: []kind{ext4, block}},
	{point: crashpoint.StageBound, call: stage, thick: true, kinds: []kind{ext4, block}},
	{point: crashpoint.StageAttached, call: stage, kinds: []kind{ext4, xfs, block}},
	{point: crashpoint.StageMounted, call: stage, kinds: formatted},
	{point: crashpoint.StageDone, call: stage, kinds: []kind{ext4, xfs, block}},
	{point: crashpoint.StageHalfFormat, call: stage, thick: true, kinds: []kind{ext4}},
	{point: crashpoint.StageFormatted, call: stage, thick: true, kinds: []kind{xfs}},
	{point: crashpoint.StageLocked, call: stage, used: true, kinds: []kind{xfs}},
	{point: crashpoint.StageAttached, call: stage, used: true, kinds: []kind{ext4, block}},
	{point: crashpoint.StageMounted, call: stage, used: true, kinds: []kind{ext4, xfs}},
	{point: crashpoint.StageDone, call: stage, used: true, kinds: []kind{ext4, block}},

	{point: crashpoint.StageMounted, call: stage, used: true, kinds: onNode},
	{point: crashpoint.StageDone, call: stage, kinds: onNode},

	{point: crashpoint.StageAttached, call: stage, kinds: []kind{disk}},
	{point: crashpoint.StageFormatting, call: stage, kinds: []kind{disk}},
	{point: crashpoint.StageFormatted, call: stage, kinds: []kind{disk}},
	{point: crashpoint.StageNoted, call: stage, kinds: []kind{disk}},
	{point: crashpoint.StageMarked, call: stage, kinds: []kind{disk}},
	{point: crashpoint.StageMounted, call: stage, used: true, kinds: []kind{disk}},

	{point: crashpoint.PublishTarget, call: publish, used: true, kinds: append(onNode, ext4, block)},
	{point: crashpoint.PublishTarget, call: publish, used: true, readOnly: true, kinds: raw},
	{point: crashpoint.PublishReadOnly, call: publish, used: true, readOnly: true, kinds: raw},
	{point: crashpoint.PublishDone, call: publish, used: true, kinds: []kind{btrfs, block}},
	{point: crashpoint.PublishDone, call: publish, used: true, readOnly: true, kinds: []kind{ext4, block}},

	{point: crashpoint.GrowImage, call: expand, kinds: growable},
	{point: crashpoint.GrowImage, call: expand, thick: true, kinds: raw},
	{point: crashpoint.GrowImage, call: expand, kinds: onNode},
	{point: crashpoint.GrowRecord, call: expand, kinds: growable},
	{point: crashpoint.GrowRecord, call: expand, kinds: onNode},
	{point: crashpoint.GrowBackup, call: expand, kinds: []kind{disk}},
	{point: crashpoint.GrowImage, call: expand, kinds: []kind{disk}},
	{point: crashpoint.GrowDevice, call: nodeExpand, kinds: growable},
	{point: crashpoint.GrowDevice, call: nodeExpand, kinds: []kind{disk}},
	{point: crashpoint.GrowDone, call: nodeExpand, kinds: []kind{xfs, btrfs, block}},

	{point: crashpoint.UnpublishGone, call: unpublish, kinds: []kind{ext4, block}},
	{point: crashpoint.UnpublishGone, call: unpublish, readOnly: true, kinds: raw},
	{point: crashpoint.UnpublishTarget, call: unpublish, kinds: []kind{ext4, block}},
	{point: crashpoint.UnpublishTarget, call: unpublish, readOnly: true, kinds: raw},
	{point: crashpoint.UnpublishDone, call: unpublish, kinds: []kind{xfs, block}},
	{point: crashpoint.UnpublishDone, call: unpublish, readOnly: true, kinds: raw},
	{point: crashpoint.UnstageMount, call: unstage, kinds: append(onNode, ext4, xfs, block)},
	{point: crashpoint.UnstageGone, call: unstage, kinds: []kind{ext4, block}},

	{point: crashpoint.DeleteRenamed, call: remove, kinds: append(onNode, ext4)},
	{point: crashpoint.DeleteRenamed, call: remove, class: nested, kinds: []kind{local}},
	{point: crashpoint.DeleteDone, call: remove, kinds: []kind{ext4}},
	{point: crashpoint.UnstageMount, call: unstage, kinds: []kind{disk}},
	{point: crashpoint.DeleteRenamed, call: remove, kinds: []kind{disk}},
	{point: crashpoint.ReapZeroed, call: remove, kinds: []kind{disk}},
	{point: crashpoint.ReapErasing, call: remove, kinds: []kind{disk}},
	{point: crashpoint.ReapRemoved, call: remove, kinds: []kind{local}},
	{point: crashpoint.ReapStarted, call: remove, kinds: append(onNode, ext4, block)},
}

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
		{r.call == drop, "-dropped"}, // two rows of one name had a # in it, which ends a socket's address
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

func TestEveryPointHasARow(t *testing.T) {
	for _, p := range crashpoint.All {
		if !slices.ContainsFunc(allRows(), func(r row) bool { return r.point == p }) {
			t.Errorf("no row reaches %s", p)
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
	eachRow(t, goBack)
}

func goBack(t *testing.T, c *co, r row) {
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

// behindAnswer are the points that are passed after the answer.
var behindAnswer = []crashpoint.Point{
	crashpoint.ReapStarted, crashpoint.ReapRemoved, crashpoint.ReapZeroed, crashpoint.ReapErasing,
}

func (r row) reach(t *testing.T, c *co) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	err := c.attempt(ctx, r.call)
	if err == nil && !slices.Contains(behindAnswer, r.point) {
		t.Fatalf("%s was answered: %s is not passed before that", r.call, r.point)
	}
	if c.host.shared() {
		c.host.awaitCrash(t, err)
		return
	}
	if err != nil && status.Code(err) != codes.Unavailable || !c.host.process.ended() {
		t.Fatalf("%s does not pass %s; it returned %v", r.call, r.point, err)
	}
	if p := c.host.process; !p.killed() {
		t.Fatalf("the driver was to die of SIGKILL, it ended with %v", p.cmd.ProcessState)
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
