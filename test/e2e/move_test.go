//go:build e2e

package e2e

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/trivet-csi/trivet/cluster/status"
	"github.com/trivet-csi/trivet/internal/crashpoint"
)

// logger is a StatefulSet whose pod appends records to its volume. A record is a number and the time since the machine
// started. The pod prints each record after it is on the disk.
const logger = `
apiVersion: apps/v1
kind: StatefulSet
metadata: {name: log}
spec:
  serviceName: log
  replicas: 1
  selector: {matchLabels: {app: log}}
  template:
    metadata: {labels: {app: log}}
    spec:
      terminationGracePeriodSeconds: 1
      containers:
      - name: c
        image: docker.io/library/busybox:1.37
        command:
        - sh
        - -c
        - |
          i=$(cat /data/log 2>/dev/null | wc -l)
          while record="$i $(cut -d' ' -f1 /proc/uptime)"; echo "$record" >>/data/log && sync /data/log; do
            echo "$record"
            i=$((i+1))
            sleep 0.1
          done
        volumeMounts: [{name: data, mountPath: /data}]
  volumeClaimTemplates:
  - metadata: {name: data, labels: {kept: "yes"}}
    spec:
      storageClassName: trivet-loop
      accessModes: [ReadWriteOnce]
      resources: {requests: {storage: 64Mi}}
`

// record matches the records that the pods print.
var record = regexp.MustCompile(`^[0-9]+ [0-9]+\.[0-9]+$`)

// moving is a StatefulSet whose claim is moved.
type moving struct {
	ns     string
	plugin func(ctx context.Context, args ...string) *exec.Cmd
	uid    string // of the claim

	mu sync.Mutex
	// printed contains the records that the pods have printed, and arrived when this process has read each of them.
	printed []string
	arrived []time.Time
}

// movedClaim is the claim of the StatefulSet.
const movedClaim = "data-log-0"

// startMoving installs the chart with snapshots and options, and starts the StatefulSet "log" of a manifest.
func startMoving(t *testing.T, manifest string, options ...string) *moving {
	t.Helper()
	m := &moving{ns: newNamespace(t, "move"), plugin: installPlugin(t, "trivet-crashpoints")}
	installSnapshotAPI(t)
	installLocal(t, append([]string{"--set", "snapshots.enabled=true"}, options...)...)
	eventually(t, time.Minute, "all pools are open", func() (string, bool) { // after an installation, they are not recorded yet
		out, err := m.plugin(t.Context(), "status").CombinedOutput()
		return string(out), err == nil
	})
	kubectlInput(t, manifest, "-n", m.ns, "apply", "-f", "-")
	t.Cleanup(func() {
		for _, n := range nodes() {
			kubectlLast(t, "uncordon", n.name)
		}
		kubectlLast(t, "-n", m.ns, "delete", "statefulset", "--all", "--timeout=2m")
		kubectlLast(t, "-n", m.ns, "delete", "pvc,volumesnapshot", "--all", "--timeout=2m")
		kubectlLast(t, "wait", "pv", "--all", "--for=delete", "--timeout=2m")
	})
	kubectl(t, "-n", m.ns, "rollout", "status", "statefulset/log", "--timeout=10m")
	m.uid = kubectl(t, "-n", m.ns, "get", "pvc", movedClaim, "-o", "jsonpath={.metadata.uid}")
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		m.follow(ctx)
	}()
	t.Cleanup(func() { stop(); <-done })
	return m
}

// follow reads the records that the pods print, until ctx ends.
func (m *moving) follow(ctx context.Context) {
	for ctx.Err() == nil {
		cmd := exec.CommandContext(ctx, "kubectl", "-n", m.ns, "logs", "-f", "log-0")
		out, err := cmd.StdoutPipe()
		if err == nil && cmd.Start() == nil {
			for lines := bufio.NewScanner(out); lines.Scan(); {
				if record.Match(lines.Bytes()) { // kubectl also prints errors of the kubelet
					m.mu.Lock()
					m.printed, m.arrived = append(m.printed, lines.Text()), append(m.arrived, time.Now())
					m.mu.Unlock()
				}
			}
			_ = cmd.Wait()
		}
	}
}

// move prepares a call of `kubectl trivet move` for the claim, which kills itself at a point unless it is empty.
func (m *moving) move(t *testing.T, at crashpoint.Point, args ...string) *exec.Cmd {
	t.Helper()
	cmd := m.plugin(t.Context(), append([]string{"move", "-n", m.ns, movedClaim}, args...)...)
	cmd.Env = append(cmd.Env, "TRIVET_CRASH_AT="+string(at))
	return cmd
}

// mustMove moves the claim to a node, and checks the result.
func (m *moving) mustMove(t *testing.T, to string) {
	t.Helper()
	begin := time.Now()
	out, err := m.move(t, "", "--to", to).CombinedOutput()
	t.Logf("after %v: %s", time.Since(begin).Round(time.Second/10), out)
	must(t, err)
	m.check(t, to)
}

// killed moves the claim to a node. The command must kill itself at a point.
func (m *moving) killed(t *testing.T, at crashpoint.Point, args ...string) string {
	t.Helper()
	return wantKilled(t, m.move(t, at, args...))
}

// wantKilled runs a command, which must kill itself, and returns what it has printed.
func wantKilled(t *testing.T, cmd *exec.Cmd) string {
	t.Helper()
	out, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
		t.Fatalf("%s: got %v and\n%s\nwant the command killed", cmd, err, out)
	}
	return string(out)
}

// check checks that the pod runs on a node with all records, that the claim is the same, and that nothing else is left.
func (m *moving) check(t *testing.T, node string) {
	t.Helper()
	m.checkRecords(t, node)
	claim, err := client.CoreV1().PersistentVolumeClaims(m.ns).Get(t.Context(), movedClaim, metav1.GetOptions{})
	must(t, err)
	if string(claim.UID) != m.uid || claim.Labels["kept"] != "yes" || claim.Annotations["csi.trivet.dev/move"] != "" {
		t.Errorf("got the claim %+v, want the UID %s, the label kept, and no state of a move", claim.ObjectMeta, m.uid)
	}
	if at := nodeOfVolume(t, claim.Spec.VolumeName); at != node {
		t.Errorf("got the volume on %s, want %s", at, node)
	}
	eventually(t, time.Minute, "only the claim and its volume are left", func() (string, bool) {
		out := kubectl(t, "-n", m.ns, "get", "pvc,volumesnapshot,pv,volumesnapshotcontent", "-o", "name")
		return out, len(strings.Fields(out)) == 2
	})
	if out := kubectl(t, "-n", "trivet-system", "get", "configmap", "-l", "csi.trivet.dev/move", "-o", "name"); out != "" {
		t.Errorf("got the ConfigMaps %s, want that the state of the move is deleted", out)
	}
	if out := kubectl(t, "get", "node", "-o", "jsonpath={.items[*].spec.unschedulable}"); out != "" {
		t.Errorf("got unschedulable %q of the nodes, want none cordoned", out)
	}
	eventually(t, time.Minute, "there are no orphans", func() (string, bool) { // after an installation, the pools are not recorded yet
		out, err := m.plugin(t.Context(), "orphans").CombinedOutput()
		return string(out), err == nil && strings.TrimSpace(string(out)) == "No orphans found."
	})
}

// checkRecords waits until a pod on a node has written more records, and checks that the volume has all records that any pod
// has printed. It logs the longest time between two records.
func (m *moving) checkRecords(t *testing.T, node string) {
	t.Helper()
	began := len(m.records(t))
	eventually(t, 3*time.Minute, "the pod on "+node+" writes", func() (string, bool) {
		records := m.records(t)
		at, _ := try(t.Context(), "kubectl", "-n", m.ns, "get", "pod", "log-0", "-o", "jsonpath={.spec.nodeName}")
		return fmt.Sprintf("%d records, on %s", len(records), at), len(records) > began+5 && at == node
	})
	m.mu.Lock()
	printed := slices.Clone(m.printed)
	m.mu.Unlock()
	records := m.records(t)
	for _, line := range printed {
		number, _, _ := strings.Cut(line, " ")
		if i, err := strconv.Atoi(number); err != nil || i >= len(records) || records[i] != line {
			t.Fatalf("the volume lacks the record %q that a pod has written; it has %d records, and %d were printed", line, len(records), len(printed))
		}
	}
	longest, before := 0.0, 0.0
	for i, line := range records {
		number, text, _ := strings.Cut(line, " ")
		at, err := strconv.ParseFloat(text, 64)
		if err != nil || number != strconv.Itoa(i) {
			t.Fatalf("got the record %q, want number %d", line, i)
		}
		if i > 0 {
			longest = max(longest, at-before)
		}
		before = at
	}
	t.Logf("%d records, %d of them printed, longest time between two records: %.1f s", len(records), len(printed), longest)
}

// records returns the records in the volume, or none if no pod runs.
func (m *moving) records(t *testing.T) []string {
	t.Helper()
	out, err := try(t.Context(), "kubectl", "-n", m.ns, "exec", "log-0", "--", "cat", "/data/log")
	if err != nil {
		return nil
	}
	return strings.Split(strings.TrimSpace(out), "\n")
}

// elsewhere returns a node on which the volume of the claim is not, and the node on which it is.
func (m *moving) elsewhere(t *testing.T) (other, node string) {
	t.Helper()
	node = nodeOfVolume(t, volumeOf(t, m.ns, movedClaim))
	for _, n := range nodes() {
		if n.name != node {
			other = n.name
		}
	}
	return other, node
}

// TestMove moves the volume of a StatefulSet's claim while its pod writes. No record may be missing, whatever interrupts the
// command.
func TestMove(t *testing.T) {
	m := startMoving(t, logger)
	t.Run("there and back", func(t *testing.T) {
		other, node := m.elsewhere(t)
		before := kubectl(t, "-n", m.ns, "get", "pvc", movedClaim, "-o", "jsonpath={.metadata.resourceVersion}")
		if out := output(t, m.move(t, "", "--to", other, "--dry-run")); !strings.Contains(out, other) || !strings.Contains(out, "log-0 of StatefulSet/log") {
			t.Errorf("got the plan\n%s\nwant %s and the pod", out, other)
		}
		if after := kubectl(t, "-n", m.ns, "get", "pvc", movedClaim, "-o", "jsonpath={.metadata.resourceVersion}"); after != before {
			t.Errorf("got the resourceVersion %s after a dry run, want %s", after, before)
		}
		m.mustMove(t, other)
		m.mustMove(t, node)
	})
	t.Run("killed", func(t *testing.T) { m.testKilled(t, steps) })
	t.Run("used before it continues", func(t *testing.T) {
		m.testUsed(t, crashpoint.MoveStopped, crashpoint.MoveCaughtUp, crashpoint.MoveKept)
	})
	t.Run("abort", m.testAbort)
	t.Run("budget", m.testBudget)
	t.Run("no room", m.testNoRoom)
	t.Run("keep", m.testKeep)
	t.Run("without pods", m.testWithoutPods)
	t.Run("drain", m.testDrain)
	t.Run("refusals", m.testRefusals)
}

// steps contains the step in which the command continues after it was killed at a point.
var steps = map[crashpoint.Point]string{
	crashpoint.MoveBegun: "copy", crashpoint.MoveSnapshot: "copy", crashpoint.MoveCopying: "copy", crashpoint.MoveCopied: "copy",
	crashpoint.MoveCordoned: "stop", crashpoint.MoveStopped: "stop", crashpoint.MoveCaughtUp: "last",
	crashpoint.MoveKept: "swap", crashpoint.MoveLost: "swap", crashpoint.MoveReplaced: "swap", crashpoint.MoveRunning: "start",
	crashpoint.MoveReleased: "clean", crashpoint.MoveCopyGone: "clean", crashpoint.MoveOldGone: "clean",
}

// testKilled kills the command at each point of steps, and continues each time. A tenant overwrites the annotation of the claim
// meanwhile.
func (m *moving) testKilled(t *testing.T, steps map[crashpoint.Point]string) {
	other, _ := m.elsewhere(t)
	want := ""
	for _, at := range crashpoint.Move {
		if steps[at] == "" {
			continue
		}
		if out := m.killed(t, at, "--to", other); want != "" && !strings.Contains(out, want) {
			t.Errorf("got\n%s\nwant %q", out, want)
		}
		want = "at the step " + steps[at] + "."
		kubectl(t, "-n", m.ns, "annotate", "--overwrite", "pvc", movedClaim, "csi.trivet.dev/move={}")
	}
	m.mustMove(t, other)
}

// testUsed starts the pod again on the old node after the command was killed at each of several points.
func (m *moving) testUsed(t *testing.T, points ...crashpoint.Point) {
	for _, at := range points {
		t.Run(string(at), func(t *testing.T) {
			other, node := m.elsewhere(t)
			m.killed(t, at, "--to", other)
			kubectl(t, "uncordon", node)
			kubectl(t, "-n", m.ns, "rollout", "status", "statefulset/log", "--timeout=2m")
			m.checkRecords(t, node)
			m.mustMove(t, other)
		})
	}
}

// testAborted undoes the move after the command was killed at each of several points.
func (m *moving) testAborted(t *testing.T, points ...crashpoint.Point) {
	for _, at := range points {
		t.Run(string(at), func(t *testing.T) {
			other, node := m.elsewhere(t)
			m.killed(t, at, "--to", other)
			m.killed(t, crashpoint.MoveAborting, "--abort")
			out, err := m.move(t, "", "--to", other).CombinedOutput()
			if err == nil || !strings.Contains(string(out), "is being undone") {
				t.Errorf("got %v and\n%s\nwant that only --abort can continue", err, out)
			}
			output(t, m.move(t, "", "--abort"))
			m.check(t, node)
		})
	}
}

// testAbort undoes the move at several points.
func (m *moving) testAbort(t *testing.T) {
	m.testAborted(t, crashpoint.MoveBegun, crashpoint.MoveSnapshot, crashpoint.MoveCopying, crashpoint.MoveCordoned, crashpoint.MoveCaughtUp, crashpoint.MoveKept, crashpoint.MoveLost)
	t.Run("too late", func(t *testing.T) {
		other, _ := m.elsewhere(t)
		m.killed(t, crashpoint.MoveReplaced, "--to", other)
		out, err := m.move(t, "", "--abort").CombinedOutput()
		if err == nil || !strings.Contains(string(out), "complete the move with --to "+other) {
			t.Errorf("got %v and\n%s\nwant that the move can only be completed", err, out)
		}
		m.mustMove(t, other)
	})
}

// testBudget: a PodDisruptionBudget delays the eviction.
func (m *moving) testBudget(t *testing.T) {
	applyText(t, m.ns, "{apiVersion: policy/v1, kind: PodDisruptionBudget, metadata: {name: log}, spec: {minAvailable: 1, selector: {matchLabels: {app: log}}}}")
	t.Cleanup(func() { kubectlLast(t, "-n", m.ns, "delete", "pdb", "--all") })
	other, node := m.elsewhere(t)
	eventually(t, time.Minute, "the budget is observed", func() (string, bool) {
		out := kubectl(t, "-n", m.ns, "get", "pdb", "log", "-o", "jsonpath={.status.currentHealthy}")
		return out, out == "1"
	})
	out, err := m.move(t, "", "--to", other, "--timeout", "5s").CombinedOutput()
	if err == nil || !strings.Contains(string(out), "disruption budget") || !strings.Contains(string(out), "timed out") {
		t.Errorf("got %v and\n%s\nwant a timeout because of the budget", err, out)
	}
	m.checkRecords(t, node)
	kubectl(t, "-n", m.ns, "delete", "pdb", "log")
	m.mustMove(t, other)
}

// testKeep keeps the old volume, and deletes it with the printed command.
func (m *moving) testKeep(t *testing.T) {
	other, _ := m.elsewhere(t)
	out, err := m.move(t, "", "--to", other, "--keep").CombinedOutput()
	must(t, err)
	_, command, found := strings.Cut(string(out), "\n  kubectl ")
	if kept := kubectl(t, "get", "pv", "-l", "csi.trivet.dev/moved-from="+movedClaim, "-o", "name"); kept == "" || !found {
		t.Fatalf("got the PersistentVolume %q and\n%s\nwant one with the label, and the command that deletes it", kept, out)
	}
	run(t, "sh", "-c", "kubectl "+command)
	m.check(t, other)
}

// testWithoutPods moves the volume while no pod uses the claim.
func (m *moving) testWithoutPods(t *testing.T) {
	other, _ := m.elsewhere(t)
	kubectl(t, "-n", m.ns, "scale", "statefulset/log", "--replicas=0")
	kubectl(t, "-n", m.ns, "wait", "pod", "log-0", "--for=delete", "--timeout=2m")
	out, err := m.move(t, "", "--to", other).CombinedOutput()
	must(t, err)
	if !strings.Contains(string(out), "is cordoned") {
		t.Errorf("got\n%s\nwant the node cordoned, so that no pod starts there meanwhile", out)
	}
	kubectl(t, "-n", m.ns, "scale", "statefulset/log", "--replicas=1")
	kubectl(t, "-n", m.ns, "rollout", "status", "statefulset/log", "--timeout=2m")
	m.check(t, other)
}

// placed is a claim whose volume is created on a node without a pod.
const placed = `
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: %s, annotations: {volume.kubernetes.io/selected-node: %s}}
spec:
  storageClassName: %s
  accessModes: [ReadWriteOnce]
  resources: {requests: {storage: 32Mi}}
`

// testNoRoom: a copy for which the other node has lost its room after the plan is created when there is room again.
func (m *moving) testNoRoom(t *testing.T) {
	other, _ := m.elsewhere(t)
	m.killed(t, crashpoint.MoveBegun, "--to", other)
	var report status.Report
	must(t, json.Unmarshal([]byte(output(t, m.plugin(t.Context(), "status", "-o", "json"))), &report))
	i := slices.IndexFunc(report.Pools, func(p status.Pool) bool { return p.Node == other && p.Name == "limited" })
	if i < 0 {
		t.Fatalf("got the pools %+v, want one of %s", report.Pools, other)
	}
	applyText(t, m.ns, strings.Replace(fmt.Sprintf(placed, "filler", other, "trivet-loop"), "32Mi", strconv.FormatInt(report.Pools[i].RoomBytes-32<<20, 10), 1))
	volumeOf(t, m.ns, "filler")

	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	cmd := m.plugin(ctx, "move", "-n", m.ns, movedClaim, "--to", other)
	out, err := cmd.StdoutPipe()
	must(t, err)
	must(t, cmd.Start())
	retried := false
	for lines := bufio.NewScanner(out); lines.Scan(); {
		t.Log(lines.Text())
		if !retried && strings.Contains(lines.Text(), "is tried again") {
			retried = true
			kubectl(t, "-n", m.ns, "delete", "pvc", "filler", "--timeout=2m")
		}
	}
	if err := cmd.Wait(); err != nil || !retried {
		t.Fatalf("got %v, tried again: %t, want the volume moved when there is room again", err, retried)
	}
	m.check(t, other)
}

// testDrain moves all volumes of a node. That of a pod without a controller cannot be moved.
func (m *moving) testDrain(t *testing.T) {
	other, node := m.elsewhere(t)
	for name, class := range map[string]string{"image": "trivet-loop", "directory": "trivet-directories", "pinned": "trivet-loop"} {
		applyText(t, m.ns, fmt.Sprintf(placed, name, node, class))
		if at := nodeOfVolume(t, volumeOf(t, m.ns, name)); at != node {
			t.Fatalf("got the volume of %s on %s, want %s", name, at, node)
		}
	}
	applyText(t, m.ns, "apiVersion: v1\nkind: Pod"+strings.Replace(fmt.Sprintf(user, ""), movedClaim, "pinned", 1))
	out, err := m.plugin(t.Context(), "drain", node).CombinedOutput()
	if err == nil || !strings.Contains(string(out), "has no controller") || !strings.Contains(string(out), "--skip-unmovable") {
		t.Errorf("got %v and\n%s\nwant that the claim pinned cannot be moved", err, out)
	}
	if unschedulable := kubectl(t, "get", "node", node, "-o", "jsonpath={.spec.unschedulable}"); unschedulable != "" {
		t.Errorf("got unschedulable %s of %s after a refusal, want none", unschedulable, node)
	}
	lost := m.plugin(t.Context(), "drain", node, "--skip-unmovable")
	lost.Env = append(lost.Env, "TRIVET_CRASH_AT="+string(crashpoint.MoveLost))
	wantKilled(t, lost)
	t.Logf("%s", output(t, m.plugin(t.Context(), "drain", node, "--skip-unmovable")))
	for name, want := range map[string]string{"image": other, movedClaim: other, "directory": other, "pinned": node} {
		if at := nodeOfVolume(t, volumeOf(t, m.ns, name)); at != want {
			t.Errorf("got the volume of %s on %s, want %s", name, at, want)
		}
	}
	if unschedulable := kubectl(t, "get", "node", node, "-o", "jsonpath={.spec.unschedulable}"); unschedulable != "true" {
		t.Errorf("got unschedulable %q of %s, want true", unschedulable, node)
	}
	kubectl(t, "uncordon", node)
	kubectl(t, "-n", m.ns, "delete", "pod/user", "pvc/image", "pvc/directory", "pvc/pinned", "--timeout=2m")
	m.check(t, other)
}

// user is a pod, or the template of one, that uses the claim.
const user = `
metadata: {name: user, labels: {app: user}}
spec:
  terminationGracePeriodSeconds: 1
  %s
  containers: [{name: c, image: "docker.io/library/busybox:1.37", command: [sleep, "1000000"], volumeMounts: [{name: data, mountPath: /data}]}]
  volumes: [{name: data, persistentVolumeClaim: {claimName: data-log-0}}]
`

// onlyReader is a user who may read everything, and fetch the report of the drivers.
const onlyReader = `
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: move-reader}
rules:
- {apiGroups: ["*"], resources: ["*"], verbs: [get, list, watch]}
- {apiGroups: [""], resources: [pods/portforward], verbs: [create]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: move-reader}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: move-reader}
subjects: [{apiGroup: rbac.authorization.k8s.io, kind: User, name: reader}]
`

// testRefusals: a move that cannot succeed changes nothing.
func (m *moving) testRefusals(t *testing.T) {
	other, node := m.elsewhere(t)
	refuse := func(t *testing.T, to, want string, args ...string) {
		t.Helper()
		out, err := m.move(t, "", append(args, "--to", to)...).CombinedOutput()
		if err == nil || !strings.Contains(string(out), want) {
			t.Errorf("got %v and\n%s\nwant an error that contains %q", err, out, want)
		}
		m.check(t, node)
	}
	indented := strings.ReplaceAll(user, "\n", "\n    ")
	for name, tc := range map[string]struct{ manifest, kind, want string }{
		"bare pod":  {"apiVersion: v1\nkind: Pod" + fmt.Sprintf(user, ""), "pod", "has no controller"},
		"DaemonSet": {"apiVersion: apps/v1\nkind: DaemonSet\nmetadata: {name: user}\nspec:\n  selector: {matchLabels: {app: user}}\n  template:" + fmt.Sprintf(indented, ""), "daemonset", "DaemonSet"},
		"toleration": {
			"apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: user}\nspec:\n  selector: {matchLabels: {app: user}}\n  template:" + fmt.Sprintf(indented, "tolerations: [{operator: Exists}]"),
			"deployment", "tolerates the taint",
		},
		"node selector": {
			"apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: user}\nspec:\n  selector: {matchLabels: {app: user}}\n  template:" + fmt.Sprintf(indented, "nodeSelector: {kubernetes.io/hostname: "+node+"}"),
			"deployment", "cannot run on node",
		},
	} {
		t.Run(name, func(t *testing.T) {
			applyText(t, m.ns, tc.manifest)
			eventually(t, time.Minute, "a pod exists", func() (string, bool) {
				out := kubectl(t, "-n", m.ns, "get", "pod", "-l", "app=user", "-o", "name")
				return out, out != ""
			})
			refuse(t, other, tc.want)
			kubectl(t, "-n", m.ns, "delete", tc.kind, "user", "--timeout=2m")
			kubectl(t, "-n", m.ns, "wait", "pod", "-l", "app=user", "--for=delete", "--timeout=2m")
		})
	}
	t.Run("same node", func(t *testing.T) { refuse(t, node, "already on this node") })
	t.Run("no such node", func(t *testing.T) { refuse(t, "nowhere", "no such node") })
	t.Run("without rights", func(t *testing.T) {
		applyText(t, m.ns, onlyReader)
		defer kubectlLast(t, "delete", "clusterrole,clusterrolebinding", "move-reader")
		refuse(t, other, "needs the right to create pods/eviction", "--as", "reader")
	})
	t.Run("cordoned", func(t *testing.T) {
		kubectl(t, "cordon", other)
		defer kubectlLast(t, "uncordon", other)
		out, err := m.move(t, "", "--to", other).CombinedOutput()
		if err == nil || !strings.Contains(string(out), "kubectl uncordon "+other) {
			t.Errorf("got %v and\n%s\nwant that the node is cordoned", err, out)
		}
	})
}
