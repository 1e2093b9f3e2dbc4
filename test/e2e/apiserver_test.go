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

// TestAPIServerAway: while the API server does not answer, until the sidecars lose their leases,
// the router serves the nodes that it has recorded. Then all calls succeed again, and no driver
// was restarted.
func TestAPIServerAway(t *testing.T) {
	ns := newNamespace(t, "away")
	waitDriver(t)
	moveIn(t, ns, tenant{name: "before"})
	before := restarts(t)
	was := leading()
	router := routerOf(t, was)

	stopped := processes("kube-apiserver")
	signal(t, syscall.SIGSTOP, stopped)
	t.Cleanup(func() { signal(t, syscall.SIGCONT, stopped) })
	for _, n := range nodes() {
		checkRouted(t, router, n)
	}
	eventually(t, 2*time.Minute, "the leader's sidecars have ended", func() (string, bool) {
		left := processes("/csi-")
		return fmt.Sprint(left), !slices.ContainsFunc(left, func(pid int) bool { return slices.Contains(was, pid) })
	})
	for _, n := range nodes() {
		checkRouted(t, router, n)
	}

	signal(t, syscall.SIGCONT, stopped)
	for _, n := range nodes() {
		moveIn(t, ns, tenant{name: "after-" + n.name, node: n.name})
	}
	waitDriver(t)
	if after := restarts(t); after != before {
		t.Errorf("drivers were restarted:\n%s\nbefore:\n%s", after, before)
	}
}

func signal(t *testing.T, s syscall.Signal, pids []int) {
	t.Helper()
	if len(pids) == 0 {
		t.Fatal("no process to signal")
	}
	for _, pid := range pids {
		if err := syscall.Kill(pid, s); err != nil {
			t.Error(err)
		}
	}
}

// routerOf is the router's socket among the processes of a controller's pod.
func routerOf(t *testing.T, pod []int) csi.ControllerClient {
	t.Helper()
	drivers := processes(driver, "driver", "--services=controller")
	i := slices.IndexFunc(drivers, func(pid int) bool { return slices.Contains(pod, pid) })
	if i < 0 {
		t.Fatalf("no driver among the processes %v", pod)
	}
	conn, err := grpc.NewClient(fmt.Sprintf("unix:/proc/%d/root/csi/csi.sock", drivers[i]), grpc.WithTransportCredentials(insecure.NewCredentials()))
	must(t, err)
	t.Cleanup(func() { conn.Close() })
	return csi.NewControllerClient(conn)
}

// checkRouted makes and deletes a volume on a node by the router.
func checkRouted(t *testing.T, router csi.ControllerClient, n node) {
	t.Helper()
	there := []*csi.Topology{{Segments: map[string]string{driverName + "/node": n.name}}}
	made, err := router.CreateVolume(t.Context(), &csi.CreateVolumeRequest{
		Name:          "routed-" + n.name,
		CapacityRange: &csi.CapacityRange{RequiredBytes: 32 << 20},
		Parameters:    map[string]string{"backend": "loop"},
		VolumeCapabilities: []*csi.VolumeCapability{{
			AccessType: &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}},
			AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER},
		}},
		AccessibilityRequirements: &csi.TopologyRequirement{Requisite: there, Preferred: there},
	})
	if err != nil {
		t.Fatalf("making a volume on %s: %v", n.name, err)
	}
	if _, err := router.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: made.GetVolume().GetVolumeId()}); err != nil {
		t.Errorf("deleting %s: %v", made.GetVolume().GetVolumeId(), err)
	}
}
