//go:build e2e

package e2e

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// What cluster/storage.sh gave each node.
const (
	storage     = "/var/lib/trivet-e2e"
	limitedPool = storage + "/limited"
)

// TestLocal has the driver from the chart with inline volumes, a pool that limits
// directories and one of disks, and applies the examples of them: their sizes hold, what
// is claimed is there for the next pod, and nothing stays of what is deleted.
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
		eventually(t, 2*time.Minute, "nothing left in the pools of "+n.name, func() (string, bool) {
			left := append(n.leftLimited(), n.marked()...)
			return strings.Join(left, "; "), len(left) == 0
		})
	}
}

// installLocal installs the chart with the values of cluster/storage.sh and options, and
// the manifests again at the end of the test.
func installLocal(t *testing.T, options ...string) {
	t.Helper()
	kubectl(t, "delete", "-f", manifests, "--timeout=3m")
	t.Cleanup(func() {
		if out, err := try(context.Background(), "helm", "uninstall", "trivet", "-n", namespace, "--wait", "--ignore-not-found", "--timeout=3m"); err != nil {
			t.Error(out)
		}
		kubectlLast(t, "apply", "--server-side", "-f", manifests)
	})
	values := filepath.Join(os.Getenv("TRIVET_E2E_STATE"), "local.yaml")
	run(t, "helm", append([]string{"install", "trivet", chart, "-n", namespace, "--create-namespace", "-f", values, "--wait", "--timeout=3m"}, options...)...)
	waitDriver(t)
}

// checkSize looks at filesystem and size, in MiB, that a pod sees, and fills it.
func checkSize(t *testing.T, ns, pod, dir, fsType string, size int) {
	t.Helper()
	want := fmt.Sprintf("%s at most %d MiB, nearly all of it", fsType, size)
	got := in(t, ns, pod, fmt.Sprintf(`df -PmT %s | awk 'END {print $2, ($3 <= %[2]d && $3 > %[2]d*9/10)}'`, dir, size))
	if got != fsType+" 1" {
		t.Errorf("%s: %s sees %q, want %s", dir, pod, in(t, ns, pod, "df -PmT "+dir), want)
	}
	checkFull(t, ns, pod, dir, size)
}

// checkFull asks for more space than the volume has.
func checkFull(t *testing.T, ns, pod, dir string, size int) {
	t.Helper()
	out := in(t, ns, pod, fmt.Sprintf("fallocate -l %dM %s/fill 2>&1 || true; rm -f %s/fill", size+1, dir, dir))
	if !strings.Contains(out, "No space left") && !strings.Contains(out, "quota exceeded") {
		t.Errorf("%s of %s: %d MiB are not too many: %q", dir, pod, size+1, out)
	}
}

// checkText waits for what a pod writes.
func checkText(t *testing.T, ns, pod, path, want string) {
	t.Helper()
	eventually(t, time.Minute, path+" of "+pod, func() (string, bool) {
		out, err := try(t.Context(), "kubectl", "-n", ns, "exec", pod, "--", "cat", path)
		return out, err == nil && strings.TrimSpace(out) == want
	})
}

// checkKept starts the pod of an example again: the volume has the data of the first pod.
func checkKept(t *testing.T, ns, pod, path string) {
	t.Helper()
	in(t, ns, pod, "echo kept >/data/kept && sync /data/kept")
	kubectl(t, "-n", ns, "delete", "pod", pod, "--timeout=2m")
	kubectl(t, "-n", ns, "apply", "-f", path)
	kubectl(t, "-n", ns, "wait", "pod", pod, "--for=condition=Ready", "--timeout=3m")
	if got := in(t, ns, pod, "cat /data/kept; stat -c %g /data"); got != "kept\n1000" {
		t.Errorf("%s came back with %q", pod, got)
	}
}

// growDisk makes the disk of a claim larger, as a LUN is made, and lets the volume
// follow in the running pod.
func growDisk(t *testing.T, ns, claim string, size int) {
	t.Helper()
	n := nodeNamed(t, placeOf(t, volumeOf(t, ns, claim)))
	marked := n.marked()
	if len(marked) != 1 {
		t.Fatalf("disks of volumes: %q", marked)
	}
	device, err := os.Readlink(n.path(storage + "/disks/" + marked[0]))
	must(t, err)
	must(t, os.Truncate(n.path(storage+"/images/"+marked[0]), int64(size)<<20))
	run(t, "losetup", "--set-capacity", device)
	// The mark takes some of the disk.
	kubectl(t, "-n", ns, "patch", "pvc", claim, "--type=merge", "-p", fmt.Sprintf(`{"spec":{"resources":{"requests":{"storage":"%dMi"}}}}`, size-8))
	eventually(t, 2*time.Minute, "the larger disk in the running pod", func() (string, bool) {
		out, err := try(t.Context(), "kubectl", "-n", ns, "exec", claim, "--", "sh", "-c", fmt.Sprintf("df -Pm /data | awk 'END {print ($2 > %d*9/10)}'; cat /data/kept", size))
		return out, err == nil && out == "1\nkept\n"
	})
}

// volumeContext is what the volume of a claim says of itself.
func volumeContext(t *testing.T, ns, claim, key string) string {
	t.Helper()
	return kubectl(t, "get", "pv", volumeOf(t, ns, claim), "-o", "jsonpath={.spec.csi.volumeAttributes."+key+"}")
}

// seen is where a file of the node is found through what is mounted there.
func (n node) seen(file string) string {
	pid, _ := os.ReadFile(filepath.Join(n.dir, "pid"))
	return filepath.Join("/proc", strings.TrimSpace(string(pid)), "root", file)
}

// leftLimited is what lies in the pool that limits directories, and the loop devices
// of images there.
func (n node) leftLimited() []string {
	var left []string
	for _, dir := range []string{"volumes", "snapshots", ".trivet/tmp", ".trivet/trash"} {
		entries, err := os.ReadDir(n.seen(filepath.Join(limitedPool, dir)))
		if err != nil {
			return []string{err.Error()}
		}
		for _, e := range entries {
			left = append(left, n.name+" has "+filepath.Join(dir, e.Name()))
		}
	}
	var st unix.Stat_t
	if err := unix.Stat(n.seen(limitedPool), &st); err != nil {
		return append(left, err.Error())
	}
	devices, _ := filepath.Glob("/dev/loop[0-9]*")
	return append(left, slices.DeleteFunc(devices, func(device string) bool { return loopInfo(device).Device != st.Dev })...)
}

// marked are the node's disks that a volume has, or had before they are wiped.
func (n node) marked() []string {
	const header = "EFI PART" // of a GUID partition table, in the second sector
	images, err := filepath.Glob(n.path(storage + "/images/[0-9]*"))
	if err != nil || len(images) == 0 {
		return []string{"no disks"}
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
