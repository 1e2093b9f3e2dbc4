//go:build e2e

package e2e

import (
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/trivet-csi/trivet/internal/testenv"
)

// writers are the pods of TestUpgradeAndRollback that append consecutive numbers to a file until a write fails: the
// first one to an image, the other one to a directory.
var writers = []struct{ pod, file string }{{"example-original", "/data/log"}, {"counting", "/data/numbers"}}

// TestUpgradeAndRollback installs the chart and the driver of the commit in test/frozen/release, upgrades both to the
// current version, and rolls back, while pods write. Each driver uses, grows, copies and deletes what the other one has
// created.
func TestUpgradeAndRollback(t *testing.T) {
	testenv.Require(t, "history")
	release, commit := releasedChart(t)
	ns := newNamespace(t, "rollback")
	installSnapshotAPI(t)

	installChart(t, release, "--set-string", "image.tag="+commit, "--set", "snapshots.enabled=true")
	checkReleased(t, commit, true)
	applySnapshots(t, ns, "1-volume.yaml")
	startCounting(t, ns, "trivet-directories")
	mounts := mountsOfWriters(t, ns)
	before := waitLogged(t, ns, "example-original", "/data/log")
	applySnapshots(t, ns, "2-snapshot.yaml")
	waitSnapshot(t, ns, "example")
	after := waitLogged(t, ns, "example-original", "/data/log")
	old := claimPod{name: "old", class: "example-original", size: "320Mi"}
	startPod(t, ns, old)
	snapshot(t, ns, "old", "old")

	helmLocal(t, "upgrade", chartURL, "--set", "snapshots.enabled=true")
	checkReleased(t, commit, false)
	checkWriters(t, ns, mounts)
	newBefore := waitLogged(t, ns, "example-original", "/data/log")
	snapshot(t, ns, "new", "example-original")
	newAfter := waitLogged(t, ns, "example-original", "/data/log")
	applySnapshots(t, ns, "3-restore.yaml")
	applySnapshots(t, ns, "4-clone.yaml")
	replacePod(t, ns, old)
	waitReady(t, ns)
	checkLog(t, ns, "example-restored", "/data/log", before, after)
	checkLog(t, ns, "example-clone", "/data/log", newAfter, math.MaxInt)
	grow(t, ns, "example-original", "counting")
	kubectl(t, "-n", ns, "delete", "volumesnapshot", "old", "--timeout=2m")
	deletePod(t, ns, "old")
	created := claimPod{name: "created", class: "example-original", size: "320Mi"}
	startPod(t, ns, created)

	run(t, "helm", "rollback", "trivet", "1", "-n", namespace, "--wait", "--timeout=3m")
	waitDriver(t)
	checkReleased(t, commit, true)
	checkWriters(t, ns, mounts)
	applyText(t, ns, fmt.Sprintf(restoredClaim, "restored-first", "new", "Filesystem", "640Mi")+fmt.Sprintf(restoredClaim, "restored-second", "example", "Filesystem", "640Mi")+reader)
	replacePod(t, ns, created)
	waitReady(t, ns)
	checkLog(t, ns, "reader", "/first/log", newBefore, newAfter)
	checkLog(t, ns, "reader", "/second/log", before, after)
	grow(t, ns, "created")
	checkWriters(t, ns, mounts)

	kubectl(t, "-n", ns, "delete", "pod,pvc,volumesnapshot", "--all", "--timeout=3m")
	checkLimitedEmpty(t)
}

// releasedChart returns the path of the chart of the commit in test/frozen/release, which test/e2e/run packages, and the
// commit.
func releasedChart(t *testing.T) (path, commit string) {
	t.Helper()
	path = filepath.Join(os.Getenv("TRIVET_E2E_STATE"), "released.tgz")
	commit = strings.TrimSpace(read(t, "../frozen/release"))
	if _, err := os.Stat(path); err != nil {
		t.Fatalf("commit %s of test/frozen/release is not in the clone (%v): fetch the history of the repository (git fetch --unshallow), or omit this test with TRIVET_TEST_WITHOUT=history", commit, err)
	}
	return path, commit
}

// checkReleased checks whether all pods run the driver of the commit in test/frozen/release, which has the commit as
// its version, or the current one.
func checkReleased(t *testing.T, commit string, want bool) {
	t.Helper()
	for _, pod := range driverPods(t, allPods) {
		version := kubectl(t, "-n", namespace, "exec", pod, "-c", "trivet", "--", "trivet", "version")
		if got := strings.Contains(version, commit); got != want {
			t.Errorf("pod %s runs the released driver: got %t, want %t:\n%s", pod, got, want, version)
		}
	}
}

// mountsOfWriters returns a description of the mount of each writer's volume.
func mountsOfWriters(t *testing.T, ns string) (mounts []string) {
	t.Helper()
	for _, w := range writers {
		mounts = append(mounts, mountOf(t, ns, w.pod))
	}
	return mounts
}

// checkWriters checks that the volumes of all writers are still mounted, that the writers still write, and that
// nothing that they have written is lost.
func checkWriters(t *testing.T, ns string, mounts []string) {
	t.Helper()
	for i, w := range writers {
		checkLog(t, ns, w.pod, w.file, waitLogged(t, ns, w.pod, w.file), math.MaxInt)
		if now := mountOf(t, ns, w.pod); now != mounts[i] {
			t.Errorf("got %s of the volume of pod %s, want %s as before", now, w.pod, mounts[i])
		}
	}
}

// replacePod replaces the pod of a claim by one that checks the data of the first one.
func replacePod(t *testing.T, ns string, x claimPod) {
	t.Helper()
	kubectl(t, "-n", ns, "delete", "pod", x.name, "--timeout=2m")
	x.command = checkToken
	startPod(t, ns, x)
}

// grow expands claims to 640 MiB while their pods run.
func grow(t *testing.T, ns string, claims ...string) {
	t.Helper()
	const size = "640Mi"
	for _, claim := range claims {
		kubectl(t, "-n", ns, "patch", "pvc", claim, "--type=merge", "-p", `{"spec":{"resources":{"requests":{"storage":"`+size+`"}}}}`)
	}
	for _, claim := range claims {
		kubectl(t, "-n", ns, "wait", "pvc", claim, "--for=jsonpath={.status.capacity.storage}="+size, "--timeout=2m")
	}
}
