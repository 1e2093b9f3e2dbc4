//go:build e2e

package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

const (
	// flexProgram is the name of the program that test/e2e/run builds in the cluster's state directory.
	flexProgram = "trivet"
	flexPool    = stateDir + "/pools/flexvolume"
	flexState   = stateDir + "/flexvolume"
)

// TestFlexVolume checks that a kubelet mounts PersistentVolumes through a link to the program in its volume
// plugin directory, that a second pod finds the data of the first, and that no mounts are left.
func TestFlexVolume(t *testing.T) {
	ns := newNamespace(t, "flexvolume")
	n := nodes()[0]
	n.installFlexVolume(t)
	for _, backend := range []string{"loop", "local"} {
		t.Run(backend, func(t *testing.T) {
			kubectlInput(t, flexVolume(backend), "apply", "-f", "-")
			x := claimPod{name: backend, node: n.name, class: `""`, volume: "flex-" + backend}
			startPod(t, ns, x)
			checkFlexMount(t, n, backend)
			kubectl(t, "-n", ns, "delete", "pod", x.name, "--timeout=2m")
			x.command = checkToken
			startPod(t, ns, x)
			kubectl(t, "-n", ns, "delete", "pod", x.name, "--timeout=2m")
			n.checkFlexGone(t)
			kubectl(t, "-n", ns, "delete", "pvc", x.name, "--timeout=2m")
			kubectl(t, "delete", "pv", x.volume, "--timeout=2m")
		})
	}
}

// installFlexVolume creates the link in the kubelet's volume plugin directory, with a configuration and a
// pool.
func (n node) installFlexVolume(t *testing.T) {
	t.Helper()
	dir := filepath.Join(n.dir, "flexvolume", "trivet~trivet")
	config := fmt.Sprintf("pools:\n- {name: flexvolume, directory: {path: %s}, quota: off}\n", flexPool)
	must(t, os.MkdirAll(n.path(filepath.Dir(flexPool)), 0o700))
	must(t, os.MkdirAll(dir, 0o755))
	t.Cleanup(func() {
		for _, path := range []string{dir, n.path(flexPool), n.path(flexState)} {
			removeAll(t, path)
		}
	})
	must(t, os.WriteFile(filepath.Join(dir, "config.yaml"), []byte(config), 0o600))
	must(t, os.Symlink(filepath.Join(os.Getenv("TRIVET_E2E_STATE"), flexProgram), filepath.Join(dir, "trivet")))
}

// flexVolume returns the manifest of a PersistentVolume with a FlexVolume.
func flexVolume(backend string) string {
	return fmt.Sprintf(`
apiVersion: v1
kind: PersistentVolume
metadata: {name: flex-%[1]s}
spec:
  capacity: {storage: 32Mi}
  accessModes: [ReadWriteOnce]
  persistentVolumeReclaimPolicy: Retain
  storageClassName: ""
  flexVolume:
    driver: trivet/trivet
    options: {backend: %[1]s, size: 32Mi}
`, backend)
}

// checkFlexMount checks that the node has the pod's mount and the staging mount from which it is bound.
func checkFlexMount(t *testing.T, n node, backend string) {
	t.Helper()
	if got := n.flexMounts(t); len(got) != 2 {
		t.Errorf("%s: got mounts %q, want 2", backend, got)
	}
}

// checkFlexGone waits until the node has no mounts and no records of FlexVolumes.
func (n node) checkFlexGone(t *testing.T) {
	t.Helper()
	eventually(t, time.Minute, "no FlexVolume is mounted on "+n.name, func() (string, bool) {
		left := n.flexMounts(t)
		for _, dir := range []string{"staged", "targets"} {
			names, _ := filepath.Glob(n.path(filepath.Join(flexState, dir, "*")))
			left = append(left, names...)
		}
		return strings.Join(left, "; "), len(left) == 0
	})
}

// flexMounts returns the mount points of FlexVolumes on the node: those of pods and the staging mounts.
func (n node) flexMounts(t *testing.T) (at []string) {
	t.Helper()
	for _, m := range n.mounts(t, func(mountpoint string) bool {
		return strings.HasPrefix(mountpoint, "/var/lib/kubelet/pods/") && strings.Contains(mountpoint, "/volumes/trivet~trivet/") || strings.HasPrefix(mountpoint, flexState)
	}) {
		at = append(at, m.Mountpoint)
	}
	return at
}
