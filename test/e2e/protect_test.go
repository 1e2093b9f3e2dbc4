//go:build e2e

package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/trivet-csi/trivet/cluster/status"
	"github.com/trivet-csi/trivet/internal/crashpoint"
)

// TestProtect keeps copies of a claim on another node. The node of the claim is lost, and the claim gets the newest copy. Only what
// was written after its snapshot may be missing, whatever interrupts the command. Then the lost node comes back.
func TestProtect(t *testing.T) {
	m := startMoving(t, logger, "--set", "protection.enabled=true")
	other, name := m.elsewhere(t)
	lost := nodeNamed(t, name)
	pv := volumeOf(t, m.ns, movedClaim)
	old := kubectl(t, "get", "pv", pv, "-o", "jsonpath={.spec.csi.volumeHandle}")
	t.Run("by a class", m.testClass)
	execIn(t, m.ns, "log-0", "dd if=/dev/urandom of=/data/large bs=1M count=24 2>/dev/null && sync /data/large")

	t.Logf("%s", output(t, m.protect(t, "--on", other, "--every", "24h")))
	t.Cleanup(func() { _, _ = m.protect(t, "--stop").CombinedOutput() }) // if the test has failed before it stops the protection
	before := m.received(t, other)
	for number := 1; number <= 3; number++ {
		m.copyNow(t, number)
		after := m.received(t, other)
		if whole := after-before >= 24<<20; whole != (number == 1) {
			t.Errorf("copy %d: got %d bytes received, want 24 MiB for the first copy, and only the differences for the others", number, after-before)
		}
		before = after
	}
	m.wantCopies(t, 2, 3)
	if out := output(t, m.protect(t)); !strings.Contains(out, m.copyName(2)) || !strings.Contains(out, m.copyName(3)) || strings.Contains(out, m.copyName(1)) {
		t.Errorf("got\n%s\nwant the copies 2 and 3", out)
	}
	m.refuseRecovery(t, "is ready: nothing is lost")

	lost.die(t)
	kubectl(t, "wait", "node", name, "--for=condition=Ready=Unknown", "--timeout=3m")
	m.refuseRecovery(t, "make sure that the machine is off")
	kubectl(t, "taint", "node", name, outOfService+"=nodeshutdown:NoExecute")
	t.Cleanup(func() { _, _ = try(context.Background(), "kubectl", "taint", "node", name, outOfService+"-") })
	var taken time.Time
	eventually(t, 5*time.Minute, "the claim can be recovered", func() (string, bool) {
		out, err := m.recover(t, "", "--dry-run").CombinedOutput()
		return string(out), err == nil
	})
	for _, v := range m.report(t) {
		if v.CopyOf == old && v.Snapshotted.After(taken) {
			taken = v.Snapshotted
		}
	}
	if out := output(t, m.recover(t, "", "--dry-run")); !strings.Contains(out, taken.UTC().Format(time.RFC3339)) || !strings.Contains(out, m.copyName(3)) {
		t.Errorf("got the plan\n%s\nwant copy 3 with the data of %v", out, taken)
	}
	if at := metricOf(t, other, `trivet_copy_timestamp_seconds{pool="limited",source="`+old+`"}`); int64(at) != taken.Unix() {
		t.Errorf("got the time %f of the newest copy in the metrics, want %v", at, taken)
	}
	m.mu.Lock()
	var kept []string // the records that were printed before the snapshot
	for i, record := range m.printed {
		if m.arrived[i].Before(taken) {
			kept = append(kept, record)
		}
	}
	m.mu.Unlock()

	out, err := m.recover(t, "").CombinedOutput() // without an answer
	if err == nil || !strings.Contains(string(out), "nothing is changed") {
		t.Errorf("got %v and\n%s\nwant that nothing is changed without a confirmation", err, out)
	}
	wantKilled(t, m.recover(t, crashpoint.MoveKept, "--yes", "--copy", m.copyName(2)))
	m.useCopy(t, other, 2)
	m.refuseRecovery(t, "was used by a pod or changed")
	output(t, m.recover(t, "", "--abort"))
	if at := nodeOfVolume(t, pv); at != name {
		t.Errorf("got the volume on %s after an abort, want %s", at, name)
	}
	for _, at := range []crashpoint.Point{crashpoint.MoveBegun, crashpoint.MoveKept, crashpoint.MoveLost, crashpoint.MoveReplaced, crashpoint.MoveReleased} {
		wantKilled(t, m.recover(t, at, "--yes"))
	}
	t.Logf("%s", output(t, m.recover(t, "", "--yes")))
	m.checkRecovered(t, other, taken, kept)

	t.Run("the lost node comes back", func(t *testing.T) {
		lost.revive(t)
		kubectl(t, "wait", "node", name, "--for=condition=Ready", "--timeout=3m")
		kubectl(t, "taint", "node", name, outOfService+"-")
		waitDriver(t)
		m.checkOldUnused(t, old, name)
		if at := nodeOf(t, m.ns, "log-0"); at != other {
			t.Errorf("got the pod on %s, want %s", at, other)
		}
	})
	t.Run("the copies would be on the claim's node", func(t *testing.T) {
		kubectl(t, "-n", namespace, "create", "job", "--from=cronjob/"+m.job(), "same-node")
		kubectl(t, "-n", namespace, "wait", "job/same-node", "--for=condition=Failed", "--timeout=3m")
		if log := kubectl(t, "-n", namespace, "logs", "job/same-node"); !strings.Contains(log, "a copy there protects nothing") {
			t.Errorf("got the log\n%s\nwant that the volume is on the node of the copies", log)
		}
	})
	t.Run("protect to the other node", func(t *testing.T) {
		output(t, m.protect(t, "--on", name, "--every", "24h", "--keep", "1"))
		m.copyNow(t, 9)
		if all := m.copies(t); len(all) != 1 {
			t.Errorf("got the copies %q, want one: those of the old volume are of no use", all)
		}
		output(t, m.protect(t, "--stop"))
		m.wantCopies(t)
		for _, left := range []string{
			kubectl(t, "-n", namespace, "get", "cronjob,job,pod", "-l", "csi.trivet.dev/protect", "-o", "name"),
			kubectl(t, "-n", m.ns, "get", "rolebinding", "-l", "csi.trivet.dev/protect", "-o", "name"),
		} {
			if left != "" {
				t.Errorf("got %s after --stop, want nothing left", left)
			}
		}
	})
	kubectl(t, "patch", "pv", m.kept(t), "-p", `{"spec":{"persistentVolumeReclaimPolicy":"Delete"}}`)
	m.check(t, other)
}

// protecting is a StorageClass that protects its claims.
const protecting = `
apiVersion: storage.k8s.io/v1
kind: StorageClass
metadata: {name: protecting}
provisioner: csi.trivet.dev
parameters: {backend: loop, pool: limited, csi.storage.k8s.io/fstype: ext4, protect: 1m}
volumeBindingMode: WaitForFirstConsumer
`

// testClass creates a claim of a class that protects it without any command, and deletes the claim.
func (m *moving) testClass(t *testing.T) {
	const label = "csi.trivet.dev/protect"
	kubectlInput(t, protecting, "apply", "-f", "-")
	t.Cleanup(func() { kubectlLast(t, "delete", "storageclass", "protecting") })
	startPod(t, m.ns, claimPod{name: "kept", class: "protecting"})
	uid, node := kubectl(t, "-n", m.ns, "get", "pvc", "kept", "-o", "jsonpath={.metadata.uid}"), nodeOf(t, m.ns, "kept")
	cronJob := func() string {
		return kubectl(t, "-n", namespace, "get", "cronjob", "-l", label+"="+uid, "-o", `jsonpath={.items[*].metadata.annotations['csi\.trivet\.dev/copies-on']}`)
	}
	eventually(t, time.Minute, "the claim has a CronJob", func() (string, bool) { out := cronJob(); return out, out != "" })
	eventually(t, 4*time.Minute, "the claim has a copy", func() (string, bool) {
		jobs, _ := try(t.Context(), "kubectl", "-n", namespace, "logs", "-l", label+"="+uid)
		out := kubectl(t, "-n", m.ns, "get", "pvc", "-l", label+"="+uid, "-o", `jsonpath={.items[?(@.status.phase=="Bound")].spec.volumeName}`)
		return out + "\n" + jobs, out != ""
	})
	pv := volumeOf(t, m.ns, "trivet-copy-"+uid+"-1")
	if at := nodeOfVolume(t, pv); at == node || at != cronJob() {
		t.Errorf("got the copy on %s, want it on the node %s of the CronJob, and not on that of the claim, %s", at, cronJob(), node)
	}
	out, err := m.plugin(t.Context(), "protect", "-n", m.ns, "kept", "--stop").CombinedOutput()
	if err == nil || !strings.Contains(string(out), "which would protect it again") {
		t.Errorf("got %v and\n%s\nwant that the class protects the claim", err, out)
	}
	deletePod(t, m.ns, "kept")
	eventually(t, 3*time.Minute, "nothing of the protection is left", func() (string, bool) {
		out := kubectl(t, "-n", namespace, "get", "cronjob,job,pod", "-l", label, "-o", "name") +
			kubectl(t, "-n", m.ns, "get", "rolebinding", "-l", label, "-o", "name") +
			kubectl(t, "-n", m.ns, "get", "pvc,volumesnapshot,pv,volumesnapshotcontent", "-o", "name")
		return out, len(strings.Fields(out)) == 2 // the claim of the StatefulSet, and its volume
	})
}

// protect prepares a call of `kubectl trivet protect` for the claim.
func (m *moving) protect(t *testing.T, args ...string) *exec.Cmd {
	t.Helper()
	return m.plugin(context.WithoutCancel(t.Context()), append([]string{"protect", "-n", m.ns, movedClaim}, args...)...)
}

// recover prepares a call of `kubectl trivet recover` for the claim, which kills itself at a point unless it is empty.
func (m *moving) recover(t *testing.T, at crashpoint.Point, args ...string) *exec.Cmd {
	t.Helper()
	cmd := m.plugin(t.Context(), append([]string{"recover", "-n", m.ns, movedClaim}, args...)...)
	cmd.Env = append(cmd.Env, "TRIVET_CRASH_AT="+string(at))
	return cmd
}

// refuseRecovery checks that the claim cannot be recovered now.
func (m *moving) refuseRecovery(t *testing.T, want string) {
	t.Helper()
	out, err := m.recover(t, "", "--yes").CombinedOutput()
	if err == nil || !strings.Contains(string(out), want) {
		t.Errorf("got %v and\n%s\nwant an error that contains %q", err, out, want)
	}
}

// job returns the name of the CronJob of the protection.
func (m *moving) job() string { return "trivet-protect-" + m.uid }

// copyName returns the name of a copy.
func (m *moving) copyName(number int) string {
	return "trivet-copy-" + m.uid + "-" + string(rune('0'+number))
}

// copyNow makes a copy by a Job of the CronJob.
func (m *moving) copyNow(t *testing.T, number int) {
	t.Helper()
	name := m.copyName(number)
	kubectl(t, "-n", namespace, "create", "job", "--from=cronjob/"+m.job(), name)
	out, err := try(t.Context(), "kubectl", "-n", namespace, "wait", "job/"+name, "--for=condition=Complete", "--timeout=3m")
	log, _ := try(t.Context(), "kubectl", "-n", namespace, "logs", "job/"+name)
	t.Logf("%s", log)
	if err != nil {
		t.Fatalf("got %s, want the Job complete", out)
	}
}

// copies returns the names of the claims of the copies.
func (m *moving) copies(t *testing.T) []string {
	t.Helper()
	return strings.Fields(kubectl(t, "-n", m.ns, "get", "pvc", "-l", "csi.trivet.dev/protect="+m.uid, "-o", "jsonpath={.items[*].metadata.name}"))
}

// wantCopies waits until the copies and their snapshots are those with some numbers.
func (m *moving) wantCopies(t *testing.T, numbers ...int) {
	t.Helper()
	want := []string{}
	for _, n := range numbers {
		want = append(want, m.copyName(n))
	}
	eventually(t, time.Minute, "the copies are "+strings.Join(want, ", "), func() (string, bool) {
		claims := m.copies(t)
		snapshots := strings.Fields(kubectl(t, "-n", m.ns, "get", "volumesnapshot", "-o", "jsonpath={.items[*].metadata.name}"))
		return strings.Join(append(claims, snapshots...), ", "), slices.Equal(claims, want) && slices.Equal(snapshots, want)
	})
}

// report returns the volumes that the drivers report.
func (m *moving) report(t *testing.T) (all []status.Volume) {
	t.Helper()
	out, _ := m.plugin(t.Context(), "volumes", "-o", "json").Output() // fails while a node does not report
	must(t, json.Unmarshal(out, &all))
	return all
}

// useCopy uses a copy in a pod on a node, and deletes the pod.
func (m *moving) useCopy(t *testing.T, node string, number int) {
	t.Helper()
	applyText(t, m.ns, "apiVersion: v1\nkind: Pod"+strings.Replace(fmt.Sprintf(user, "nodeName: "+node), movedClaim, m.copyName(number), 1))
	kubectl(t, "-n", m.ns, "wait", "pod", "user", "--for=condition=Ready", "--timeout=2m")
	kubectl(t, "-n", m.ns, "delete", "pod", "user", "--timeout=2m")
}

// received returns the bytes of volumes that the driver of a node has received since it started.
func (m *moving) received(t *testing.T, node string) int {
	t.Helper()
	return int(metricOf(t, node, `trivet_transferred_bytes_total{direction="received"}`))
}

// metricOf returns the value of a metric of a node's driver.
func metricOf(t *testing.T, node, series string) (value float64) {
	t.Helper()
	pod := nodeNamed(t, node).driverPod(t)
	page := kubectl(t, "get", "--raw", "/api/v1/namespaces/"+namespace+"/pods/"+pod+":9810/proxy/metrics")
	for line := range strings.Lines(page) {
		if text, ok := strings.CutPrefix(line, series+" "); ok {
			must(t, json.Unmarshal([]byte(strings.TrimSpace(text)), &value))
			return value
		}
	}
	t.Fatalf("got no %s in the metrics of %s", series, pod)
	return 0
}

// checkRecovered checks that the pod runs on a node with all records that were printed before the snapshot of the copy was taken.
func (m *moving) checkRecovered(t *testing.T, node string, taken time.Time, kept []string) {
	t.Helper()
	kubectl(t, "-n", m.ns, "rollout", "status", "statefulset/log", "--timeout=3m")
	if at := nodeOf(t, m.ns, "log-0"); at != node {
		t.Errorf("got the pod on %s, want %s", at, node)
	}
	records := m.records(t)
	if len(kept) == 0 || len(records) < len(kept) || !slices.Equal(records[:len(kept)], kept) {
		t.Fatalf("got %d records, want the %d that were printed before %v first", len(records), len(kept), taken)
	}
	t.Logf("%d records, %d of them were printed before the snapshot", len(records), len(kept))
	m.mu.Lock()
	m.printed, m.arrived = nil, nil // the lost records were printed, too
	m.mu.Unlock()
	claim, err := client.CoreV1().PersistentVolumeClaims(m.ns).Get(t.Context(), movedClaim, metav1.GetOptions{})
	must(t, err)
	if got := claim.Annotations["csi.trivet.dev/recovered"]; string(claim.UID) != m.uid || got != taken.UTC().Format(time.RFC3339) {
		t.Errorf("got the claim %+v, want the UID %s and the time of the data %v", claim.ObjectMeta, m.uid, taken)
	}
	if got, want := m.copies(t), []string{m.copyName(2)}; !slices.Equal(got, want) {
		t.Errorf("got the copies %q, want %q: the claim has the other one", got, want)
	}
}

// kept returns the name of the PersistentVolume that keeps the old volume.
func (m *moving) kept(t *testing.T) string {
	t.Helper()
	return kubectl(t, "get", "pv", "-l", "csi.trivet.dev/moved-from="+movedClaim, "-o", "jsonpath={.items[*].metadata.name}")
}

// checkOldUnused checks that the old volume is kept on its node, and that no pod can use it.
func (m *moving) checkOldUnused(t *testing.T, handle, node string) {
	t.Helper()
	kept := m.kept(t)
	got := kubectl(t, "get", "pv", kept, "-o", "jsonpath={.status.phase} {.spec.persistentVolumeReclaimPolicy} {.spec.csi.volumeHandle}")
	if at := nodeOfVolume(t, kept); got != "Released Retain "+handle || at != node {
		t.Errorf("got %s with %s on %s, want it released, with Retain and %s on %s", kept, got, at, handle, node)
	}
	eventually(t, 2*time.Minute, "the old volume is on its node, and not staged", func() (string, bool) {
		all := m.report(t)
		i := slices.IndexFunc(all, func(v status.Volume) bool { return v.ID == handle })
		if i < 0 {
			return "it is not reported", false
		}
		out, _ := json.Marshal(all[i])
		return string(out), all[i].Node == node && !all[i].Staged
	})
	applyText(t, m.ns, claim("thief", "trivet-loop", "32Mi", kept))
	waitDescribed(t, time.Minute, m.ns, "pvc/thief", "already bound to a different claim")
	kubectl(t, "-n", m.ns, "delete", "pvc", "thief")
}
