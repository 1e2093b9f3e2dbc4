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
	"github.com/trivet-csi/trivet/volumemanager/plugins/plugintest"
)

const trivetName = "csi.trivet.dev"

// trivet is this project's driver in its own process, with a pool on xfs.
type trivet struct {
	*host
	t                    *testing.T // the top-level test
	binary, socket, pool string
	log                  *os.File
	process              *exec.Cmd
}

// newTrivet runs a registered driver until the test ends.
func newTrivet(t *testing.T) *trivet {
	t.Helper()
	d := &trivet{t: t, binary: filepath.Join(t.TempDir(), "trivet"), pool: filepath.Join(testenv.Filesystem(t, "xfs", "4G"), "pool")}
	must(t, testenv.Build(d.binary))
	d.host = newHost(t)
	yes := true
	d.CSIDrivers[trivetName] = &storagev1.CSIDriver{Spec: storagev1.CSIDriverSpec{
		PodInfoOnMount:       &yes,
		VolumeLifecycleModes: []storagev1.VolumeLifecycleMode{storagev1.VolumeLifecyclePersistent, storagev1.VolumeLifecycleEphemeral},
	}}
	base := filepath.Dir(d.Root)
	d.socket = filepath.Join(base, "trivet.sock")
	config := fmt.Sprintf("pools: [{name: default, directory: {path: %q}, ephemeral: true}]\n", d.pool)
	must(t, os.WriteFile(filepath.Join(base, "config.yaml"), []byte(config), 0o600))
	var err error
	d.log, err = os.Create(filepath.Join(base, "log"))
	must(t, err)
	d.run(t)
	t.Cleanup(func() { d.end(t) })
	d.startRegistrar(t, "trivet-reg.sock", info(trivetName, d.socket, "1.0.0"))
	d.waitForStatus(t, "trivet-reg.sock", registered)
	return d
}

// run starts the driver's process.
func (d *trivet) run(t *testing.T) {
	t.Helper()
	base := filepath.Dir(d.Root)
	d.process = exec.Command(d.binary, "driver", "--endpoint", "unix://"+d.socket, "--node-id", nodeName,
		"--config", filepath.Join(base, "config.yaml"), "--state-dir", filepath.Join(base, "state"), "--http-address", "", "-v", "2")
	d.process.Stdout, d.process.Stderr = d.log, d.log
	must(t, d.process.Start())
}

// kill kills the driver's process.
func (d *trivet) kill() {
	_ = d.process.Process.Kill()
	_ = d.process.Wait() // returns that it was killed
}

// end kills the driver. If the test has failed, it logs the end of the driver's log and cleans up.
func (d *trivet) end(t *testing.T) {
	t.Helper()
	d.kill()
	if t.Failed() {
		b, err := os.ReadFile(d.log.Name())
		t.Logf("end of the driver's log (%v):\n%s", err, b[max(0, len(b)-8192):])
		d.clear(t)
	}
	must(t, d.log.Close())
}

// clear unmounts volumes and frees loop devices after a failed test.
func (d *trivet) clear(t *testing.T) {
	t.Helper()
	for _, at := range slices.Backward(mounts(t, d.Root)) {
		t.Logf("unmounting %s: %v", at, syscall.Unmount(at, 0))
	}
	images := plugintest.Value(filepath.Glob(d.pool + "/volumes/*/image"))(t)
	for _, image := range images {
		for _, device := range strings.Fields(testenv.Run(t, "losetup", "-n", "-O", "NAME", "-j", image)) {
			t.Logf("freeing %s: %v", device, exec.Command("losetup", "-d", device).Run())
		}
	}
}

// step kills and restarts the driver. Then it makes a call twice, each time until the call succeeds.
func (d *trivet) step(t *testing.T, call func(context.Context) error) {
	t.Helper()
	d.kill()
	d.run(t)
	waitFor(t, func() error { return call(t.Context()) })
	// The call is idempotent. It may fail while the plugin queries the restarted driver.
	waitFor(t, func() error { return call(t.Context()) })
}

// provision creates a volume, and returns its PersistentVolume.
func (d *trivet) provision(t *testing.T, o plugins.ProvisionOptions) *plugins.Spec {
	t.Helper()
	var pv *corev1.PersistentVolume
	d.step(t, func(ctx context.Context) (err error) {
		pv, err = d.Provision(ctx, o)
		return err
	})
	return &plugins.Spec{PersistentVolume: pv}
}

// attachAndStage attaches and stages a volume.
func (d *trivet) attachAndStage(t *testing.T, spec *plugins.Spec) {
	t.Helper()
	needs := plugintest.Value(d.NeedsAttach(spec))(t)
	if !needs {
		t.Error("NeedsAttach: got false, want true")
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

// removeAll restarts the plugin and the driver, undoes all that the records on disk contain, and deletes
// the volumes.
func (d *trivet) removeAll(t *testing.T, specs []*plugins.Spec, pods ...*corev1.Pod) {
	t.Helper()
	d.start(d.t)
	d.waitForStatus(t, "trivet-reg.sock", registered)
	d.kill()
	d.run(t)
	waitFor(t, func() error { return d.undo(t, pods) })
	wantNothingLeft(t, d.Root)
	for _, spec := range specs {
		d.step(t, func(ctx context.Context) error { return d.Delete(ctx, spec.PersistentVolume) })
	}
	left := plugintest.Value(os.ReadDir(filepath.Join(d.pool, "volumes")))(t)
	if len(left) > 0 {
		t.Errorf("got volumes %v in the pool, want none", left)
	}
}

// TestTrivet makes all calls for a volume to this project's driver, and kills the driver before each call.
func TestTrivet(t *testing.T) {
	testenv.RequireRoot(t)
	d := newTrivet(t)
	// The ext4 volume does not grow, because that needs CAP_SYS_RESOURCE: test/crash tests it.
	t.Run("ext4", func(t *testing.T) { d.filesystem(t, "ext4", "32Mi", "32Mi") })
	t.Run("xfs", func(t *testing.T) { d.filesystem(t, "xfs", "300Mi", "400Mi") })
	t.Run("block", d.block)
	t.Run("inline", d.inline)
}

// filesystem publishes a volume to two pods, expands it if larger is more than size, and publishes a copy
// and a restored snapshot.
func (d *trivet) filesystem(t *testing.T, fsType, size, larger string) {
	o := options(trivetName, fsType, size, map[string]string{"csi.storage.k8s.io/fstype": fsType})
	spec := d.provision(t, o)
	d.attachAndStage(t, spec)
	group := int64(4711)
	one, two := pod(fsType+"-one"), pod(fsType+"-two")
	path := d.publish(t, spec, one, plugins.MounterArgs{FSGroup: &group})
	must(t, os.WriteFile(path+"/data", []byte("precious"), 0o600))
	var st syscall.Stat_t
	must(t, syscall.Stat(path, &st))
	if int64(st.Gid) != group {
		t.Errorf("got group %d, want %d", st.Gid, group)
	}
	other := d.publish(t, spec, two, plugins.MounterArgs{})
	wantContent(t, other)

	if larger != size {
		d.expand(t, spec, path, larger)
	}
	if now := bytesOf(t, path); now < minFilesystem(larger) {
		t.Errorf("got a filesystem of %d bytes on a volume of %s, want at least %d", now, larger, minFilesystem(larger))
	}

	copyOptions := options(trivetName, fsType+"-copy", larger, o.Class.Parameters)
	copyOptions.Source.Volume = spec.PersistentVolume
	restoreOptions := options(trivetName, fsType+"-restored", larger, o.Class.Parameters)
	restoreOptions.Source.SnapshotHandle = d.createSnapshot(t, spec)
	specs := []*plugins.Spec{spec}
	for _, o := range []plugins.ProvisionOptions{copyOptions, restoreOptions} {
		duplicate := d.provision(t, o)
		d.attachAndStage(t, duplicate)
		wantContent(t, d.publish(t, duplicate, one, plugins.MounterArgs{}))
		specs = append(specs, duplicate)
	}
	d.deleteSnapshot(t, restoreOptions.Source.SnapshotHandle)
	d.removeAll(t, specs, one, two)
}

// expand expands a volume in the pool and on the node. path is the path of a pod's mount or raw device.
func (d *trivet) expand(t *testing.T, spec *plugins.Spec, path, larger string) {
	t.Helper()
	actual, node := resource.Quantity{}, false
	d.step(t, func(ctx context.Context) (err error) {
		actual, node, err = d.Expand(ctx, spec.PersistentVolume, resource.MustParse(larger))
		return err
	})
	if !node {
		t.Error("Expand: got that the node need not expand the volume, want that it must")
	}
	staging := plugintest.Value(d.DeviceMountPath(spec))(t)
	d.step(t, func(ctx context.Context) error {
		return d.NodeExpand(ctx, spec, plugins.NodeExpandOptions{Path: path, DeviceMountPath: staging, Size: actual})
	})
}

// minFilesystem returns the minimum number of bytes of the filesystem on a volume of a size.
func minFilesystem(size string) int64 {
	q := resource.MustParse(size)
	return q.Value() * 8 / 10
}

// bytesOf returns the size of a filesystem in bytes.
func bytesOf(t *testing.T, path string) int64 {
	t.Helper()
	var st syscall.Statfs_t
	must(t, syscall.Statfs(path, &st))
	return int64(st.Blocks) * st.Bsize
}

// wantContent requires the file data of the first volume.
func wantContent(t *testing.T, path string) {
	t.Helper()
	plugintest.WantText(t, path+"/data", "precious")
}

// block publishes a raw device to a pod, and expands it.
func (d *trivet) block(t *testing.T) {
	mode := corev1.PersistentVolumeBlock
	o := options(trivetName, "block", "16Mi", nil)
	o.Claim.Spec.VolumeMode = &mode
	spec := d.provision(t, o)
	d.attachAndStage(t, spec)
	one := pod("block-one")
	m := plugintest.Value(d.NewBlockVolumeMapper(spec, one))(t)
	attachment := plugintest.Value(d.Attach(t.Context(), spec))(t)
	d.step(t, func(ctx context.Context) error { return m.SetUpDevice(ctx, attachment) })
	d.step(t, m.MapPodDevice)
	if want := d.Root + "/pods/uid-block-one/volumeDevices/kubernetes.io~csi/" + spec.Name(); m.Path() != want {
		t.Errorf("got path %s, want %s", m.Path(), want)
	}
	to, err := os.Readlink(m.Path())
	if want := d.Root + "/plugins/kubernetes.io/csi/volumeDevices/publish/" + spec.Name() + "/uid-block-one"; to != want || err != nil {
		t.Errorf("got a link to %s, %v; want %s", to, err, want)
	}
	writeDevice(t, m.Path())
	d.expand(t, spec, m.Path(), "32Mi")
	if now := testenv.Run(t, "blockdev", "--getsize64", m.Path()); now != "33554432" {
		t.Errorf("got a device of %s bytes, want 32 MiB", now)
	}
	d.removeAll(t, []*plugins.Spec{spec}, one)
}

// writeDevice writes to a raw device.
func writeDevice(t *testing.T, path string) {
	t.Helper()
	f := plugintest.Value(os.OpenFile(path, os.O_WRONLY|os.O_SYNC, 0))(t)
	plugintest.Value(f.Write([]byte("precious")))(t)
	must(t, f.Close())
}

// inline publishes an inline volume to a pod twice.
func (d *trivet) inline(t *testing.T) {
	spec, one := inline(trivetName, "scratch", map[string]string{"size": "32Mi"}), pod("inline-one")
	path := d.publish(t, spec, one, plugins.MounterArgs{})
	must(t, os.WriteFile(path+"/data", []byte("precious"), 0o600))
	wantContent(t, d.publish(t, spec, one, plugins.MounterArgs{}))
	d.removeAll(t, nil, one)
}

// control returns a client of the driver, because the plugin takes no snapshots.
func (d *trivet) control(t *testing.T) csi.ControllerClient {
	t.Helper()
	conn := plugintest.Value(grpc.NewClient("unix:"+d.socket, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithAuthority("localhost")))(t)
	t.Cleanup(func() { must(t, conn.Close()) })
	return csi.NewControllerClient(conn)
}

// createSnapshot creates a snapshot of a volume, and returns its ID.
func (d *trivet) createSnapshot(t *testing.T, spec *plugins.Spec) (id string) {
	t.Helper()
	r := plugintest.Value(d.control(t).CreateSnapshot(t.Context(), &csi.CreateSnapshotRequest{Name: "of-" + spec.Name(), SourceVolumeId: spec.PersistentVolume.Spec.CSI.VolumeHandle}))(t)
	return r.GetSnapshot().GetSnapshotId()
}

// deleteSnapshot deletes a snapshot.
func (d *trivet) deleteSnapshot(t *testing.T, id string) {
	t.Helper()
	plugintest.Value(d.control(t).DeleteSnapshot(t.Context(), &csi.DeleteSnapshotRequest{SnapshotId: id}))(t)
}
