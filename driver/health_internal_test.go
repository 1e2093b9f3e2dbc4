package driver

import (
	"context"
	"errors"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/trivet-csi/trivet/cluster/kube"
	"github.com/trivet-csi/trivet/cluster/status"
	"github.com/trivet-csi/trivet/volume"
)

// TestExaminationHangs: an examination that hangs ends after its timeout, and is not started again before it has returned.
func TestExaminationHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := &examiner{running: map[string]bool{}}
		var started atomic.Int32
		release := make(chan struct{})
		hang := func(context.Context) (int, error) {
			started.Add(1)
			<-release
			return 1, nil
		}
		begun := time.Now()
		if _, err := within(t.Context(), e, "v", hang); !errors.Is(err, errUnresponsive) || time.Since(begun) != examinationTime {
			t.Errorf("got %v after %v, want errUnresponsive after %v", err, time.Since(begun), examinationTime)
		}
		begun = time.Now()
		if _, err := within(t.Context(), e, "v", hang); !errors.Is(err, errUnresponsive) || time.Since(begun) != 0 || started.Load() != 1 {
			t.Errorf("got %v after %v and %d starts, want errUnresponsive at once, and one start", err, time.Since(begun), started.Load())
		}
		close(release)
		synctest.Wait()
		if n, err := within(t.Context(), e, "v", hang); err != nil || n != 1 {
			t.Errorf("got %d, %v after the end of the examination, want its result", n, err)
		}
	})
}

// TestHealthRound: a volume counts as examined if its node has answered and has examined the pool.
func TestHealthRound(t *testing.T) {
	d := &Driver{options: Options{NodeID: "a"}}
	found := status.Examination{
		Volumes:    []status.Examined{{ID: "loop:slow.01234567:v", Health: []status.Health{{Status: "INACCESSIBLE", Reason: "PoolUnavailable", Message: "gone"}}}},
		Unexamined: []string{"slow", "nas0"},
	}
	r := d.healthRound(map[string]status.Examination{"a": found})
	if len(r.Conditions) != 1 || r.Conditions[0].Node != "a" || r.Conditions[0].Message != "gone" || !r.Conditions[0].Inaccessible {
		t.Errorf("got conditions %+v", r.Conditions)
	}
	damaged := status.Examination{Volumes: []status.Examined{{ID: "loop:fast.01234567:v", Health: []status.Health{{Status: "DATA_LOSS", Reason: "RecordDamaged"}}}}}
	if all := d.healthRound(map[string]status.Examination{"a": damaged}).Conditions; len(all) != 1 || !all[0].Inaccessible {
		t.Errorf("got conditions %+v of a damaged record, want that the volume could not be examined completely", all)
	}
	for id, want := range map[string]bool{
		"loop:fast.01234567:v": true, "loop:slow.01234567:w": false, "nfs:nas0:v": false, "nfs:nas1:v": true, "static": true,
	} {
		if got := r.Examined("a", id); got != want {
			t.Errorf("%s: got examined %t, want %t", id, got, want)
		}
		if r.Examined("b", id) {
			t.Errorf("%s counts as examined by a node that did not answer", id)
		}
	}
	if !r.Exists("a") || r.Exists("b") {
		t.Error("the node of this driver, and no other, must exist")
	}
}

// TestStagedSubjects: the staged volumes of NFS servers are examined, a static one by its path, and those of pools that cannot be used,
// which no list contains.
func TestStagedSubjects(t *testing.T) {
	e := &examiner{staged: func() (all []kube.StagedVolume) {
		for _, handle := range []string{"loop:fast.01234567:listed", "loop:fast.01234567:deleted", "loop:slow.01234567:v", "nfs:nas0:v", "static"} {
			all = append(all, kube.StagedVolume{Handle: handle, Path: "/staged/" + handle})
		}
		return all
	}}
	closed := errors.New("not open")
	got := e.stagedOnly([]subject{{id: "loop:fast.01234567:listed"}}, map[string]error{"slow": closed})
	want := []subject{{id: "loop:slow.01234567:v", unusable: closed}, {id: "nfs:nas0:v"}, {id: "static", staging: "/staged/static"}}
	if !slices.Equal(got, want) {
		t.Errorf("got %+v, want %+v", got, want)
	}
}

// TestAcceptedHealth: the controller ignores what a node reports about pools of other nodes, unknown reasons, and what exceeds the
// limit.
func TestAcceptedHealth(t *testing.T) {
	e := status.Examination{Unexamined: []string{"slow"}}
	for _, v := range []struct{ id, reason string }{
		{"loop:own.01234567:v", "DiskMissing"},
		{"loop:other.01234567:v", "DiskMissing"},
		{"nfs:nas0:v", "ServerSilent"},
		{"static", "ServerSilent"},
		{"loop:own.01234567:w", "no reason"},
		{"loop:own.01234567:x", "Invented"},
	} {
		e.Volumes = append(e.Volumes, status.Examined{ID: v.id, Health: []status.Health{{Status: "INACCESSIBLE", Reason: v.reason}}})
	}
	got := accepted(e, func(id volume.ID) bool { return id.Pool == "own" })
	var ids []string
	for _, v := range got.Volumes {
		ids = append(ids, v.ID)
	}
	if want := []string{"loop:own.01234567:v", "nfs:nas0:v", "static"}; !slices.Equal(ids, want) || !slices.Equal(got.Unexamined, e.Unexamined) {
		t.Errorf("got volumes %q and unexamined pools %q, want %q and %q", ids, got.Unexamined, want, e.Unexamined)
	}
	for range 2 * maxNodeVolumes {
		e.Volumes = append(e.Volumes, status.Examined{ID: "static", Health: []status.Health{{Reason: "ServerSilent"}}})
	}
	if n := len(accepted(e, func(volume.ID) bool { return true }).Volumes); n != maxNodeVolumes {
		t.Errorf("got %d volumes of one node, want %d", n, maxNodeVolumes)
	}
}
