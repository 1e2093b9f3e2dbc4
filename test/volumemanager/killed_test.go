package volumemanager

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/trivet-csi/trivet/volumemanager/reconciler"
)

// slots is the number of pods that run in parallel. In each slot, one pod follows another.
const slots = 4

// TestKilled kills the manager and the driver repeatedly while pods are added and removed. No data is
// lost, no volume of a running pod is unmounted, and in the end no volume is left.
func TestKilled(t *testing.T) {
	m := newMachineWithDriver(t)
	if *seed == 0 {
		*seed = uint64(time.Now().UnixNano())
	}
	t.Logf("-seed=%d", *seed)
	m.installFlex("loop", "local")
	m.put("config", settings)
	w := m.watchMounts()
	endKilling := m.killRandomly(rand.New(rand.NewPCG(*seed, slots)))
	var all errgroup.Group
	for i := range slots {
		s := &slot{machine: m, watch: w, number: i, rand: rand.New(rand.NewPCG(*seed, uint64(i)))}
		all.Go(func() error { return s.run((*lives + slots - 1) / slots) })
	}
	err := all.Wait()
	t.Logf("killed %d times", endKilling())
	must(t, errors.Join(err, w.end()))
	m.removeAll()
	must(t, m.checkPool(0))
	m.checkFlexClean()
}

// slot runs pods, one after another. Some of their volumes are reused by all pods of the slot.
type slot struct {
	*machine
	watch  *watch
	number int
	rand   *rand.Rand
	// written contains the names of the files that earlier pods have written to the reused volumes.
	written []string
}

func (s *slot) name() string { return fmt.Sprint("slot-", s.number) }

// disk returns the name of the slot's local volume.
func (s *slot) disk() string { return "disk-" + s.name() }

// reused returns the volumes that all pods of the slot use.
func (s *slot) reused() []string { return []string{s.name(), s.disk(), "flex"} }

// run creates the reused volumes and runs n pods.
func (s *slot) run(n int) error {
	dir := filepath.Join(s.dir, s.disk())
	if err := os.Mkdir(dir, 0o755); err != nil {
		return err
	}
	s.put("claim-"+s.name(), claim(s.name(), []string{"ext4", "xfs", "directory", "btrfs"}[s.number%4], "320Mi", ""),
		persistent(s.disk(), "1Gi", fmt.Sprintf("local: {path: %q}", dir)), claim(s.disk(), `""`, "1Mi", ", volumeName: "+s.disk()))
	for i := range n {
		if err := s.runPod(fmt.Sprintf("%s-%d", s.name(), i)); err != nil {
			return fmt.Errorf("pod %d of %s: %w", i, s.name(), err)
		}
	}
	return nil
}

// runPod runs one pod with the reused volumes and with volumes of its own. It removes some pods before
// they are ready.
func (s *slot) runPod(uid string) error {
	s.put(uid, claim(uid, "ext4", "16Mi", ", volumeMode: Block"), podOf(uid,
		claimed(s.name()), claimed(s.disk()), claimed(uid),
		fmt.Sprintf("{name: flex, flexVolume: {driver: trivet/%s, options: {size: 32Mi, volume: %s}}}", []string{"loop", "local"}[s.number%2], s.name()),
		"{name: config, configMap: {name: settings}}",
		"{name: secret, secret: {secretName: keys}}",
		"{name: scratch, emptyDir: {}}",
		"{name: memory, emptyDir: {medium: Memory}}",
		"{name: inline, csi: {driver: csi.trivet.dev, volumeAttributes: {size: 16Mi}}}"))
	if s.rand.IntN(5) == 0 {
		time.Sleep(s.randomPause())
		return s.removePod(uid)
	}
	p, err := s.ready(uid)
	if err != nil {
		return err
	}
	if err := s.use(uid, p); err != nil {
		return err
	}
	return s.removePod(uid)
}

// randomPause returns a random duration below a second.
func (s *slot) randomPause() time.Duration { return time.Duration(s.rand.Int64N(int64(time.Second))) }

// use writes to the volumes of a pod and reads from them, while it holds files in them open. It returns
// an error if a mount changes.
func (s *slot) use(uid string, p pod) (err error) {
	files, err := s.openFiles(uid, p)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, files.close()) }()
	for _, volume := range s.reused() {
		if err := s.reuse(p[volume], uid); err != nil {
			return err
		}
	}
	s.written = append(s.written, uid)
	if b, err := os.ReadFile(filepath.Join(p["secret"].Path, "password")); string(b) != "s3cret" {
		return fmt.Errorf("content of the secret: got %q, error %v; want s3cret", b, err) //nolint:errorlint // err may be nil
	}
	time.Sleep(s.randomPause())
	for _, volume := range append(s.reused(), "scratch", "memory", "inline") {
		if b, err := os.ReadFile(filepath.Join(p[volume].Path, "held")); string(b) != uid {
			return fmt.Errorf("content of the open file in %s: got %q, error %v; want %s", volume, b, err, uid) //nolint:errorlint // err may be nil
		}
	}
	return s.watch.check()
}

// reuse reads the files of earlier pods from a reused volume, and writes another file.
func (s *slot) reuse(v reconciler.VolumeStatus, uid string) error {
	for _, name := range s.written {
		if b, err := os.ReadFile(filepath.Join(v.Path, name)); err != nil || string(b) != name {
			return fmt.Errorf("content of %s in reused volume %s: got %q, error %v; want %s", name, v.Volume, b, err, name) //nolint:errorlint // err may be nil
		}
	}
	return writeSynced(filepath.Join(v.Path, uid), uid)
}

// openFiles are the open files of a pod. The mounts at paths must not change.
type openFiles struct {
	watch *watch
	files []*os.File
	paths []string
}

// openFiles writes to a file in each volume of a pod except those that are read-only or a device, and
// keeps the files open.
func (s *slot) openFiles(uid string, p pod) (o *openFiles, err error) {
	o = &openFiles{watch: s.watch}
	for name, v := range p {
		if name == uid {
			continue // a device
		}
		o.paths = append(o.paths, v.Path)
		if slices.Contains([]string{"secret", "config"}, name) {
			continue
		}
		f, err := os.Create(filepath.Join(v.Path, "held"))
		if err == nil {
			o.files = append(o.files, f)
			_, err = f.WriteString(uid)
		}
		if err != nil {
			return nil, errors.Join(err, o.close())
		}
	}
	s.watch.add(o.paths)
	return o, nil
}

// close closes the files, and ends the watch of the pod's mounts.
func (o *openFiles) close() (err error) {
	o.watch.remove(o.paths)
	for _, f := range o.files {
		err = errors.Join(err, f.Close())
	}
	return err
}

// removePod removes a pod and waits until it is unmounted.
func (s *slot) removePod(uid string) error {
	s.remove(uid)
	return s.waitRemoved(uid)
}

// writeSynced writes a text to a new file and syncs it.
func writeSynced(path, text string) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	_, err = f.WriteString(text)
	return errors.Join(err, f.Sync(), f.Close())
}

// watch records changes of the mounts at some paths.
type watch struct {
	t *testing.T

	mu sync.Mutex
	// ids holds the IDs of the mounts at each watched path.
	ids  map[string]string
	errs []error // one for each change
	stop func()  // ends the comparisons
}

// watchMounts starts a watch, which compares the mount table every 10 ms.
func (m *machine) watchMounts() *watch {
	w := &watch{t: m.t, ids: map[string]string{}}
	w.stop = repeatedly(w.compare, 10*time.Millisecond)
	return w
}

// repeatedly calls do until it is stopped.
func repeatedly(do func(), every time.Duration) (stop func()) {
	end, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		tick := time.NewTicker(every)
		defer tick.Stop()
		for {
			select {
			case <-end:
				return
			case <-tick.C:
				do()
			}
		}
	}()
	return func() {
		close(end)
		<-ended
	}
}

// mountIDs returns the IDs of the mounts at each path, in the order of the mount table.
func mountIDs(t *testing.T) map[string]string {
	ids := map[string]string{}
	for _, m := range mountTable(t) {
		ids[m.path] += m.id + " "
	}
	return ids
}

// compare records an error for each watched path whose mounts have changed.
func (w *watch) compare() {
	w.mu.Lock()
	defer w.mu.Unlock()
	now := mountIDs(w.t)
	for path, before := range w.ids {
		if now[path] != before {
			w.errs = append(w.errs, fmt.Errorf("IDs of the mounts at %s: got %q, want %q as before", path, now[path], before))
			w.ids[path] = now[path]
		}
	}
}

// add starts to watch paths, whose mounts must exist already.
func (w *watch) add(paths []string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	now := mountIDs(w.t)
	for _, path := range paths {
		w.ids[path] = now[path]
	}
}

// remove ends the watch of paths.
func (w *watch) remove(paths []string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, path := range paths {
		delete(w.ids, path)
	}
}

// check returns an error if a mount has changed so far.
func (w *watch) check() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	return errors.Join(w.errs...)
}

// end stops the watch and returns the result of check.
func (w *watch) end() error {
	w.stop()
	return w.check()
}

// killRandomly kills and restarts the manager, the driver or both at random times until end is called.
func (m *machine) killRandomly(r *rand.Rand) (end func() (kills int)) {
	kills := 0
	stop := repeatedly(func() {
		life := time.Duration(r.Int64N(int64(time.Second)))
		if kills%20 == 19 { // a slow machine does not finish any operation in the other lives
			life = 5 * time.Second
		}
		time.Sleep(life)
		which := 1 + r.IntN(3) // 1: the manager; 2: the driver; 3: both
		manager, driver := which&1 != 0, which&2 != 0
		if manager {
			m.manager.kill()
		}
		if driver {
			m.driver.kill()
		}
		time.Sleep(time.Duration(r.Int64N(int64(100 * time.Millisecond))))
		if manager {
			m.startManager()
		}
		if driver {
			m.startDriver()
		}
		kills++
	}, time.Millisecond)
	return func() int {
		stop()
		return kills
	}
}

// TestReboot: after a reboot, when files on disk exist, but no mounts, loop devices and data in memory,
// all volumes are mounted again, and the volumes of a removed pod are removed.
func TestReboot(t *testing.T) {
	m := newMachineWithDriver(t)
	m.installFlex("loop")
	m.put("config", settings)
	var claims []string
	names := []string{}
	for _, k := range kinds() {
		claims, names = append(claims, claim(k.name, k.class, k.size, k.more)), append(names, k.name)
	}
	m.put("claims", claims...)
	volumes := append(claimsOf(names),
		"{name: secret, secret: {secretName: keys}}",
		"{name: scratch, emptyDir: {}}",
		"{name: memory, emptyDir: {medium: Memory}}",
		"{name: inline, csi: {driver: csi.trivet.dev, volumeAttributes: {size: 16Mi}}}",
		"{name: flexed, flexVolume: {driver: trivet/loop, fsType: ext4, options: {size: 32Mi, volume: mine}}}")
	m.put("stays", podWith("stays", `containers: [{name: main, image: none, volumeMounts: [{name: xfs, mountPath: /x, subPath: part}]}]`, volumes...))
	m.put("goes", podOf("goes", volumes[len(kinds()):len(volumes)-1]...)) // without the claims and flexed
	p := m.await("stays")
	other := m.await("goes")
	for _, name := range append(names, "scratch", "memory", "inline", "flexed") {
		write(t, p[name].Path)
	}
	write(t, p["xfs"].SubPaths[0].Path)
	write(t, other["scratch"].Path)

	m.manager.kill()
	m.driver.kill()
	m.remove("goes")
	m.unmountAll()
	if mounts := mountsBelow(t, m.dir); len(mounts) > 0 {
		t.Errorf("after unmountAll: got mounts %q, want none", mounts)
	}
	m.startDriver()
	m.startManager()
	p = m.await("stays")
	for _, name := range append(names, "scratch", "flexed") {
		wantWritten(t, name, p[name].Path)
	}
	wantWritten(t, "subPath", p["xfs"].SubPaths[0].Path)
	for _, name := range []string{"memory", "inline"} {
		if _, err := os.Stat(filepath.Join(p[name].Path, "file")); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("volume %s in memory still has its file, or Stat failed: %v", name, err)
		}
	}
	if b, err := os.ReadFile(filepath.Join(p["secret"].Path, "password")); string(b) != "s3cret" {
		t.Errorf("content of the secret: got %q, error %v; want s3cret", b, err)
	}
	m.awaitRemoved("goes")
	m.removeAll()
	must(t, m.checkPool(0))
	m.checkFlexClean()
}
