//go:build vm

package nfs

import (
	"fmt"
	"maps"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/trivet-csi/trivet/internal/retry"
	"github.com/trivet-csi/trivet/internal/testenv/nfsd"
)

// The columns of the table.
const (
	before  = "before"
	atOnce  = "link cut, at once"
	within  = "within the outage"
	after   = "after the outage"
	stopped = "server stopped"
	back    = "the server is back"
)

// outage is the pool's setting. It is long enough for the calls of a column.
const outage = 40 * time.Second

// scene is a node with 20 volumes of a server that becomes unreachable, and with volumes on other
// media, which must not be affected.
type scene struct {
	*machine
	server, other *nfsd.Server
	link          *nfsd.Link // to server
	table         table

	directories, images []*vol
	beside              []*vol // of other, and node-local
	spare               []*vol // never staged
	writers             map[*vol]*writer
	whole               *testing.T // writers run across the parts of the test
	rounds              int
}

// TestOutage cuts a node off from its server, and stops the server, while programs write to
// volumes.
func TestOutage(t *testing.T) {
	s := setScene(t)
	t.Run("shorter than the outage", s.testShort)
	if !t.Failed() {
		t.Run("longer", s.testLong)
	}
	if !t.Failed() {
		t.Run("server stopped", s.testStopped)
	}
	if !t.Failed() {
		t.Run("clear", s.testClear)
	}
	s.table.show(t)
}

func setScene(t *testing.T) *scene {
	t.Helper()
	s := &scene{writers: map[*vol]*writer{}, whole: t}
	s.table.columns = []string{before, atOnce, within, after, stopped, back}
	s.server = nfsd.Start(t, nfsd.Options{})
	t.Setenv("TRIVET_TEST_DISK", "") // the first server uses the disk
	s.other = nfsd.Start(t, nfsd.Options{})
	n := s.server.Node(t, "node-1")
	s.other.Join(t, n)
	s.link = n.Link
	s.machine = start(t, n, "node-1", nfsPool("nas", s.server, s.server.Export(t, "nas"), "outage: "+outage.String())+
		nfsPool("other", s.other, s.other.Export(t, "other"))+
		fmt.Sprintf("- name: local\n  overcommit: 100\n  directory: {path: %s}\n", t.TempDir()+"/pool"))
	for i := range 10 {
		fsType, size := "ext4", 64*mib
		if i == 1 || i == 5 {
			fsType, size = "xfs", 320*mib
		}
		s.directories = append(s.directories, s.directory(t, "nas", fmt.Sprintf("directory-%d", i)))
		s.images = append(s.images, s.image(t, "nas", fmt.Sprintf("image-%d", i), fsType, size))
	}
	s.beside = []*vol{
		s.directory(t, "other", "beside-directory"), s.image(t, "other", "beside-image", "ext4", 64*mib),
		s.image(t, "local", "beside-local", "ext4", 64*mib),
	}
	for i := range 2 {
		s.spare = append(s.spare, s.directory(t, "nas", fmt.Sprintf("spare-%d", i)))
	}
	for _, c := range slices.Concat(s.calls(), s.teardowns(codes.OK)) {
		s.table.set(c.row, "", "") // sets the order of calls that run at the same time
	}
	return s
}

// Of the volumes of each kind, the last two have no writer: one is published, and one was
// unpublished with writes that the server does not have.
const (
	idle  = 8
	dirty = 9
)

func (s *scene) all() []*vol { return slices.Concat(s.directories, s.images) }

// busy lists the volumes that have writers.
func (s *scene) busy() []*vol { return slices.Concat(s.directories[:idle], s.images[:idle], s.beside) }

// bringUp starts writers on all volumes but four.
func (s *scene) bringUp(t *testing.T) {
	t.Helper()
	s.rounds++
	each(slices.Concat(s.all(), s.beside), func(v *vol) {
		for _, step := range []func(*testing.T, *vol) error{s.attach, s.stage, s.publish} {
			if err := step(t, v); err != nil {
				t.Errorf("%s: %v", v.name, err)
			}
		}
	})
	t.Logf("all volumes are published")
	for _, v := range s.busy() {
		if s.writers[v] == nil {
			s.writers[v] = startWriter(s.whole, s.file(v, fmt.Sprintf("records-%d", s.rounds)))
		}
	}
	for _, v := range s.busy() {
		s.writers[v].awaitProgress(t)
	}
	for _, v := range []*vol{s.directories[dirty], s.images[dirty]} {
		must(t, os.WriteFile(s.file(v, "unsynced"), make([]byte, mib), 0o644))
		must(t, s.unpublish(t, v))
	}
	t.Logf("all writers write")
}

// bringDown ends all writers, checks their records, and takes all volumes down.
func (s *scene) bringDown(t *testing.T) {
	t.Helper()
	for v, w := range s.writers {
		w.finish(t)
		delete(s.writers, v)
	}
	each(slices.Concat(s.all(), s.beside), func(v *vol) {
		for _, step := range []func(*testing.T, *vol) error{s.unpublish, s.unstage, s.leave} {
			if err := step(t, v); err != nil {
				t.Errorf("%s: %v", v.name, err)
			}
		}
	})
	t.Logf("all volumes are taken down")
}

// each calls a function for all volumes, for six at the same time.
func each(volumes []*vol, do func(*vol)) {
	var all sync.WaitGroup
	slots := make(chan struct{}, 6)
	for _, v := range volumes {
		all.Go(func() {
			slots <- struct{}{}
			do(v)
			<-slots
		})
	}
	all.Wait()
}

// leave detaches a volume from this node.
func (s *scene) leave(t *testing.T, v *vol) error { return s.detach(t, v, s.name) }

// noteThreads records the threads of the driver and its workers.
func (s *scene) noteThreads(column string) {
	s.table.set("threads", column, fmt.Sprintf("%d, %d workers", s.threads(), len(s.workers())))
}

// call is a row of the table, with the result while the server does not respond.
type call struct {
	row  string
	code codes.Code
	do   func(*testing.T) error
}

// calls lists the calls for the pool, without those that take volumes down.
func (s *scene) calls() []call {
	d, i := s.directories, s.images
	return []call{
		{"CreateVolume", codes.Unavailable, func(t *testing.T) error { return s.tryDirectory(t, "nas", "made in trouble") }},
		{"DeleteVolume", codes.Unavailable, func(t *testing.T) error { return s.delete(t, &vol{id: s.spare[0].id}) }},
		{"ControllerPublishVolume", codes.Unavailable, func(t *testing.T) error { return s.attach(t, d[5]) }},
		{"ControllerUnpublishVolume", codes.Unavailable, func(t *testing.T) error { return s.detach(t, s.spare[1], s.name) }},
		{"ControllerExpandVolume", codes.Unavailable, func(t *testing.T) error { return s.expand(t, d[6], mib) }},
		{"ControllerGetVolume", codes.Unavailable, func(t *testing.T) error { return s.getVolume(t, d[7]) }},
		{"ControllerGetVolumeHealth", codes.OK, func(t *testing.T) error { return s.getVolumeHealth(t, i[7]) }},
		{"ValidateVolumeCapabilities", codes.Unavailable, func(t *testing.T) error {
			_, err := s.control.ValidateVolumeCapabilities(deadline(t), &csi.ValidateVolumeCapabilitiesRequest{VolumeId: i[6].id, VolumeCapabilities: []*csi.VolumeCapability{i[6].capability}})
			return err
		}},
		{"GetCapacity", codes.Unavailable, func(t *testing.T) error {
			_, err := s.control.GetCapacity(deadline(t), &csi.GetCapacityRequest{Parameters: directoryIn("nas")})
			return err
		}},
		{"ListVolumes", codes.Unavailable, func(t *testing.T) error { return s.listVolumes(t) }},
		{"NodeStageVolume, directory", codes.Unavailable, func(t *testing.T) error { return s.stage(t, d[0]) }},
		{"NodeStageVolume, image", codes.Unavailable, func(t *testing.T) error { return s.stage(t, i[0]) }},
		{"NodePublishVolume, directory", codes.Unavailable, func(t *testing.T) error { return s.publish(t, d[1]) }},
		{"NodePublishVolume, image", codes.Unavailable, func(t *testing.T) error { return s.publish(t, i[1]) }},
		{"NodeGetVolumeStats, directory", codes.Unavailable, func(t *testing.T) error { return s.stats(t, d[2]) }},
		{"NodeGetVolumeStats, image", codes.Unavailable, func(t *testing.T) error { return s.stats(t, i[2]) }},
		{"NodeGetVolumeHealth, directory", codes.OK, func(t *testing.T) error { return s.checkHealth(t, d[3]) }},
		{"NodeGetVolumeHealth, image", codes.OK, func(t *testing.T) error { return s.checkHealth(t, i[3]) }},
		{"NodeExpandVolume, image", codes.Unavailable, func(t *testing.T) error {
			_, err := s.node.NodeExpandVolume(deadline(t), &csi.NodeExpandVolumeRequest{VolumeId: i[4].id, VolumePath: s.target(i[4]), CapacityRange: &csi.CapacityRange{RequiredBytes: mib}})
			return err
		}},
	}
}

// teardowns lists the calls that take volumes down: the idle volumes are unpublished and the dirty
// ones unstaged. unstage is the result of NodeUnstageVolume.
func (s *scene) teardowns(unstage codes.Code) []call {
	d, i := s.directories, s.images
	return []call{
		{"NodeUnpublishVolume, directory", codes.OK, func(t *testing.T) error { return s.unpublish(t, d[idle]) }},
		{"NodeUnpublishVolume, image", codes.OK, func(t *testing.T) error { return s.unpublish(t, i[idle]) }},
		{"NodeUnstageVolume, directory", unstage, func(t *testing.T) error { return s.unstage(t, d[dirty]) }},
		{"NodeUnstageVolume, image", unstage, func(t *testing.T) error { return s.unstage(t, i[dirty]) }},
	}
}

func (s *scene) checkHealth(t *testing.T, v *vol) error {
	_, err := s.tryHealth(t, v)
	return err
}

// calm measures the calls before the outage.
func (s *scene) calm(t *testing.T) {
	t.Helper()
	stop := s.undisturbed(t, before)
	for _, c := range s.calls() {
		must(t, s.table.measure(c.row, before, func() error { return c.do(t) }))
	}
	stop()
	s.restoreSpare(t)
	s.noteThreads(before)
}

// restoreSpare undoes the calls CreateVolume and DeleteVolume.
func (s *scene) restoreSpare(t *testing.T) {
	t.Helper()
	must(t, s.delete(t, s.directory(t, "nas", "made in trouble")))
	s.spare[0] = s.directory(t, "nas", s.spare[0].name)
}

// inTrouble makes all calls one by one. Within the outage it first makes all at the same time,
// while the driver detects that the server does not respond.
func (s *scene) inTrouble(t *testing.T, column string) {
	t.Helper()
	if column == within {
		s.atOnce(t)
	}
	for _, c := range slices.Concat(s.calls(), s.teardowns(codes.Unavailable)) {
		err := s.table.measure(c.row, column, func() error { return c.do(t) })
		if c.code == codes.Unavailable {
			wantCode(t, err, c.code, "has not answered since")
		} else {
			wantCode(t, err, c.code)
		}
	}
	s.wantSilent(t)
	for _, v := range s.beside {
		s.writers[v].awaitProgress(t)
	}
	s.noteThreads(column)
}

// atOnce makes all calls at the same time, before the driver has detected the outage.
func (s *scene) atOnce(t *testing.T) {
	t.Helper()
	var all sync.WaitGroup
	for _, c := range slices.Concat(s.calls(), s.teardowns(codes.Unavailable)) {
		all.Go(func() {
			err := s.table.measure(c.row, atOnce, func() error { return c.do(t) })
			if code := status.Code(err); code != codes.Unavailable && code != c.code {
				t.Errorf("%s, at once: %v", c.row, err)
			}
		})
	}
	all.Wait()
	s.noteThreads(atOnce)
}

// wantSilent fails unless health reports that the server does not respond.
func (s *scene) wantSilent(t *testing.T) {
	t.Helper()
	if reasons := s.health(t, s.directories[0]); !slices.Contains(reasons, "ServerSilent") {
		t.Errorf("health of a volume: got %q, want ServerSilent", reasons)
	}
	resp, err := s.node.NodeGetStorageHealth(deadline(t), &csi.NodeGetStorageHealthRequest{})
	must(t, err)
	silent := func(h *csi.NodeGetStorageHealthResponse_StorageBackendHealth) bool {
		return h.GetReason() == "ServerSilent"
	}
	if !slices.ContainsFunc(resp.GetBackendHealth(), silent) {
		t.Errorf("storage health of the node: got %v, want ServerSilent", resp)
	}
}

// undisturbed makes calls for volumes of other pools until stop. The calls must succeed.
func (s *scene) undisturbed(t *testing.T, column string) (stop func()) {
	t.Helper()
	done := make(chan struct{})
	var loops sync.WaitGroup
	for pool, kind := range map[string]string{"other": "another server's pool", "local": "a node-local pool"} {
		loops.Go(func() { s.lives(t, pool, kind, column, done) })
	}
	return func() { close(done); loops.Wait() }
}

// lives creates, uses and deletes volumes of a pool.
func (s *scene) lives(t *testing.T, pool, kind, column string, done <-chan struct{}) {
	var longest time.Duration
	for n := 0; ; n++ {
		select {
		case <-done:
			s.table.set("a volume's whole life in "+kind, column, fmt.Sprintf("%d, the longest %s", n, short(longest)))
			return
		case <-time.After(time.Second): // the virtual machine is slow
		}
		begin := time.Now()
		if err := s.life(t, pool, fmt.Sprintf("%s-%d-%d", pool, s.rounds, n)); err != nil {
			t.Errorf("in %s meanwhile: %v", kind, err)
			return
		}
		longest = max(longest, time.Since(begin))
	}
}

func (s *scene) life(t *testing.T, pool, name string) error {
	v, err := s.tryCreate(t, name, 64*mib, filesystem("ext4", oneNode), imageIn(pool))
	if err != nil {
		return err
	}
	for _, step := range []func(*testing.T, *vol) error{
		s.attach, s.stage, s.publish, s.stats, s.checkHealth, s.unpublish, s.unstage, s.leave, s.delete,
	} {
		if err := step(t, v); err != nil {
			return err
		}
	}
	return nil
}

// wantAlive fails unless all calls succeed and the workers are as before.
func (s *scene) wantAlive(t *testing.T, atFirst int) {
	t.Helper()
	for _, c := range slices.Concat(s.calls(), s.teardowns(codes.OK)) {
		eventually(t, func() error { return s.table.measure(c.row, back, func() error { return c.do(t) }) })
	}
	for v, w := range s.writers {
		w.awaitProgress(t)
		if reasons := s.health(t, v); len(reasons) > 0 {
			t.Errorf("health of %s: got %q", v.name, reasons)
		}
	}
	s.restoreSpare(t)
	err := retry.For(t.Context(), patience, func() (bool, error) {
		n := len(s.workers())
		return n != 2, fmt.Errorf("got %d workers, want 2", n)
	})
	if len(s.workers()) != 2 {
		t.Error(err)
	}
	if n := s.threads(); n > atFirst+maxMoreThreads {
		t.Errorf("got %d threads, at first %d", n, atFirst)
	}
	s.noteThreads(back)
}

// maxMoreThreads is how many threads Go's runtime may have started meanwhile.
const maxMoreThreads = 40

// testShort: no data is lost in an outage that is shorter than the limit, whether fsynced or not.
func (s *scene) testShort(t *testing.T) {
	s.bringUp(t)
	s.calm(t)
	atFirst := s.threads()
	stop := s.undisturbed(t, within)
	s.link.Cut(t)
	t.Logf("the link is cut")
	s.inTrouble(t, within)
	t.Logf("all calls were made")
	for _, v := range []*vol{s.directories[0], s.images[0]} { // a program uses it
		wantCode(t, s.unpublish(t, v), codes.FailedPrecondition, "fuser")
	}
	s.link.Restore(t)
	stop()
	s.wantAlive(t, atFirst)
	for _, v := range []*vol{s.directories[dirty], s.images[dirty]} {
		s.up(t, v)
		if got, err := os.ReadFile(s.file(v, "unsynced")); err != nil || int64(len(got)) != mib {
			t.Errorf("%s: got %d bytes that were not synced, %v, want %d", v.name, len(got), err, mib)
		}
	}
}

// testLong: half of the volumes are unstaged by force, and the writers of the others wait.
func (s *scene) testLong(t *testing.T) {
	s.bringUp(t)
	atFirst := s.threads()
	s.link.Cut(t)
	for _, v := range []*vol{s.directories[dirty], s.images[dirty]} {
		wantCode(t, s.unstage(t, v), codes.Unavailable)
	}
	killed := map[*vol]*writer{}
	for _, v := range slices.Concat(s.directories[:4], s.images[:4]) {
		killed[v] = s.writers[v]
		delete(s.writers, v)
		killed[v].kill()
	}
	err := retry.For(t.Context(), outage+patience, func() (bool, error) {
		err := s.unstage(t, s.directories[dirty])
		return status.Code(err) == codes.Unavailable, err
	})
	must(t, err)
	t.Logf("the outage is over")
	stop := s.undisturbed(t, after)
	for _, c := range slices.Concat(s.calls(), s.teardowns(codes.OK)) {
		wantCode(t, s.table.measure(c.row, after, func() error { return c.do(t) }), c.code)
	}
	s.tearDown(t, killed)
	s.wantSilent(t)
	s.noteThreads(after)
	for v, w := range s.writers {
		if !slices.Contains(s.beside, v) && w.err != nil {
			t.Errorf("the writer of %s failed: %v", v.name, w.err)
		}
	}
	stop()
	t.Logf("half of the volumes are unstaged")
	s.link.Restore(t)
	for v, w := range killed {
		<-w.ended
		eventually(t, func() error { return s.attach(t, v) })
		s.mount(t, v)
		w.wantRecords(t, w.path)
	}
	s.wantAlive(t, atFirst)
}

// tearDown unpublishes and unstages volumes at the same time, as a kubelet does. Their programs
// were killed, and have not ended: they wait for the server.
func (s *scene) tearDown(t *testing.T, victims map[*vol]*writer) {
	t.Helper()
	each(slices.Collect(maps.Keys(victims)), func(v *vol) {
		kind := ", image of a killed pod"
		if slices.Contains(s.directories, v) {
			kind = ", directory of a killed pod"
		}
		if err := s.table.measure("NodeUnpublishVolume"+kind, after, func() error { return s.unpublish(t, v) }); err != nil {
			t.Errorf("unpublish of %s: %v", v.name, err)
			return
		}
		if err := s.table.measure("NodeUnstageVolume"+kind, after, func() error { return s.unstage(t, v) }); err != nil {
			t.Errorf("unstage of %s: %v", v.name, err)
		}
	})
}

// testStopped: the server refuses connections.
func (s *scene) testStopped(t *testing.T) {
	s.bringUp(t)
	atFirst := s.threads()
	stop := s.undisturbed(t, stopped)
	s.server.Stop(t)
	serve := sync.OnceFunc(func() { s.server.Serve(t) })
	t.Cleanup(serve)
	s.await(t, "ServerSilent")
	s.inTrouble(t, stopped)
	serve()
	stop()
	s.wantAlive(t, atFirst)
}

// await waits until the health of a volume has a reason.
func (s *scene) await(t *testing.T, reason string) {
	t.Helper()
	err := retry.For(t.Context(), patience, func() (bool, error) {
		resp, err := s.node.NodeGetVolumeHealth(deadline(t), &csi.NodeGetVolumeHealthRequest{VolumeId: s.directories[0].id})
		for _, h := range resp.GetVolumeHealth().GetHealthStatuses() {
			if h.GetReason() == reason {
				return false, nil
			}
		}
		return true, fmt.Errorf("no %s: %v, %w", reason, resp, err)
	})
	must(t, err)
}

// testClear takes down and deletes all volumes.
func (s *scene) testClear(t *testing.T) {
	s.bringDown(t)
	for _, v := range slices.Concat(s.all(), s.beside, s.spare) {
		must(t, s.delete(t, v))
	}
	wantEmpty(t, s.server, "/nas")
	wantEmpty(t, s.other, "/other")
	s.stop(t)
	s.wantNothingLeft(t)
}
