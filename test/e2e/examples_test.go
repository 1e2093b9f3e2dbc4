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

// TestExamples applies every example unmodified and checks its pod. Examples that need an NFS
// server, or settings that the manifests lack, are only validated by the API server; TestLocal and
// TestSnapshots run the latter.
func TestExamples(t *testing.T) {
	checks := map[string]func(t *testing.T, ns, path string){
		"mount.yaml":       checkMount,
		"raw-block.yaml":   checkRawBlock,
		"expansion":        checkExpansion,
		"statefulset.yaml": checkStatefulSet,
		"ephemeral.yaml":   checkEphemeral,
		"local":            checkLocal,
	}
	accepted := []string{"disks", "inline", "nfs"}
	entries, err := os.ReadDir(examples)
	must(t, err)
	for _, e := range entries {
		if e.Name() == "README.md" || e.Name() == "volume-manager" { // of which package volumemanager's tests are
			continue
		}
		t.Run(e.Name(), func(t *testing.T) {
			path := filepath.Join(examples, e.Name())
			if e.Name() == "snapshots" {
				return
			}
			if slices.Contains(accepted, e.Name()) {
				kubectl(t, "apply", "--server-side", "--dry-run=server", "--validate=strict", "-f", path)
				return
			}
			check := checks[e.Name()]
			if check == nil {
				t.Fatal("no check for this example")
			}
			name, _, _ := strings.Cut(e.Name(), ".")
			check(t, newNamespace(t, "example-"+name), path)
		})
	}
}

// apply applies a file, and deletes what is in it at the end of the test.
func apply(t *testing.T, ns, path string) {
	t.Helper()
	kubectl(t, "-n", ns, "apply", "-f", path)
	t.Cleanup(func() { remove(t, ns, path) })
}

func checkLocal(t *testing.T, ns, path string) {
	apply(t, ns, path)
	waitReady(t, ns)
	if got := in(t, ns, "example-local", "stat -c '%a %g' /data; test -s /data/log && echo written"); !strings.Contains(got, "1000") || !strings.Contains(got, "written") {
		t.Errorf("the pod sees %q", got)
	}
}

func checkMount(t *testing.T, ns, path string) {
	apply(t, ns, path)
	waitReady(t, ns)
	if got := in(t, ns, "example-mount", "grep ' /data ' /proc/mounts"); !strings.Contains(got, " xfs rw,") || !strings.Contains(got, "noatime") {
		t.Errorf("mounted as %s", got)
	}
	if got := in(t, ns, "example-mount", "stat -c %g /data/log"); got != "1000" {
		t.Errorf("group %s", got)
	}
	// The size holds: 1 GiB and no more.
	if got := in(t, ns, "example-mount", "dd if=/dev/zero of=/data/fill bs=1M count=1100 2>&1 || true"); !strings.Contains(got, "No space left") {
		t.Errorf("1100 MiB went into a volume of 1 GiB: %s", got)
	}
}

func checkRawBlock(t *testing.T, ns, path string) {
	apply(t, ns, path)
	waitReady(t, ns)
	if got := in(t, ns, "example-raw-block", "blockdev --getsize64 /dev/volume"); got != "268435456" {
		t.Errorf("%s bytes", got)
	}
	// The pod wrote its first 8 MiB before it was ready to be looked at, or does so now.
	eventually(t, time.Minute, "what the pod wrote", func() (string, bool) {
		out, err := try(t.Context(), "kubectl", "-n", ns, "logs", "example-raw-block")
		return out, err == nil && strings.Contains(out, "8+0 records out")
	})
	if got := in(t, ns, "example-raw-block", "dd if=/dev/volume bs=1M count=8 2>/dev/null | tr -d '\\000' | wc -c"); got == "0" {
		t.Error("the device has nothing of what was written")
	}
}

func checkExpansion(t *testing.T, ns, path string) {
	apply(t, ns, filepath.Join(path, "1-claim.yaml"))
	waitReady(t, ns)
	in(t, ns, "example-growing", "echo kept >/data/file")
	kubectl(t, "-n", ns, "apply", "-f", filepath.Join(path, "2-larger.yaml"))
	eventually(t, 2*time.Minute, "2 GiB in the running pod", func() (string, bool) {
		size, err := try(t.Context(), "kubectl", "-n", ns, "get", "pvc", "example-growing", "-o", "jsonpath={.status.capacity.storage}")
		return size, err == nil && size == "2Gi"
	})
	if got := in(t, ns, "example-growing", "df -m /data | awk 'END {print ($2 > 1900)}'; cat /data/file"); got != "1\nkept" {
		t.Errorf("after growing: %q", got)
	}
}

func checkStatefulSet(t *testing.T, ns, path string) {
	apply(t, ns, path)
	kubectl(t, "-n", ns, "rollout", "status", "statefulset/example-stateful", "--timeout=3m")
	for _, pod := range []string{"example-stateful-0", "example-stateful-1"} {
		if got := in(t, ns, pod, "cat /data/owner; echo once >>/data/kept"); got != pod {
			t.Errorf("%s has the volume of %s", pod, got)
		}
	}
	kubectl(t, "-n", ns, "delete", "pod", "--all", "--wait")
	kubectl(t, "-n", ns, "rollout", "status", "statefulset/example-stateful", "--timeout=3m")
	waitReady(t, ns)
	for _, pod := range []string{"example-stateful-0", "example-stateful-1"} {
		if got := in(t, ns, pod, "cat /data/owner /data/kept"); got != pod+"\nonce" {
			t.Errorf("%s came back with %q", pod, got)
		}
	}
}

func checkEphemeral(t *testing.T, ns, path string) {
	apply(t, ns, path)
	waitReady(t, ns)
	if got := in(t, ns, "example-ephemeral", "cat /scratch/file"); got != "scratch" {
		t.Errorf("read %q", got)
	}
	kubectl(t, "-n", ns, "delete", "-f", path)
	eventually(t, time.Minute, "the claim gone with its pod", func() (string, bool) {
		out, err := try(t.Context(), "kubectl", "-n", ns, "get", "pvc", "-o", "name")
		return out, err == nil && out == ""
	})
}
