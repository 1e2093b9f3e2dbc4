//go:build vm

package loop_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/backend/loop"
	"github.com/trivet-csi/trivet/internal/retry"
	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/internal/testenv/nfsd"
	"github.com/trivet-csi/trivet/linux/blockdev"
	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// In these tests images are on an export. The driver in this process is on one node. The other node has
// no driver, because two drivers on one kernel would find each other's loop devices.

// worker is the backend with an nfs pool, as in a worker process.
type worker struct {
	backend.Backend
	mounts string
}

// serve opens the pool on an export for a node. silent is the time for which the server has not answered.
func serve(t *testing.T, c pool.NFS, node, mounts string, silent time.Duration) *worker {
	t.Helper()
	shared := pool.Shared{Mount: mountBase(t), NodeID: node, Maintains: true, MountsDir: mounts}
	if silent > 0 {
		shared.SilentSince = time.Now().Add(-silent)
	}
	set := pool.NewSharedSet(backend.Kinds{loop.Kind}.Forms(), pool.Config{Name: "nas", NFS: &c, Overcommit: 10}, nil, shared)
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() { defer close(ended); set.Run(ctx) }()
	t.Cleanup(func() { stop(); <-ended })
	if silent == 0 {
		err := retry.For(ctx, 40*time.Second, func() (bool, error) {
			_, err := set.Named("")
			return err != nil, err
		})
		must(t, err)
	}
	return &worker{loop.New(set), mounts}
}

// mountBase returns a function that mounts the export to read the pool's records.
func mountBase(t *testing.T) func(context.Context, pool.Config) (*os.File, string, error) {
	return func(ctx context.Context, c pool.Config) (*os.File, string, error) {
		options := append(slices.Clone(c.NFS.MountOptions), "nosharecache", "lookupcache=none", "actimeo=0")
		m, version, err := mount.MountNFS(ctx, mount.NFS{Server: c.NFS.Server, Path: c.NFS.Export, Options: options}, 0)
		if err != nil {
			return nil, "", err
		}
		t.Cleanup(func() { _ = m.Close() })
		root, err := m.OpenRoot()
		return root, version, err
	}
}

// secrets open the encrypted volumes.
var secrets = volume.NewSecrets(map[string]string{volume.SecretPassphrase: "passphrase"})

// make creates a thin volume. Without a filesystem ("") it is a raw device.
func (w *worker) make(t *testing.T, name, fsType string, size int64) volume.Volume {
	t.Helper()
	return w.makeWith(t, name, fsType, size, volume.EncryptionNone)
}

// makeWith does the same as make with an encryption.
func (w *worker) makeWith(t *testing.T, name, fsType string, size int64, encryption string) volume.Volume {
	t.Helper()
	v, err := w.Create(context.Background(), volume.Spec{
		CoName: name, Capacity: volume.Range{Required: size},
		Capabilities: []volume.Capability{{Block: fsType == "", FSType: fsType}},
		Parameters:   volume.Parameters{Values: map[string]string{"allocation": "thin", volume.ParamEncryption: encryption}},
	})
	must(t, err)
	return v
}

func (w *worker) publish(t *testing.T, v volume.Volume, node string) {
	t.Helper()
	must(t, w.Backend.(backend.Publisher).Publish(context.Background(), v, backend.Publication{Node: node}))
}

// stage attaches a volume and mounts its filesystem.
func (w *worker) stage(t *testing.T, v volume.Volume) string {
	t.Helper()
	source, err := w.Attach(context.Background(), v, secrets)
	must(t, err)
	at := t.TempDir()
	must(t, errors.Join(source.Mount(context.Background(), at, mount.Options{}), source.Close()))
	return at
}

// wantNothingLeft fails the test if private mounts, loop devices or open containers are left.
func (w *worker) wantNothingLeft(t *testing.T) {
	t.Helper()
	left, err := os.ReadDir(w.mounts)
	must(t, err)
	if len(left) > 0 {
		t.Errorf("%s contains %v, want nothing", w.mounts, left)
	}
	if numbers := bound(w.mounts); len(numbers) > 0 {
		t.Errorf("loop devices of images: got %v, want none", numbers)
	}
	nodes, err := filepath.Glob("/dev/trivet/trivet-*")
	must(t, err)
	var mapped []string
	err = retry.For(t.Context(), 2*time.Second, func() (bool, error) { // newer kernels remove the directory of a device after the device
		mapped, err = filepath.Glob("/sys/class/block/dm-*")
		return len(mapped) > 0, err
	})
	must(t, err)
	if len(nodes)+len(mapped) > 0 {
		t.Errorf("mapped devices: got nodes %v and devices %v, want none", nodes, mapped)
	}
}

// TestNFS runs each test with an export of its own.
func TestNFS(t *testing.T) {
	s := nfsd.Start(t, nfsd.Options{})
	for name, run := range map[string]func(*testing.T, *nfsd.Server, pool.NFS){
		"life": testNFSLife, "growth": testNFSGrowth, "locked": testNFSLocked,
		"outage": testNFSOutage(volume.EncryptionNone), "outage encrypted": testNFSOutage(volume.EncryptionLUKS2),
		"outage raw encrypted": testNFSOutageRaw, "fencing": testNFSFencing, "NFS 4.1": testNFSWithoutHoles,
	} {
		t.Run(name, func(t *testing.T) {
			export := s.Export(t, strings.ReplaceAll(name, " ", "-"))
			run(t, s, pool.NFS{Server: s.Address(), Export: export, Init: true, Outage: "10s"})
		})
	}
}

// testNFSLife: volumes are created, attached, detached and deleted, and cannot be deleted while in use.
func testNFSLife(t *testing.T, _ *nfsd.Server, c pool.NFS) {
	w := serve(t, c, "a", t.TempDir(), 0)
	ctx := context.Background()
	for fsType, size := range map[string]int64{"ext4": 64 << 20, "xfs": 320 << 20} {
		v := w.make(t, "life-"+fsType, fsType, size)
		for range 2 {
			w.publish(t, v, "a")
			at := w.stage(t, v)
			testenv.Run(t, "dd", "if=/dev/zero", "of="+filepath.Join(at, "file"), "bs=1M", "count=8", "conv=fsync", "status=none")
			wantKind(t, w.Delete(ctx, v.ID), volume.ErrPrecondition)
			must(t, mount.Unmount(at))
			must(t, w.Detach(ctx, v))
			must(t, w.Detach(ctx, volume.Volume{ID: v.ID}))
			w.wantNothingLeft(t)
		}
		must(t, w.Backend.(backend.Publisher).Unpublish(ctx, v.ID, "a"))
		must(t, w.Delete(ctx, v.ID))
	}
	v := w.make(t, "life-raw", "", 8<<20)
	if v.SectorSize != 512 {
		t.Errorf("raw volume: got sectors of %d bytes, want 512", v.SectorSize)
	}
	source, err := w.Attach(ctx, v, volume.Secrets{})
	must(t, err)
	must(t, source.Close())
	again, err := w.Attach(ctx, v, volume.Secrets{})
	must(t, err)
	if again.String() != source.String() {
		t.Errorf("second attach: got %s, want %s as before", again, source)
	}
	wantKind(t, w.Delete(ctx, v.ID), volume.ErrInUse)
	must(t, w.Detach(ctx, v))
	must(t, w.Delete(ctx, v.ID))
	w.wantNothingLeft(t)
}

// testNFSGrowth: if another process on this node has expanded an image, ResizeDevice gives the device the
// new size.
func testNFSGrowth(t *testing.T, _ *nfsd.Server, c pool.NFS) {
	ctx := context.Background()
	w, controller := serve(t, c, "a", t.TempDir(), 0), serve(t, c, "", "", 0)
	v := w.make(t, "grown", "", 8<<20)
	source, err := w.Attach(ctx, v, volume.Secrets{})
	must(t, err)
	must(t, source.Close())
	defer func() { must(t, w.Detach(ctx, v)) }()
	for _, size := range []int64{16 << 20, 24 << 20} {
		_, err := controller.Backend.(backend.Expander).Expand(ctx, v, volume.Range{Required: size})
		must(t, err)
		grown, err := w.Get(ctx, v.ID)
		must(t, err)
		must(t, w.Backend.(backend.Expander).ResizeDevice(ctx, grown, volume.Secrets{}))
		device, err := os.Open(source.String())
		must(t, err)
		have, err := device.Seek(0, 2)
		must(t, errors.Join(err, device.Close()))
		if have != size {
			t.Errorf("size of the device: got %d bytes, want %d", have, size)
		}
	}
}

// testNFSLocked: a node attaches a volume only if no other node has locked the image. After the lease of a
// node has expired, another node can lock the image, and the server refuses writes of the first node.
func testNFSLocked(t *testing.T, s *nfsd.Server, c pool.NFS) {
	ctx := context.Background()
	w := serve(t, c, "a", t.TempDir(), 0)
	v := w.make(t, "locked", "", 8<<20)
	other := s.Node(t, "node-b")
	at := t.TempDir()
	run(t, other.Command("mount", "-t", "nfs", "-o", "vers=4.2,nosharecache", s.Address()+":"+c.Export, at))
	t.Cleanup(func() { run(t, other.Command("umount", at)) })
	lock := func(words ...string) *exec.Cmd {
		return other.Command("flock", append([]string{"--nonblock", filepath.Join(at, "volumes", v.ID.Name, "image")}, words...)...)
	}

	w.publish(t, v, "b")
	_, err := w.Attach(ctx, v, volume.Secrets{})
	wantKind(t, err, volume.ErrPrecondition)
	must(t, w.Backend.(backend.Publisher).Unpublish(ctx, v.ID, "b"))
	w.publish(t, v, "a")
	held := lock("sh", "-c", "echo locked; exec cat")
	release, err := held.StdinPipe()
	must(t, err)
	says, err := held.StdoutPipe()
	must(t, err)
	must(t, held.Start())
	_, err = says.Read(make([]byte, 1))
	must(t, err)
	_, err = w.Attach(ctx, v, volume.Secrets{})
	wantKind(t, err, volume.ErrUnavailable)
	wantKind(t, w.Delete(ctx, v.ID), volume.ErrPrecondition)
	must(t, errors.Join(release.Close(), held.Wait()))
	w.wantNothingLeft(t)

	source, err := w.Attach(ctx, v, volume.Secrets{})
	must(t, err)
	must(t, source.Close())
	if err := lock("true").Run(); err == nil {
		t.Error("another node got the lock of an image that is attached on this node")
	}
	must(t, w.Backend.(backend.Publisher).Unpublish(ctx, v.ID, "a"))
	w.publish(t, v, "b")
	if !slices.ContainsFunc(w.Backend.(backend.HealthChecker).Health(ctx, v), func(c backend.Condition) bool { return c.Reason == "LockLost" }) {
		t.Error("health does not report that another node owns the volume")
	}
	s.Expire(t, s.Link())
	run(t, lock("true"))
	if out, err := exec.Command("dd", "if=/dev/urandom", "of="+source.String(), "bs=4k", "count=1", "oflag=direct").CombinedOutput(); err == nil {
		t.Errorf("a node that lost its lock still writes: %s", out)
	}
	image, err := os.ReadFile(filepath.Join(s.Dir(c.Export), "volumes", v.ID.Name, "image"))
	must(t, err)
	if len(bytes.Trim(image, "\x00")) > 0 {
		t.Error("the server accepted a write of a node that has lost its lock")
	}
	must(t, w.Detach(ctx, v))
	w.wantNothingLeft(t)
}

func run(t *testing.T, cmd *exec.Cmd) {
	t.Helper()
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", cmd, err, out)
	}
}

// testNFSOutage: if the server does not answer, a volume is detached by force, but only after the outage
// time.
func testNFSOutage(encryption string) func(*testing.T, *nfsd.Server, pool.NFS) {
	return func(t *testing.T, s *nfsd.Server, c pool.NFS) {
		ctx := context.Background()
		w := serve(t, c, "a", t.TempDir(), 0)
		v := w.makeWith(t, "outage", "ext4", 64<<20, encryption)
		beside := w.makeWith(t, "beside", "ext4", 64<<20, encryption)
		at, besideAt := w.stage(t, v), w.stage(t, beside)
		overwrite := func() {
			for _, dir := range []string{at, besideAt} {
				f, err := os.OpenFile(filepath.Join(dir, "dirty"), os.O_WRONLY|os.O_CREATE, 0o600)
				must(t, err)
				_, err = f.Write(bytes.Repeat([]byte("x"), 4<<20))
				must(t, errors.Join(err, f.Close()))
			}
		}
		overwrite() // creates the files, because that requires reads from the server
		testenv.Run(t, "sync", "-f", at, besideAt)
		s.Link().Cut(t)
		overwrite()

		early := serve(t, c, "a", w.mounts, time.Second)
		wantKind(t, early.Detach(ctx, volume.Volume{ID: v.ID}), volume.ErrUnavailable)
		late := serve(t, c, "a", w.mounts, time.Minute)
		start := time.Now()
		source, ok, err := late.Present(ctx, volume.Volume{ID: v.ID})
		if err != nil || !ok || source.String() == "" {
			t.Fatalf("Present: got %v, %v; want the device", ok, err)
		}
		unmounted := make(chan error, 1)
		go func() { unmounted <- mount.Unmount(at) }()
		must(t, source.(*blockdev.DeviceSource).Abort(ctx))
		must(t, late.Detach(ctx, volume.Volume{ID: v.ID}))
		t.Logf("detached by force in %v", time.Since(start))

		s.Link().Restore(t)
		must(t, <-unmounted) // ends after the server has confirmed the release of the lock
		testenv.Run(t, "sync", "-f", besideAt)
		must(t, mount.Unmount(besideAt))
		must(t, w.Detach(ctx, beside))
		w.wantNothingLeft(t)
		again := w.stage(t, v)
		must(t, mount.Unmount(again))
		must(t, w.Detach(ctx, v))
		w.wantNothingLeft(t)
	}
}

// testNFSOutageRaw: an encrypted raw device whose user was killed, and waits for the server, is detached by force.
func testNFSOutageRaw(t *testing.T, s *nfsd.Server, c pool.NFS) {
	ctx := context.Background()
	w := serve(t, c, "a", t.TempDir(), 0)
	v := w.makeWith(t, "outage-raw", "", 64<<20, volume.EncryptionLUKS2)
	attach := func() string {
		source, err := w.Attach(ctx, v, secrets)
		must(t, err)
		must(t, source.Close())
		return source.String()
	}
	device := attach()
	s.Link().Cut(t)
	writer := exec.Command("dd", "if=/dev/zero", "of="+device, "bs=1M", "count=32")
	must(t, writer.Start())
	time.Sleep(2 * time.Second) // so that its writes wait for the server
	must(t, writer.Process.Kill())
	late := serve(t, c, "a", w.mounts, time.Minute)
	start := time.Now()
	must(t, late.Detach(ctx, volume.Volume{ID: v.ID}))
	t.Logf("detached by force in %v", time.Since(start))
	if err := writer.Wait(); err == nil {
		t.Error("the killed program wrote everything")
	}
	s.Link().Restore(t)
	must(t, w.Detach(ctx, v))
	w.wantNothingLeft(t)
	if again := attach(); again != device {
		t.Errorf("got device %s, want %s", again, device)
	}
	must(t, w.Detach(ctx, v))
	w.wantNothingLeft(t)
}

// testNFSFencing: a volume is not attached if the configuration or the node does not allow fencing by
// locks, unless fencing is left to the administrator.
func testNFSFencing(t *testing.T, _ *nfsd.Server, c pool.NFS) {
	ctx := context.Background()
	w := serve(t, c, "a", t.TempDir(), 0)
	v := w.make(t, "fenced", "", 8<<20)
	attach := func(c pool.NFS, node string) error {
		w := serve(t, c, node, t.TempDir(), 0)
		source, err := w.Attach(ctx, v, volume.Secrets{})
		if err != nil {
			return err
		}
		return errors.Join(source.Close(), w.Detach(ctx, v))
	}
	with := func(options ...string) pool.NFS { c := c; c.MountOptions = options; return c }
	wantKind(t, attach(with("nfsvers=4.0"), "a"), volume.ErrPrecondition)
	wantKind(t, attach(with("local_lock=flock"), "a"), volume.ErrPrecondition)
	must(t, attach(c, "a"))
	wantKind(t, attach(c, "same-identity"), volume.ErrPrecondition)
	none := with("nfsvers=4.0")
	none.Fencing = pool.FencingNone
	must(t, attach(none, "same-identity"))
	const parameter = "/sys/module/nfs/parameters/recover_lost_locks"
	must(t, os.WriteFile(parameter, []byte("Y"), 0))
	defer func() { must(t, os.WriteFile(parameter, []byte("N"), 0)) }()
	wantKind(t, attach(c, "a"), volume.ErrPrecondition)
}

// testNFSWithoutHoles: with NFS 4.1, which neither reports nor creates holes, thick volumes are refused,
// and blank images are staged without being read completely.
func testNFSWithoutHoles(t *testing.T, s *nfsd.Server, c pool.NFS) {
	ctx := context.Background()
	c.MountOptions = []string{"nfsvers=4.1"}
	w := serve(t, c, "a", t.TempDir(), 0)
	_, err := w.Create(ctx, volume.Spec{
		CoName: "thick", Capacity: volume.Range{Required: 64 << 20},
		Capabilities: []volume.Capability{{FSType: "ext4"}}, Parameters: volume.Parameters{Values: map[string]string{"allocation": "thick"}},
	})
	wantKind(t, err, volume.ErrPrecondition)
	v := w.make(t, "large", "ext4", 12<<30)
	before := bytesRead(t)
	at := w.stage(t, v)
	if n := bytesRead(t) - before; n > 1<<30 {
		t.Errorf("staging a blank image of 12 GiB read %d bytes, want at most 1 GiB", n)
	}
	must(t, mount.Unmount(at))
	must(t, w.Detach(ctx, v))

	half := w.make(t, "half", "ext4", 64<<20)
	folder := filepath.Join(s.Dir(c.Export), "volumes", half.ID.Name)
	must(t, os.WriteFile(filepath.Join(folder, "formatting"), nil, 0o600))
	must(t, unix.Truncate(filepath.Join(folder, "image"), 0)) // as after an interrupted blockdev.WipeImage
	must(t, mount.Unmount(w.stage(t, half)))
	must(t, w.Detach(ctx, half))

	foreign := w.make(t, "foreign", "ext4", 64<<20)
	f, err := os.OpenFile(filepath.Join(s.Dir(c.Export), "volumes", foreign.ID.Name, "image"), os.O_WRONLY, 0)
	must(t, err)
	_, err = f.WriteAt([]byte("data"), 32<<20)
	must(t, errors.Join(err, f.Close()))
	_, err = w.Attach(ctx, foreign, volume.Secrets{})
	wantKind(t, err, volume.ErrDamaged)
	w.wantNothingLeft(t)
}

// bytesRead returns how many bytes this process and its children have read.
func bytesRead(t *testing.T) (n int64) {
	t.Helper()
	b, err := os.ReadFile("/proc/self/io")
	must(t, err)
	_, err = fmt.Sscanf(string(b), "rchar: %d", &n)
	must(t, err)
	return n
}

func wantKind(t *testing.T, err, kind error) {
	t.Helper()
	if !errors.Is(err, kind) {
		t.Errorf("got %v, want %v", err, kind)
	}
}
