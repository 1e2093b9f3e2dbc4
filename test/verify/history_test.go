package verify

import (
	"fmt"
	"math/rand/v2"
	"os"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/internal/treetest"
)

// history is one volume with its snapshots, clones and restored volumes.
type history struct {
	*ground
	seed  uint64
	rand  *rand.Rand
	tally *tally

	kind   kind
	source *vol
	writer *writer
	// tree: the volume has a directory tree that does not change.
	tree bool
	cuts []*cut
}

// cut is a snapshot or a clone that was made between two moments.
type cut struct {
	id            string // of a snapshot
	copy          *vol   // the clone, or what the snapshot was restored to
	after, before moment
}

func newHistory(t *testing.T, g *ground, seed uint64, into *tally) *history {
	t.Helper()
	r := rand.New(rand.NewPCG(seed, 0))
	h := &history{ground: g, seed: seed, rand: r, tally: into, kind: g.kinds[r.IntN(len(g.kinds))]}
	h.tree = !h.kind.Block() && r.IntN(4) == 0
	blocks := 256
	if h.kind.Block() {
		blocks = int(h.kind.Size() / blockSize)
	}
	h.writer = newWriter(seed, blocks)
	return h
}

func (h *history) name(what string) string { return fmt.Sprintf("%s-%x", what, h.seed) }

func (h *history) run(t *testing.T) {
	t.Logf("%s, tree: %t", h.kind.Name(), h.tree)
	h.source = h.newVol(t, h.kind, h.name("source"), h.kind.Size(), nil)
	t.Cleanup(func() { h.takeDown(t) })
	h.source.publish(t)
	if h.tree {
		must(t, os.Mkdir(h.source.tree(), 0o755))
		treetest.Make(t, h.source.tree(), h.seed)
	}
	for i := range 2 + h.rand.IntN(2) {
		h.write(t)
		h.cut(t, i)
	}
	h.compareCuts(t)
	for i, c := range h.cuts {
		h.checkCopy(t, i, c)
	}
	h.removeAll(t)
}

// takeDown unmounts the volumes of a failed history.
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

// volumes returns all volumes of the history.
func (h *history) volumes() []*vol {
	out := []*vol{h.source}
	for _, c := range h.cuts {
		if c.copy != nil {
			out = append(out, c.copy)
		}
	}
	return out
}

// write lets the writer run for a random time.
func (h *history) write(t *testing.T) {
	t.Helper()
	must(t, h.writer.some(h.source.file(), 1+h.rand.IntN(6)))
}

// live reports whether a copy can be made while the volume is written.
func (h *history) live() bool {
	switch {
	case h.kind.Has(backendtest.Directory):
		return h.subvolumes
	case h.kind.Block():
		return h.shares
	}
	return true
}

// cut makes a snapshot, or sometimes a clone.
func (h *history) cut(t *testing.T, i int) {
	t.Helper()
	c := &cut{}
	h.cuts = append(h.cuts, c)
	take := h.snapshot
	if h.rand.IntN(4) == 0 {
		take = h.clone
	}
	cut := func() {
		c.after = h.writer.moment()
		take(t, c, h.name(fmt.Sprintf("cut-%d", i)))
		c.before = h.writer.moment()
	}
	switch {
	case !h.live():
		h.source.unpublish(t)
		cut()
		h.source.publish(t)
	case h.rand.IntN(3) == 0:
		must(t, h.writer.unsynced(h.source.file()))
		cut()
	default:
		h.whileWriting(t, cut)
	}
}

func (h *history) whileWriting(t *testing.T, do func()) {
	t.Helper()
	stop, ended := make(chan struct{}), make(chan error)
	go func() { ended <- h.writer.until(h.source.file(), stop) }()
	defer func() {
		close(stop)
		must(t, <-ended)
	}()
	do()
}

func (h *history) snapshot(t *testing.T, c *cut, name string) {
	t.Helper()
	class := map[string]string{}
	if h.rand.IntN(4) == 0 && h.kind.Has(backendtest.Filesystem) {
		class["consistency"] = "frozen"
	}
	resp, err := h.control.CreateSnapshot(t.Context(), &csi.CreateSnapshotRequest{Name: name, SourceVolumeId: h.source.id, Parameters: class})
	must(t, err)
	c.id = resp.GetSnapshot().GetSnapshotId()
}

func (h *history) clone(t *testing.T, c *cut, name string) {
	t.Helper()
	c.copy = h.newVol(t, h.kind, name, h.kind.Size(), &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Volume{
		Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: h.source.id},
	}})
}

func (h *history) restore(t *testing.T, c *cut, name string) {
	t.Helper()
	size := h.kind.Size()
	if h.kind.FSType != "ext4" { // which grows with a capability that not every machine gives
		size *= 1 + h.rand.Int64N(2)
	}
	c.copy = h.newVol(t, h.kind, name, size, &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Snapshot{
		Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: c.id},
	}})
}

// compareCuts compares each snapshot of an image with the later ones by their changed blocks.
func (h *history) compareCuts(t *testing.T) {
	t.Helper()
	if !h.kind.Has(backendtest.ChangedBlocks) {
		return
	}
	var snapshots []*cut
	for _, c := range h.cuts {
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

// checkCopy compares a clone, or a volume of a snapshot, with the written content, and writes
// to it. The write must not show in other volumes.
func (h *history) checkCopy(t *testing.T, i int, c *cut) {
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
	h.tally.volumes.Add(1)
	must(t, newWriter(h.seed+1, 8).some(v.file(), 2))
	v.unpublish(t)
}

// removeAll removes volumes and snapshots in any order.
func (h *history) removeAll(t *testing.T) {
	t.Helper()
	must(t, h.writer.check(h.source.file(), h.writer.moment(), h.writer.moment()))
	var removals []func()
	for _, v := range h.volumes() {
		removals = append(removals, func() { v.remove(t) })
	}
	for _, c := range h.cuts {
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
