//go:build e2e

package e2e

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// TestExamples applies every example unmodified and checks its pod. The API server only validates the
// examples that need an NFS server or settings that the manifests lack. TestLocal, TestSnapshots and
// TestRestic run the latter.
func TestExamples(t *testing.T) {
	checks := map[string]func(t *testing.T, ns, path string){
		"mount.yaml":       checkMount,
		"raw-block.yaml":   checkRawBlock,
		"expansion":        checkExpansion,
		"statefulset.yaml": checkStatefulSet,
		"ephemeral.yaml":   checkEphemeral,
		"local":            checkLocal,
	}
	validated := []string{"disks", "inline", "nfs"}
	testedElsewhere := []string{"README.md", "values", "volume-manager"} // by test/chart and test/volumemanager
	entries, err := os.ReadDir(examples)
	must(t, err)
	for _, e := range entries {
		if slices.Contains(testedElsewhere, e.Name()) {
			continue
		}
		t.Run(e.Name(), func(t *testing.T) {
			path := filepath.Join(examples, e.Name())
			if e.Name() == "snapshots" || e.Name() == "backup" { // the API server lacks the API of snapshots
				return
			}
			if slices.Contains(validated, e.Name()) {
				kubectl(t, "apply", "--server-side", "--dry-run=server", "--validate=strict", "-f", path)
				return
			}
			check := checks[e.Name()]
			if check == nil {
				t.Fatalf("add a check for the example %s to TestExamples", e.Name())
			}
			name, _, _ := strings.Cut(e.Name(), ".")
			check(t, newNamespace(t, "example-"+name), path)
		})
	}
}

// apply applies a file, and deletes its objects at the end of the test.
func apply(t *testing.T, ns, path string) {
	t.Helper()
	kubectl(t, "-n", ns, "apply", "-f", path)
	t.Cleanup(func() { kubectlLast(t, "-n", ns, "delete", "-f", path, "--ignore-not-found", "--timeout=3m") })
}

func checkLocal(t *testing.T, ns, path string) {
	apply(t, ns, path)
	waitReady(t, ns)
	if got := execIn(t, ns, "example-local", "stat -c '%a %g' /data; test -s /data/log && echo written"); !strings.Contains(got, "1000") || !strings.Contains(got, "written") {
		t.Errorf("got %q in the pod, want group 1000 and a log", got)
	}
}

func checkMount(t *testing.T, ns, path string) {
	apply(t, ns, path)
	waitReady(t, ns)
	if got := execIn(t, ns, "example-mount", "grep ' /data ' /proc/mounts"); !strings.Contains(got, " xfs rw,") || !strings.Contains(got, "noatime") {
		t.Errorf("got mount %s, want xfs with rw and noatime", got)
	}
	if got := execIn(t, ns, "example-mount", "stat -c %g /data/log"); got != "1000" {
		t.Errorf("got group %s of /data/log, want 1000", got)
	}
	// The volume must not hold more than its size of 1 GiB.
	if got := execIn(t, ns, "example-mount", "dd if=/dev/zero of=/data/fill bs=1M count=1100 2>&1 || true"); !strings.Contains(got, "No space left") {
		t.Errorf("writing 1100 MiB to a volume of 1 GiB: got %s, want ENOSPC", got)
	}
}

func checkRawBlock(t *testing.T, ns, path string) {
	apply(t, ns, path)
	waitReady(t, ns)
	if got := execIn(t, ns, "example-raw-block", "blockdev --getsize64 /dev/volume"); got != "268435456" {
		t.Errorf("got a device of %s bytes, want 268435456", got)
	}
	// The pod may still be writing its first 8 MiB.
	eventually(t, time.Minute, "the pod has written 8 MiB", func() (string, bool) {
		out, err := try(t.Context(), "kubectl", "-n", ns, "logs", "example-raw-block")
		return out, err == nil && strings.Contains(out, "8+0 records out")
	})
	if got := execIn(t, ns, "example-raw-block", "dd if=/dev/volume bs=1M count=8 2>/dev/null | tr -d '\\000' | wc -c"); got == "0" {
		t.Error("got only zeros on the device, want the data of the pod")
	}
}

func checkExpansion(t *testing.T, ns, path string) {
	apply(t, ns, filepath.Join(path, "1-claim.yaml"))
	waitReady(t, ns)
	execIn(t, ns, "example-growing", "echo kept >/data/file")
	kubectl(t, "-n", ns, "apply", "-f", filepath.Join(path, "2-larger.yaml"))
	eventually(t, 2*time.Minute, "the claim has 2 GiB", func() (string, bool) {
		size, err := try(t.Context(), "kubectl", "-n", ns, "get", "pvc", "example-growing", "-o", "jsonpath={.status.capacity.storage}")
		return size, err == nil && size == "2Gi"
	})
	if got := execIn(t, ns, "example-growing", "df -m /data | awk 'END {print ($2 > 1900)}'; cat /data/file"); got != "1\nkept" {
		t.Errorf("after the expansion: got %q, want a filesystem of 2 GiB with the file", got)
	}
}

func checkStatefulSet(t *testing.T, ns, path string) {
	apply(t, ns, path)
	kubectl(t, "-n", ns, "rollout", "status", "statefulset/example-stateful", "--timeout=3m")
	for _, pod := range []string{"example-stateful-0", "example-stateful-1"} {
		if got := execIn(t, ns, pod, "cat /data/owner; echo once >>/data/kept"); got != pod {
			t.Errorf("got the volume of %s in %s, want its own", got, pod)
		}
	}
	kubectl(t, "-n", ns, "delete", "pod", "--all", "--wait")
	kubectl(t, "-n", ns, "rollout", "status", "statefulset/example-stateful", "--timeout=3m")
	waitReady(t, ns)
	for _, pod := range []string{"example-stateful-0", "example-stateful-1"} {
		if got := execIn(t, ns, pod, "cat /data/owner /data/kept"); got != pod+"\nonce" {
			t.Errorf("got data %q in the restarted %s, want its own", got, pod)
		}
	}
}

func checkEphemeral(t *testing.T, ns, path string) {
	apply(t, ns, path)
	waitReady(t, ns)
	if got := execIn(t, ns, "example-ephemeral", "cat /scratch/file"); got != "scratch" {
		t.Errorf("got %q from /scratch/file, want %q", got, "scratch")
	}
	kubectl(t, "-n", ns, "delete", "-f", path)
	eventually(t, time.Minute, "the claim is deleted with its pod", func() (string, bool) {
		out, err := try(t.Context(), "kubectl", "-n", ns, "get", "pvc", "-o", "name")
		return out, err == nil && out == ""
	})
}
