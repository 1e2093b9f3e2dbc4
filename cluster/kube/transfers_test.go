package kube_test

import (
	"context"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/trivet-csi/trivet/cluster/kube"
)

// transferTest is a cluster with a claim, for which a volume is created.
type transferTest struct {
	*cluster
	t   *testing.T
	log *logBuffer
	// record records an event about the transfer.
	record func(state kube.TransferState, detail string)
}

func newTransferTest(t *testing.T, c *cluster) *transferTest {
	t.Helper()
	c.put(claimsPath+"data", object{"metadata": object{"namespace": "ns", "uid": "uid-data"}})
	w := &transferTest{cluster: c, t: t}
	w.restart()
	return w
}

// restart starts another driver, which knows nothing of earlier transfers.
func (w *transferTest) restart() {
	w.t.Helper()
	e := kube.NewTransferEvents(driverName)
	calls := make(chan kube.Transfer)
	w.log, _ = start(w.t, func(ctx context.Context) {
		e.Run(ctx, user{cluster: w.cluster}.connect)
		for {
			select {
			case <-ctx.Done():
				return
			case call := <-calls:
				e.Record(ctx, call)
			}
		}
	})
	w.record = func(state kube.TransferState, detail string) {
		calls <- kube.Transfer{
			Namespace: "ns", Claim: "data", Volume: "pvc-1", Source: "snapshot s", From: "a", To: "b", Size: 10 << 30, State: state, Detail: detail,
		}
		synctest.Wait()
	}
}

// want fails the test unless the claim has exactly the events with these reasons. It returns them by reason.
func (w *transferTest) want(reasons ...string) map[string]object {
	w.t.Helper()
	found := map[string]object{}
	for _, path := range w.paths(eventsPath) {
		o := w.get(path)
		found[text(o, "reason")] = o
		if text(o, "involvedObject", "uid") != "uid-data" || text(o, "involvedObject", "kind") != "PersistentVolumeClaim" {
			w.t.Errorf("got an event on %v, want one on the claim", o["involvedObject"])
		}
	}
	if len(found) != len(reasons) || len(w.paths(eventsPath)) != len(reasons) {
		w.t.Errorf("got events %v, want %q", w.paths(eventsPath), reasons)
	}
	for _, reason := range reasons {
		if found[reason] == nil {
			w.t.Errorf("got no event %s", reason)
		}
	}
	return found
}

// TestTransferEvents: a claim has one event for the begin and the progress of a transfer, which is changed at most once a minute, and
// one for its end, also if the driver restarts.
func TestTransferEvents(t *testing.T) {
	bubble(t, func(t *testing.T, c *cluster) {
		w := newTransferTest(t, c)
		w.record(kube.TransferRuns, "")
		begun := w.want("Transferring")["Transferring"]
		if got := text(begun, "message"); got != `Transfer of snapshot s from node "a" to node "b", for a volume of 10 GiB` || text(begun, "type") != "Normal" {
			t.Errorf("got the event %v", begun)
		}
		w.record(kube.TransferContinues, "1 GiB so far")
		if got := text(w.want("Transferring")["Transferring"], "message"); strings.Contains(got, "so far") {
			t.Errorf("got the message %q in the first minute, want no progress", got)
		}
		time.Sleep(time.Minute)
		w.restart()
		w.record(kube.TransferRuns, "")
		w.record(kube.TransferContinues, "2 GiB so far")
		w.record(kube.TransferContinues, "3 GiB so far")
		changed := w.want("Transferring")["Transferring"]
		if got := text(changed, "message"); !strings.HasSuffix(got, ": 2 GiB so far") || text(changed, "count") != "2" || text(changed, "lastTimestamp") == text(begun, "lastTimestamp") {
			t.Errorf("got the event %v after a minute, want one progress", changed)
		}
		w.restart()
		w.record(kube.TransferCompleted, "")
		w.record(kube.TransferCompleted, "")
		ended := w.want("Transferring", "Transferred")["Transferred"]
		if got := text(ended, "message"); !strings.HasSuffix(got, "is complete") || text(ended, "count") != "1" {
			t.Errorf("got the event %v, want one that the transfer is complete", ended)
		}
	})
}

// TestTransferEventFailed: a failure is a warning with the reason, and is repeated at most once a minute.
func TestTransferEventFailed(t *testing.T) {
	bubble(t, func(t *testing.T, c *cluster) {
		w := newTransferTest(t, c)
		w.record(kube.TransferFailed, "node a is down")
		w.record(kube.TransferFailed, "node a is still down")
		failed := w.want("TransferFailed")["TransferFailed"]
		if got := text(failed, "message"); !strings.HasSuffix(got, ": node a is down") || text(failed, "type") != "Warning" || text(failed, "count") != "1" {
			t.Errorf("got the event %v, want one warning with the first reason", failed)
		}
		time.Sleep(time.Minute)
		w.record(kube.TransferFailed, strings.Repeat("long ", 1000))
		if got := w.want("TransferFailed")["TransferFailed"]; len(text(got, "message")) != 1024 || text(got, "count") != "2" {
			t.Errorf("got the event %v, want a second one with 1024 bytes", got)
		}
	})
}

// TestTransferWithoutEvents: there are no events about a volume that existed before, and about a claim that does not exist or is
// being deleted.
func TestTransferWithoutEvents(t *testing.T) {
	bubble(t, func(t *testing.T, c *cluster) {
		w := newTransferTest(t, c)
		w.record(kube.TransferCompleted, "")
		c.put(claimsPath+"data", object{"metadata": object{"namespace": "ns", "uid": "uid-data", "deletionTimestamp": "2026-01-01T00:00:00Z"}})
		w.record(kube.TransferRuns, "")
		c.remove(claimsPath + "data")
		w.record(kube.TransferFailed, "any")
		w.want()
		if w.log.String() != "" {
			t.Errorf("got the log %s, want nothing", w.log)
		}
	})
}

// TestTransferEventsForbidden: missing rights are logged once in ten minutes.
func TestTransferEventsForbidden(t *testing.T) {
	bubble(t, func(t *testing.T, c *cluster) {
		c.refuseAll("POST events", http.StatusForbidden)
		w := newTransferTest(t, c)
		for range 20 {
			w.record(kube.TransferContinues, "any")
			time.Sleep(time.Minute)
		}
		if got := w.log.count("Recording an event about a transfer failed"); got != 2 {
			t.Errorf("got %d log lines in 20 minutes, want 2:\n%s", got, w.log)
		}
	})
}
