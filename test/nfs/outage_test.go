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

// outage is the pool's `outage:`. It is long enough to make all calls of a column.
const outage = 40 * time.Second

// outageTest is a node with 20 volumes of a server that becomes unreachable, and with volumes in other
// pools, which the outage must not affect.
type outageTest struct {
	*machine
	server, other *nfsd.Server
	link          *nfsd.Link // to server
	table         table

	directories, images []*vol
	unaffected          []*vol // in a pool of other, and in a pool of the node
	spare               []*vol // never staged
	writers             map[*vol]*writer
	parent              *testing.T // the test that ends the writers, which run across the subtests
	rounds              int        // the number of calls of startVolumes
}

// TestOutage cuts a node off from a server, and then stops the server, while programs write to volumes.
func TestOutage(t *testing.T) {
	s := newOutageTest(t)
	t.Run("shorter than the outage", s.testShort)
	if !t.Failed() {
		t.Run("longer than the outage", s.testLong)
	}
	if !t.Failed() {
		t.Run("server stopped", s.testStopped)
	}
	if !t.Failed() {
		t.Run("clear", s.testClear)
	}
	s.table.show(t)
}

// newOutageTest starts both servers and the driver, and creates the volumes.
func newOutageTest(t *testing.T) *outageTest {
	t.Helper()
	s := &outageTest{writers: map[*vol]*writer{}, parent: t}
	s.table.columns = []string{before, atOnce, within, after, stopped, back}
	s.server = nfsd.Start(t, nfsd.Options{})
	t.Setenv("TRIVET_TEST_DISK", "") // the first server already uses the disk
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
		class := imageIn("nas")
		if i == 3 || i == 6 { // one whose writer is killed during the outage, and one whose writer continues
			class = encryptedIn("nas")
		}
		s.images = append(s.images, s.create(t, fmt.Sprintf("image-%d", i), size, filesystem(fsType, oneNode), class))
	}
	s.unaffected = []*vol{
		s.directory(t, "other", "unaffected-directory"), s.image(t, "other", "unaffected-image", "ext4", 64*mib),
		s.image(t, "local", "unaffected-local", "ext4", 64*mib),
	}
	for i := range 2 {
		s.spare = append(s.spare, s.directory(t, "nas", fmt.Sprintf("spare-%d", i)))
	}
	for _, c := range slices.Concat(s.calls(), s.teardowns(codes.OK)) {
		s.table.set(c.row, "", "") // defines the order of the rows, because calls later run at the same time
	}
	return s
}

// The indices of the volumes that have no writer, among the directories and among the images: idle is
// published, and unsynced was unpublished with writes that are not on the server.
const (
	idle     = 8
	unsynced = 9
)

// all returns the volumes of the server that becomes unreachable, except spare.
func (s *outageTest) all() []*vol { return slices.Concat(s.directories, s.images) }

// busy returns the volumes that have writers.
func (s *outageTest) busy() []*vol {
	return slices.Concat(s.directories[:idle], s.images[:idle], s.unaffected)
}

// startVolumes publishes all volumes, and starts a writer on each except the idle and unsynced ones.
func (s *outageTest) startVolumes(t *testing.T) {
	t.Helper()
	s.rounds++
	each(slices.Concat(s.all(), s.unaffected), func(v *vol) {
		for _, step := range []func(*testing.T, *vol) error{s.controllerPublish, s.stage, s.publish} {
			if err := step(t, v); err != nil {
				t.Errorf("%s: %v", v.name, err)
			}
		}
	})
	t.Logf("all volumes are published")
	for _, v := range s.busy() {
		if s.writers[v] == nil {
			s.writers[v] = startWriter(s.parent, s.file(v, fmt.Sprintf("records-%d", s.rounds)))
		}
	}
	for _, v := range s.busy() {
		s.writers[v].awaitProgress(t)
	}
	for _, v := range []*vol{s.directories[unsynced], s.images[unsynced]} {
		must(t, os.WriteFile(s.file(v, "unsynced"), make([]byte, mib), 0o644))
		must(t, s.unpublish(t, v))
	}
	t.Logf("all writers write")
}

// stopVolumes ends all writers, checks their records, and unpublishes all volumes.
func (s *outageTest) stopVolumes(t *testing.T) {
	t.Helper()
	for v, w := range s.writers {
		w.finish(t)
		delete(s.writers, v)
	}
	each(slices.Concat(s.all(), s.unaffected), func(v *vol) {
		for _, step := range []func(*testing.T, *vol) error{s.unpublish, s.unstage, s.unpublishHere} {
			if err := step(t, v); err != nil {
				t.Errorf("%s: %v", v.name, err)
			}
		}
	})
	t.Logf("all volumes are unpublished")
}

// each calls do for all volumes, for at most six at the same time.
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

// unpublishHere unpublishes a volume from this node with ControllerUnpublishVolume.
func (s *outageTest) unpublishHere(t *testing.T, v *vol) error {
	return s.controllerUnpublish(t, v, s.name)
}

// noteThreads records the number of threads of the driver and its workers.
func (s *outageTest) noteThreads(column string) {
	s.table.set("threads", column, fmt.Sprintf("%d, %d workers", s.threads(), len(s.workers())))
}

// call is a row of the table. code is its result while the server does not answer.
type call struct {
	row  string
	code codes.Code
	do   func(*testing.T) error
}

// calls returns the calls for the pool except those of teardowns.
func (s *outageTest) calls() []call {
	d, i := s.directories, s.images
	return []call{
		{"CreateVolume", codes.Unavailable, func(t *testing.T) error { return s.tryDirectory(t, "nas", "during-outage") }},
		{"DeleteVolume", codes.Unavailable, func(t *testing.T) error { return s.delete(t, &vol{id: s.spare[0].id}) }},
		{"ControllerPublishVolume", codes.Unavailable, func(t *testing.T) error { return s.controllerPublish(t, d[5]) }},
		{"ControllerUnpublishVolume", codes.Unavailable, func(t *testing.T) error { return s.controllerUnpublish(t, s.spare[1], s.name) }},
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

// teardowns returns the calls that unpublish the idle volumes and unstage the unsynced ones. unstage is
// the result of NodeUnstageVolume.
func (s *outageTest) teardowns(unstage codes.Code) []call {
	d, i := s.directories, s.images
	return []call{
		{"NodeUnpublishVolume, directory", codes.OK, func(t *testing.T) error { return s.unpublish(t, d[idle]) }},
		{"NodeUnpublishVolume, image", codes.OK, func(t *testing.T) error { return s.unpublish(t, i[idle]) }},
		{"NodeUnstageVolume, directory", unstage, func(t *testing.T) error { return s.unstage(t, d[unsynced]) }},
		{"NodeUnstageVolume, image", unstage, func(t *testing.T) error { return s.unstage(t, i[unsynced]) }},
	}
}

// checkHealth calls NodeGetVolumeHealth and ignores the reported conditions.
func (s *outageTest) checkHealth(t *testing.T, v *vol) error {
	_, err := s.tryHealth(t, v)
	return err
}

// measureBefore measures the calls before the outage.
func (s *outageTest) measureBefore(t *testing.T) {
	t.Helper()
	stop := s.useUnaffected(t, before)
	for _, c := range s.calls() {
		must(t, s.table.measure(c.row, before, func() error { return c.do(t) }))
	}
	stop()
	s.restoreSpare(t)
	s.noteThreads(before)
}

// restoreSpare undoes CreateVolume and DeleteVolume of calls.
func (s *outageTest) restoreSpare(t *testing.T) {
	t.Helper()
	must(t, s.delete(t, s.directory(t, "nas", "during-outage")))
	s.spare[0] = s.directory(t, "nas", s.spare[0].name)
}

// measureDuring measures the calls one by one. For the column within, it first makes all calls at the
// same time, before the driver has detected that the server does not answer.
func (s *outageTest) measureDuring(t *testing.T, column string) {
	t.Helper()
	if column == within {
		s.callAtOnce(t)
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
	for _, v := range s.unaffected {
		s.writers[v].awaitProgress(t)
	}
	s.noteThreads(column)
}

// callAtOnce makes all calls at the same time, before the driver has detected the outage.
func (s *outageTest) callAtOnce(t *testing.T) {
	t.Helper()
	var all sync.WaitGroup
	for _, c := range slices.Concat(s.calls(), s.teardowns(codes.Unavailable)) {
		all.Go(func() {
			err := s.table.measure(c.row, atOnce, func() error { return c.do(t) })
			if code := status.Code(err); code != codes.Unavailable && code != c.code {
				t.Errorf("%s directly after the link was cut: got error %v, want %v or UNAVAILABLE", c.row, err, c.code)
			}
		})
	}
	all.Wait()
	s.noteThreads(atOnce)
}

// wantSilent fails unless the health of a volume and of the node report that the server does not
// answer.
func (s *outageTest) wantSilent(t *testing.T) {
	t.Helper()
	if reasons := s.health(t, s.directories[0]); !slices.Contains(reasons, "ServerSilent") {
		t.Errorf("got health reasons %q of a volume, want ServerSilent", reasons)
	}
	resp, err := s.node.NodeGetStorageHealth(deadline(t), &csi.NodeGetStorageHealthRequest{})
	must(t, err)
	silent := func(h *csi.NodeGetStorageHealthResponse_StorageBackendHealth) bool {
		return h.GetReason() == "ServerSilent"
	}
	if !slices.ContainsFunc(resp.GetBackendHealth(), silent) {
		t.Errorf("got storage health %v of the node, want ServerSilent", resp)
	}
}

// useUnaffected makes calls for volumes of other pools until stop. The calls must succeed.
func (s *outageTest) useUnaffected(t *testing.T, column string) (stop func()) {
	t.Helper()
	done := make(chan struct{})
	var loops sync.WaitGroup
	for pool, kind := range map[string]string{"other": "another server's pool", "local": "a node-local pool"} {
		loops.Go(func() { s.useVolumes(t, pool, kind, column, done) })
	}
	return func() { close(done); loops.Wait() }
}

// useVolumes creates, uses and deletes volumes of a pool, one per second, until done is closed.
func (s *outageTest) useVolumes(t *testing.T, pool, kind, column string, done <-chan struct{}) {
	var longest time.Duration
	for n := 0; ; n++ {
		select {
		case <-done:
			s.table.set("a volume's whole life in "+kind, column, fmt.Sprintf("%d, the longest %s", n, rounded(longest)))
			return
		case <-time.After(time.Second): // the virtual machine is slow
		}
		begin := time.Now()
		if err := s.useVolume(t, pool, fmt.Sprintf("%s-%d-%d", pool, s.rounds, n)); err != nil {
			t.Errorf("using a volume in %s during the outage: %v", kind, err)
			return
		}
		longest = max(longest, time.Since(begin))
	}
}

// useVolume makes all calls of a volume's life for an image in a pool.
func (s *outageTest) useVolume(t *testing.T, pool, name string) error {
	v, err := s.tryCreate(t, name, 64*mib, filesystem("ext4", oneNode), imageIn(pool))
	if err != nil {
		return err
	}
	for _, step := range []func(*testing.T, *vol) error{
		s.controllerPublish, s.stage, s.publish, s.stats, s.checkHealth, s.unpublish, s.unstage, s.unpublishHere, s.delete,
	} {
		if err := step(t, v); err != nil {
			return err
		}
	}
	return nil
}

// wantRecovered fails unless all calls succeed again, the driver has as many workers as before, and it has at
// most maxMoreThreads threads more than atFirst, their number before the outage.
func (s *outageTest) wantRecovered(t *testing.T, atFirst int) {
	t.Helper()
	for _, c := range slices.Concat(s.calls(), s.teardowns(codes.OK)) {
		eventually(t, func() error { return s.table.measure(c.row, back, func() error { return c.do(t) }) })
	}
	for v, w := range s.writers {
		w.awaitProgress(t)
		if reasons := s.health(t, v); len(reasons) > 0 {
			t.Errorf("got health reasons %q of %s, want none", reasons, v.name)
		}
	}
	s.restoreSpare(t)
	err := retry.For(t.Context(), waitTimeout, func() (bool, error) {
		n := len(s.workers())
		return n != 2, fmt.Errorf("got %d workers, want 2", n)
	})
	if len(s.workers()) != 2 {
		t.Error(err)
	}
	if n := s.threads(); n > atFirst+maxMoreThreads {
		t.Errorf("got %d threads, want at most %d", n, atFirst+maxMoreThreads)
	}
	s.noteThreads(back)
}

// maxMoreThreads is the number of threads that Go's runtime may have started during the outage.
const maxMoreThreads = 40

// testShort: the server does not answer for less than outage. No data is lost, not even data that was
// not synced.
func (s *outageTest) testShort(t *testing.T) {
	s.startVolumes(t)
	s.measureBefore(t)
	atFirst := s.threads()
	stop := s.useUnaffected(t, within)
	s.link.Cut(t)
	t.Logf("the link is cut")
	s.measureDuring(t, within)
	t.Logf("all calls were made")
	for _, v := range []*vol{s.directories[0], s.images[0]} { // a writer uses them
		wantCode(t, s.unpublish(t, v), codes.FailedPrecondition, "fuser")
	}
	s.link.Restore(t)
	stop()
	s.wantRecovered(t, atFirst)
	for _, v := range []*vol{s.directories[unsynced], s.images[unsynced]} {
		s.up(t, v)
		if got, err := os.ReadFile(s.file(v, "unsynced")); err != nil || int64(len(got)) != mib {
			t.Errorf("%s: got %d bytes of unsynced data and error %v, want %d bytes", v.name, len(got), err, mib)
		}
	}
}

// testLong: the server does not answer for longer than outage. Volumes whose writers were killed are
// force-unstaged, and the other writers wait and then continue.
func (s *outageTest) testLong(t *testing.T) {
	s.startVolumes(t)
	atFirst := s.threads()
	s.link.Cut(t)
	for _, v := range []*vol{s.directories[unsynced], s.images[unsynced]} {
		wantCode(t, s.unstage(t, v), codes.Unavailable)
	}
	killed := map[*vol]*writer{}
	for _, v := range slices.Concat(s.directories[:4], s.images[:4]) {
		killed[v] = s.writers[v]
		delete(s.writers, v)
		killed[v].kill()
	}
	err := retry.For(t.Context(), outage+waitTimeout, func() (bool, error) {
		err := s.unstage(t, s.directories[unsynced])
		return status.Code(err) == codes.Unavailable, err
	})
	must(t, err)
	t.Logf("the server has not answered for the time set by outage")
	stop := s.useUnaffected(t, after)
	for _, c := range slices.Concat(s.calls(), s.teardowns(codes.OK)) {
		wantCode(t, s.table.measure(c.row, after, func() error { return c.do(t) }), c.code)
	}
	s.tearDown(t, killed)
	s.wantSilent(t)
	s.awaitExamined(t, s.directories[0], "ServerSilent", true)
	s.noteThreads(after)
	for v, w := range s.writers {
		if slices.Contains(s.unaffected, v) {
			continue
		}
		select {
		case <-w.ended:
			t.Errorf("the writer of %s ended with error %v, want it to wait for the server", v.name, w.err)
		default:
		}
	}
	stop()
	t.Logf("half of the volumes are unstaged")
	s.link.Restore(t)
	for v, w := range killed {
		<-w.ended
		eventually(t, func() error { return s.controllerPublish(t, v) })
		s.mount(t, v)
		w.wantRecords(t, w.path)
	}
	s.awaitExamined(t, s.directories[0], "ServerSilent", false)
	s.wantRecovered(t, atFirst)
}

// tearDown unpublishes and unstages volumes at the same time, as a kubelet does. Their writers were
// killed but have not ended, because they wait for the server.
func (s *outageTest) tearDown(t *testing.T, writers map[*vol]*writer) {
	t.Helper()
	each(slices.Collect(maps.Keys(writers)), func(v *vol) {
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

// testStopped: the NFS server is stopped and refuses connections.
func (s *outageTest) testStopped(t *testing.T) {
	s.startVolumes(t)
	atFirst := s.threads()
	stop := s.useUnaffected(t, stopped)
	s.server.Stop(t)
	serve := sync.OnceFunc(func() { s.server.Serve(t) })
	t.Cleanup(serve)
	s.await(t, "ServerSilent")
	s.measureDuring(t, stopped)
	serve()
	stop()
	s.wantRecovered(t, atFirst)
}

// await waits until the health of the first directory has a reason.
func (s *outageTest) await(t *testing.T, reason string) {
	t.Helper()
	err := retry.For(t.Context(), waitTimeout, func() (bool, error) {
		resp, err := s.node.NodeGetVolumeHealth(deadline(t), &csi.NodeGetVolumeHealthRequest{VolumeId: s.directories[0].id})
		for _, h := range resp.GetVolumeHealth().GetHealthStatuses() {
			if h.GetReason() == reason {
				return false, nil
			}
		}
		return true, fmt.Errorf("got health %v and error %w, want %s", resp, err, reason)
	})
	must(t, err)
}

// testClear unpublishes and deletes all volumes.
func (s *outageTest) testClear(t *testing.T) {
	s.stopVolumes(t)
	for _, v := range slices.Concat(s.all(), s.unaffected, s.spare) {
		must(t, s.delete(t, v))
	}
	wantEmpty(t, s.server, "/nas")
	wantEmpty(t, s.other, "/other")
	s.stop(t)
	s.wantNothingLeft(t)
}
