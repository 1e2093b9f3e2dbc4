//go:build e2e

package e2e

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/internal/testenv"
)

// Directories that cluster/storage.sh creates on each node.
const (
	storage     = "/var/lib/trivet-e2e"
	limitedPool = storage + "/limited"
)

// TestLocal installs the chart with inline volumes, a pool that limits directories and a pool of disks, and
// applies their examples. The sizes must be enforced, the data of claims must be kept for the next pod, and
// nothing may be left of deleted volumes.
func TestLocal(t *testing.T) {
	ns := newNamespace(t, "local")
	installLocal(t)
	for _, dir := range []string{"inline", "local", "disks"} {
		apply(t, ns, filepath.Join(examples, dir))
	}
	waitReady(t, ns)

	t.Run("inline", func(t *testing.T) {
		checkSize(t, ns, "example-inline", "/scratch", "xfs", 1<<10)
		checkSize(t, ns, "example-inline-memory", "/keys", "tmpfs", 16)
		checkText(t, ns, "example-inline", "/scratch/file", "scratch")
		checkText(t, ns, "example-inline-memory", "/keys/file", "secret")
	})
	t.Run("directory", func(t *testing.T) {
		// The kernel may lack the quotas that limit a directory. See backend.EnforcedCooperative.
		if volumeContext(t, ns, "example-local", "enforced") == "cooperative" {
			checkFull(t, ns, "example-local", "/data", 1<<10)
		}
		checkKept(t, ns, "example-local", filepath.Join(examples, "local"))
	})
	t.Run("disk", func(t *testing.T) {
		checkSize(t, ns, "example-disk", "/data", "xfs", 2<<10)
		checkKept(t, ns, "example-disk", filepath.Join(examples, "disks"))
		growDisk(t, ns, "example-disk", 3<<10)
	})

	kubectl(t, "-n", ns, "delete", "pod,pvc", "--all", "--timeout=3m")
	for _, n := range nodes() {
		eventually(t, 2*time.Minute, "the pools of "+n.name+" are empty", func() (string, bool) {
			left := append(n.leftLimited(), n.usedDisks()...)
			return strings.Join(left, "; "), len(left) == 0
		})
	}
}

// installLocal does the same as installChart with the chart of the registry.
func installLocal(t *testing.T, options ...string) {
	t.Helper()
	installChart(t, chartURL, options...)
}

// installChart replaces the manifests by a chart with the values of cluster/storage.sh and options. At the end of the
// test it applies the manifests again.
func installChart(t *testing.T, chart string, options ...string) {
	t.Helper()
	uninstall(t)
	t.Cleanup(func() {
		if out, err := try(context.Background(), "helm", "uninstall", "trivet", "-n", namespace, "--wait", "--ignore-not-found", "--timeout=3m"); err != nil {
			t.Error(out)
		}
		kubectlLast(t, "apply", "--server-side", "-f", manifests)
	})
	helmLocal(t, "install", chart, options...)
}

// helmLocal installs or upgrades the release, with the values of cluster/storage.sh and options.
func helmLocal(t *testing.T, command, chart string, options ...string) {
	t.Helper()
	values := filepath.Join(os.Getenv("TRIVET_E2E_STATE"), "local.yaml")
	run(t, "helm", append([]string{command, "trivet", chart, "--plain-http", "-n", namespace, "--create-namespace", "-f", values, "--wait", "--timeout=3m"}, options...)...)
	waitDriver(t)
}

// checkSize checks the filesystem type and the size in MiB of a volume, and that the size is enforced.
func checkSize(t *testing.T, ns, pod, dir, fsType string, size int) {
	t.Helper()
	want := fmt.Sprintf("%s with 90 to 100 %% of %d MiB", fsType, size)
	got := execIn(t, ns, pod, fmt.Sprintf(`df -PmT %s | awk 'END {print $2, ($3 <= %[2]d && $3 > %[2]d*9/10)}'`, dir, size))
	if got != fsType+" 1" {
		t.Errorf("%s in %s: got %q, want %s", dir, pod, execIn(t, ns, pod, "df -PmT "+dir), want)
	}
	checkFull(t, ns, pod, dir, size)
}

// checkFull checks that a pod cannot allocate more space than the size of the volume in MiB.
func checkFull(t *testing.T, ns, pod, dir string, size int) {
	t.Helper()
	out := execIn(t, ns, pod, fmt.Sprintf("fallocate -l %dM %s/fill 2>&1 || true; rm -f %s/fill", size+1, dir, dir))
	if !strings.Contains(out, "No space left") && !strings.Contains(out, "quota exceeded") {
		t.Errorf("%s in %s: got %q when allocating %d MiB, want ENOSPC or EDQUOT", dir, pod, out, size+1)
	}
}

// checkText waits until a file in a pod has the wanted content.
func checkText(t *testing.T, ns, pod, path, want string) {
	t.Helper()
	eventually(t, time.Minute, fmt.Sprintf("%s in %s contains %q", path, pod, want), func() (string, bool) {
		out, err := try(t.Context(), "kubectl", "-n", ns, "exec", pod, "--", "cat", path)
		return out, err == nil && strings.TrimSpace(out) == want
	})
}

// checkKept replaces the pod of an example and checks that the volume still has the data of the first pod.
func checkKept(t *testing.T, ns, pod, path string) {
	t.Helper()
	execIn(t, ns, pod, "echo kept >/data/kept && sync /data/kept")
	kubectl(t, "-n", ns, "delete", "pod", pod, "--timeout=2m")
	kubectl(t, "-n", ns, "apply", "-f", path)
	kubectl(t, "-n", ns, "wait", "pod", pod, "--for=condition=Ready", "--timeout=3m")
	if got := execIn(t, ns, pod, "cat /data/kept; stat -c %g /data"); got != "kept\n1000" {
		t.Errorf("got %q in the new pod %s, want the data of the first one and group 1000", got, pod)
	}
}

// growDisk grows the disk of a claim to a size in MiB, as an administrator grows a LUN, and then expands the
// claim while its pod, which has the same name, runs.
func growDisk(t *testing.T, ns, claim string, size int) {
	t.Helper()
	n := nodeNamed(t, nodeOfVolume(t, volumeOf(t, ns, claim)))
	used := n.usedDisks()
	if len(used) != 1 {
		t.Fatalf("got disks %q of volumes, want one", used)
	}
	device, err := os.Readlink(n.path(storage + "/disks/" + used[0]))
	must(t, err)
	must(t, os.Truncate(n.path(storage+"/images/"+used[0]), int64(size)<<20))
	run(t, "losetup", "--set-capacity", device)
	// The driver's mark occupies less than 8 MiB of the disk.
	kubectl(t, "-n", ns, "patch", "pvc", claim, "--type=merge", "-p", fmt.Sprintf(`{"spec":{"resources":{"requests":{"storage":"%dMi"}}}}`, size-8))
	eventually(t, 2*time.Minute, "the pod sees the larger disk", func() (string, bool) {
		out, err := try(t.Context(), "kubectl", "-n", ns, "exec", claim, "--", "sh", "-c", fmt.Sprintf("df -Pm /data | awk 'END {print ($2 > %d*9/10)}'; cat /data/kept", size))
		return out, err == nil && out == "1\nkept\n"
	})
}

// volumeContext returns a value of the volume context of a claim's volume.
func volumeContext(t *testing.T, ns, claim, key string) string {
	t.Helper()
	return kubectl(t, "get", "pv", volumeOf(t, ns, claim), "-o", "jsonpath={.spec.csi.volumeAttributes."+key+"}")
}

// leftLimited lists the files of volumes in the pool that limits directories, and the loop devices of images
// in the pool.
func (n node) leftLimited() []string {
	left, err := testenv.PoolEntries(n.throughMounts(limitedPool))
	var st unix.Stat_t
	if err := errors.Join(err, unix.Stat(n.throughMounts(limitedPool), &st)); err != nil {
		return []string{err.Error()}
	}
	devices, _ := filepath.Glob("/dev/loop[0-9]*")
	return append(left, slices.DeleteFunc(devices, func(device string) bool { return loopInfo(device).Device != st.Dev })...)
}

// checkLimitedEmpty waits until nothing is left of volumes and snapshots in the pools that limit directories.
func checkLimitedEmpty(t *testing.T) {
	t.Helper()
	for _, n := range nodes() {
		eventually(t, 2*time.Minute, "the pool of "+n.name+" is empty", func() (string, bool) {
			left := n.leftLimited()
			return strings.Join(left, "; "), len(left) == 0
		})
	}
}

// usedDisks returns the disks of the node that belong to volumes, or to deleted volumes whose disks are not
// wiped yet.
func (n node) usedDisks() []string {
	const header = "EFI PART" // the signature of a GUID partition table, in the second sector
	images, err := filepath.Glob(n.path(storage + "/images/[0-9]*"))
	if err != nil || len(images) == 0 {
		return []string{fmt.Sprintf("no images of disks in %s: %v", n.path(storage+"/images"), err)}
	}
	var marked []string
	for _, image := range images {
		if f, err := os.Open(image); err == nil {
			start := make([]byte, 1024)
			_, _ = f.ReadAt(start, 0)
			f.Close()
			if bytes.HasPrefix(start[512:], []byte(header)) {
				marked = append(marked, filepath.Base(image))
			}
		}
	}
	return marked
}
