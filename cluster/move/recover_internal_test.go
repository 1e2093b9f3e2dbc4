package move

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/trivet-csi/trivet/cluster/kube"
)

// beginRecovery is begin with the recovery of a claim whose node a is ready again.
func beginRecovery(t *testing.T) (*apiServer, *Mover) {
	t.Helper()
	s, open := begin(t, "old")
	s.objects["/api/v1/nodes/a"] = object(t, `{"metadata":{"name":"a"},"status":{"conditions":[{"type":"Ready","status":"True"}]}}`)
	s.objects["/apis/storage.k8s.io/v1/volumeattachments"] = object(t, `{"metadata":{},"items":[]}`)
	m := open()
	m.Recover, m.Timeout, m.state.Recovery = true, time.Nanosecond, &recovery{Claim: "trivet-move-1-1", Policy: "Delete"}
	return s, m
}

// TestNodeIsBack: if the node is ready again, a recovery changes nothing, and does not stop pods as a move does.
func TestNodeIsBack(t *testing.T) {
	s, m := beginRecovery(t)
	if err := m.swap(t.Context()); !errors.Is(err, errUsed) || !strings.Contains(err.Error(), "node a of the volume is ready") {
		t.Errorf("got %v, want that the node is ready", err)
	}
	if s.version != 0 || m.state.Step != swapping {
		t.Errorf("got %d writes and the step %q, want no change", s.version, m.state.Step)
	}
}

// TestNodeIsBackLate: if the node is ready again after the PersistentVolume was removed, the claim gets its old volume.
func TestNodeIsBackLate(t *testing.T) {
	s, m := beginRecovery(t)
	delete(s.objects, pvPath)
	if err := m.swap(t.Context()); err == nil {
		t.Error("got no error, want one")
	}
	v, err := kube.AsPersistentVolume(s.objects[pvPath])
	if err != nil || v.Spec.CSI.VolumeHandle != "old" {
		t.Errorf("got %+v, %v, want the PersistentVolume with the old volume", v, err)
	}
}

// TestAbandonCopy: an abort deletes no copy of a recovery, and restores the reclaim policy of its PersistentVolume.
func TestAbandonCopy(t *testing.T) {
	s, m := beginRecovery(t)
	const copiedPath = "/api/v1/persistentvolumes/pv-copy"
	s.objects[copyPath] = object(t, `{"metadata":{"namespace":"ns","name":"trivet-move-1-1","uid":"v"},"spec":{"volumeName":"pv-copy"}}`)
	s.objects[copiedPath] = object(t, strings.Replace(copied, `"Delete"`, `"Retain"`, 1))
	if err := m.abandonCopies(t.Context()); err != nil {
		t.Fatal(err)
	}
	v, err := kube.AsPersistentVolume(s.objects[copiedPath])
	if _, claimed := s.objects[copyPath]; err != nil || v.Spec.ReclaimPolicy != "Delete" || !claimed {
		t.Errorf("got %+v, %v, claim %t, want the copy with the policy Delete", v, err, claimed)
	}
}
