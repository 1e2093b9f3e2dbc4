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

// machine has a directory of manifests, a running volume manager, and possibly a driver with a pool.
type machine struct {
	t *testing.T
	// dir contains all other directories except the pool.
	dir, root, manifests, registry, flex string
	pool                                 string   // the directory of the driver's pool; empty if there is none
	log                                  *os.File // the output of all processes
	manager, driver                      *process // nil if the process was not started
}

// newMachine starts a manager without a driver. The directories have short names, because the paths of
// sockets must be short (unix(7)).
func newMachine(t *testing.T) *machine {
	t.Helper()
	testenv.RequireRoot(t)
	m := &machine{t: t, dir: t.TempDir()}
	for name, dir := range map[string]*string{"root": &m.root, "manifests": &m.manifests, "reg": &m.registry, "flex": &m.flex} {
		*dir = filepath.Join(m.dir, name)
		must(t, os.Mkdir(*dir, 0o755))
	}
	var err error
	m.log, err = os.Create(filepath.Join(m.dir, "log"))
	must(t, err)
	t.Cleanup(m.end)
	m.startManager()
	return m
}

// newMachineWithDriver starts a manager, and this project's driver with a pool on xfs, and more pools.
func newMachineWithDriver(t *testing.T, more ...string) *machine {
	t.Helper()
	m := newMachine(t)
	m.pool = filepath.Join(testenv.Filesystem(t, "xfs", "8G"), "pool")
	pools := append([]string{fmt.Sprintf("{name: default, directory: {path: %q}, ephemeral: true, overcommit: 100}", m.pool)}, more...)
	config := fmt.Sprintf("pools: [%s]\nephemeralMemory: 16Mi\n", strings.Join(pools, ", "))
	must(t, os.WriteFile(filepath.Join(m.dir, "config.yaml"), []byte(config), 0o600))
	m.startDriver()
	t.Cleanup(m.end) // before the pool is unmounted
	m.put("classes", classes)
	return m
}

// process is a running program.
type process struct{ *exec.Cmd }

// start starts a program with environment variables in addition to those of the test.
func (m *machine) start(env []string, words ...string) *process {
	m.t.Helper()
	p := &process{exec.Command(words[0], words[1:]...)}
	p.Env = append(os.Environ(), env...)
	p.Stdout, p.Stderr = m.log, m.log
	must(m.t, p.Start())
	return p
}

// kill sends SIGKILL and waits for the end of the process.
func (p *process) kill() {
	_ = p.Process.Kill()
	_ = p.Wait() // returns an error, because the process was killed
}

// stop sends SIGTERM and waits, as systemd does.
func (p *process) stop() error {
	return errors.Join(p.Process.Signal(syscall.SIGTERM), p.Wait())
}

func (m *machine) startManager() {
	m.t.Helper()
	words := []string{
		program, "volume-manager", "--manifests", m.manifests, "--root-dir", m.root, "--plugins-registry", m.registry,
		"--volume-plugin-dir", m.flex, "--http-address", "", "--node-name", nodeName,
	}
	// The manager passes the environment to FlexVolume executables.
	m.manager = m.start([]string{
		"TRIVET_FLEXVOLUME_STATE_DIR=" + filepath.Join(m.dir, "flexstate"), "TRIVET_FLEXVOLUME_ENDPOINT=unix://" + filepath.Join(m.dir, "none.sock"),
	}, words...)
}

func (m *machine) startDriver() {
	m.t.Helper()
	m.driver = m.start(nil, program, "driver", "--endpoint", "unix://"+m.socket(), "--node-id", nodeName, "--config", filepath.Join(m.dir, "config.yaml"),
		"--state-dir", filepath.Join(m.dir, "state"), "--plugins-registry", m.registry, "--http-address", "", "-v", "2")
}

func (m *machine) socket() string { return filepath.Join(m.dir, "csi.sock") }

// end stops manager and driver. If the test has failed, it logs their state.
func (m *machine) end() {
	if m.manager == nil {
		return
	}
	if m.t.Failed() {
		m.logState()
	}
	for _, p := range []*process{m.manager, m.driver} {
		if p == nil {
			continue
		}
		if err := p.stop(); err != nil {
			m.t.Errorf("trivet %s: got exit status %v after SIGTERM, want 0", p.Args[1], err)
		}
	}
	m.manager, m.driver = nil, nil
	if err := m.leftovers(); err != nil && !m.t.Failed() {
		m.t.Error(err)
		m.logState()
	}
	m.unmountAll()
	_ = m.log.Close()
}

// logState logs the manager's status and the end of the processes' output.
func (m *machine) logState() {
	out, err := exec.Command(program, "volume-manager", "status", "--root-dir", m.root).CombinedOutput()
	m.t.Logf("status (%v):\n%s", err, out)
	b, err := os.ReadFile(m.log.Name())
	m.t.Logf("the end of the log (%v):\n%s", err, b[max(0, len(b)-16384):])
}

// unmountAll unmounts all mounts and frees the loop devices.
func (m *machine) unmountAll() {
	// The root directory may be outside dir, on another disk.
	for _, at := range slices.Backward(append(mountsBelow(m.t, m.dir), mountsBelow(m.t, m.root)...)) {
		if err := syscall.Unmount(at, syscall.MNT_DETACH); err != nil && !errors.Is(err, syscall.EINVAL) {
			m.t.Logf("unmounting %s: %v", at, err)
		}
	}
	for _, device := range m.loops() {
		if err := exec.Command("losetup", "-d", device).Run(); err != nil {
			m.t.Logf("freeing %s: %v", device, err)
		}
	}
}

// loops returns the loop devices of images on the pool's filesystem.
func (m *machine) loops() (devices []string) {
	files, _ := filepath.Glob("/sys/block/loop*/loop/backing_file")
	for _, f := range files {
		// A device may be freed meanwhile.
		if backing, err := os.ReadFile(f); err == nil && m.pool != "" && strings.HasPrefix(string(backing), filepath.Dir(m.pool)+"/") {
			devices = append(devices, "/dev/"+strings.Split(f, "/")[3])
		}
	}
	return devices
}

// leftovers returns an error if mounts, loop devices, or files in the manager's root directory exist.
func (m *machine) leftovers() error {
	var errs []error
	mounts := mountsBelow(m.t, m.dir)
	if m.driver != nil { // a running driver mounts the exports and the records of its pools
		mounts = slices.DeleteFunc(mounts, func(at string) bool {
			return strings.HasPrefix(at, filepath.Join(m.dir, "state/exports")+"/") || strings.HasPrefix(at, filepath.Join(m.dir, "state/lvm")+"/")
		})
	}
	if len(mounts) > 0 {
		errs = append(errs, fmt.Errorf("got mounts %q, want none", mounts))
	}
	if devices := m.loops(); len(devices) > 0 {
		errs = append(errs, fmt.Errorf("got loop devices %q, want none", devices))
	}
	err := filepath.WalkDir(m.root, func(path string, e fs.DirEntry, err error) error {
		name, _ := filepath.Rel(m.root, path)
		switch {
		case err != nil:
			return err
		case name == "volume-manager":
			return filepath.SkipDir
		case !e.IsDir() || strings.HasPrefix(name, "pods/") || strings.Count(name, "/") > maxPluginDepth && filepath.Base(filepath.Dir(name)) != "volumeDevices":
			return fmt.Errorf("%s was not removed", path)
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

// mounted is an entry of the mount table.
type mounted struct{ id, path, fsType string }

// mountTable parses proc_pid_mountinfo(5).
func mountTable(t *testing.T) (table []mounted) {
	t.Helper()
	b, err := os.ReadFile("/proc/self/mountinfo")
	must(t, err)
	for line := range strings.Lines(string(b)) {
		first, filesystem, _ := strings.Cut(line, " - ")
		fields := strings.Fields(first)
		table = append(table, mounted{fields[0], fields[4], strings.Fields(filesystem)[0]})
	}
	return table
}

// put writes a manifest and renames it into the directory.
func (m *machine) put(name string, text ...string) {
	m.t.Helper()
	file := filepath.Join(m.dir, name+".new")
	must(m.t, os.WriteFile(file, []byte(strings.Join(text, "---\n")), 0o600))
	must(m.t, os.Rename(file, m.manifest(name)))
}

// manifest returns the path of a manifest.
func (m *machine) manifest(name string) string { return filepath.Join(m.manifests, name+".yaml") }

// remove removes manifests.
func (m *machine) remove(names ...string) {
	m.t.Helper()
	for _, name := range names {
		must(m.t, os.Remove(m.manifest(name)))
	}
}

func (m *machine) status() (volumemanager.Status, error) {
	return volumemanager.ReadStatus(context.Background(), m.root)
}

// awaitStatus waits until condition returns nil for the status of the manager.
func (m *machine) awaitStatus(condition func(volumemanager.Status) error) {
	m.t.Helper()
	eventually(m.t, func() error {
		s, err := m.status()
		if err == nil {
			err = condition(s)
		}
		return err
	})
}

// pod holds the volumes of a ready pod by name.
type pod map[string]reconciler.VolumeStatus

// await waits until a pod of the default namespace is ready.
func (m *machine) await(name string) pod {
	m.t.Helper()
	p, err := m.ready(name)
	must(m.t, err)
	return p
}

// ready is like await, but returns the error and can be called in any goroutine. The manager may be
// killed and restarted during the call.
func (m *machine) ready(name string) (pod, error) {
	p := pod{}
	return p, until(func() error {
		s, err := volumemanager.AwaitPod(context.Background(), m.root, types.NamespacedName{Namespace: "default", Name: name}, waitLimit)
		if err != nil {
			return err
		}
		if !s.Ready {
			return fmt.Errorf("pod %s is not ready, known %t, volumes %+v: %w", name, s.Known, s.Volumes, errFinal)
		}
		for _, v := range s.Volumes {
			p[v.Volume] = v
		}
		return nil
	})
}

// awaitVolume waits until a volume of a pod has a phase, and a message that contains a text.
func (m *machine) awaitVolume(name, volume string, phase state.Phase, message string) {
	m.t.Helper()
	m.awaitStatus(func(s volumemanager.Status) error {
		for _, v := range s.Volumes {
			if v.Pod == "default/"+name && v.Volume == volume {
				if v.Phase == phase && strings.Contains(v.Message, message) {
					return nil
				}
				return fmt.Errorf("volume %s of pod %s: got phase %s, message %q; want %s, %q", volume, name, v.Phase, v.Message, phase, message)
			}
		}
		return fmt.Errorf("the status has no volume %s of pod %s", volume, name)
	})
}

// awaitProblem waits until a problem of a manifest is reported.
func (m *machine) awaitProblem(file, message string) {
	m.t.Helper()
	m.awaitStatus(func(s volumemanager.Status) error {
		for _, p := range s.Problems {
			if p.File == m.manifest(file) && strings.Contains(p.Message, message) {
				return nil
			}
		}
		return fmt.Errorf("got problems %+v, want one of %s with message %q", s.Problems, file, message)
	})
}

// awaitRemoved waits until the directories of pods are removed.
func (m *machine) awaitRemoved(uids ...string) {
	m.t.Helper()
	for _, uid := range uids {
		must(m.t, m.waitRemoved(uid))
	}
}

// waitRemoved is like awaitRemoved for one pod, but returns the error.
func (m *machine) waitRemoved(uid string) error {
	return until(func() error {
		_, err := os.Lstat(filepath.Join(m.root, "pods", uid))
		if err == nil {
			return fmt.Errorf("pods/%s exists", uid)
		}
		if mounts := mountsBelow(m.t, filepath.Join(m.root, "pods", uid)); len(mounts) > 0 {
			return fmt.Errorf("pods/%s was removed, but the mounts %q exist: %w", uid, mounts, errFinal)
		}
		return nil
	})
}

// removeAll removes all manifests except those of drivers and classes, and waits until no volumes exist
// except the kept PersistentVolumes.
func (m *machine) removeAll(kept ...string) {
	m.t.Helper()
	files, err := os.ReadDir(m.manifests)
	must(m.t, err)
	for _, f := range files {
		if !slices.Contains([]string{"classes.yaml", "hostpath.yaml"}, f.Name()) {
			must(m.t, os.Remove(filepath.Join(m.manifests, f.Name())))
		}
	}
	m.awaitStatus(func(s volumemanager.Status) error {
		var names []string
		for _, v := range s.PersistentVolumes {
			names = append(names, v.Name)
		}
		if len(s.Volumes)+len(s.Claims) > 0 || !slices.Equal(names, kept) {
			return fmt.Errorf("got volumes %+v, claims %+v, PersistentVolumes %+v; want only PersistentVolumes %q", s.Volumes, s.Claims, s.PersistentVolumes, kept)
		}
		return m.leftovers()
	})
}

// checkPool returns an error unless the pool has n volumes.
func (m *machine) checkPool(n int) error {
	volumes, err := filepath.Glob(filepath.Join(m.pool, "volumes", "*"))
	if err == nil && len(volumes) != n {
		err = fmt.Errorf("got volumes %q in the pool, want %d volumes", volumes, n)
	}
	return err
}

// controller returns a client of the driver's controller service.
func (m *machine) controller() csi.ControllerClient {
	m.t.Helper()
	dial := func(ctx context.Context, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", m.socket())
	}
	conn, err := grpc.NewClient("passthrough:///driver", grpc.WithContextDialer(dial), grpc.WithTransportCredentials(insecure.NewCredentials()))
	must(m.t, err)
	m.t.Cleanup(func() { _ = conn.Close() })
	return csi.NewControllerClient(conn)
}
