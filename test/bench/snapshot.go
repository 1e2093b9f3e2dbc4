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
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/test/markdown"
)

// copied is an image that is copied.
type copied struct {
	name string
	size int64
	fill func(*os.File) error
	// extents is the minimum number of its extents.
	extents int
	// turns is the number of sets of five copies in a round.
	turns int
}

const (
	tib = 1 << 40
	// manyExtents is the number of extents of a fragmented image.
	manyExtents = 16384
	// extentsChanged is how many change between two snapshots.
	extentsChanged = 10000
)

// images returns the images of the copies that share blocks.
func images(o options) []copied {
	data := int64(gib)
	if o.quick {
		data /= 8
	}
	return []copied{
		{name: "10 GiB", size: 10 * gib, fill: inPieces(data, 8), extents: 8, turns: 4},
		{name: "1 TiB", size: tib, fill: inPieces(data, 8), extents: 8, turns: 4},
		{name: "10 GiB in extents", size: 10 * gib, fill: inPieces(manyExtents*4096, manyExtents), extents: manyExtents, turns: 1},
	}
}

// inPieces writes data in pieces of one size, evenly distributed in a file.
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
			if err := writeAll(f, b, at, piece); err != nil {
				return err
			}
		}
		return f.Sync()
	}
}

// writeAll allocates a piece in one extent, and writes it.
func writeAll(f *os.File, b []byte, at, length int64) error {
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

func ofSnapshot(id string) *csi.VolumeContentSource {
	return &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Snapshot{Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: id}}}
}

func ofVolume(id string) *csi.VolumeContentSource {
	return &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Volume{Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: id}}}
}

// rawOf is the class of raw devices.
func rawOf(size int64) class { return classOf("images-xfs", "block", size) }

// snapshotResult has the times of copies that share blocks.
type snapshotResult struct {
	fsType string
	images []copied
	// samples has the calls for an image, by the names of call and image.
	samples samples
	// others has the times of calls for other volumes, with and without snapshots being made.
	others  samples
	deltas  sample
	changed int
}

// copier is a server that makes copies in turns with another server.
type copier struct {
	*contender
	// image returns the path of a volume's image.
	image func(name string) string
	// sources has its volumes, by image.
	sources map[string]*vol
}

// measureSnapshots makes copies of images on both servers in turns.
func measureSnapshots(ctx context.Context, g *ground, o options) (*snapshotResult, error) {
	r := &snapshotResult{fsType: g.fsType, images: images(o), samples: samples{}, others: samples{}}
	copiers, err := startCopiers(ctx, g, o)
	if err != nil {
		return nil, err
	}
	for _, image := range r.images {
		for _, c := range copiers {
			if err := c.makeSource(ctx, image); err != nil {
				return nil, err
			}
		}
		for n := range image.turns * o.rounds {
			slices.Reverse(copiers)
			if err := r.copyAll(ctx, g, copiers, image, n); err != nil {
				return nil, err
			}
		}
	}
	driver := copiers[slices.IndexFunc(copiers, func(c *copier) bool { return c.name == trivet })]
	if err := r.measureOthers(ctx, g, driver, copiers, o); err != nil {
		return nil, err
	}
	if err := r.measureDelta(ctx, driver, o); err != nil {
		return nil, err
	}
	for _, c := range copiers {
		if err := c.takeDown(ctx); err != nil {
			return nil, err
		}
	}
	return r, nil
}

func startCopiers(ctx context.Context, g *ground, o options) ([]*copier, error) {
	driver, err := startTrivet(ctx, g, o.binary, trivet, rawOf(0))
	if err != nil {
		return nil, err
	}
	floors, err := startFloors(ctx, g, rawOf(0), []floorKind{{floorDurable, []string{"--durable"}, nil}})
	if err != nil {
		return nil, err
	}
	return []*copier{
		{driver, func(name string) string { return filepath.Join(g.poolPath(trivet), "volumes", name, "image") }, map[string]*vol{}},
		{floors[0], func(name string) string { return filepath.Join(g.disk, floorDurable, "volumes", name) }, map[string]*vol{}},
	}, nil
}

// makeSource creates the volume of an image, and fills it.
func (c *copier) makeSource(ctx context.Context, image copied) error {
	v := &vol{name: strings.ToLower(strings.ReplaceAll(image.name, " ", "-")), class: rawOf(image.size)}
	if err := createVolume(ctx, c.clients[0], v); err != nil {
		return err
	}
	c.sources[image.name] = v
	f, err := os.OpenFile(c.image(v.name), os.O_RDWR, 0)
	if err != nil {
		return err
	}
	return errors.Join(image.fill(f), f.Close())
}

// copyAll makes some copies of each kind on each server, and removes them.
func (r *snapshotResult) copyAll(ctx context.Context, g *ground, copiers []*copier, image copied, n int) error {
	made := map[*copier][][]*vol{}
	for _, what := range []call{snapshot, restore, cloning} {
		for _, c := range copiers {
			vols := c.copies(image, what, n, made[c])
			made[c] = append(made[c], vols)
			if err := g.settle(); err != nil {
				return err
			}
			if err := c.turn(ctx, c.clients[:1], what, vols, r.samples.of(c.name, what.name+" "+image.name, 1)); err != nil {
				return fmt.Errorf("%s: %w", c.name, err)
			}
		}
	}
	for c, all := range made {
		for i, undo := range []call{dropSnapshot, remove, remove} {
			if _, err := forAll(ctx, c.clients[:1], undo, all[i]); err != nil {
				return err
			}
		}
		if c.quiet != nil {
			if err := c.quiet(ctx); err != nil {
				return err
			}
		}
	}
	return nil
}

// copies returns new volumes for a call; before has the volumes of the calls before it.
func (c *copier) copies(image copied, what call, n int, before [][]*vol) []*vol {
	vols := make([]*vol, 5)
	source := c.sources[image.name]
	for i := range vols {
		v := &vol{name: fmt.Sprintf("%s-%s-%d-%d", source.name, what.name, n, i), class: source.class, source: source.id}
		switch what.name {
		case restore.name:
			v.content = ofSnapshot(before[0][i].id)
		case cloning.name:
			v.content = ofVolume(source.id)
		}
		vols[i] = v
	}
	return vols
}

// alone stands for a measurement without snapshots. Other values name the server that makes
// snapshots meanwhile.
const alone = "alone"

// measureOthers stages and publishes volumes, with snapshots of the fragmented image being
// made all the time, and without.
func (r *snapshotResult) measureOthers(ctx context.Context, g *ground, driver *copier, copiers []*copier, o options) error {
	dir, err := g.kubelet("others")
	if err != nil {
		return err
	}
	vols, err := newVolumes(dir, "other", 10*manyCallers, ext4Of(manySize))
	if err != nil {
		return err
	}
	if err := callAll(ctx, driver.clients, vols, create, controllerPublish, stage, unstage); err != nil {
		return err
	}
	for range 2 * o.rounds {
		if err := r.stageOthers(ctx, g, driver, vols, alone); err != nil {
			return err
		}
		for _, c := range copiers {
			halt := c.keepCutting(ctx, r.images[len(r.images)-1])
			err := r.stageOthers(ctx, g, driver, vols, c.name)
			if err := errors.Join(err, halt()); err != nil {
				return err
			}
		}
	}
	if err := callAll(ctx, driver.clients, vols, controllerUnpublish, remove); err != nil {
		return err
	}
	return removeFolders(vols)
}

func (r *snapshotResult) stageOthers(ctx context.Context, g *ground, driver *copier, vols []*vol, when string) error {
	if err := g.settle(); err != nil {
		return err
	}
	for _, one := range []call{stage, publish, unpublish, unstage} {
		took, err := forAll(ctx, driver.clients, one, vols)
		if err != nil {
			return err
		}
		s := r.others.of(when, one.name, manyCallers)
		s.took = append(s.took, took...)
	}
	return nil
}

// keepCutting makes and deletes snapshots of an image until halt is called.
func (c *copier) keepCutting(ctx context.Context, image copied) (halt func() error) {
	ctx, stop := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() {
		for n := 0; ctx.Err() == nil; n++ {
			v := &vol{name: fmt.Sprintf("meanwhile-%d", n), source: c.sources[image.name].id}
			whole := context.WithoutCancel(ctx)
			if err := errors.Join(createSnapshot(whole, c.clients[0], v), deleteSnapshot(whole, c.clients[0], v)); err != nil {
				ended <- err
				return
			}
		}
		ended <- nil
	}()
	return func() error {
		stop()
		return <-ended
	}
}

// measureDelta changes some of the extents of a large image, and reads the list of changes.
func (r *snapshotResult) measureDelta(ctx context.Context, driver *copier, o options) error {
	image := copied{name: "delta", size: tib, fill: inPieces(manyExtents*4096, manyExtents)}
	if err := driver.makeSource(ctx, image); err != nil {
		return err
	}
	older := &vol{name: "older", source: driver.sources[image.name].id}
	newer := &vol{name: "newer", source: older.source}
	if err := createSnapshot(ctx, driver.clients[0], older); err != nil {
		return err
	}
	if err := rewrite(driver.image(image.name)); err != nil {
		return err
	}
	if err := createSnapshot(ctx, driver.clients[0], newer); err != nil {
		return err
	}
	for range 5 * o.rounds {
		start := time.Now()
		n, err := countChanged(ctx, driver.clients[0], older.id, newer.id)
		if err != nil {
			return err
		}
		r.changed = n
		r.deltas.took = append(r.deltas.took, time.Since(start))
	}
	return errors.Join(deleteSnapshot(ctx, driver.clients[0], older), deleteSnapshot(ctx, driver.clients[0], newer))
}

// rewrite changes extents that inPieces has written, in random order.
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

func countChanged(ctx context.Context, c *client, older, newer string) (n int, err error) {
	stream, err := c.GetMetadataDelta(ctx, &csi.GetMetadataDeltaRequest{BaseSnapshotId: older, TargetSnapshotId: newer})
	if err != nil {
		return 0, err
	}
	for {
		message, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return n, nil
		}
		if err != nil {
			return n, err
		}
		n += len(message.GetBlockMetadata())
	}
}

// takeDown removes the sources and stops the server.
func (c *copier) takeDown(ctx context.Context) error {
	for _, v := range c.sources {
		if err := deleteVolume(ctx, c.clients[0], v); err != nil {
			return err
		}
	}
	if c.quiet != nil {
		if err := c.quiet(ctx); err != nil {
			return err
		}
	}
	return c.stop()
}

func (r *snapshotResult) String() string {
	t := markdown.Table{{"of an image", "call", "p50", "p99", "CPU", "floor p50", "p99", "CPU", "p50 ratio", "more than in few extents, per extent", "floor"}}
	for _, image := range r.images {
		for _, what := range []call{snapshot, restore, cloning} {
			a, b := r.of(trivet, what, image), r.of(floorDurable, what, image)
			own, bare := "", ""
			if image.extents == manyExtents {
				own, bare = r.perExtent(trivet, what, image), r.perExtent(floorDurable, what, image)
			}
			t.Row(image.title(), what.name, micros(a.p50()), micros(a.at(99)), micros(a.cpuPerCall()),
				micros(b.p50()), micros(b.at(99)), micros(b.cpuPerCall()), times(a.slower(b)), own, bare)
		}
	}
	others := markdown.Table{{"call of others", "p50", "p99", "meanwhile, p50", "p99", "p50 ratio", "floor's meanwhile, p50", "p99", "p50 ratio"}}
	for _, one := range []call{stage, publish, unpublish, unstage} {
		a, b, f := r.others.of(alone, one.name, manyCallers), r.others.of(trivet, one.name, manyCallers), r.others.of(floorDurable, one.name, manyCallers)
		others.Row(one.name, micros(a.p50()), micros(a.at(99)), micros(b.p50()), micros(b.at(99)), times(b.slower(a)), micros(f.p50()), micros(f.at(99)), times(f.slower(a)))
	}
	return fmt.Sprintf("### Snapshots on %s\n\n%d times each, %d times of a fragmented image; in µs.\n\n%s\n%d callers stage and publish, and meanwhile one takes snapshots of the image of %d extents, of the driver or of the floor:\n\n%s\nWhich of %d extents of a 1 TiB image have changed: %d ranges in %s (p50; most %s; wanted: at most 1 s).\n",
		r.fsType, len(r.of(trivet, snapshot, r.images[0]).took), len(r.of(trivet, snapshot, r.images[2]).took), t.Text(true), manyCallers, manyExtents, others.Text(true), manyExtents, r.changed, millis(r.deltas.p50()), millis(r.deltas.at(100)))
}

func (image copied) title() string {
	return fmt.Sprintf("%s, %d extents", strings.TrimSuffix(image.name, " in extents"), image.extents)
}

func (r *snapshotResult) of(server string, what call, image copied) *sample {
	return r.samples.of(server, what.name+" "+image.name, 1)
}

// perExtent is the additional time of an extent, compared with the image of the same size with
// few extents.
func (r *snapshotResult) perExtent(server string, what call, image copied) string {
	more := r.of(server, what, image).p50() - r.of(server, what, r.images[0]).p50()
	return fmt.Sprintf("%.1f µs", float64(more)/1e3/float64(image.extents-r.images[0].extents))
}
