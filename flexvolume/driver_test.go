package flexvolume_test

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/trivet-csi/trivet/internal/testenv"
)

// driver is a running driver.
type driver struct {
	controller csi.ControllerClient
	node       csi.NodeClient
	process    *exec.Cmd
}

var capability = &csi.VolumeCapability{
	AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER},
	AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{}},
}

// startDriver starts a driver on the socket that the executable uses, and waits until it serves.
func (k *kubelet) startDriver(config string) *driver {
	k.t.Helper()
	c := exec.Command(program, "driver", "--endpoint", "unix://"+k.socket, "--node-id", "n", "--config", config, "--state-dir", k.t.TempDir(), "--http-address", "")
	must(k.t, c.Start())
	d := &driver{process: c}
	k.t.Cleanup(d.kill)
	conn, err := grpc.NewClient("unix://"+k.socket, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithAuthority("localhost"))
	must(k.t, err)
	k.t.Cleanup(func() { _ = conn.Close() })
	ctx, cancel := context.WithTimeout(k.t.Context(), 20*time.Second)
	defer cancel()
	for ready := false; !ready; {
		resp, err := csi.NewIdentityClient(conn).Probe(ctx, &csi.ProbeRequest{}, grpc.WaitForReady(true))
		must(k.t, err)
		ready = resp.GetReady().GetValue()
	}
	d.controller, d.node = csi.NewControllerClient(conn), csi.NewNodeClient(conn)
	return d
}

func (d *driver) kill() {
	_ = d.process.Process.Kill()
	_ = d.process.Wait()
}

// claimed is a volume that CSI created and mounted at a target.
type claimed struct{ id, staging, target string }

func (k *kubelet) claim(d *driver, name string) claimed {
	k.t.Helper()
	created, err := d.controller.CreateVolume(k.t.Context(), &csi.CreateVolumeRequest{
		Name: name, CapacityRange: &csi.CapacityRange{RequiredBytes: 32 << 20}, VolumeCapabilities: []*csi.VolumeCapability{capability},
	})
	must(k.t, err)
	c := claimed{created.GetVolume().GetVolumeId(), k.t.TempDir(), filepath.Join(k.t.TempDir(), "target")}
	_, err = d.node.NodeStageVolume(k.t.Context(), &csi.NodeStageVolumeRequest{VolumeId: c.id, StagingTargetPath: c.staging, VolumeCapability: capability})
	must(k.t, err)
	_, err = d.node.NodePublishVolume(k.t.Context(), &csi.NodePublishVolumeRequest{VolumeId: c.id, StagingTargetPath: c.staging, TargetPath: c.target, VolumeCapability: capability})
	must(k.t, err)
	return c
}

func (k *kubelet) drop(d *driver, c claimed) {
	k.t.Helper()
	_, err := d.node.NodeUnpublishVolume(k.t.Context(), &csi.NodeUnpublishVolumeRequest{VolumeId: c.id, TargetPath: c.target})
	must(k.t, err)
	_, err = d.node.NodeUnstageVolume(k.t.Context(), &csi.NodeUnstageVolumeRequest{VolumeId: c.id, StagingTargetPath: c.staging})
	must(k.t, err)
	_, err = d.controller.DeleteVolume(k.t.Context(), &csi.DeleteVolumeRequest{VolumeId: c.id})
	must(k.t, err)
}

// TestOnePool: a pool serves CSI and FlexVolume concurrently. While the driver does not run, an
// on-demand driver serves FlexVolume; when the driver starts again, it takes over the pool, even
// during calls. No pod can mount a volume of CSI by its name.
func TestOnePool(t *testing.T) {
	k := newKubelet(t, testenv.Filesystem(t, "xfs", "2G"))
	config := filepath.Join(k.plugins, "trivet~loop", "config.yaml")
	of := func(volume string) string { return options("size", "32Mi", "volume", volume) }
	d := k.startDriver(config)
	csiVolume := k.claim(d, "pvc-1")
	k.write(filepath.Join(csiVolume.target, "file"), "csi")
	web, db := k.target("web"), k.target("db")
	k.succeed("loop", "mount", web, of("one"))
	k.write(filepath.Join(web, "file"), "flexvolume")
	k.wantDrivers(0)
	k.refuse("has no namespace in its record", "loop", "mount", db, of("pvc-1"))
	k.refuse("has no namespace in its record", "loop", "mount", k.target("db"), options("volume", "pvc-1"))
	k.read(filepath.Join(csiVolume.target, "file"), "csi")

	d.kill()
	db = k.target("db")
	k.succeed("loop", "mount", db, of("one"))
	k.wantDrivers(1)
	k.wantStateDirClosed()
	k.read(filepath.Join(db, "file"), "flexvolume")
	k.read(filepath.Join(csiVolume.target, "file"), "csi")

	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		for at := k.target("busy"); ; {
			select {
			case <-stop:
				return
			default:
				k.succeed("loop", "mount", at, of("two"))
				k.succeed("loop", "unmount", at)
				at = k.target("busy")
			}
		}
	}()
	d = k.startDriver(config)
	k.awaitPool(d)
	time.Sleep(time.Second)
	close(stop)
	<-stopped
	k.drop(d, csiVolume)
	k.succeed("loop", "unmount", web)
	k.succeed("loop", "unmount", db)
	k.wantDrivers(0)
}

// awaitPool waits until a driver serves the pool.
func (k *kubelet) awaitPool(d *driver) {
	k.t.Helper()
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(50 * time.Millisecond) {
		_, err := d.controller.GetCapacity(k.t.Context(), &csi.GetCapacityRequest{})
		if err == nil {
			return
		}
		if time.Now().After(end) {
			k.t.Fatal(err)
		}
	}
}

// TestOtherPool: a pool of the driver and a pool of FlexVolume's configuration have one name. No call
// uses the wrong pool.
func TestOtherPool(t *testing.T) {
	k := newKubelet(t, testenv.Filesystem(t, "xfs", "1G"))
	at := k.target("web")
	k.succeed("loop", "mount", at, options("size", "32Mi"))
	k.succeed("loop", "unmount", at)
	config := filepath.Join(t.TempDir(), "config.yaml")
	k.write(config, "pools: [{name: flex, directory: {path: "+k.pool+"2}, size: 100Mi}]\n")
	d := k.startDriver(config)
	k.refuse("give the two pools different names", "loop", "mount", k.target("web"), options("size", "32Mi"))
	d.kill()
	at = k.target("web")
	k.succeed("loop", "mount", at, options())

	must(t, os.Remove(filepath.Join(k.state, "uuids", "flex.uuid"))) // as after an upgrade
	k.awaitIdle()
	d = k.startDriver(config)
	k.refuse("give the two pools different names", "loop", "mount", k.target("db"), options("size", "32Mi"))
	d.kill()
	k.succeed("loop", "unmount", at)
}

// TestSecondPool: the running driver serves one of two pools. The on-demand driver serves the other
// pool, and both pools after the running driver has ended.
func TestSecondPool(t *testing.T) {
	k := newKubelet(t, testenv.Filesystem(t, "xfs", "2G"))
	config := filepath.Join(k.plugins, "trivet~loop", "config.yaml")
	first := filepath.Join(t.TempDir(), "config.yaml")
	one := "pools:\n- {name: flex, directory: {path: " + k.pool + "}, size: 500Mi}\n"
	k.write(first, one)
	k.write(config, one+"- {name: second, directory: {path: "+k.pool+"2}, size: 500Mi}\n")
	d := k.startDriver(first)
	at, second := k.target("web"), k.target("db")
	k.succeed("loop", "mount", second, options("pool", "second", "volume", "two", "size", "32Mi"))
	before := k.drivers()
	time.Sleep(1500 * time.Millisecond)
	if after := k.drivers(); len(before) != 1 || !slices.Equal(before, after) {
		t.Errorf("the on-demand drivers were %v, and are %v", before, after)
	}
	k.succeed("loop", "mount", at, options("pool", "flex", "volume", "one", "size", "32Mi"))
	k.succeed("loop", "unmount", second)
	d.kill()
	k.succeed("loop", "unmount", at)
	at, second = k.target("web"), k.target("db")
	k.succeed("loop", "mount", at, options("pool", "flex", "volume", "one"))
	k.succeed("loop", "mount", second, options("pool", "second", "volume", "two"))
	k.succeed("loop", "unmount", at)
	k.succeed("loop", "unmount", second)
}

// TestUnlistedPool: if the configuration lists pools, no call accepts another pool of the
// running driver. With `pools: []` calls accept all of them. A mounted volume can be unmounted
// in any case.
func TestUnlistedPool(t *testing.T) {
	k := newKubelet(t, testenv.Filesystem(t, "xfs", "1G"))
	running := filepath.Join(t.TempDir(), "config.yaml")
	k.write(running, "pools: [{name: private, directory: {path: "+k.pool+"2}, size: 500Mi}]\n")
	k.startDriver(running)
	private := options("pool", "private", "size", "32Mi")
	refused := func() {
		const says = `option pool="private": must be one of the pools ["flex"] of the configuration of FlexVolume`
		k.refuse(says, "loop", "mount", k.target("web"), private)
		k.refuse(says, "loop", "expandvolume", private, "", fmt.Sprint(64<<20), fmt.Sprint(32<<20))
		k.refuse(says, "loop", "expandfs", private, "", "", fmt.Sprint(64<<20), fmt.Sprint(32<<20))
		k.refuse(says, "loop", "assign", "shop", private)
	}
	refused()

	config := filepath.Join(k.plugins, "trivet~loop", "config.yaml")
	listed, err := os.ReadFile(config)
	must(t, err)
	k.write(config, "pools: []\n")
	k.refuse(`option pool="other": must be one of the pools ["private"] of the driver at `, "loop", "mount", k.target("web"), options("pool", "other"))
	web, db := k.target("web"), k.target("db")
	k.succeed("loop", "mount", web, private)
	k.succeed("loop", "mount", db, options()) // the only pool
	k.write(config, string(listed))
	refused()
	k.succeed("loop", "unmount", web)
	k.succeed("loop", "unmount", db)
}

// TestPoolRemoved: a volume can be unmounted when no driver serves its pool any more, and init does not
// wait for a driver.
func TestPoolRemoved(t *testing.T) {
	k := newKubelet(t, testenv.SimpleQuotas(t, "2G"))
	for _, driver := range []string{"loop", "local"} {
		t.Run(driver, func(t *testing.T) { k.on(t).poolRemoved(driver) })
	}
}

func (k *kubelet) poolRemoved(driver string) {
	config := filepath.Join(k.plugins, "trivet~"+driver, "config.yaml")
	before, err := os.ReadFile(config)
	must(k.t, err)
	web, db := k.target("web"), k.target("db")
	k.succeed(driver, "mount", web, options("volume", driver, "size", "160Mi"))
	k.succeed(driver, "mount", db, options("volume", driver))
	k.awaitIdle()
	must(k.t, syscall.Unmount(db, 0)) // as if a call to unmount had been killed
	k.write(config, "pools: []\n")
	began := time.Now()
	k.succeed(driver, "init")
	if took := time.Since(began); took > 5*time.Second {
		k.t.Errorf("init took %v", took)
	}
	k.succeed(driver, "unmount", web)
	k.checkNothingLeft()

	k.write(config, string(before))
	web = k.target("web")
	k.succeed(driver, "mount", web, options("volume", driver))
	k.succeed(driver, "unmount", web)
}

// TestShareOnDemand: the on-demand driver serves a call without a pool, as for a directory of a server:
// the running driver may be configured to refuse NFS.
func TestShareOnDemand(t *testing.T) {
	k := newKubelet(t, testenv.Filesystem(t, "xfs", "1G"))
	k.startDriver(filepath.Join(k.plugins, "trivet~loop", "config.yaml"))
	k.succeed("nfs", "unmount", k.target("web"))
	k.wantDrivers(1)
}

// TestDriverKilled: the on-demand driver is killed during calls, which another driver completes.
func TestDriverKilled(t *testing.T) {
	k := newKubelet(t, testenv.Filesystem(t, "xfs", "1G"))
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		for {
			select {
			case <-stop:
				return
			case <-time.After(70 * time.Millisecond):
				for _, pid := range k.drivers() {
					_ = syscall.Kill(pid, syscall.SIGKILL)
				}
			}
		}
	}()
	for range 10 {
		at := k.target("web")
		k.succeed("loop", "mount", at, options("size", "32Mi"))
		k.succeed("loop", "unmount", at)
	}
	close(stop)
	<-stopped
}

// wantDrivers checks the number of running on-demand drivers.
func (k *kubelet) wantDrivers(want int) {
	k.t.Helper()
	if got := k.drivers(); len(got) != want {
		k.t.Errorf("%d on-demand drivers run, want %d", len(got), want)
	}
}

// wantStateDirClosed checks that programs of the on-demand driver do not inherit its descriptor of the
// state directory.
func (k *kubelet) wantStateDirClosed() {
	k.t.Helper()
	for _, pid := range k.drivers() {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/fdinfo/3", pid))
		must(k.t, err)
		var pos, flags int
		_, err = fmt.Sscanf(string(b), "pos:\t%d\nflags:\t%o\n", &pos, &flags)
		must(k.t, err)
		if flags&syscall.O_CLOEXEC == 0 {
			k.t.Errorf("descriptor 3 is inherited: %s", b)
		}
	}
}

// drivers returns the process IDs of the on-demand drivers of this kubelet.
func (k *kubelet) drivers() (pids []int) {
	files, err := filepath.Glob("/proc/[0-9]*/cmdline")
	must(k.t, err)
	for _, f := range files {
		b, err := os.ReadFile(f)
		if words := strings.Split(string(b), "\x00"); err == nil && len(words) > 1 && words[1] == "flexvolume-driver" && strings.Contains(string(b), k.state) {
			pid, err := strconv.Atoi(filepath.Base(filepath.Dir(f)))
			must(k.t, err)
			pids = append(pids, pid)
		}
	}
	return pids
}

// TestMigration follows docs/flexvolume.md: the driver receives the pool, and a PersistentVolume with a
// csi source uses the volume that FlexVolume created.
func TestMigration(t *testing.T) {
	k := newKubelet(t, testenv.Filesystem(t, "xfs", "1G"))
	web := k.target("web")
	k.succeed("loop", "mount", web, options("size", "32Mi"))
	k.write(filepath.Join(web, "file"), "kept")
	k.succeed("loop", "unmount", web)

	config := filepath.Join(k.plugins, "trivet~loop", "config.yaml")
	id := k.volumeID(config)
	node := k.startDriver(config).node
	staging, target := t.TempDir(), filepath.Join(t.TempDir(), "target")
	_, err := node.NodeStageVolume(t.Context(), &csi.NodeStageVolumeRequest{VolumeId: id, StagingTargetPath: staging, VolumeCapability: capability})
	must(t, err)
	_, err = node.NodePublishVolume(t.Context(), &csi.NodePublishVolumeRequest{VolumeId: id, StagingTargetPath: staging, TargetPath: target, VolumeCapability: capability})
	must(t, err)
	k.read(filepath.Join(target, "file"), "kept")
	_, err = node.NodeUnpublishVolume(t.Context(), &csi.NodeUnpublishVolumeRequest{VolumeId: id, TargetPath: target})
	must(t, err)
	_, err = node.NodeUnstageVolume(t.Context(), &csi.NodeUnstageVolumeRequest{VolumeId: id, StagingTargetPath: staging})
	must(t, err)
}

// volumeID returns the ID of the only volume, as in the documentation.
func (k *kubelet) volumeID(config string) string {
	k.t.Helper()
	out := testenv.Run(k.t, program, "volumes", "--config", config, "--state-dir", k.state, "-o", "json")
	var list []struct{ ID, Name string }
	if err := json.Unmarshal([]byte(out), &list); err != nil || len(list) != 1 || list[0].Name != "pv" {
		k.t.Fatalf("%s: %v", out, err)
	}
	return list[0].ID
}
