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

	"github.com/trivet-csi/trivet/flexvolume"
	"github.com/trivet-csi/trivet/internal/testenv"
)

// driver is a process of trivet driver, with clients of its CSI services.
type driver struct {
	controller csi.ControllerClient
	node       csi.NodeClient
	process    *exec.Cmd
}

var capability = &csi.VolumeCapability{
	AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER},
	AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{}},
}

// startDriver starts a driver on the socket on which the executable looks for the running driver, and waits
// until it is ready.
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

// csiVolume is a volume that createAndMount has mounted.
type csiVolume struct{ id, staging, target string }

// createAndMount creates, stages and publishes a volume by CSI calls.
func (k *kubelet) createAndMount(d *driver, name string) csiVolume {
	k.t.Helper()
	created, err := d.controller.CreateVolume(k.t.Context(), &csi.CreateVolumeRequest{
		Name: name, CapacityRange: &csi.CapacityRange{RequiredBytes: 32 << 20}, VolumeCapabilities: []*csi.VolumeCapability{capability},
	})
	must(k.t, err)
	v := csiVolume{created.GetVolume().GetVolumeId(), k.t.TempDir(), filepath.Join(k.t.TempDir(), "target")}
	_, err = d.node.NodeStageVolume(k.t.Context(), &csi.NodeStageVolumeRequest{VolumeId: v.id, StagingTargetPath: v.staging, VolumeCapability: capability})
	must(k.t, err)
	_, err = d.node.NodePublishVolume(k.t.Context(), &csi.NodePublishVolumeRequest{VolumeId: v.id, StagingTargetPath: v.staging, TargetPath: v.target, VolumeCapability: capability})
	must(k.t, err)
	return v
}

// unmountAndDelete unpublishes, unstages and deletes a volume of createAndMount.
func (k *kubelet) unmountAndDelete(d *driver, v csiVolume) {
	k.t.Helper()
	_, err := d.node.NodeUnpublishVolume(k.t.Context(), &csi.NodeUnpublishVolumeRequest{VolumeId: v.id, TargetPath: v.target})
	must(k.t, err)
	_, err = d.node.NodeUnstageVolume(k.t.Context(), &csi.NodeUnstageVolumeRequest{VolumeId: v.id, StagingTargetPath: v.staging})
	must(k.t, err)
	_, err = d.controller.DeleteVolume(k.t.Context(), &csi.DeleteVolumeRequest{VolumeId: v.id})
	must(k.t, err)
}

// TestPoolSharedWithCSI: CSI and FlexVolume use one pool concurrently. While the driver does not run, an
// on-demand driver serves FlexVolume calls. When the driver starts again, it takes over the pool from the
// on-demand driver, even if FlexVolume calls are in progress. A FlexVolume call cannot mount a CSI volume by
// the volume's name.
func TestPoolSharedWithCSI(t *testing.T) {
	k := newKubelet(t, testenv.Filesystem(t, "xfs", "2G"))
	config := filepath.Join(k.plugins, "trivet~loop", "config.yaml")
	volumeOptions := func(volume string) string { return options("size", "32Mi", "volume", volume) }
	d := k.startDriver(config)
	pvc := k.createAndMount(d, "pvc-1")
	k.write(filepath.Join(pvc.target, "file"), "csi")
	web, db := k.target("web"), k.target("db")
	k.succeed("loop", "mount", web, volumeOptions("one"))
	k.write(filepath.Join(web, "file"), "flexvolume")
	k.wantOnDemandDrivers(0)
	k.refuse("has no namespace in its record", "loop", "mount", db, volumeOptions("pvc-1"))
	k.refuse("has no namespace in its record", "loop", "mount", k.target("db"), options("volume", "pvc-1"))
	k.read(filepath.Join(pvc.target, "file"), "csi")

	d.kill()
	db = k.target("db")
	k.succeed("loop", "mount", db, volumeOptions("one"))
	k.wantOnDemandDrivers(1)
	k.wantStateDirCloseOnExec()
	k.read(filepath.Join(db, "file"), "flexvolume")
	k.read(filepath.Join(pvc.target, "file"), "csi")

	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		for busy := k.target("busy"); ; {
			select {
			case <-stop:
				return
			default:
				k.succeed("loop", "mount", busy, volumeOptions("two"))
				k.succeed("loop", "unmount", busy)
				busy = k.target("busy")
			}
		}
	}()
	d = k.startDriver(config)
	k.awaitPool(d)
	time.Sleep(time.Second) // for FlexVolume calls that the running driver serves
	close(stop)
	<-stopped
	k.unmountAndDelete(d, pvc)
	k.succeed("loop", "unmount", web)
	k.succeed("loop", "unmount", db)
	k.wantOnDemandDrivers(0)
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

// TestSamePoolName: the driver and the FlexVolume configuration have different pools with the same name.
// No call uses the wrong pool.
func TestSamePoolName(t *testing.T) {
	k := newKubelet(t, testenv.Filesystem(t, "xfs", "1G"))
	web := k.target("web")
	k.succeed("loop", "mount", web, options("size", "32Mi"))
	k.succeed("loop", "unmount", web)
	config := filepath.Join(t.TempDir(), "config.yaml")
	k.write(config, "pools: [{name: flex, directory: {path: "+k.pool+"2}, size: 100Mi}]\n")
	d := k.startDriver(config)
	k.refuse("give the two pools different names", "loop", "mount", k.target("web"), options("size", "32Mi"))
	d.kill()
	web = k.target("web")
	k.succeed("loop", "mount", web, options())
	k.succeed("loop", "unmount", web)
}

// TestSecondPool: while the running driver serves one of two pools, the on-demand driver serves only the
// other pool. After the running driver has ended, the on-demand driver serves both pools.
func TestSecondPool(t *testing.T) {
	k := newKubelet(t, testenv.Filesystem(t, "xfs", "2G"))
	config := filepath.Join(k.plugins, "trivet~loop", "config.yaml")
	running := filepath.Join(t.TempDir(), "config.yaml")
	firstPool := "pools:\n- {name: flex, directory: {path: " + k.pool + "}, size: 500Mi}\n"
	k.write(running, firstPool)
	k.write(config, firstPool+"- {name: second, directory: {path: "+k.pool+"2}, size: 500Mi}\n")
	d := k.startDriver(running)
	first, second := k.target("web"), k.target("db")
	k.succeed("loop", "mount", second, options("pool", "second", "volume", "two", "size", "32Mi"))
	before := k.onDemandDrivers()
	time.Sleep(1500 * time.Millisecond) // the on-demand driver queries the running driver's pools every 500 ms
	if after := k.onDemandDrivers(); len(before) != 1 || !slices.Equal(before, after) {
		t.Errorf("got on-demand drivers %v after %v, want the same single process", after, before)
	}
	k.succeed("loop", "mount", first, options("pool", "flex", "volume", "one", "size", "32Mi"))
	k.succeed("loop", "unmount", second)
	d.kill()
	k.succeed("loop", "unmount", first)
	first, second = k.target("web"), k.target("db")
	k.succeed("loop", "mount", first, options("pool", "flex", "volume", "one"))
	k.succeed("loop", "mount", second, options("pool", "second", "volume", "two"))
	k.succeed("loop", "unmount", first)
	k.succeed("loop", "unmount", second)
}

// TestUnlistedPool: if the FlexVolume configuration lists pools, calls for another pool of the running
// driver fail. With `pools: []` calls for all pools of the running driver succeed. A mounted volume can be
// unmounted in both cases.
func TestUnlistedPool(t *testing.T) {
	k := newKubelet(t, testenv.Filesystem(t, "xfs", "1G"))
	running := filepath.Join(t.TempDir(), "config.yaml")
	k.write(running, "pools: [{name: private, directory: {path: "+k.pool+"2}, size: 500Mi}]\n")
	k.startDriver(running)
	private := options("pool", "private", "size", "32Mi")
	checkRefused := func() {
		const message = `option pool="private": must be one of the pools ["flex"] of the configuration of FlexVolume`
		k.refuse(message, "loop", "mount", k.target("web"), private)
		k.refuse(message, "loop", "expandvolume", private, "", fmt.Sprint(64<<20), fmt.Sprint(32<<20))
		k.refuse(message, "loop", "expandfs", private, "", "", fmt.Sprint(64<<20), fmt.Sprint(32<<20))
		k.refuse(message, "loop", "assign", "shop", private)
	}
	checkRefused()

	config := filepath.Join(k.plugins, "trivet~loop", "config.yaml")
	listed, err := os.ReadFile(config)
	must(t, err)
	k.write(config, "pools: []\n")
	k.refuse(`option pool="other": must be one of the pools ["private"] of the driver at `, "loop", "mount", k.target("web"), options("pool", "other"))
	web, db := k.target("web"), k.target("db")
	k.succeed("loop", "mount", web, private)
	k.succeed("loop", "mount", db, options()) // no pool is needed, because the driver has only one
	k.write(config, string(listed))
	checkRefused()
	k.succeed("loop", "unmount", web)
	k.succeed("loop", "unmount", db)
}

// TestPoolRemoved: a volume can be unmounted after its pool was removed from the configuration. init then does
// not start a driver and wait until it serves the pool.
func TestPoolRemoved(t *testing.T) {
	k := newKubelet(t, testenv.SimpleQuotas(t, "2G"))
	for _, driver := range []string{"loop", "local"} {
		t.Run(driver, func(t *testing.T) { k.on(t).poolRemoved(driver) })
	}
}

// poolRemoved is TestPoolRemoved for one FlexVolume driver.
func (k *kubelet) poolRemoved(driver string) {
	config := filepath.Join(k.plugins, "trivet~"+driver, "config.yaml")
	before, err := os.ReadFile(config)
	must(k.t, err)
	web, db := k.target("web"), k.target("db")
	k.succeed(driver, "mount", web, options("volume", driver, "size", "160Mi"))
	k.succeed(driver, "mount", db, options("volume", driver))
	k.awaitIdle()
	must(k.t, syscall.Unmount(db, 0)) // the state after a killed call to unmount
	k.write(config, "pools: []\n")
	log := filepath.Join(k.state, flexvolume.LogFile)
	logged, err := os.ReadFile(log)
	must(k.t, err)
	k.succeed(driver, "init")
	if now, err := os.ReadFile(log); err != nil || len(now) != len(logged) {
		k.t.Errorf("init started a driver, whose log is %s (error %v), want none", now[min(len(logged), len(now)):], err)
	}
	k.succeed(driver, "unmount", web)
	k.checkNothingLeft()

	k.write(config, string(before))
	web = k.target("web")
	k.succeed(driver, "mount", web, options("volume", driver))
	k.succeed(driver, "unmount", web)
}

// TestNFSOnDemand: the on-demand driver serves calls without a pool, such as for an NFS directory, although a
// driver runs: the configuration of the running driver may refuse NFS.
func TestNFSOnDemand(t *testing.T) {
	k := newKubelet(t, testenv.Filesystem(t, "xfs", "1G"))
	k.startDriver(filepath.Join(k.plugins, "trivet~loop", "config.yaml"))
	k.succeed("nfs", "unmount", k.target("web"))
	k.wantOnDemandDrivers(1)
}

// TestDriverKilled: if the on-demand driver is killed during a call, the call succeeds with a new
// on-demand driver. Each driver of a call lives longer than the one before it, because a driver on a loaded
// machine needs more time for its work.
func TestDriverKilled(t *testing.T) {
	k := newKubelet(t, testenv.Filesystem(t, "xfs", "1G"))
	kills := 0
	for range 10 {
		web := k.target("web")
		kills += k.whileKilling(func() { k.succeed("loop", "mount", web, options("size", "32Mi")) })
		kills += k.whileKilling(func() { k.succeed("loop", "unmount", web) })
	}
	if kills < 10 {
		t.Errorf("got %d killed drivers, want at least 10", kills)
	}
}

// whileKilling makes a call and kills the on-demand drivers meanwhile. It returns the number of killed drivers.
func (k *kubelet) whileKilling(call func()) (kills int) {
	ctx, cancel := context.WithCancel(k.t.Context())
	defer cancel()
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		for pause := 5 * time.Millisecond; ; pause += pause / 4 {
			select {
			case <-ctx.Done():
				return
			case <-time.After(pause):
			}
			for _, pid := range k.onDemandDrivers() {
				if syscall.Kill(pid, syscall.SIGKILL) == nil {
					kills++
				}
			}
		}
	}()
	call()
	cancel()
	<-stopped
	return kills
}

// wantOnDemandDrivers checks the number of running on-demand drivers.
func (k *kubelet) wantOnDemandDrivers(want int) {
	k.t.Helper()
	if got := k.onDemandDrivers(); len(got) != want {
		k.t.Errorf("got %d on-demand drivers, want %d", len(got), want)
	}
}

// wantStateDirCloseOnExec checks that the on-demand driver's file descriptor of the state directory (3)
// is not inherited by the programs that the driver runs.
func (k *kubelet) wantStateDirCloseOnExec() {
	k.t.Helper()
	for _, pid := range k.onDemandDrivers() {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/fdinfo/3", pid))
		must(k.t, err)
		var pos, flags int
		_, err = fmt.Sscanf(string(b), "pos:\t%d\nflags:\t%o\n", &pos, &flags)
		must(k.t, err)
		if flags&syscall.O_CLOEXEC == 0 {
			k.t.Errorf("file descriptor 3 is not close-on-exec: %s", b)
		}
	}
}

// onDemandDrivers returns the process IDs of this kubelet's on-demand drivers.
func (k *kubelet) onDemandDrivers() (pids []int) {
	files, err := filepath.Glob("/proc/[0-9]*/cmdline")
	must(k.t, err)
	for _, f := range files {
		b, err := os.ReadFile(f)
		if args := strings.Split(string(b), "\x00"); err == nil && len(args) > 1 && args[1] == "flexvolume-driver" && strings.Contains(string(b), k.state) {
			pid, err := strconv.Atoi(filepath.Base(filepath.Dir(f)))
			must(k.t, err)
			pids = append(pids, pid)
		}
	}
	return pids
}

// TestMigration follows docs/flexvolume.md: a driver with the pool of FlexVolume mounts a volume that FlexVolume
// created.
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

// volumeID returns the ID of the only volume. It runs the command that docs/flexvolume.md gives.
func (k *kubelet) volumeID(config string) string {
	k.t.Helper()
	out := testenv.Run(k.t, program, "volumes", "--config", config, "--state-dir", k.state, "-o", "json")
	var list []struct{ ID, Name string }
	if err := json.Unmarshal([]byte(out), &list); err != nil || len(list) != 1 || list[0].Name != "pv" {
		k.t.Fatalf("trivet volumes printed %s (%v), want one volume named pv", out, err)
	}
	return list[0].ID
}
