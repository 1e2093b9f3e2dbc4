//go:build e2e

package e2e

import (
	"fmt"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

// TestAPIServerAway stops the API server until the sidecars have lost their leases. Meanwhile the
// controller's driver must still forward calls to the nodes. When the API server answers again, volumes
// must work as before, and no driver may have restarted.
func TestAPIServerAway(t *testing.T) {
	ns := newNamespace(t, "away")
	waitDriver(t)
	startPod(t, ns, claimPod{name: "before"})
	before := restarts(t)
	leaders := leaderProcesses()
	router := routerOf(t, leaders)

	stopped := processes("kube-apiserver")
	signal(t, syscall.SIGSTOP, stopped)
	t.Cleanup(func() { signal(t, syscall.SIGCONT, stopped) })
	for _, n := range nodes() {
		checkRouted(t, router, n)
	}
	eventually(t, 2*time.Minute, "the leader's sidecars have ended", func() (string, bool) {
		left := processes("/csi-")
		return fmt.Sprint(left), !slices.ContainsFunc(left, func(pid int) bool { return slices.Contains(leaders, pid) })
	})
	for _, n := range nodes() {
		checkRouted(t, router, n)
	}

	signal(t, syscall.SIGCONT, stopped)
	for _, n := range nodes() {
		startPod(t, ns, claimPod{name: "after-" + n.name, node: n.name})
	}
	waitDriver(t)
	if after := restarts(t); after != before {
		t.Errorf("got restart counts\n%s\nwant, as before,\n%s", after, before)
	}
}

// signal sends a signal to processes. There must be at least one.
func signal(t *testing.T, s syscall.Signal, pids []int) {
	t.Helper()
	if len(pids) == 0 {
		t.Fatalf("got no process to which to send %v, want at least one", s)
	}
	for _, pid := range pids {
		if err := syscall.Kill(pid, s); err != nil {
			t.Error(err)
		}
	}
}

// routerOf returns a client of the controller's driver, given the PIDs of the processes in the driver's pod.
func routerOf(t *testing.T, pod []int) csi.ControllerClient {
	t.Helper()
	drivers := processes(driver, "driver", "--services=controller")
	i := slices.IndexFunc(drivers, func(pid int) bool { return slices.Contains(pod, pid) })
	if i < 0 {
		t.Fatalf("got no controller's driver among the processes %v, want one", pod)
	}
	conn, err := grpc.NewClient(fmt.Sprintf("unix:/proc/%d/root/csi/csi.sock", drivers[i]), grpc.WithTransportCredentials(insecure.NewCredentials()))
	must(t, err)
	t.Cleanup(func() { conn.Close() })
	return csi.NewControllerClient(conn)
}

// checkRouted creates and deletes a volume on a node by calls to the controller's driver.
func checkRouted(t *testing.T, router csi.ControllerClient, n node) {
	t.Helper()
	onNode := []*csi.Topology{{Segments: map[string]string{driverName + "/node": n.name}}}
	created, err := router.CreateVolume(t.Context(), &csi.CreateVolumeRequest{
		Name:          "routed-" + n.name,
		CapacityRange: &csi.CapacityRange{RequiredBytes: 32 << 20},
		Parameters:    map[string]string{"backend": "loop"},
		VolumeCapabilities: []*csi.VolumeCapability{{
			AccessType: &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}},
			AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER},
		}},
		AccessibilityRequirements: &csi.TopologyRequirement{Requisite: onNode, Preferred: onNode},
	})
	if err != nil {
		t.Fatalf("CreateVolume on %s: %v", n.name, err)
	}
	if _, err := router.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: created.GetVolume().GetVolumeId()}); err != nil {
		t.Errorf("DeleteVolume of %s: %v", created.GetVolume().GetVolumeId(), err)
	}
}
