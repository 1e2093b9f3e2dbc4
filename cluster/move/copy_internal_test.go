package move

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/trivet-csi/trivet/cluster/status"
)

const (
	podsPath   = "/api/v1/namespaces/ns/pods"
	eventsPath = "/api/v1/namespaces/ns/events"
	// user is a pod that uses the claim on node a.
	user = `{"metadata":{"namespace":"ns","name":"p","uid":"p"},"spec":{"nodeName":"a","volumes":[{"persistentVolumeClaim":{"claimName":"data"}}]},"status":{"phase":"Running"}}`
)

// addPendingCopy adds the claim of a copy that has no volume yet.
func addPendingCopy(t *testing.T, s *apiServer) {
	t.Helper()
	s.objects[copyPath] = object(t, `{"metadata":{"namespace":"ns","name":"trivet-move-1-1","uid":"v"},"status":{"phase":"Pending"}}`)
	s.objects[eventsPath] = object(t, `{"metadata":{},"items":[]}`)
}

// TestStrayCopy: a move selects the node of a copy again after the provisioner has removed it, and shows the reason. A protection does
// not.
func TestStrayCopy(t *testing.T) {
	for name, retried := range map[string]bool{"move": true, "protection": false} {
		s, open := begin(t, "old")
		addPendingCopy(t, s)
		s.objects[eventsPath+"/e"] = object(t, `{"metadata":{"namespace":"ns","name":"e"},"lastTimestamp":"2026-01-02T03:04:05Z","message":"node \"b\": pool fast is full"}`)
		var lines []string
		c := open().copier()
		c.retried, c.progress = retried, func(format string, args ...any) { lines = append(lines, fmt.Sprintf(format, args...)) }
		selected, checks := false, 0
		_, err := c.waitCopied(t.Context(), "trivet-move-1-1", func() error {
			s.mu.Lock()
			defer s.mu.Unlock()
			annotations, _ := s.objects[copyPath]["metadata"].(map[string]any)["annotations"].(map[string]any)
			if selected, checks = annotations[selectedNode] == "b", checks+1; selected || checks == 5 {
				return errUsed // ends the wait
			}
			return nil
		})
		if !errors.Is(err, errUsed) || selected != retried {
			t.Errorf("%s: got %v, node selected: %t, want %t", name, err, selected, retried)
		}
		if text := strings.Join(lines, "\n"); retried != (strings.Contains(text, "pool fast is full: node b is tried again") && strings.Contains(text, "--abort")) {
			t.Errorf("%s: got the output %q", name, text)
		}
	}
}

// lockedMove returns a move in the step last whose volume cannot be used during the transfer, and whose last check of the pods is too
// old.
func lockedMove(t *testing.T) (*apiServer, *Mover) {
	t.Helper()
	s, open := begin(t, "old")
	addPendingCopy(t, s)
	s.objects[podsPath] = object(t, `{"metadata":{},"items":[]}`)
	m := open()
	m.state.Step, m.state.Single, m.state.Locked, m.unused = catching, true, true, now().Add(-time.Hour)
	return s, m
}

// sending returns the report of a node that sends volumes to other ones.
func sending(id string, as ...string) status.Report {
	return status.Report{Volumes: []status.Volume{{ID: "other", SentAs: []string{"pvc-v"}}, {ID: id, SentAs: as}}}
}

// TestCheckUnusedLate: if the last check of the pods is too old, a pod may have used the volume, unless its node reports that it sends
// the volume to the newest copy, and the volume is locked meanwhile.
func TestCheckUnusedLate(t *testing.T) {
	silent := errors.New("the node does not answer")
	for name, tc := range map[string]struct {
		change  func(s *apiServer, m *Mover)
		report  status.Report
		failure error
		want    []error
	}{
		"sent":           {report: sending("old", "pvc-x", "pvc-v")},
		"sent elsewhere": {report: sending("old", "pvc-x"), want: []error{errUsed}},
		"not sent":       {report: sending("old"), want: []error{errUsed}},
		"not reported":   {report: sending("new", "pvc-v"), want: []error{errUsed}},
		"no report":      {failure: silent, want: []error{errUsed, silent}},
		"not locked":     {change: func(_ *apiServer, m *Mover) { m.state.Locked = false }, report: sending("old", "pvc-v"), want: []error{errUsed}},
		"no copy":        {change: func(s *apiServer, _ *Mover) { delete(s.objects, copyPath) }, report: sending("old", "pvc-v"), want: []error{errUsed}},
		"deleted copy": {change: func(s *apiServer, _ *Mover) {
			s.objects[copyPath]["metadata"].(map[string]any)["deletionTimestamp"] = "2026-01-02T03:04:05Z"
		}, report: sending("old", "pvc-v"), want: []error{errUsed}},
		"used":         {change: func(s *apiServer, _ *Mover) { s.objects[podsPath+"/p"] = object(t, user) }, report: sending("old", "pvc-v"), want: []error{errUsed}},
		"recent check": {change: func(_ *apiServer, m *Mover) { m.unused = now() }, failure: silent},
	} {
		s, m := lockedMove(t)
		m.nodeReport = func(context.Context, string) (status.Report, error) { return tc.report, tc.failure }
		if tc.change != nil {
			tc.change(s, m)
		}
		err := m.checkUnused(t.Context())
		if (err == nil) != (len(tc.want) == 0) || slices.ContainsFunc(tc.want, func(want error) bool { return !errors.Is(err, want) }) {
			t.Errorf("%s: got %v, want %v", name, err, tc.want)
		}
	}
}

// TestLongReport: a report can take longer than the pods may be unchecked, because they are checked meanwhile.
func TestLongReport(t *testing.T) {
	for name, tc := range map[string]struct {
		meanwhile func(s *apiServer)
		ends      bool // checkUnused returns an error
	}{
		"unused":             {func(*apiServer) {}, false},
		"used meanwhile":     {func(s *apiServer) { s.objects[podsPath+"/p"] = object(t, user) }, true},
		"pods not available": {func(s *apiServer) { delete(s.objects, podsPath) }, true},
	} {
		s, m := lockedMove(t)
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
		defer cancel()
		before, begun := m.unused, time.Time{}
		m.nodeReport = func(ctx context.Context, _ string) (status.Report, error) {
			begun = now()
			s.mu.Lock()
			tc.meanwhile(s)
			s.mu.Unlock()
			return sending("old", "pvc-v"), s.awaitRead(ctx, podsPath)
		}
		if err := m.checkUnused(ctx); (err != nil) != tc.ends || ctx.Err() != nil {
			t.Errorf("%s: got %v, want an error: %t", name, err, tc.ends)
		}
		if tc.ends && m.unused != before || !tc.ends && !m.unused.After(begun) {
			t.Errorf("%s: got the last successful check at %v, want the one at %v: %t, or one after %v", name, m.unused, before, tc.ends, begun)
		}
	}
}

// awaitRead waits until a path is read once more.
func (s *apiServer) awaitRead(ctx context.Context, path string) error {
	count := func() int {
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.reads[path]
	}
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for before := count(); count() == before; {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
	}
	return nil
}
