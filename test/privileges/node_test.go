package privileges

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"go.yaml.in/yaml/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/backend/backendtest/targets"
	"github.com/trivet-csi/trivet/backend/lvm"
	"github.com/trivet-csi/trivet/internal/retry"
	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/pool"
)

const (
	nodeID = "node-1.example"
	// waitTimeout is the maximum duration of the wait for a pool that must open or become empty.
	waitTimeout = time.Minute
	// stepTimeout is the maximum duration of a start, of a step of a life, and of the removal of all that a life has left. In a
	// virtual machine on a busy machine, a start or a copy takes more than a minute.
	stepTimeout = 5 * time.Minute
	// burstable is the cgroup of the pods of the test.
	burstable = "kubepods.slice/kubepods-burstable.slice"
	// lvmLocks is the directory of LVM's locks.
	lvmLocks = "/run/lock/lvm"
)

// program is the path of the driver's program.
var program string

func TestMain(m *testing.M) { testenv.Main(testenv.WithProgram{M: m, Root: true, Path: &program}) }

func must(tb testing.TB, err error) {
	tb.Helper()
	if err != nil {
		tb.Fatal(err)
	}
}

// subject is a kind of volume that is tested, with its pool.
type subject struct {
	name   string // in the table
	target string
	kind   backendtest.Kind
	medium backendtest.Medium
}

// newSubject returns a subject with an empty pool.
func newSubject(t *testing.T, name, target, kind string) *subject {
	t.Helper()
	of := targets.ByName(t, target)
	if of.Prepare != nil {
		of.Prepare(t, &of)
	}
	kinds := of.Volumes()
	s := &subject{name: name, target: target, kind: kinds[slices.IndexFunc(kinds, func(k backendtest.Kind) bool { return k.Name() == kind })]}
	s.medium = of.Medium(t, backendtest.Room{Total: "8G", Volumes: 3, Each: s.kind.Size()})
	return s
}

// group returns the volume group of the subject's pool; nil if the pool is not one.
func (s *subject) group() *lvm.Group {
	g, _ := s.medium.Config.Section.(*lvm.Group)
	return g
}

// limited reports whether the I/O of pods on the subject's volumes is limited.
func (s *subject) limited() bool {
	return s.kind.Has(backendtest.Filesystem | backendtest.NodeLocal)
}

// left returns an error if the pool contains volumes or snapshots, also deleted ones.
func (s *subject) left() error {
	if g := s.group(); g != nil { // only the driver mounts the records of the pool
		return backendtest.CheckOnlyRecords(g)
	}
	left, err := testenv.PoolEntries(s.medium.Dir)
	if err == nil && len(left) > 0 {
		err = fmt.Errorf("got %q in the pool, want no volumes and snapshots", left)
	}
	return err
}

// node is a machine on which the driver is started again and again, with other privileges.
type node struct {
	// kubelet, plugin and state are the directories of the kubelet, of the driver's socket, and of the driver. Each is a
	// mount, as in a container.
	kubelet, plugin, state string
	root                   string // the root directory of the container
	cgroups                string // has the files of a cgroup v2 hierarchy, which this machine may not have
	config                 string
	log                    *os.File
	subjects               []*subject
	volumes                int // the number of names of volumes so far
}

// newNode returns a node with the pools of the subjects.
func newNode(t *testing.T, subjects ...*subject) *node {
	t.Helper()
	dir := t.TempDir()
	n := &node{
		kubelet: filepath.Join(dir, "kubelet"), plugin: filepath.Join(dir, "plugin"), state: filepath.Join(dir, "state"),
		root: filepath.Join(dir, "root"), cgroups: filepath.Join(dir, "cgroup"), config: filepath.Join(dir, "config.yaml"), subjects: subjects,
	}
	for _, mounted := range []string{n.root, n.kubelet, n.plugin, n.state} {
		must(t, os.Mkdir(mounted, 0o755))
		must(t, syscall.Mount(mounted, mounted, "", syscall.MS_BIND, ""))
		t.Cleanup(func() { must(t, syscall.Unmount(mounted, 0)) })
		must(t, syscall.Mount("", mounted, "", syscall.MS_PRIVATE, "")) // shared with no mount of this namespace
		if mounted != n.root {
			must(t, syscall.Mount("", mounted, "", syscall.MS_SHARED, ""))
		}
	}
	for file, text := range map[string]string{
		"cgroup.controllers": "io memory\n", "kubepods.slice/cgroup.subtree_control": "io memory\n", "kubepods.slice/io.max": "",
		burstable + "/cgroup.subtree_control": "io memory\n",
	} {
		file = filepath.Join(n.cgroups, file)
		must(t, os.MkdirAll(filepath.Dir(file), 0o755))
		must(t, os.WriteFile(file, []byte(text), 0o644))
	}
	var pools []pool.Config
	for _, s := range subjects {
		c := &s.medium.Config
		c.Name = s.target
		if c.Section != nil {
			c.Sections = map[string]any{string(c.Kind()): c.Section}
		}
		if s.medium.Dir == "" {
			s.medium.Dir = c.Within(n.state).Directory.Path
		}
		pools = append(pools, *c)
	}
	b, err := yaml.Marshal(map[string]any{"pools": pools})
	must(t, err)
	must(t, os.WriteFile(n.config, b, 0o600))
	n.log, err = os.Create(filepath.Join(dir, "log"))
	must(t, err)
	t.Cleanup(func() { _ = n.log.Close() })
	return n
}

// container is a shell script that makes namespaces like those of the driver's container, and executes the driver. Its root is a
// read-only tmpfs with IMAGE, files of this machine in place of those of the image, and DIRS, writable directories of the
// node. Mounts propagate from KUBELET to the node, and from the node to STATE and POOLS. WITHOUT contains commands that
// take away something.
const container = `set -e
mount -t tmpfs -o mode=755 none $ROOT
cd $ROOT
mkdir old proc run sys tmp
cp -P /bin /sbin /lib* .
bind() {
	if [ -d $1 ]; then mkdir -p .$1; else mkdir -p .${1%/*}; : >.$1; fi
	mount --rbind $1 .$1
}
for path in $IMAGE; do bind $path; mount -o remount,bind,ro .$path; done
for dir in /dev $DIRS; do bind $dir; mount --make-rprivate .$dir; done
for dir in $STATE $POOLS; do bind $dir; mount --make-rslave .$dir; done
bind $KUBELET
mount -t sysfs -o ro none sys
mount --bind $CGROUPS sys/fs/cgroup
pivot_root . old
cd /
mount -t proc none /proc
mount --make-rprivate /old
umount -l /old
rmdir /old
mount -o remount,ro /
eval "$WITHOUT"
exec "$@"
`

// privileges are those of a driver in a container.
type privileges struct {
	capabilities []string // without the prefix CAP_; nil in a privileged container, which has all
	without      string   // shell commands that take away something
}

// command returns the command of the driver in a container with privileges, or without a container if p is nil.
func (n *node) command(p *privileges) *exec.Cmd {
	words := []string{program, "driver", "--endpoint", "unix://" + n.socket(), "--node-id", nodeID, "--config", n.config, "--state-dir", n.state, "--http-address", "", "-v", "2"}
	if p == nil {
		return exec.Command(words[0], words[1:]...)
	}
	if p.capabilities != nil {
		set := "-all"
		for _, c := range p.capabilities {
			set += ",+" + strings.ToLower(c)
		}
		words = append([]string{"setpriv", "--bounding-set=" + set, "--inh-caps=-all", "--"}, words...)
	}
	cmd := exec.Command("/bin/sh", append([]string{"-c", container, "sh"}, words...)...)
	cmd.Env = append(os.Environ(), "ROOT="+n.root, "CGROUPS="+n.cgroups, "KUBELET="+n.kubelet, "STATE="+n.state, "POOLS="+strings.Join(n.pools(), " "), "WITHOUT="+p.without,
		"IMAGE="+strings.Join([]string{"/usr", "/etc", program, n.config}, " "), "DIRS="+strings.Join(n.dirs(), " "))
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS | syscall.CLONE_NEWPID | syscall.CLONE_NEWIPC | syscall.CLONE_NEWUTS}
	if !n.has(func(s *subject) bool { return s.kind.Has(backendtest.Shared) }) {
		cmd.SysProcAttr.Cloneflags |= syscall.CLONE_NEWNET // with NFS, the pods of the nodes use the network of their node
	}
	return cmd
}

// has reports whether a subject has a property.
func (n *node) has(property func(*subject) bool) bool {
	return slices.ContainsFunc(n.subjects, property)
}

// dirs returns the directories of the node in the container whose mounts do not propagate.
func (n *node) dirs() []string {
	dirs := []string{n.plugin}
	if n.has(func(s *subject) bool { return s.group() != nil }) {
		dirs = append(dirs, lvmLocks)
	}
	return dirs
}

func (n *node) socket() string { return filepath.Join(n.plugin, "csi.sock") }

// pools returns the mounts of the pools that are directories.
func (n *node) pools() (dirs []string) {
	for _, s := range n.subjects {
		if at := s.medium.Config.Directory.Path; at != "" {
			dirs = append(dirs, filepath.Dir(at))
		}
	}
	return dirs
}

// instance is one process of the driver.
type instance struct {
	cmd      *exec.Cmd
	conn     *grpc.ClientConn
	identity csi.IdentityClient
	control  csi.ControllerClient
	node     csi.NodeClient
	ended    chan struct{} // closed when the process has ended
	logged   int64         // the size of the log when the process started
}

// start starts the driver, and returns when it is ready. If it ends before that, the error is its log.
func (n *node) start(t *testing.T, p *privileges) (*instance, error) {
	t.Helper()
	d := &instance{cmd: n.command(p), ended: make(chan struct{})}
	info, err := n.log.Stat()
	must(t, err)
	d.logged = info.Size()
	d.cmd.Stdout, d.cmd.Stderr = n.log, n.log
	must(t, d.cmd.Start())
	go func() {
		_ = d.cmd.Wait() // the log contains the reason
		close(d.ended)
	}()
	quick := grpc.ConnectParams{Backoff: backoff.Config{BaseDelay: time.Millisecond, Multiplier: 1.5, MaxDelay: 20 * time.Millisecond}, MinConnectTimeout: time.Second}
	d.conn, err = grpc.NewClient("unix://"+n.socket(), grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithAuthority("localhost"),
		grpc.WithConnectParams(quick), grpc.WithUnaryInterceptor(backendtest.AddPassphrase))
	must(t, err)
	d.identity, d.control, d.node = csi.NewIdentityClient(d.conn), csi.NewControllerClient(d.conn), csi.NewNodeClient(d.conn)
	ready := retry.For(t.Context(), stepTimeout, func() (bool, error) {
		select {
		case <-d.ended:
			return false, errors.New(n.logSince(d.logged))
		default:
		}
		resp, err := d.identity.Probe(t.Context(), &csi.ProbeRequest{})
		if err == nil && !resp.GetReady().GetValue() {
			err = errors.New("the driver is not ready")
		}
		return err != nil, err
	})
	if ready != nil {
		_ = d.cmd.Process.Kill() // fails if the process has ended
		d.stop()
		return nil, ready
	}
	return d, nil
}

// stop ends the driver, and waits for its end.
func (d *instance) stop() {
	_ = d.conn.Close()
	_ = d.cmd.Process.Signal(syscall.SIGTERM) // fails if the process has ended
	<-d.ended
}

// logSince returns the log after an offset.
func (n *node) logSince(offset int64) string {
	b, err := os.ReadFile(n.log.Name())
	if err != nil {
		return err.Error()
	}
	return string(b[offset:])
}

// awaitEmpty waits until the pool of a subject contains no deleted volumes. It fails when the driver has logged that it
// cannot remove one.
func (n *node) awaitEmpty(ctx context.Context, s *subject, d *instance) error {
	return retry.For(ctx, waitTimeout, func() (bool, error) {
		err := s.left()
		if err == nil {
			return false, nil
		}
		for line := range strings.Lines(n.logSince(d.logged)) {
			if strings.Contains(line, "Removing an entry of the trash failed") && strings.Contains(line, `pool="`+s.target+`"`) {
				return false, errors.New(line)
			}
		}
		return true, err
	})
}
