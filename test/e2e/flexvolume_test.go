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
	// flexProgram is what test/e2e/run builds in the cluster's folder.
	flexProgram = "trivet"
	flexPool    = stateDir + "/pools/flexvolume"
	flexState   = stateDir + "/flexvolume"
)

// TestFlexVolume: a kubelet mounts PersistentVolumes through a link to the program in its
// volume plugin directory. What one pod wrote the next one finds, and nothing stays
// mounted.
func TestFlexVolume(t *testing.T) {
	ns := newNamespace(t, "flexvolume")
	n := nodes()[0]
	n.installFlexVolume(t)
	for _, backend := range []string{"loop", "local"} {
		t.Run(backend, func(t *testing.T) {
			pipe(t, flexVolume(backend), "apply", "-f", "-")
			x := tenant{name: backend, node: n.name, class: `""`, volume: "flex-" + backend}
			moveIn(t, ns, x)
			checkFlexMount(t, n, backend)
			kubectl(t, "-n", ns, "delete", "pod", x.name, "--timeout=2m")
			x.does = finds
			moveIn(t, ns, x)
			kubectl(t, "-n", ns, "delete", "pod", x.name, "--timeout=2m")
			n.checkFlexGone(t)
			kubectl(t, "-n", ns, "delete", "pvc", x.name, "--timeout=2m")
			kubectl(t, "delete", "pv", x.volume, "--timeout=2m")
		})
	}
}

// installFlexVolume puts the link where the kubelet looks, and a pool for it beside.
func (n node) installFlexVolume(t *testing.T) {
	t.Helper()
	dir := filepath.Join(n.dir, "flexvolume", "trivet~trivet")
	config := fmt.Sprintf("pools:\n- {name: flexvolume, directory: {path: %s}, quota: off}\n", flexPool)
	must := func(err error) {
		must(t, err)
	}
	must(os.MkdirAll(n.path(filepath.Dir(flexPool)), 0o700))
	must(os.MkdirAll(dir, 0o755))
	t.Cleanup(func() {
		for _, path := range []string{dir, n.path(flexPool), n.path(flexState)} {
			if err := os.RemoveAll(path); err != nil {
				t.Error(err)
			}
		}
	})
	must(os.WriteFile(filepath.Join(dir, "config.yaml"), []byte(config), 0o600))
	must(os.Symlink(filepath.Join(os.Getenv("TRIVET_E2E_STATE"), flexProgram), filepath.Join(dir, "trivet")))
}

// flexVolume is a PersistentVolume as FlexVolume has it.
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

// checkFlexMount looks for the pod's mount, and the one that it is bound from.
func checkFlexMount(t *testing.T, n node, backend string) {
	t.Helper()
	if got := n.flexMounts(t); len(got) != 2 {
		t.Errorf("%s: mounted are %q", backend, got)
	}
}

func (n node) checkFlexGone(t *testing.T) {
	t.Helper()
	eventually(t, time.Minute, "no FlexVolume mounted on "+n.name, func() (string, bool) {
		left := n.flexMounts(t)
		for _, dir := range []string{"staged", "targets"} {
			names, _ := filepath.Glob(n.path(filepath.Join(flexState, dir, "*")))
			left = append(left, names...)
		}
		return strings.Join(left, "; "), len(left) == 0
	})
}

func (n node) flexMounts(t *testing.T) (at []string) {
	t.Helper()
	for _, m := range n.mounts(t, func(mountpoint string) bool {
		return strings.HasPrefix(mountpoint, "/var/lib/kubelet/pods/") && strings.Contains(mountpoint, "/volumes/trivet~trivet/") || strings.HasPrefix(mountpoint, flexState)
	}) {
		at = append(at, m.Mountpoint)
	}
	return at
}
