package move

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/trivet-csi/trivet/cluster/kube"
	"github.com/trivet-csi/trivet/cluster/status"
)

// beginRecovery is begin with the recovery of a claim whose node a is ready again.
func beginRecovery(t *testing.T) (*apiServer, *Mover) {
	t.Helper()
	s, open := begin(t, "old")
	s.objects["/api/v1/nodes/a"] = object(t, `{"metadata":{"name":"a"},"status":{"conditions":[{"type":"Ready","status":"True"}]}}`)
	s.objects["/apis/storage.k8s.io/v1/volumeattachments"] = object(t, `{"metadata":{},"items":[]}`)
	m := open()
	m.Recover, m.Timeout, m.state.Recovery = true, time.Nanosecond, &recovery{Claim: "trivet-move-1-1", Policy: "Delete"}
	m.state.CopyUID, m.state.CopyRound = "v", 1
	return s, m
}

const copiedPath = "/api/v1/persistentvolumes/pv-copy"

// addCopy adds the copy, whose PersistentVolume has the policy Retain.
func addCopy(t *testing.T, s *apiServer) {
	t.Helper()
	s.objects[copyPath] = object(t, `{"metadata":{"namespace":"ns","name":"trivet-move-1-1","uid":"v"},"spec":{"volumeName":"pv-copy"}}`)
	s.objects[copiedPath] = object(t, strings.NewReplacer(`"Delete"`, `"Retain"`, `"spec"`, `"status":{"phase":"Bound"},"spec"`).Replace(copied))
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
	if err := m.swap(t.Context()); !errors.Is(err, errUsed) || !strings.Contains(err.Error(), "node a of the volume is ready") {
		t.Errorf("got %v, want that the node is ready", err)
	}
	v, err := kube.AsPersistentVolume(s.objects[pvPath])
	if err != nil || v.Spec.CSI.VolumeHandle != "old" || v.Spec.ReclaimPolicy != "Retain" {
		t.Errorf("got %+v, %v, want the PersistentVolume with the old volume and its policy Retain", v, err)
	}
}

// TestAbandonCopy: an abort deletes no copy of a recovery, and restores the reclaim policy of its PersistentVolume.
func TestAbandonCopy(t *testing.T) {
	s, m := beginRecovery(t)
	addCopy(t, s)
	if err := m.abandonCopies(t.Context()); err != nil {
		t.Fatal(err)
	}
	v, err := kube.AsPersistentVolume(s.objects[copiedPath])
	if _, claimed := s.objects[copyPath]; err != nil || v.Spec.ReclaimPolicy != "Delete" || !claimed {
		t.Errorf("got %+v, %v, claim %t, want the copy with the policy Delete", v, err, claimed)
	}
}

// TestAbandonCopyWithoutClaim: an abort restores the policy of the copy's PersistentVolume also if its claim was deleted.
func TestAbandonCopyWithoutClaim(t *testing.T) {
	s, m := beginRecovery(t)
	addCopy(t, s)
	delete(s.objects, copyPath)
	if err := m.abandonCopies(t.Context()); err != nil {
		t.Fatal(err)
	}
	if v, err := kube.AsPersistentVolume(s.objects[copiedPath]); err != nil || v.Spec.ReclaimPolicy != "Delete" {
		t.Errorf("got %+v, %v, want the policy Delete", v, err)
	}
}

// TestKeepCopy: the old PersistentVolume is removed only if the copy is that of the state, and is not being deleted.
func TestKeepCopy(t *testing.T) {
	ending := map[string]any{"deletionTimestamp": "2026-01-02T03:04:05Z"}
	for name, tc := range map[string]struct {
		change func(s *apiServer)
		want   string
	}{
		"complete":        {func(*apiServer) {}, ""},
		"another claim":   {func(s *apiServer) { s.objects[copyPath]["metadata"].(map[string]any)["uid"] = "w" }, "and not to it"},
		"claim deleted":   {func(s *apiServer) { merge(s.objects[copyPath]["metadata"].(map[string]any), ending) }, "is being deleted"},
		"volume deleted":  {func(s *apiServer) { merge(s.objects[copiedPath]["metadata"].(map[string]any), ending) }, "is being deleted"},
		"volume released": {func(s *apiServer) { s.objects[copiedPath]["status"] = map[string]any{"phase": "Released"} }, "is not Bound"},
	} {
		s, m := beginRecovery(t)
		addCopy(t, s)
		tc.change(s)
		_, err := m.keepCopy(t.Context())
		if (err == nil) != (tc.want == "") || err != nil && !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: got %v, want %q", name, err, tc.want)
		}
	}
}

// TestRemoveChosen: at the end, the superfluous PersistentVolume of the copy is removed also if the copy's claim was deleted. A claim of
// the same name that a user has created since is not changed.
func TestRemoveChosen(t *testing.T) {
	for name, tc := range map[string]struct {
		change func(s *apiServer)
		left   bool
	}{
		"claim of the copy": {func(*apiServer) {}, false},
		"no claim":          {func(s *apiServer) { delete(s.objects, copyPath) }, false},
		"another claim": {func(s *apiServer) {
			merge(s.objects[copyPath], kube.Object{"metadata": map[string]any{"uid": "w"}, "spec": map[string]any{"volumeName": "foreign"}})
		}, true},
	} {
		s, m := beginRecovery(t)
		addCopy(t, s)
		s.objects[pvPath]["spec"].(map[string]any)["csi"].(map[string]any)["volumeHandle"] = "new"
		tc.change(s)
		if err := m.removeCopies(t.Context(), 1); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		_, claimed := s.objects[copyPath]
		if _, kept := s.objects[copiedPath]; kept || claimed != tc.left {
			t.Errorf("%s: got the PersistentVolume %t, the claim %t, want no PersistentVolume, and the claim %t", name, kept, claimed, tc.left)
		}
		if _, kept := s.objects[pvPath]; !kept {
			t.Errorf("%s: got no PersistentVolume of the claim, want that it is kept", name)
		}
	}
}

// TestCheckCopy: a recovery that has begun is continued only with its copy.
func TestCheckCopy(t *testing.T) {
	_, m := beginRecovery(t)
	for name, want := range map[string]bool{"": true, "trivet-move-1-1": true, "other": false} {
		if err := m.CheckCopy(name); (err == nil) != want {
			t.Errorf("%q: got %v, want accepted: %t", name, err, want)
		}
	}
}

// TestVerifyAgain: before the old PersistentVolume is removed, a new report of the node with the copy must show that the copy is
// unchanged.
func TestVerifyAgain(t *testing.T) {
	taken := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	for name, tc := range map[string]struct {
		change func(s *apiServer, v *status.Volume)
		want   string
	}{
		"unchanged": {func(*apiServer, *status.Volume) {}, ""},
		"used":      {func(_ *apiServer, v *status.Volume) { v.CopyOf = "" }, "was used by a pod or changed"},
		"replaced":  {func(_ *apiServer, v *status.Volume) { v.Snapshotted = taken.Add(time.Hour) }, "has the data of"},
		"in use": {func(s *apiServer, _ *status.Volume) {
			s.objects[podsPath+"/p"] = object(t, strings.Replace(user, `"claimName":"data"`, `"claimName":"trivet-move-1-1"`, 1))
		}, "uses the copy trivet-move-1-1"},
	} {
		s, m := beginRecovery(t)
		addCopy(t, s)
		s.objects[podsPath] = object(t, `{"metadata":{},"items":[]}`)
		s.objects[copiedPath]["spec"].(map[string]any)["nodeAffinity"] = object(t, `{"required":{"nodeSelectorTerms":[{"matchExpressions":[{"key":"csi.trivet.dev/node","operator":"In","values":["b"]}]}]}}`)
		m.state.Recovery.Snapshotted = taken
		v := status.Volume{ID: "new", Node: "b", CopyOf: "old", Snapshotted: taken}
		tc.change(s, &v)
		m.nodeReport = func(_ context.Context, node string) (status.Report, error) {
			if node != "b" {
				t.Errorf("%s: got a request for the report of node %q, want b", name, node)
			}
			return status.Report{Driver: "d", Volumes: []status.Volume{v}}, nil
		}
		if err := m.verifyAgain(t.Context()); (err == nil) != (tc.want == "") || err != nil && !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: got %v, want %q", name, err, tc.want)
		}
	}
}
