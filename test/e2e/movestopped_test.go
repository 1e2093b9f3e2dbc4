//go:build e2e

package e2e

import (
	"maps"
	"strings"
	"testing"
	"time"

	"github.com/trivet-csi/trivet/internal/crashpoint"
)

// stoppedSteps is steps for a volume that is copied while the pods are stopped. No copy is made before.
func stoppedSteps() map[crashpoint.Point]string {
	all := maps.Clone(steps)
	delete(all, crashpoint.MoveCopied)
	all[crashpoint.MoveBegun], all[crashpoint.MoveSnapshot], all[crashpoint.MoveCopying] = "stop", "last", "last"
	return all
}

// TestMoveWithoutSnapshots moves volumes of which no snapshot can be taken while they are in use. They are copied while the pod is
// stopped. As in TestMove, no record may be missing.
func TestMoveWithoutSnapshots(t *testing.T) {
	for name, tc := range map[string]struct {
		class, snapshots, reason string
		locked                   bool
	}{
		"no snapshot class": {"trivet-loop", "false", "has no VolumeSnapshotClass", false},
		"whole disks":       {"trivet-disks", "true", "no snapshot of the volume can be taken while it is in use", true},
	} {
		t.Run(name, func(t *testing.T) {
			m := startMoving(t, strings.Replace(logger, "trivet-loop", tc.class, 1), "--set", "snapshots.enabled="+tc.snapshots+",config.transferLimit.bytesPerSecond=1Mi")
			t.Run("plan", func(t *testing.T) { m.testStoppedPlan(t, tc.reason) })
			t.Run("killed", func(t *testing.T) { m.testKilled(t, stoppedSteps()) })
			t.Run("used before it continues", func(t *testing.T) { m.testUsed(t, crashpoint.MoveCopying, crashpoint.MoveCaughtUp) })
			t.Run("abort", func(t *testing.T) { m.testAborted(t, crashpoint.MoveCopying, crashpoint.MoveLost) })
			t.Run("drain", m.testStoppedDrain)
			if tc.locked {
				t.Run("same transfer", m.testSameTransfer)
			}
		})
	}
}

// testStoppedPlan: the plan contains the reason why the pods are stopped while everything is copied.
func (m *moving) testStoppedPlan(t *testing.T, reason string) {
	other, node := m.elsewhere(t)
	if out := output(t, m.move(t, "", "--to", other, "--dry-run")); !strings.Contains(out, "while everything is copied") || !strings.Contains(out, reason) {
		t.Errorf("got the plan\n%s\nwant that everything is copied while the pods are stopped, and %q", out, reason)
	}
	m.check(t, node)
}

// testSameTransfer: a command that was killed continues with the transfer that runs, because no pod can use the volume meanwhile.
func (m *moving) testSameTransfer(t *testing.T) {
	other, _ := m.elsewhere(t)
	kubectl(t, "-n", m.ns, "exec", "log-0", "--", "sh", "-c", "dd if=/dev/urandom of=/data/random bs=1M count=24 && sync /data/random")
	m.killed(t, crashpoint.MoveCopying, "--to", other)
	eventually(t, time.Minute, "the volume is being sent", func() (string, bool) {
		out := output(t, m.plugin(t.Context(), "volumes", "-o", "json"))
		return out, strings.Contains(out, `"sentAs"`)
	})
	out, err := m.move(t, "", "--to", other).CombinedOutput()
	t.Logf("%s", out)
	must(t, err)
	if !strings.Contains(string(out), "-1 is complete") {
		t.Errorf("got\n%s\nwant that the first copy is used", out)
	}
	m.check(t, other)
}

// testStoppedDrain moves the volume with its node's other volumes.
func (m *moving) testStoppedDrain(t *testing.T) {
	other, node := m.elsewhere(t)
	if out := output(t, m.plugin(t.Context(), "drain", node)); !strings.Contains(out, "everything is copied") {
		t.Errorf("got\n%s\nwant that everything is copied while the pods are stopped", out)
	}
	kubectl(t, "uncordon", node)
	m.check(t, other)
}
