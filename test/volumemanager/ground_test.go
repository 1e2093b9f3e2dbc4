package volumemanager

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"k8s.io/apimachinery/pkg/types"

	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/volumemanager"
	"github.com/trivet-csi/trivet/volumemanager/reconciler"
	"github.com/trivet-csi/trivet/volumemanager/state"
)

// ground is a machine: a directory of manifests, a manager, and a driver with a pool.
type ground struct {
	t *testing.T
	// dir has all the others but the pool.
	dir, root, manifests, registry, flex string
	pool                                 string
	log                                  *os.File
	manager, driver                      *process
}

// newGround starts a manager, without a driver. Its directories have short names: the paths
// of sockets have to be (unix(7)).
func newGround(t *testing.T) *ground {
	t.Helper()
	testenv.RequireRoot(t)
	g := &ground{t: t, dir: t.TempDir()}
	for name, dir := range map[string]*string{"root": &g.root, "manifests": &g.manifests, "reg": &g.registry, "flex": &g.flex} {
		*dir = filepath.Join(g.dir, name)
		must(t, os.Mkdir(*dir, 0o755))
	}
	var err error
	g.log, err = os.Create(filepath.Join(g.dir, "log"))
	must(t, err)
	t.Cleanup(g.end)
	g.startManager()
	return g
}

// newTrivet is newGround with this project's driver, whose pool is on an xfs.
func newTrivet(t *testing.T) *ground {
	t.Helper()
	g := newGround(t)
	g.pool = filepath.Join(testenv.Filesystem(t, "xfs", "8G"), "pool")
	config := fmt.Sprintf("pools: [{name: default, directory: {path: %q}, ephemeral: true, overcommit: 100}]\nephemeralMemory: 16Mi\n", g.pool)
	must(t, os.WriteFile(filepath.Join(g.dir, "config.yaml"), []byte(config), 0o600))
	g.startDriver()
	// Before the filesystem of the pool goes.
	t.Cleanup(g.end)
	g.put("classes", classes)
	return g
}

// process is one run of a program.
type process struct{ *exec.Cmd }

func (g *ground) start(env []string, words ...string) *process {
	g.t.Helper()
	p := &process{exec.Command(words[0], words[1:]...)}
	p.Env = append(os.Environ(), env...)
	p.Stdout, p.Stderr = g.log, g.log
	must(g.t, p.Start())
	return p
}

// kill ends a process at once.
func (p *process) kill() {
	_ = p.Process.Kill()
	_ = p.Wait() // how it ended is known
}

// stop ends a process as systemd does.
func (p *process) stop() error {
	return errors.Join(p.Process.Signal(syscall.SIGTERM), p.Wait())
}

func (g *ground) startManager() {
	g.t.Helper()
	words := []string{
		program, "volume-manager", "--manifests", g.manifests, "--root-dir", g.root, "--plugins-registry", g.registry,
		"--volume-plugin-dir", g.flex, "--http-address", "", "--node-name", nodeName,
	}
	// FlexVolume executables are the manager's children.
	g.manager = g.start([]string{
		"TRIVET_FLEXVOLUME_STATE_DIR=" + filepath.Join(g.dir, "flexstate"), "TRIVET_FLEXVOLUME_ENDPOINT=unix://" + filepath.Join(g.dir, "none.sock"),
	}, words...)
}

func (g *ground) startDriver() {
	g.t.Helper()
	g.driver = g.start(nil, program, "driver", "--endpoint", "unix://"+g.socket(), "--node-id", nodeName, "--config", filepath.Join(g.dir, "config.yaml"),
		"--state-dir", filepath.Join(g.dir, "state"), "--plugins-registry", g.registry, "--http-address", "", "-v", "2")
}

func (g *ground) socket() string { return filepath.Join(g.dir, "csi.sock") }

// end ends what runs; of a test that has failed it shows and clears what is there.
func (g *ground) end() {
	if g.manager == nil {
		return
	}
	if g.t.Failed() {
		g.explain()
	}
	for _, p := range []*process{g.manager, g.driver} {
		if p == nil {
			continue
		}
		if err := p.stop(); err != nil {
			g.t.Errorf("%s ended with %v", p.Args[1], err)
		}
	}
	g.manager, g.driver = nil, nil
	if left := g.left(); left != nil && !g.t.Failed() {
		g.t.Error(left)
		g.explain()
	}
	g.clear()
	_ = g.log.Close()
}

func (g *ground) explain() {
	out, err := exec.Command(program, "volume-manager", "status", "--root-dir", g.root).CombinedOutput()
	g.t.Logf("status (%v):\n%s", err, out)
	b, err := os.ReadFile(g.log.Name())
	g.t.Logf("the end of the log (%v):\n%s", err, b[max(0, len(b)-16384):])
}

// clear takes away what is mounted, and frees loop devices.
func (g *ground) clear() {
	// The root directory may be on a disk of its own.
	for _, at := range slices.Backward(append(mountsBelow(g.t, g.dir), mountsBelow(g.t, g.root)...)) {
		if err := syscall.Unmount(at, syscall.MNT_DETACH); err != nil && !errors.Is(err, syscall.EINVAL) {
			g.t.Logf("unmounting %s: %v", at, err)
		}
	}
	for _, device := range g.loops() {
		if err := exec.Command("losetup", "-d", device).Run(); err != nil {
			g.t.Logf("freeing %s: %v", device, err)
		}
	}
}

// loops are the devices of images on the pool's filesystem.
func (g *ground) loops() (devices []string) {
	files, _ := filepath.Glob("/sys/block/loop*/loop/backing_file")
	for _, f := range files {
		// One that is freed between the two looks is not there.
		if on, err := os.ReadFile(f); err == nil && g.pool != "" && strings.HasPrefix(string(on), filepath.Dir(g.pool)+"/") {
			devices = append(devices, "/dev/"+strings.Split(f, "/")[3])
		}
	}
	return devices
}

// left is an error if anything is on the machine.
func (g *ground) left() error {
	var errs []error
	mounts := mountsBelow(g.t, g.dir)
	if g.driver != nil { // which has its exports mounted as long as it runs
		mounts = slices.DeleteFunc(mounts, func(at string) bool { return strings.HasPrefix(at, filepath.Join(g.dir, "state/exports")+"/") })
	}
	if len(mounts) > 0 {
		errs = append(errs, fmt.Errorf("mounted: %q", mounts))
	}
	if devices := g.loops(); len(devices) > 0 {
		errs = append(errs, fmt.Errorf("loop devices: %q", devices))
	}
	err := filepath.WalkDir(g.root, func(path string, e fs.DirEntry, err error) error {
		name, _ := filepath.Rel(g.root, path)
		switch {
		case err != nil:
			return err
		case name == "volume-manager":
			return filepath.SkipDir
		case !e.IsDir() || strings.HasPrefix(name, "pods/") || strings.Count(name, "/") > deepest && filepath.Base(filepath.Dir(name)) != "volumeDevices":
			return fmt.Errorf("left: %s", path)
		}
		return nil
	})
	return errors.Join(append(errs, err)...)
}

// deepest is how deep below the root directory plugins keep directories of their own, but
// for two of csi: plugins/kubernetes.io/csi/volumeDevices.
const deepest = 3

// mountsBelow are the paths below a directory that have something mounted, as often as it
// is, in their order.
func mountsBelow(t *testing.T, dir string) (paths []string) {
	t.Helper()
	for _, m := range mountTable(t) {
		if strings.HasPrefix(m.path, dir+"/") {
			paths = append(paths, m.path)
		}
	}
	return paths
}

type mounted struct{ id, path, fsType string }

// mountTable is proc_pid_mountinfo(5).
func mountTable(t *testing.T) (table []mounted) {
	t.Helper()
	b, err := os.ReadFile("/proc/self/mountinfo")
	must(t, err)
	for line := range strings.Lines(string(b)) {
		own, filesystem, _ := strings.Cut(line, " - ")
		fields := strings.Fields(own)
		table = append(table, mounted{fields[0], fields[4], strings.Fields(filesystem)[0]})
	}
	return table
}

// put writes a manifest beside the others, and renames it there.
func (g *ground) put(name string, text ...string) {
	g.t.Helper()
	file := filepath.Join(g.dir, name+".new")
	must(g.t, os.WriteFile(file, []byte(strings.Join(text, "---\n")), 0o600))
	must(g.t, os.Rename(file, g.manifest(name)))
}

func (g *ground) manifest(name string) string { return filepath.Join(g.manifests, name+".yaml") }

func (g *ground) remove(names ...string) {
	g.t.Helper()
	for _, name := range names {
		must(g.t, os.Remove(g.manifest(name)))
	}
}

func (g *ground) status() (volumemanager.Status, error) {
	return volumemanager.ReadStatus(context.Background(), g.root)
}

// holds waits until a condition of the status holds.
func (g *ground) holds(condition func(volumemanager.Status) error) {
	g.t.Helper()
	eventually(g.t, func() error {
		s, err := g.status()
		if err == nil {
			err = condition(s)
		}
		return err
	})
}

// pod is what the manager tells of a pod of the default namespace once it is ready, by its
// volumes' names.
type pod map[string]reconciler.VolumeStatus

// await waits until a pod is ready.
func (g *ground) await(name string) pod {
	g.t.Helper()
	p, err := g.ready(name)
	must(g.t, err)
	return p
}

// ready is await, for any goroutine. The manager may be killed meanwhile.
func (g *ground) ready(name string) (pod, error) {
	p := pod{}
	return p, until(func() error {
		s, err := volumemanager.AwaitPod(context.Background(), g.root, types.NamespacedName{Namespace: "default", Name: name}, patience)
		if err != nil {
			return err
		}
		if !s.Ready {
			return fmt.Errorf("pod %s is not ready, known: %t: %+v: %w", name, s.Known, s.Volumes, errFinal)
		}
		for _, v := range s.Volumes {
			p[v.Volume] = v
		}
		return nil
	})
}

// says waits until a volume of a pod has a phase, and a message.
func (g *ground) says(name, volume string, phase state.Phase, message string) {
	g.t.Helper()
	g.holds(func(s volumemanager.Status) error {
		for _, v := range s.Volumes {
			if v.Pod == "default/"+name && v.Volume == volume {
				if v.Phase == phase && strings.Contains(v.Message, message) {
					return nil
				}
				return fmt.Errorf("%s of pod %s is %s and says %q; want %s, %q", volume, name, v.Phase, v.Message, phase, message)
			}
		}
		return fmt.Errorf("no volume %s of pod %s", volume, name)
	})
}

// complains waits until a problem of a manifest is told.
func (g *ground) complains(file, message string) {
	g.t.Helper()
	g.holds(func(s volumemanager.Status) error {
		for _, p := range s.Problems {
			if p.File == g.manifest(file) && strings.Contains(p.Message, message) {
				return nil
			}
		}
		return fmt.Errorf("want a problem of %s that says %q: %+v", file, message, s.Problems)
	})
}

// gone waits until nothing of a pod is on the machine.
func (g *ground) gone(uids ...string) {
	g.t.Helper()
	for _, uid := range uids {
		must(g.t, g.isGone(uid))
	}
}

func (g *ground) isGone(uid string) error {
	return until(func() error {
		_, err := os.Lstat(filepath.Join(g.root, "pods", uid))
		if err == nil {
			return fmt.Errorf("pods/%s is there", uid)
		}
		if mounts := mountsBelow(g.t, filepath.Join(g.root, "pods", uid)); len(mounts) > 0 {
			return fmt.Errorf("mounted: %q: %w", mounts, errFinal)
		}
		return nil
	})
}

// wantNothing removes all manifests but those of drivers and classes, and waits until
// nothing is left but PersistentVolumes that are kept.
func (g *ground) wantNothing(kept ...string) {
	g.t.Helper()
	files, err := os.ReadDir(g.manifests)
	must(g.t, err)
	for _, f := range files {
		if !slices.Contains([]string{"classes.yaml", "hostpath.yaml"}, f.Name()) {
			must(g.t, os.Remove(filepath.Join(g.manifests, f.Name())))
		}
	}
	g.holds(func(s volumemanager.Status) error {
		var names []string
		for _, v := range s.PersistentVolumes {
			names = append(names, v.Name)
		}
		if len(s.Volumes)+len(s.Claims) > 0 || !slices.Equal(names, kept) {
			return fmt.Errorf("volumes %+v, claims %+v, PersistentVolumes %+v", s.Volumes, s.Claims, s.PersistentVolumes)
		}
		return g.left()
	})
}

// poolHas is an error unless the pool has so many volumes.
func (g *ground) poolHas(n int) error {
	volumes, err := filepath.Glob(filepath.Join(g.pool, "volumes", "*"))
	if err == nil && len(volumes) != n {
		err = fmt.Errorf("the pool has %q, want %d", volumes, n)
	}
	return err
}

// control talks to the driver beside the manager.
func (g *ground) control() csi.ControllerClient {
	g.t.Helper()
	dial := func(ctx context.Context, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", g.socket())
	}
	conn, err := grpc.NewClient("passthrough:///driver", grpc.WithContextDialer(dial), grpc.WithTransportCredentials(insecure.NewCredentials()))
	must(g.t, err)
	g.t.Cleanup(func() { _ = conn.Close() })
	return csi.NewControllerClient(conn)
}
