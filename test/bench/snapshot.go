package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/backend/backendtest/targets"
	"github.com/trivet-csi/trivet/test/markdown"
	"github.com/trivet-csi/trivet/test/measure"
)

// sourceImage describes a volume that is copied.
type sourceImage struct {
	name string
	size int64                // in bytes
	fill func(*os.File) error // writes the data of the volume to its image
	// extents is the minimum number of its extents.
	extents int
	// turns is how often five copies of each kind are made in a round.
	turns int
}

const (
	tib = 1 << 40
	// manyExtents is the number of extents of a fragmented image.
	manyExtents = 16384
	// extentsChanged is the number of extents that change between two snapshots.
	extentsChanged = 10000
)

// images returns the images that are copied on filesystems that can share blocks.
func images(o options) []sourceImage {
	data := int64(gib)
	if o.quick {
		data /= 8
	}
	return []sourceImage{
		{name: "10 GiB", size: 10 * gib, fill: inPieces(data, 8), extents: 8, turns: 4},
		{name: "1 TiB", size: tib, fill: inPieces(data, 8), extents: 8, turns: 4},
		{name: "10 GiB in extents", size: 10 * gib, fill: inPieces(manyExtents*4096, manyExtents), extents: manyExtents, turns: 1},
	}
}

// inPieces returns a function that writes data bytes to a file, in pieces of equal size that are evenly
// distributed.
func inPieces(data int64, pieces int) func(*os.File) error {
	return func(f *os.File) error {
		info, err := f.Stat()
		if err != nil {
			return err
		}
		piece := data / int64(pieces)
		b := make([]byte, min(piece, mib))
		_, _ = rand.NewChaCha8([32]byte{}).Read(b) // never fails
		for i := range int64(pieces) {
			at := info.Size() / int64(pieces) * i &^ 4095
			if err := writePiece(f, b, at, piece); err != nil {
				return err
			}
		}
		return f.Sync()
	}
}

// writePiece allocates a piece in one extent and fills it with copies of b.
func writePiece(f *os.File, b []byte, at, length int64) error {
	if err := unix.Fallocate(int(f.Fd()), 0, at, length); err != nil {
		return fmt.Errorf("fallocate: %w", err)
	}
	for end := at + length; at < end; at += int64(len(b)) {
		if _, err := f.WriteAt(b, at); err != nil {
			return err
		}
	}
	return nil
}

var (
	snapshot     = call{"snapshot", createSnapshot}
	restore      = call{"restore", createVolume}
	cloning      = call{"clone", createVolume}
	dropSnapshot = call{"delete a snapshot", deleteSnapshot}
)

func createSnapshot(ctx context.Context, c *client, v *vol) error {
	resp, err := c.CreateSnapshot(ctx, &csi.CreateSnapshotRequest{Name: v.name, SourceVolumeId: v.source})
	v.id = resp.GetSnapshot().GetSnapshotId()
	return err
}

func deleteSnapshot(ctx context.Context, c *client, v *vol) error {
	_, err := c.DeleteSnapshot(ctx, &csi.DeleteSnapshotRequest{SnapshotId: v.id})
	return err
}

func contentOfSnapshot(id string) *csi.VolumeContentSource {
	return &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Snapshot{Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: id}}}
}

func contentOfVolume(id string) *csi.VolumeContentSource {
	return &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Volume{Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: id}}}
}

// rawOf returns the class of block volumes.
func rawOf(size int64) class { return classOf(targets.Volume("images-xfs", "block"), size) }

// snapshotResult contains the times of copies that share blocks with their source.
type snapshotResult struct {
	fsType string
	images []sourceImage
	// samples contains the calls that copy. The call of a key is the name of the call and of the image.
	samples samples
	// others contains calls for other volumes. The server of a key is the name of the server that took
	// snapshots at the same time, or the constant alone.
	others samples
	// deltas are the durations of reading a list of changed blocks, and changed is its length.
	deltas  measure.Durations
	changed int
}

// copier is a server that makes copies of the source images.
type copier struct {
	*contender
	// image returns the path of a volume's image.
	image func(name string) string
	// sources contains the volume of each source image, by the image's name.
	sources map[string]*vol
}

// measureSnapshots makes copies of images with the driver and with a floor in turns.
func measureSnapshots(ctx context.Context, g *testbed, o options) *snapshotResult {
	r := &snapshotResult{fsType: g.fsType, images: images(o), samples: samples{}, others: samples{}}
	driver := startCopier(ctx, g, o)
	floor := startFloors(ctx, g, rawOf(0), []floorKind{{floorDurable, []string{"--durable"}, nil}})[0]
	copiers := []*copier{driver, {floor, func(name string) string { return filepath.Join(g.Disk, floorDurable, "volumes", name) }, map[string]*vol{}}}
	for _, image := range r.images {
		for _, c := range copiers {
			c.makeSource(ctx, image)
		}
		for n := range image.turns * o.rounds {
			slices.Reverse(copiers)
			r.copyAll(ctx, g, copiers, image, n)
		}
	}
	r.measureOthers(ctx, g, driver, copiers, o)
	r.measureDelta(ctx, driver, o)
	for _, c := range copiers {
		c.takeDown(ctx)
	}
	return r
}

// startCopier starts the driver as a copier.
func startCopier(ctx context.Context, g *testbed, o options) *copier {
	image := func(name string) string { return filepath.Join(g.poolPath(trivet), "volumes", name, "image") }
	return &copier{startTrivet(ctx, g, o.binary, trivet, rawOf(0)), image, map[string]*vol{}}
}

// makeSource creates and fills the volume of a source image.
func (c *copier) makeSource(ctx context.Context, image sourceImage) {
	v := &vol{name: strings.ToLower(strings.ReplaceAll(image.name, " ", "-")), class: rawOf(image.size)}
	measure.Must(createVolume(ctx, c.clients[0], v))
	c.sources[image.name] = v
	f := measure.Get(os.OpenFile(c.image(v.name), os.O_RDWR, 0))
	measure.Must(errors.Join(image.fill(f), f.Close()))
}

// copyAll makes five snapshots, restored volumes and clones on each server, and removes them.
func (r *snapshotResult) copyAll(ctx context.Context, g *testbed, copiers []*copier, image sourceImage, n int) {
	made := map[*copier][][]*vol{}
	for _, what := range []call{snapshot, restore, cloning} {
		for _, c := range copiers {
			vols := c.copies(image, what, n, made[c])
			made[c] = append(made[c], vols)
			g.Settle()
			c.turn(ctx, c.clients[:1], what, vols, r.of(c.Name, what, image))
		}
	}
	for c, all := range made {
		for i, undo := range []call{dropSnapshot, remove, remove} { // of snapshot, restore and cloning
			forAll(ctx, c.clients[:1], undo, all[i])
		}
		c.quiet(ctx)
	}
}

// copies returns the five snapshots or volumes that a call is to create. before contains what the
// earlier calls of copyAll created, the snapshots first.
func (c *copier) copies(image sourceImage, what call, n int, before [][]*vol) []*vol {
	vols := make([]*vol, 5)
	source := c.sources[image.name]
	for i := range vols {
		v := &vol{name: fmt.Sprintf("%s-%s-%d-%d", source.name, what.name, n, i), class: source.class, source: source.id}
		switch what.name {
		case restore.name:
			v.content = contentOfSnapshot(before[0][i].id)
		case cloning.name:
			v.content = contentOfVolume(source.id)
		}
		vols[i] = v
	}
	return vols
}

// alone names the measurement during which no server takes snapshots.
const alone = "alone"

// measureOthers stages and publishes volumes, first without concurrent snapshots, then while each
// copier in turn takes snapshots of the fragmented image.
func (r *snapshotResult) measureOthers(ctx context.Context, g *testbed, driver *copier, copiers []*copier, o options) {
	vols := newVolumes(g.kubelet("others"), "other", 10*manyCallers, ext4Of(manySize))
	callAll(ctx, driver.clients, vols, create, controllerPublish, stage, unstage)
	for range 2 * o.rounds {
		r.stageOthers(ctx, g, driver, vols, alone)
		for _, c := range copiers {
			halt := c.keepSnapshotting(ctx, r.images[len(r.images)-1])
			r.stageOthers(ctx, g, driver, vols, c.Name)
			measure.Must(halt())
		}
	}
	callAll(ctx, driver.clients, vols, controllerUnpublish, remove)
	removeStaging(vols)
}

// stageOthers makes the calls of a node for the volumes. when is the server of the samples' keys.
func (r *snapshotResult) stageOthers(ctx context.Context, g *testbed, driver *copier, vols []*vol, when string) {
	g.Settle()
	for _, one := range []call{stage, publish, unpublish, unstage} {
		r.others.of(when, one.name, manyCallers).Add(forAll(ctx, driver.clients, one, vols)...)
	}
}

// keepSnapshotting takes and deletes snapshots of an image until halt is called.
func (c *copier) keepSnapshotting(ctx context.Context, image sourceImage) (halt func() error) {
	ctx, stop := context.WithCancel(ctx)
	var group errgroup.Group
	group.Go(func() error {
		uncanceled := context.WithoutCancel(ctx)
		for n := 0; ctx.Err() == nil; n++ {
			v := &vol{name: fmt.Sprintf("meanwhile-%d", n), source: c.sources[image.name].id}
			if err := errors.Join(createSnapshot(uncanceled, c.clients[0], v), deleteSnapshot(uncanceled, c.clients[0], v)); err != nil {
				return err
			}
		}
		return nil
	})
	return func() error {
		stop()
		return group.Wait()
	}
}

// measureDelta changes some extents of a large image between two snapshots, and reads the list of
// changed blocks several times.
func (r *snapshotResult) measureDelta(ctx context.Context, driver *copier, o options) {
	image := sourceImage{name: "delta", size: tib, fill: inPieces(manyExtents*4096, manyExtents)}
	driver.makeSource(ctx, image)
	older := &vol{name: "older", source: driver.sources[image.name].id}
	newer := &vol{name: "newer", source: older.source}
	measure.Must(createSnapshot(ctx, driver.clients[0], older))
	measure.Must(rewrite(driver.image(image.name)))
	measure.Must(createSnapshot(ctx, driver.clients[0], newer))
	for range 5 * o.rounds {
		r.deltas.Time(func() (err error) {
			r.changed, err = countChanged(ctx, driver.clients[0], older.id, newer.id)
			return err
		})
	}
	measure.Must(errors.Join(deleteSnapshot(ctx, driver.clients[0], older), deleteSnapshot(ctx, driver.clients[0], newer)))
}

// rewrite changes extentsChanged of the extents that inPieces has written, in random order.
func rewrite(image string) error {
	f, err := os.OpenFile(image, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	const step = tib / manyExtents
	for _, i := range rand.New(rand.NewPCG(1, 1)).Perm(manyExtents)[:extentsChanged] {
		if _, err := f.WriteAt(make([]byte, 4096), int64(i)*step); err != nil {
			return err
		}
	}
	return f.Sync()
}

// countChanged returns the number of ranges in the list of blocks that differ between two snapshots.
func countChanged(ctx context.Context, c *client, older, newer string) (n int, err error) {
	stream, err := c.GetMetadataDelta(ctx, &csi.GetMetadataDeltaRequest{BaseSnapshotId: older, TargetSnapshotId: newer})
	for err == nil {
		var message *csi.GetMetadataDeltaResponse
		message, err = stream.Recv()
		n += len(message.GetBlockMetadata())
	}
	if errors.Is(err, io.EOF) {
		err = nil
	}
	return n, err
}

// takeDown removes the source volumes and stops the server.
func (c *copier) takeDown(ctx context.Context) {
	for _, v := range c.sources {
		measure.Must(deleteVolume(ctx, c.clients[0], v))
	}
	c.quiet(ctx)
	c.stop()
}

func (r *snapshotResult) String() string {
	t := markdown.Table{{"image", "call", "p50", "p99", "CPU", "floor p50", "p99", "CPU", "p50 ratio", "additional time per extent", "floor's"}}
	for _, image := range r.images {
		for _, what := range []call{snapshot, restore, cloning} {
			a, b := r.of(trivet, what, image), r.of(floorDurable, what, image)
			perExtent, floorPerExtent := "", ""
			if image.extents == manyExtents {
				perExtent, floorPerExtent = r.perExtent(trivet, what, image), r.perExtent(floorDurable, what, image)
			}
			t.Row(image.title(), what.name, micros(a.P50()), micros(a.At(99)), micros(a.cpuPerCall()),
				micros(b.P50()), micros(b.At(99)), micros(b.cpuPerCall()), times(a.slower(b)), perExtent, floorPerExtent)
		}
	}
	others := markdown.Table{{"call", "no snapshots, p50", "p99", "driver takes snapshots, p50", "p99", "p50 ratio", "floor takes snapshots, p50", "p99", "p50 ratio"}}
	for _, one := range []call{stage, publish, unpublish, unstage} {
		a, b, f := r.others.of(alone, one.name, manyCallers), r.others.of(trivet, one.name, manyCallers), r.others.of(floorDurable, one.name, manyCallers)
		others.Row(one.name, micros(a.P50()), micros(a.At(99)), micros(b.P50()), micros(b.At(99)), times(b.slower(a)), micros(f.P50()), micros(f.At(99)), times(f.slower(a)))
	}
	return fmt.Sprintf("### Snapshots on %s\n\n%d calls of each kind, %d of each kind for the fragmented image; times in µs.\n\n%s\n%d callers stage and publish other volumes while one caller takes snapshots of the image with %d extents, with the driver or with the floor:\n\n%s\nChanged blocks of a 1 TiB image with %d extents: %d ranges listed in %s (p50; max %s; goal: at most 1 s).\n",
		r.fsType, len(r.of(trivet, snapshot, r.images[0]).Durations), len(r.of(trivet, snapshot, r.images[2]).Durations), t.Text(true), manyCallers, manyExtents, others.Text(true), manyExtents, r.changed, millis(r.deltas.P50()), millis(r.deltas.At(100)))
}

// title returns the name of the image in tables.
func (image sourceImage) title() string {
	return fmt.Sprintf("%s, %d extents", strings.TrimSuffix(image.name, " in extents"), image.extents)
}

// of returns the sample of a call that copies an image.
func (r *snapshotResult) of(server string, what call, image sourceImage) *sample {
	return r.samples.of(server, what.name+" "+image.name, 1)
}

// perExtent returns the additional time per extent, compared with the image of the same size that
// has few extents.
func (r *snapshotResult) perExtent(server string, what call, image sourceImage) string {
	more := r.of(server, what, image).P50() - r.of(server, what, r.images[0]).P50()
	return fmt.Sprintf("%.1f µs", float64(more)/1e3/float64(image.extents-r.images[0].extents))
}
