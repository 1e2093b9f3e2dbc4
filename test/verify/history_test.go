package verify

import (
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"syscall"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/internal/treetest"
)

// history is a source volume with its snapshots, clones and restored volumes.
type history struct {
	*testDriver
	seed   uint64
	rand   *rand.Rand
	totals *totals // of all histories of the pool

	kind   kind
	source *vol
	size   int64 // of the source in bytes
	writer *writer
	// tree is true if the source also contains a directory tree that does not change.
	tree     bool
	captures []*capture
}

// capture is a snapshot or a clone of the source, made after one moment of the writer and before
// another.
type capture struct {
	id            string // of the snapshot; empty for a clone
	copy          *vol   // the clone, or the volume restored from the snapshot
	size          int64  // of the source in bytes
	after, before moment
}

// newHistory returns a history. Histories with consecutive seeds have all kinds of volume of the driver.
func newHistory(t *testing.T, g *testDriver, seed uint64, totals *totals) *history {
	t.Helper()
	r := rand.New(rand.NewPCG(seed, 0))
	h := &history{testDriver: g, seed: seed, rand: r, totals: totals, kind: g.kinds[seed%uint64(len(g.kinds))]}
	h.size = h.kind.Size()
	h.tree = !h.kind.Block() && r.IntN(4) == 0
	h.writer = newWriter(seed, h.blocks())
	h.writer.unzeroed = h.kind.Has(backendtest.Encrypted)
	return h
}

// blocks returns the number of blocks of the file or device in the source.
func (h *history) blocks() int {
	if !h.kind.Block() {
		return 256
	}
	return int(h.size / blockSize)
}

// name returns a name of a volume or snapshot that no other history uses.
func (h *history) name(what string) string { return fmt.Sprintf("%s-%x", what, h.seed) }

// run writes to the source with a step after each write, compares the source and the captures with what was written, and
// removes everything.
func (h *history) run(t *testing.T) {
	t.Logf("%s, tree: %t", h.kind.Name(), h.tree)
	h.source = h.newVol(t, h.kind, h.name("source"), h.size, nil)
	t.Cleanup(func() { h.takeDown(t) })
	h.source.publish(t)
	if h.tree {
		must(t, os.Mkdir(h.source.tree(), 0o755))
		treetest.Make(t, h.source.tree(), h.seed)
	}
	for _, step := range h.steps() {
		h.write(t)
		step(t)
		h.checkSource(t)
		h.writer.blocks = h.blocks() // the source may have grown
	}
	h.compareSnapshots(t)
	for i, c := range h.captures {
		h.checkCopy(t, i, c)
	}
	h.removeAll(t)
}

// steps returns what happens to the source, in random order.
func (h *history) steps() []func(*testing.T) {
	steps := []func(*testing.T){h.restage}
	if h.kind.Has(backendtest.Snapshots) {
		steps = append(steps, slices.Repeat([]func(*testing.T){h.capture}, 2+h.rand.IntN(2))...)
	}
	if h.grows() {
		steps = append(steps, h.growInUse, h.growAtRest)
	}
	if h.restarts {
		steps = append(steps, h.restartDriver)
	}
	h.rand.Shuffle(len(steps), func(i, j int) { steps[i], steps[j] = steps[j], steps[i] })
	return steps
}

// restage unpublishes and unstages the source, and publishes it again.
func (h *history) restage(t *testing.T) {
	t.Helper()
	h.source.unpublish(t)
	h.source.publish(t)
}

// grows reports whether this machine can grow volumes of the kind. To grow an ext4 needs CAP_SYS_RESOURCE.
func (h *history) grows() bool {
	return h.kind.Has(backendtest.Expand|backendtest.Divisible) && (h.kind.FSType != "ext4" || !testenv.IsWithout("ext4-growth"))
}

// growInUse expands the source while it is written.
func (h *history) growInUse(t *testing.T) {
	t.Helper()
	h.whileWriting(t, func() {
		if !h.expand(t) {
			return
		}
		_, err := h.node.NodeExpandVolume(t.Context(), &csi.NodeExpandVolumeRequest{
			VolumeId: h.source.id, VolumePath: h.source.target, StagingTargetPath: h.source.staging, VolumeCapability: capability(h.kind),
		})
		must(t, err)
	})
}

// growAtRest expands the source while it is not staged.
func (h *history) growAtRest(t *testing.T) {
	t.Helper()
	h.source.unpublish(t)
	h.expand(t)
	h.source.publish(t)
}

// expand expands the source, and reports whether the node must be called too.
func (h *history) expand(t *testing.T) (onNode bool) {
	t.Helper()
	h.size += h.kind.Size()
	resp, err := h.control.ControllerExpandVolume(t.Context(), &csi.ControllerExpandVolumeRequest{
		VolumeId: h.source.id, CapacityRange: &csi.CapacityRange{RequiredBytes: h.size}, VolumeCapability: capability(h.kind),
	})
	must(t, err)
	return resp.GetNodeExpansionRequired()
}

// restartDriver ends the driver, in half of the histories with SIGKILL, while the source is written.
func (h *history) restartDriver(t *testing.T) {
	t.Helper()
	signal := []syscall.Signal{syscall.SIGKILL, syscall.SIGTERM}[h.rand.IntN(2)]
	h.whileWriting(t, func() { must(t, h.restart(signal)) })
}

// checkSource compares the source with what was written.
func (h *history) checkSource(t *testing.T) {
	t.Helper()
	must(t, h.writer.check(h.source.file(), h.writer.moment(), h.writer.moment()))
	h.totals.comparisons.Add(1)
}

// takeDown unmounts the volumes if the history has failed.
func (h *history) takeDown(t *testing.T) {
	t.Helper()
	if !t.Failed() {
		return
	}
	for _, v := range h.volumes() {
		for _, at := range []string{v.target, v.staging} {
			_, _ = testenv.Output("/", "umount", at)
		}
	}
}

// volumes returns the source, the clones and the restored volumes.
func (h *history) volumes() []*vol {
	out := []*vol{h.source}
	for _, c := range h.captures {
		if c.copy != nil {
			out = append(out, c.copy)
		}
	}
	return out
}

// write writes a random number of batches.
func (h *history) write(t *testing.T) {
	t.Helper()
	must(t, h.writer.write(h.source.file(), 1+h.rand.IntN(6)))
}

// live reports whether the driver can make snapshots and clones while the source is written.
func (h *history) live() bool {
	switch {
	case h.kind.Has(backendtest.Directory):
		return h.subvolumes
	case h.kind.Block():
		return h.shares
	}
	return true
}

// capture makes a snapshot, or sometimes a clone: of an unpublished source if the kind requires it,
// otherwise after a write without a sync, or during writes.
func (h *history) capture(t *testing.T) {
	t.Helper()
	c := &capture{size: h.size}
	h.captures = append(h.captures, c)
	create := h.snapshot
	if h.rand.IntN(4) == 0 {
		create = h.clone
	}
	take := func() {
		c.after = h.writer.moment()
		create(t, c, h.name(fmt.Sprintf("capture-%d", len(h.captures))))
		c.before = h.writer.moment()
	}
	switch {
	case !h.live():
		h.source.unpublish(t)
		take()
		h.source.publish(t)
	case h.rand.IntN(3) == 0:
		must(t, h.writer.writeUnsynced(h.source.file()))
		take()
	default:
		h.whileWriting(t, take)
	}
}

// whileWriting calls do while the writer writes batches to the source.
func (h *history) whileWriting(t *testing.T, do func()) {
	t.Helper()
	stop, ended := make(chan struct{}), make(chan error)
	go func() { ended <- h.writer.writeUntil(h.source.file(), stop) }()
	defer func() {
		close(stop)
		must(t, <-ended)
	}()
	do()
}

// snapshot takes a snapshot of the source, in some cases with consistency frozen.
func (h *history) snapshot(t *testing.T, c *capture, name string) {
	t.Helper()
	class := map[string]string{}
	if h.rand.IntN(4) == 0 && h.kind.Has(backendtest.Filesystem) {
		class["consistency"] = "frozen"
	}
	resp, err := h.control.CreateSnapshot(t.Context(), &csi.CreateSnapshotRequest{Name: name, SourceVolumeId: h.source.id, Parameters: class})
	must(t, err)
	c.id = resp.GetSnapshot().GetSnapshotId()
}

// clone creates a clone of the source.
func (h *history) clone(t *testing.T, c *capture, name string) {
	t.Helper()
	c.copy = h.newVol(t, h.kind, name, c.size, &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Volume{
		Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: h.source.id},
	}})
}

// restore creates a volume from the snapshot of a capture, in some cases with twice its size.
func (h *history) restore(t *testing.T, c *capture, name string) {
	t.Helper()
	size := c.size
	if h.grows() {
		size *= 1 + h.rand.Int64N(2)
	}
	c.copy = h.newVol(t, h.kind, name, size, &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Snapshot{
		Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: c.id},
	}})
}

// compareSnapshots checks the allocated blocks of each snapshot, and the changed blocks between each
// pair of snapshots.
func (h *history) compareSnapshots(t *testing.T) {
	t.Helper()
	if !h.kind.Has(backendtest.ChangedBlocks) {
		return
	}
	var snapshots []*capture
	for _, c := range h.captures {
		if c.id != "" {
			snapshots = append(snapshots, c)
		}
	}
	for i, newer := range snapshots {
		somewhere := h.rand.Int64N(h.kind.Size())
		for _, from := range []int64{0, somewhere} {
			h.checkAllocated(t, newer, from)
			for _, older := range snapshots[:i] {
				h.checkDelta(t, older, newer, from)
			}
		}
	}
}

// checkCopy compares a clone or a restored volume with the content of the source. Then it writes to
// the volume, so that later comparisons fail if the write has changed other volumes.
func (h *history) checkCopy(t *testing.T, i int, c *capture) {
	t.Helper()
	if c.copy == nil {
		h.restore(t, c, h.name(fmt.Sprintf("copy-%d", i)))
	}
	v := c.copy
	v.publish(t)
	must(t, h.writer.check(v.file(), c.after, c.before))
	if h.tree {
		treetest.Compare(t, h.source.tree(), v.tree())
	}
	h.totals.comparisons.Add(1)
	must(t, newWriter(h.seed+1, 8).write(v.file(), 2))
	v.unpublish(t)
}

// removeAll checks the source again, and deletes the volumes and snapshots in random order.
func (h *history) removeAll(t *testing.T) {
	t.Helper()
	h.checkSource(t)
	var removals []func()
	for _, v := range h.volumes() {
		removals = append(removals, func() { v.remove(t) })
	}
	for _, c := range h.captures {
		if c.id != "" {
			removals = append(removals, func() {
				_, err := h.control.DeleteSnapshot(t.Context(), &csi.DeleteSnapshotRequest{SnapshotId: c.id})
				must(t, err)
			})
		}
	}
	h.rand.Shuffle(len(removals), func(i, j int) { removals[i], removals[j] = removals[j], removals[i] })
	for _, remove := range removals {
		remove()
	}
}
