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
	// dir contains all other directories except the pool.
	dir, root, manifests, registry, flex string
	pool                                 string
	log                                  *os.File
	manager, driver                      *process
}

// newGround starts a manager without a driver. Its directories have short names, because paths of
// sockets must be short (unix(7)).
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

// newTrivet is newGround with this project's driver and a pool on xfs.
func newTrivet(t *testing.T) *ground {
	t.Helper()
	g := newGround(t)
	g.pool = filepath.Join(testenv.Filesystem(t, "xfs", "8G"), "pool")
	config := fmt.Sprintf("pools: [{name: default, directory: {path: %q}, ephemeral: true, overcommit: 100}]\nephemeralMemory: 16Mi\n", g.pool)
	must(t, os.WriteFile(filepath.Join(g.dir, "config.yaml"), []byte(config), 0o600))
	g.startDriver()
	t.Cleanup(g.end) // before the pool is unmounted
	g.put("classes", classes)
	return g
}

// process is a running program.
type process struct{ *exec.Cmd }

func (g *ground) start(env []string, words ...string) *process {
	g.t.Helper()
	p := &process{exec.Command(words[0], words[1:]...)}
	p.Env = append(os.Environ(), env...)
	p.Stdout, p.Stderr = g.log, g.log
	must(g.t, p.Start())
	return p
}

// kill sends SIGKILL.
func (p *process) kill() {
	_ = p.Process.Kill()
	_ = p.Wait() // the error is that it was killed
}

// stop sends SIGTERM and waits, as systemd does.
func (p *process) stop() error {
	return errors.Join(p.Process.Signal(syscall.SIGTERM), p.Wait())
}

func (g *ground) startManager() {
	g.t.Helper()
	words := []string{
		program, "volume-manager", "--manifests", g.manifests, "--root-dir", g.root, "--plugins-registry", g.registry,
		"--volume-plugin-dir", g.flex, "--http-address", "", "--node-name", nodeName,
	}
	// The environment is for FlexVolume executables, which the manager starts.
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

// end stops manager and driver. If the test has failed, it logs their state.
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

// clear unmounts everything and frees loop devices.
func (g *ground) clear() {
	// The root directory may be on another disk.
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

// loops returns the loop devices of images on the pool's filesystem.
func (g *ground) loops() (devices []string) {
	files, _ := filepath.Glob("/sys/block/loop*/loop/backing_file")
	for _, f := range files {
		// A device may be freed meanwhile.
		if on, err := os.ReadFile(f); err == nil && g.pool != "" && strings.HasPrefix(string(on), filepath.Dir(g.pool)+"/") {
			devices = append(devices, "/dev/"+strings.Split(f, "/")[3])
		}
	}
	return devices
}

// left returns an error if mounts, loop devices or files are left.
func (g *ground) left() error {
	var errs []error
	mounts := mountsBelow(g.t, g.dir)
	if g.driver != nil { // it mounts its exports while it runs
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
		case !e.IsDir() || strings.HasPrefix(name, "pods/") || strings.Count(name, "/") > maxPluginDepth && filepath.Base(filepath.Dir(name)) != "volumeDevices":
			return fmt.Errorf("not removed: %s", path)
		}
		return nil
	})
	return errors.Join(append(errs, err)...)
}

// maxPluginDepth is the depth of the permanent directories of plugins below the root directory. The
// directories below plugins/kubernetes.io/csi/volumeDevices are deeper.
const maxPluginDepth = 3

// mountsBelow returns the mount points below a directory in the order of the mount table.
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

// mountTable parses proc_pid_mountinfo(5).
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

// put writes a manifest and renames it into the directory.
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

// pod holds the volumes of a ready pod by name.
type pod map[string]reconciler.VolumeStatus

// await waits until a pod of the default namespace is ready.
func (g *ground) await(name string) pod {
	g.t.Helper()
	p, err := g.ready(name)
	must(g.t, err)
	return p
}

// ready is await for other goroutines. The manager may be killed meanwhile.
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

// says waits until a volume of a pod has a phase, and a message that contains a text.
func (g *ground) says(name, volume string, phase state.Phase, message string) {
	g.t.Helper()
	g.holds(func(s volumemanager.Status) error {
		for _, v := range s.Volumes {
			if v.Pod == "default/"+name && v.Volume == volume {
				if v.Phase == phase && strings.Contains(v.Message, message) {
					return nil
				}
				return fmt.Errorf("%s of pod %s is %s with message %q; want %s, %q", volume, name, v.Phase, v.Message, phase, message)
			}
		}
		return fmt.Errorf("no volume %s of pod %s", volume, name)
	})
}

// complains waits until a problem of a manifest is reported.
func (g *ground) complains(file, message string) {
	g.t.Helper()
	g.holds(func(s volumemanager.Status) error {
		for _, p := range s.Problems {
			if p.File == g.manifest(file) && strings.Contains(p.Message, message) {
				return nil
			}
		}
		return fmt.Errorf("no problem of %s with message %q: %+v", file, message, s.Problems)
	})
}

// gone waits until a pod's directory is removed.
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
			return fmt.Errorf("pods/%s exists", uid)
		}
		if mounts := mountsBelow(g.t, filepath.Join(g.root, "pods", uid)); len(mounts) > 0 {
			return fmt.Errorf("mounted: %q: %w", mounts, errFinal)
		}
		return nil
	})
}

// wantNothing removes all manifests except those of drivers and classes, and waits until only the kept
// PersistentVolumes are left.
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

// poolHas returns an error unless the pool has n volumes.
func (g *ground) poolHas(n int) error {
	volumes, err := filepath.Glob(filepath.Join(g.pool, "volumes", "*"))
	if err == nil && len(volumes) != n {
		err = fmt.Errorf("the pool has %q, want %d", volumes, n)
	}
	return err
}

// control returns a client of the driver's controller service.
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
