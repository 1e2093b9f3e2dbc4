package csi_test

import (
	"context"
	"fmt"
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
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/volumemanager/plugins"
)

const trivetName = "csi.trivet.dev"

// trivet is the driver of this project in a process of its own, with a pool on an xfs.
type trivet struct {
	*host
	t                    *testing.T // of the whole test, not of its parts
	binary, socket, pool string
	log                  *os.File
	process              *exec.Cmd
}

// newTrivet runs a driver that is registered, until the test ends.
func newTrivet(t *testing.T) *trivet {
	t.Helper()
	d := &trivet{t: t, binary: filepath.Join(t.TempDir(), "trivet"), pool: filepath.Join(testenv.Filesystem(t, "xfs", "4G"), "pool")}
	build := exec.Command("go", "build", "-o", d.binary, "github.com/trivet-csi/trivet/cmd/trivet")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	d.host = newHost(t)
	yes := true
	d.objects[trivetName] = &storagev1.CSIDriver{Spec: storagev1.CSIDriverSpec{
		PodInfoOnMount:       &yes,
		VolumeLifecycleModes: []storagev1.VolumeLifecycleMode{storagev1.VolumeLifecyclePersistent, storagev1.VolumeLifecycleEphemeral},
	}}
	base := filepath.Dir(d.root)
	d.socket = filepath.Join(base, "trivet.sock")
	config := fmt.Sprintf("pools: [{name: default, directory: {path: %q}, ephemeral: true}]\n", d.pool)
	must(t, os.WriteFile(filepath.Join(base, "config.yaml"), []byte(config), 0o600))
	var err error
	d.log, err = os.Create(filepath.Join(base, "log"))
	must(t, err)
	d.run(t)
	t.Cleanup(func() { d.end(t) })
	d.announce(t, "trivet-reg.sock", info(trivetName, d.socket, "1.0.0"))
	d.status(t, "trivet-reg.sock", registered)
	return d
}

func (d *trivet) run(t *testing.T) {
	t.Helper()
	base := filepath.Dir(d.root)
	d.process = exec.Command(d.binary, "driver", "--endpoint", "unix://"+d.socket, "--node-id", nodeName,
		"--config", filepath.Join(base, "config.yaml"), "--state-dir", filepath.Join(base, "state"), "--http-address", "", "-v", "2")
	d.process.Stdout, d.process.Stderr = d.log, d.log
	must(t, d.process.Start())
}

func (d *trivet) kill() {
	_ = d.process.Process.Kill()
	_ = d.process.Wait() // how it ended is known
}

func (d *trivet) end(t *testing.T) {
	t.Helper()
	d.kill()
	if t.Failed() {
		b, err := os.ReadFile(d.log.Name())
		t.Logf("the driver's log, its end (%v):\n%s", err, b[max(0, len(b)-8192):])
		d.clear(t)
	}
	must(t, d.log.Close())
}

// clear takes away what a failed test left.
func (d *trivet) clear(t *testing.T) {
	t.Helper()
	for _, at := range slices.Backward(mounts(t, d.root)) {
		t.Logf("unmounting %s: %v", at, syscall.Unmount(at, 0))
	}
	images, err := filepath.Glob(d.pool + "/volumes/*/image")
	must(t, err)
	for _, image := range images {
		for _, device := range strings.Fields(testenv.Run(t, "losetup", "-n", "-O", "NAME", "-j", image)) {
			t.Logf("freeing %s: %v", device, exec.Command("losetup", "-d", device).Run())
		}
	}
}

// step makes a call while the driver is killed and comes back, until it succeeds.
func (d *trivet) step(t *testing.T, call func(context.Context) error) {
	t.Helper()
	d.kill()
	d.run(t)
	waitFor(t, func() error { return call(t.Context()) })
	// Again: nothing may depend on its being the first. The driver may just be asked whether
	// it is ready.
	waitFor(t, func() error { return call(t.Context()) })
}

func (d *trivet) provision(t *testing.T, o plugins.ProvisionOptions) *plugins.Spec {
	t.Helper()
	var pv *corev1.PersistentVolume
	d.step(t, func(ctx context.Context) (err error) {
		pv, err = d.Provision(ctx, o)
		return err
	})
	return &plugins.Spec{PersistentVolume: pv}
}

// bring attaches and stages a volume.
func (d *trivet) bring(t *testing.T, spec *plugins.Spec) {
	t.Helper()
	needs, err := d.NeedsAttach(spec)
	must(t, err)
	if !needs {
		t.Error("the driver publishes, and is not asked to")
	}
	var attachment plugins.Attachment
	d.step(t, func(ctx context.Context) (err error) {
		attachment, err = d.Attach(ctx, spec)
		return err
	})
	d.step(t, func(ctx context.Context) error {
		return d.MountDevice(ctx, spec, attachment, plugins.MounterArgs{})
	})
}

// publish sets a staged volume up for a pod.
func (d *trivet) publish(t *testing.T, spec *plugins.Spec, p *corev1.Pod, args plugins.MounterArgs) (path string) {
	t.Helper()
	d.step(t, func(ctx context.Context) (err error) {
		path, err = d.setUp(ctx, t, spec, p, args)
		return err
	})
	return path
}

// remove takes a volume down by what the disk has, in a manager that knows no more, and
// deletes it.
func (d *trivet) remove(t *testing.T, specs []*plugins.Spec, pods ...*corev1.Pod) {
	t.Helper()
	d.start(d.t)
	d.status(t, "trivet-reg.sock", registered)
	d.kill()
	d.run(t)
	waitFor(t, func() error { return d.undo(t, pods) })
	nothingLeft(t, d.root)
	for _, spec := range specs {
		d.step(t, func(ctx context.Context) error { return d.Delete(ctx, spec.PersistentVolume) })
	}
	left, err := os.ReadDir(filepath.Join(d.pool, "volumes"))
	must(t, err)
	if len(left) > 0 {
		t.Errorf("volumes left: %v", left)
	}
}

func (d *trivet) undo(t *testing.T, pods []*corev1.Pod) error {
	t.Helper()
	for _, p := range pods {
		dirs, err := filepath.Glob(d.Paths().PodVolumes(p.UID, d.Name()) + "/*")
		must(t, err)
		for _, dir := range dirs {
			if err := d.tearDown(t, filepath.Base(dir), p); err != nil {
				return err
			}
		}
		links, err := filepath.Glob(d.Paths().PodDevice(p.UID, d.Name(), "*"))
		must(t, err)
		for _, link := range links {
			u, err := d.NewBlockVolumeUnmapper(filepath.Base(link), p.UID)
			must(t, err)
			if err := u.UnmapPodDevice(t.Context()); err != nil {
				return err
			}
		}
	}
	staged, err := d.DeviceMounts()
	must(t, err)
	for _, s := range staged {
		if err := d.UnmountDevice(t.Context(), s.Spec); err != nil {
			return err
		}
	}
	attached, err := d.Attachments()
	must(t, err)
	for _, a := range attached {
		if err := d.Detach(t.Context(), a.Spec); err != nil {
			return err
		}
	}
	return nil
}

// TestTrivet drives this project's driver through all that a volume can go through, with
// the driver killed before each call.
func TestTrivet(t *testing.T) {
	testenv.RequireRoot(t)
	d := newTrivet(t)
	// ext4 grows where the kernel lets this process (CAP_SYS_RESOURCE): test/crash does that.
	t.Run("ext4", func(t *testing.T) { d.filesystem(t, "ext4", "32Mi", "32Mi") })
	t.Run("xfs", func(t *testing.T) { d.filesystem(t, "xfs", "300Mi", "400Mi") })
	t.Run("block", d.block)
	t.Run("inline", d.inline)
}

func (d *trivet) filesystem(t *testing.T, fsType, size, larger string) {
	o := options(trivetName, fsType, size, map[string]string{"csi.storage.k8s.io/fstype": fsType})
	spec := d.provision(t, o)
	d.bring(t, spec)
	group := int64(4711)
	one, two := pod(fsType+"-one"), pod(fsType+"-two")
	path := d.publish(t, spec, one, plugins.MounterArgs{FSGroup: &group})
	must(t, os.WriteFile(path+"/data", []byte("precious"), 0o600))
	var st syscall.Stat_t
	must(t, syscall.Stat(path, &st))
	if int64(st.Gid) != group {
		t.Errorf("group %d", st.Gid)
	}
	other := d.publish(t, spec, two, plugins.MounterArgs{})
	wantContent(t, other)

	if larger != size {
		d.grow(t, spec, path, larger)
	}
	if now := bytesOf(t, path); now < atLeast(larger) {
		t.Errorf("%d bytes after growing to %s", now, larger)
	}

	copied := options(trivetName, fsType+"-copy", larger, o.Class.Parameters)
	copied.Source.Volume = spec.PersistentVolume
	restored := options(trivetName, fsType+"-restored", larger, o.Class.Parameters)
	restored.Source.SnapshotHandle = d.snapshot(t, spec)
	specs := []*plugins.Spec{spec}
	for _, o := range []plugins.ProvisionOptions{copied, restored} {
		same := d.provision(t, o)
		d.bring(t, same)
		wantContent(t, d.publish(t, same, one, plugins.MounterArgs{}))
		specs = append(specs, same)
	}
	d.drop(t, restored.Source.SnapshotHandle)
	d.remove(t, specs, one, two)
}

func (d *trivet) grow(t *testing.T, spec *plugins.Spec, path, larger string) {
	t.Helper()
	actual, node := resource.Quantity{}, false
	d.step(t, func(ctx context.Context) (err error) {
		actual, node, err = d.Expand(ctx, spec.PersistentVolume, resource.MustParse(larger))
		return err
	})
	if !node {
		t.Error("the node has nothing to do")
	}
	staging, err := d.DeviceMountPath(spec)
	must(t, err)
	d.step(t, func(ctx context.Context) error {
		return d.NodeExpand(ctx, spec, plugins.NodeExpandOptions{Path: path, DeviceMountPath: staging, Size: actual})
	})
}

// atLeast is what a filesystem of a size has for files and itself.
func atLeast(size string) int64 {
	q := resource.MustParse(size)
	return q.Value() * 8 / 10
}

func bytesOf(t *testing.T, path string) int64 {
	t.Helper()
	var st syscall.Statfs_t
	must(t, syscall.Statfs(path, &st))
	return int64(st.Blocks) * st.Bsize
}

func wantContent(t *testing.T, path string) {
	t.Helper()
	if b, err := os.ReadFile(path + "/data"); string(b) != "precious" {
		t.Errorf("%s: %q, %v", path, b, err)
	}
}

func (d *trivet) block(t *testing.T) {
	mode := corev1.PersistentVolumeBlock
	o := options(trivetName, "block", "16Mi", nil)
	o.Claim.Spec.VolumeMode = &mode
	spec := d.provision(t, o)
	d.bring(t, spec)
	one := pod("block-one")
	m, err := d.NewBlockVolumeMapper(spec, one)
	must(t, err)
	attachment, err := d.Attach(t.Context(), spec)
	must(t, err)
	d.step(t, func(ctx context.Context) error { return m.SetUpDevice(ctx, attachment) })
	d.step(t, m.MapPodDevice)
	if want := d.root + "/pods/uid-block-one/volumeDevices/kubernetes.io~csi/" + spec.Name(); m.Path() != want {
		t.Errorf("at %s, want %s", m.Path(), want)
	}
	to, err := os.Readlink(m.Path())
	if want := d.root + "/plugins/kubernetes.io/csi/volumeDevices/publish/" + spec.Name() + "/uid-block-one"; to != want || err != nil {
		t.Errorf("a link to %s, want %s: %v", to, want, err)
	}
	writeDevice(t, m.Path())
	d.grow(t, spec, m.Path(), "32Mi")
	if now := testenv.Run(t, "blockdev", "--getsize64", m.Path()); now != "33554432" {
		t.Errorf("%s bytes after growing", now)
	}
	d.remove(t, []*plugins.Spec{spec}, one)
}

func writeDevice(t *testing.T, path string) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_SYNC, 0)
	must(t, err)
	_, err = f.Write([]byte("precious"))
	must(t, err)
	must(t, f.Close())
}

func (d *trivet) inline(t *testing.T) {
	spec, one := inline(trivetName, "scratch", map[string]string{"size": "32Mi"}), pod("inline-one")
	path := d.publish(t, spec, one, plugins.MounterArgs{})
	must(t, os.WriteFile(path+"/data", []byte("precious"), 0o600))
	wantContent(t, d.publish(t, spec, one, plugins.MounterArgs{}))
	d.remove(t, nil, one)
}

// control talks to the driver beside the plugin, which makes no snapshots.
func (d *trivet) control(t *testing.T) csi.ControllerClient {
	t.Helper()
	conn, err := grpc.NewClient("unix:"+d.socket, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithAuthority("localhost"))
	must(t, err)
	t.Cleanup(func() { must(t, conn.Close()) })
	return csi.NewControllerClient(conn)
}

func (d *trivet) snapshot(t *testing.T, spec *plugins.Spec) (id string) {
	t.Helper()
	r, err := d.control(t).CreateSnapshot(t.Context(), &csi.CreateSnapshotRequest{Name: "of-" + spec.Name(), SourceVolumeId: spec.PersistentVolume.Spec.CSI.VolumeHandle})
	must(t, err)
	return r.GetSnapshot().GetSnapshotId()
}

func (d *trivet) drop(t *testing.T, id string) {
	t.Helper()
	_, err := d.control(t).DeleteSnapshot(t.Context(), &csi.DeleteSnapshotRequest{SnapshotId: id})
	must(t, err)
}
