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

// TestKilled kills manager and driver repeatedly while pods are added and removed. No data is lost, no
// volume of a running pod is unmounted, and nothing is left in the end.
func TestKilled(t *testing.T) {
	g := newTrivet(t)
	if *seed == 0 {
		*seed = uint64(time.Now().UnixNano())
	}
	t.Logf("-seed=%d", *seed)
	g.installFlex("loop", "local")
	g.put("config", settings)
	w := g.watchMounts()
	endKilling := g.killNowAndThen(rand.New(rand.NewPCG(*seed, slots)))
	var all errgroup.Group
	for i := range slots {
		l := &life{ground: g, watch: w, slot: i, rand: rand.New(rand.NewPCG(*seed, uint64(i)))}
		all.Go(func() error { return l.live((*lives + slots - 1) / slots) })
	}
	err := all.Wait()
	t.Logf("killed %d times", endKilling())
	must(t, errors.Join(err, w.end()))
	g.wantNothing()
	must(t, g.poolHas(0))
	g.wantFlexClean()
}

// life runs the pods of one slot, some of whose volumes are reused.
type life struct {
	*ground
	watch *watch
	slot  int
	rand  *rand.Rand
	// written are the files of earlier pods.
	written []string
}

func (l *life) name() string { return fmt.Sprint("slot-", l.slot) }

// disk is the name of the slot's local volume.
func (l *life) disk() string { return "disk-" + l.name() }

// reused returns the volumes that all pods of the slot use.
func (l *life) reused() []string { return []string{l.name(), l.disk(), "flex"} }

func (l *life) live(n int) error {
	dir := filepath.Join(l.dir, l.disk())
	if err := os.Mkdir(dir, 0o755); err != nil {
		return err
	}
	l.put("claim-"+l.name(), claim(l.name(), []string{"ext4", "xfs", "directory", "btrfs"}[l.slot%4], "320Mi", ""),
		persistent(l.disk(), "1Gi", fmt.Sprintf("local: {path: %q}", dir)), claim(l.disk(), `""`, "1Mi", ", volumeName: "+l.disk()))
	for i := range n {
		if err := l.once(fmt.Sprintf("%s-%d", l.name(), i)); err != nil {
			return fmt.Errorf("life %d of %s: %w", i, l.name(), err)
		}
	}
	return nil
}

// once runs one pod, with reused volumes and its own ones.
func (l *life) once(uid string) error {
	l.put(uid, claim(uid, "ext4", "16Mi", ", volumeMode: Block"), podOf(uid,
		claimed(l.name()), claimed(l.disk()), claimed(uid),
		fmt.Sprintf("{name: flex, flexVolume: {driver: trivet/%s, options: {size: 32Mi, volume: %s}}}", []string{"loop", "local"}[l.slot%2], l.name()),
		"{name: config, configMap: {name: settings}}",
		"{name: secret, secret: {secretName: keys}}",
		"{name: scratch, emptyDir: {}}",
		"{name: memory, emptyDir: {medium: Memory}}",
		"{name: inline, csi: {driver: csi.trivet.dev, volumeAttributes: {size: 16Mi}}}"))
	if l.rand.IntN(5) == 0 { // possibly before the volumes are mounted
		time.Sleep(l.moment())
		return l.over(uid)
	}
	p, err := l.ready(uid)
	if err != nil {
		return err
	}
	if err := l.use(uid, p); err != nil {
		return err
	}
	return l.over(uid)
}

// moment returns a random duration below a second.
func (l *life) moment() time.Duration { return time.Duration(l.rand.Int64N(int64(time.Second))) }

// use writes to the volumes of a pod and reads from them. Meanwhile nothing must be unmounted.
func (l *life) use(uid string, p pod) (err error) {
	held, err := l.hold(uid, p)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, held.release()) }()
	for _, volume := range l.reused() {
		if err := l.reuse(p[volume], uid); err != nil {
			return err
		}
	}
	l.written = append(l.written, uid)
	if b, err := os.ReadFile(filepath.Join(p["secret"].Path, "password")); string(b) != "s3cret" {
		return fmt.Errorf("the secret: %q, %w", b, err)
	}
	time.Sleep(l.moment())
	for _, volume := range append(l.reused(), "scratch", "memory", "inline") {
		if b, err := os.ReadFile(filepath.Join(p[volume].Path, "held")); string(b) != uid {
			return fmt.Errorf("content of %s: %q, %w", volume, b, err)
		}
	}
	return l.watch.check()
}

// reuse reads the files of earlier pods from a reused volume, and writes another one.
func (l *life) reuse(v reconciler.VolumeStatus, uid string) error {
	for _, name := range l.written {
		if b, err := os.ReadFile(filepath.Join(v.Path, name)); err != nil || string(b) != name {
			return fmt.Errorf("%s in reused volume %s: %q, %w", name, v.Volume, b, err)
		}
	}
	return writeSynced(filepath.Join(v.Path, uid), uid)
}

// held are files that a pod has open.
type held struct {
	watch *watch
	files []*os.File
	paths []string
}

func (l *life) hold(uid string, p pod) (h *held, err error) {
	h = &held{watch: l.watch}
	for name, v := range p {
		if name == uid {
			continue // a device
		}
		h.paths = append(h.paths, v.Path)
		if slices.Contains([]string{"secret", "config"}, name) {
			continue
		}
		f, err := os.Create(filepath.Join(v.Path, "held"))
		if err == nil {
			h.files = append(h.files, f)
			_, err = f.WriteString(uid)
		}
		if err != nil {
			return nil, errors.Join(err, h.release())
		}
	}
	l.watch.add(h.paths)
	return h, nil
}

func (h *held) release() (err error) {
	h.watch.remove(h.paths)
	for _, f := range h.files {
		err = errors.Join(err, f.Close())
	}
	return err
}

// over removes a pod.
func (l *life) over(uid string) error {
	l.remove(uid)
	return l.isGone(uid)
}

func writeSynced(path, text string) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	_, err = f.WriteString(text)
	return errors.Join(err, f.Sync(), f.Close())
}

// watch checks that mounts do not change.
type watch struct {
	t *testing.T

	mu sync.Mutex
	// ids holds the IDs of the mounts at each path.
	ids  map[string]string
	errs []error
	stop func()
}

// watchMounts starts to check the mount table repeatedly.
func (g *ground) watchMounts() *watch {
	w := &watch{t: g.t, ids: map[string]string{}}
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

func (w *watch) compare() {
	w.mu.Lock()
	defer w.mu.Unlock()
	now := mountIDs(w.t)
	for path, before := range w.ids {
		if now[path] != before {
			w.errs = append(w.errs, fmt.Errorf("the mounts at %s were %q and are %q", path, before, now[path]))
			w.ids[path] = now[path]
		}
	}
}

func (w *watch) add(paths []string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	now := mountIDs(w.t)
	for _, path := range paths {
		w.ids[path] = now[path]
	}
}

func (w *watch) remove(paths []string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, path := range paths {
		delete(w.ids, path)
	}
}

// check returns the changes so far.
func (w *watch) check() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	return errors.Join(w.errs...)
}

func (w *watch) end() error {
	w.stop()
	return w.check()
}

// killNowAndThen kills and restarts manager and driver at random times until end is called.
func (g *ground) killNowAndThen(r *rand.Rand) (end func() (kills int)) {
	kills := 0
	stop := repeatedly(func() {
		time.Sleep(time.Duration(r.Int64N(int64(time.Second))))
		which := 1 + r.IntN(3)
		manager, driver := which&1 != 0, which&2 != 0
		if manager {
			g.manager.kill()
		}
		if driver {
			g.driver.kill()
		}
		time.Sleep(time.Duration(r.Int64N(int64(100 * time.Millisecond))))
		if manager {
			g.startManager()
		}
		if driver {
			g.startDriver()
		}
		kills++
	}, time.Millisecond)
	return func() int {
		stop()
		return kills
	}
}

// TestReboot: after a reboot, files exist; mounts, loop devices and data in memory do not.
func TestReboot(t *testing.T) {
	g := newTrivet(t)
	g.installFlex("loop")
	g.put("config", settings)
	var claims []string
	names := []string{}
	for _, k := range kinds() {
		claims, names = append(claims, claim(k.name, k.class, k.size, k.more)), append(names, k.name)
	}
	g.put("claims", claims...)
	volumes := append(claimsOf(names),
		"{name: secret, secret: {secretName: keys}}",
		"{name: scratch, emptyDir: {}}",
		"{name: memory, emptyDir: {medium: Memory}}",
		"{name: inline, csi: {driver: csi.trivet.dev, volumeAttributes: {size: 16Mi}}}",
		"{name: flexed, flexVolume: {driver: trivet/loop, fsType: ext4, options: {size: 32Mi, volume: mine}}}")
	g.put("stays", podWith("stays", `containers: [{name: main, image: none, volumeMounts: [{name: xfs, mountPath: /x, subPath: part}]}]`, volumes...))
	g.put("goes", podOf("goes", volumes[len(kinds()):len(volumes)-1]...))
	p := g.await("stays")
	other := g.await("goes")
	for _, name := range append(names, "scratch", "memory", "inline", "flexed") {
		write(t, p[name].Path)
	}
	write(t, p["xfs"].SubPaths[0].Path)
	write(t, other["scratch"].Path)

	g.manager.kill()
	g.driver.kill()
	g.remove("goes")
	g.clear()
	for _, what := range mountsBelow(t, g.dir) {
		t.Errorf("%s is still mounted", what)
	}
	g.startDriver()
	g.startManager()
	p = g.await("stays")
	for _, name := range append(names, "scratch", "flexed") {
		wantWritten(t, name, p[name].Path)
	}
	wantWritten(t, "subPath", p["xfs"].SubPaths[0].Path)
	for _, name := range []string{"memory", "inline"} {
		if _, err := os.Stat(filepath.Join(p[name].Path, "file")); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("the file in %s: %v", name, err)
		}
	}
	if b, err := os.ReadFile(filepath.Join(p["secret"].Path, "password")); string(b) != "s3cret" {
		t.Errorf("the secret: %q, %v", b, err)
	}
	g.gone("goes")
	g.wantNothing()
	must(t, g.poolHas(0))
	g.wantFlexClean()
}
