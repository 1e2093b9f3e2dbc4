package kube_test

import (
	"context"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/trivet-csi/trivet/cluster/kube"
)

// round is the time between two rounds.
const round = 30 * time.Second

const claimPodsPath = "/api/v1/namespaces/ns/pods/"

// healthTest is a cluster with the nodes a and b, and the bound volume vol of the claim data, which the pod web on node a uses.
type healthTest struct {
	*cluster
	t   *testing.T
	log *logBuffer
	// conditions are those that the nodes find. unexamined are nodes that have not examined the volume, and gone those that do not
	// exist.
	conditions       []kube.VolumeCondition
	unexamined, gone []string
	updates          chan<- kube.HealthRound
}

func newHealthTest(t *testing.T, c *cluster) *healthTest {
	t.Helper()
	c.put(volumesPath+"pv", object{
		"spec": object{
			"csi":      object{"driver": driverName, "volumeHandle": "vol"},
			"claimRef": object{"namespace": "ns", "name": "data", "uid": "uid-data"},
		},
		"status": object{"phase": "Bound"},
	})
	c.put(claimsPath+"data", object{"metadata": object{"namespace": "ns", "uid": "uid-data"}})
	c.putPod("web", "a", "data")
	w := &healthTest{cluster: c, t: t}
	w.log, w.updates = w.replica()
	return w
}

// putPod creates a pod on a node that uses a claim.
func (c *cluster) putPod(name, node, claim string) {
	c.put(claimPodsPath+name, object{
		"metadata": object{"namespace": "ns", "uid": "uid-" + name},
		"spec":     object{"nodeName": node, "volumes": []object{{"name": "v", "persistentVolumeClaim": object{"claimName": claim}}}},
	})
}

// replica starts a driver that knows no earlier conditions. It has completed a round when it receives the next one.
func (w *healthTest) replica() (*logBuffer, chan<- kube.HealthRound) {
	w.t.Helper()
	e := kube.NewHealthEvents(driverName)
	updates := make(chan kube.HealthRound)
	log, _ := start(w.t, func(ctx context.Context) {
		e.Run(ctx, user{cluster: w.cluster}.connect)
		for {
			select {
			case <-ctx.Done():
				return
			case r := <-updates:
				e.Update(ctx, r)
			}
		}
	})
	return log, updates
}

func (w *healthTest) restart() { w.log, w.updates = w.replica() }

// send sends the results of a round to a driver.
func (w *healthTest) send(updates chan<- kube.HealthRound) {
	updates <- kube.HealthRound{
		Conditions: slices.Clone(w.conditions),
		Examined: func(node, volume string) bool {
			return volume == "vol" && !slices.Contains(w.unexamined, node) && !slices.Contains(w.gone, node)
		},
		Exists: func(node string) bool { return !slices.Contains(w.gone, node) },
	}
	synctest.Wait()
}

// next is the next round with the conditions.
func (w *healthTest) next(conditions ...kube.VolumeCondition) {
	w.conditions = conditions
	w.send(w.updates)
	time.Sleep(round)
}

// found is a condition that a node finds.
func found(node, reason string) kube.VolumeCondition {
	return kube.VolumeCondition{Volume: "vol", Node: node, Reason: reason, Message: "see the log"}
}

// recorded returns each event as "OBJECT TYPE REASON COUNT", sorted, and clears none.
func (w *healthTest) recorded() (all []string) {
	for _, path := range w.paths(eventsPath) {
		e := w.get(path)
		all = append(all, strings.Join([]string{text(e, "involvedObject", "kind") + "/" + text(e, "involvedObject", "uid"), text(e, "type"), text(e, "reason"), text(e, "count")}, " "))
	}
	slices.Sort(all)
	return all
}

// want fails the test unless these are the events. Without a text, the events of pods do not count.
func (w *healthTest) want(events ...string) {
	w.t.Helper()
	got := slices.DeleteFunc(w.recorded(), func(e string) bool { return strings.HasPrefix(e, "Pod/") })
	for i, e := range events {
		events[i] = "PersistentVolumeClaim/uid-data " + e
	}
	slices.Sort(events)
	if !slices.Equal(got, events) {
		w.t.Errorf("got events %q, want %q", got, events)
	}
}

// TestHealthEvents: a condition is one warning on the claim and on its pods, and is repeated after half an hour. When it is gone, they
// get one event of type Normal.
func TestHealthEvents(t *testing.T) {
	bubble(t, func(t *testing.T, c *cluster) {
		w := newHealthTest(t, c)
		w.next()
		w.want()
		w.putPod("other", "a", "unrelated")
		w.putPod("elsewhere", "b", "data")
		for range 5 {
			w.next(found("a", "FilesystemErrors"))
		}
		want := []string{"PersistentVolumeClaim/uid-data Warning FilesystemErrors 1", "Pod/uid-web Warning FilesystemErrors 1"}
		if got := w.recorded(); !slices.Equal(got, want) {
			t.Fatalf("got events %q, want %q", got, want)
		}
		e := w.get(w.paths(eventsPath)[0])
		if text(e, "message") != `node "a": see the log` || text(e, "source", "component") != driverName || text(e, "metadata", "labels", "csi.trivet.dev/health") != "FilesystemErrors" {
			t.Errorf("got the event %v", e)
		}
		for range 60 {
			w.next(found("a", "FilesystemErrors"))
		}
		w.want("Warning FilesystemErrors 2")
		for range 3 {
			w.next()
		}
		want = []string{
			"PersistentVolumeClaim/uid-data Normal ConditionGone 1", "PersistentVolumeClaim/uid-data Warning FilesystemErrors 2",
			"Pod/uid-web Normal ConditionGone 1", "Pod/uid-web Warning FilesystemErrors 2",
		}
		if got := w.recorded(); !slices.Equal(got, want) {
			t.Errorf("got events %q after the repair, want %q", got, want)
		}
	})
}

// TestHealthEventOccursAgain: a condition that occurs again soon is reported again.
func TestHealthEventOccursAgain(t *testing.T) {
	bubble(t, func(t *testing.T, c *cluster) {
		w := newHealthTest(t, c)
		for range 2 {
			w.next(found("a", "PoolAlmostFull"))
			w.next()
		}
		w.want("Warning PoolAlmostFull 2", "Normal ConditionGone 2")
	})
}

// TestHealthEventReplicas: two replicas create one event for each change, and one that restarts repeats nothing and notices the repair.
func TestHealthEventReplicas(t *testing.T) {
	bubble(t, func(t *testing.T, c *cluster) {
		w := newHealthTest(t, c)
		_, second := w.replica()
		both := func(conditions ...kube.VolumeCondition) {
			w.conditions = conditions
			w.send(w.updates)
			time.Sleep(round / 2)
			w.send(second)
			time.Sleep(round / 2)
		}
		both(found("a", "LockLost"))
		both(found("a", "LockLost"))
		w.want("Warning LockLost 1")
		w.restart()
		both(found("a", "LockLost"))
		w.want("Warning LockLost 1")
		w.restart()
		both()
		both()
		w.want("Warning LockLost 1", "Normal ConditionGone 1")
		w.restart()
		both()
		w.want("Warning LockLost 1", "Normal ConditionGone 1")
		both(found("a", "LockLost"))
		w.want("Warning LockLost 2", "Normal ConditionGone 1")
	})
}

// TestHealthEventNotExamined: a condition is only gone if each node that found it has examined the volume.
func TestHealthEventNotExamined(t *testing.T) {
	bubble(t, func(t *testing.T, c *cluster) {
		w := newHealthTest(t, c)
		w.next(found("a", "DiskMissing"), found("b", "DiskMissing"))
		w.want("Warning DiskMissing 1")
		w.unexamined = []string{"a"}
		w.next(found("b", "DiskMissing"))
		w.next() // b does not find it any more
		w.want("Warning DiskMissing 1")
		w.unexamined = nil
		unavailable := found("a", "PoolUnavailable")
		unavailable.Inaccessible = true
		w.next(unavailable)
		w.want("Warning DiskMissing 1", "Warning PoolUnavailable 1")
		w.next()
		w.want("Warning DiskMissing 1", "Warning PoolUnavailable 1", "Normal ConditionGone 1", "Normal ConditionGone 1")
	})
}

// TestHealthEventNodeGone: it is not known whether a condition is gone if its node does not exist any more.
func TestHealthEventNodeGone(t *testing.T) {
	bubble(t, func(t *testing.T, c *cluster) {
		w := newHealthTest(t, c)
		w.next(found("a", "DiskMissing"))
		w.gone = []string{"a"}
		w.next()
		w.gone = nil
		w.next()
		w.want("Warning DiskMissing 1")
	})
}

// TestHealthEventWithoutClaim: a volume without a bound claim has no events, the search for the claim is rare, and no event follows the
// end of a claim.
func TestHealthEventWithoutClaim(t *testing.T) {
	bubble(t, func(t *testing.T, c *cluster) {
		w := newHealthTest(t, c)
		bound := w.get(volumesPath + "pv")
		c.put(volumesPath+"pv", merge(bound, object{"status": object{"phase": "Released"}}))
		for range 60 {
			w.next(found("a", "DiskMissing"))
		}
		if n := c.called("GET persistentvolumes"); n < 2 || n > 4 {
			t.Errorf("got %d lists of PersistentVolumes in half an hour, want 3", n)
		}
		w.want()
		c.put(volumesPath+"pv", bound)
		for range 20 {
			w.next(found("a", "DiskMissing"))
		}
		w.want("Warning DiskMissing 1")
		c.remove(claimsPath + "data")
		w.next()
		w.want("Warning DiskMissing 1")
	})
}

// TestHealthEventOtherClaim: a claim that was deleted gets no further event, and the next claim of the volume gets the event.
func TestHealthEventOtherClaim(t *testing.T) {
	bubble(t, func(t *testing.T, c *cluster) {
		w := newHealthTest(t, c)
		w.next(found("a", "DiskMissing"))
		c.put(claimsPath+"data", object{"metadata": object{"namespace": "ns", "uid": "uid-next"}})
		c.put(volumesPath+"pv", merge(w.get(volumesPath+"pv"), object{"spec": object{
			"csi":      object{"driver": driverName, "volumeHandle": "vol"},
			"claimRef": object{"namespace": "ns", "name": "data", "uid": "uid-next"},
		}}))
		for range 61 {
			w.next(found("a", "DiskMissing"))
		}
		for _, want := range []string{"PersistentVolumeClaim/uid-data Warning DiskMissing 1", "PersistentVolumeClaim/uid-next Warning DiskMissing 1"} {
			if got := w.recorded(); !slices.Contains(got, want) {
				t.Errorf("got events %q, want %q among them", got, want)
			}
		}
	})
}

// TestHealthEventErrors: a failed event is tried again, the log has one line, and missing rights to list pods concern only the pods.
func TestHealthEventErrors(t *testing.T) {
	bubble(t, func(t *testing.T, c *cluster) {
		w := newHealthTest(t, c)
		c.refuseAll("GET pods", http.StatusForbidden)
		c.mu.Lock()
		c.fail["POST events"] = []int{http.StatusForbidden, http.StatusInternalServerError, http.StatusForbidden}
		c.mu.Unlock()
		for range 4 {
			w.next(found("a", "DiskMissing"))
		}
		want := []string{"PersistentVolumeClaim/uid-data Warning DiskMissing 1"}
		if got := w.recorded(); !slices.Equal(got, want) {
			t.Errorf("got events %q, want %q", got, want)
		}
		if got := w.log.count("Recording events about the health of volumes failed"); got != 1 {
			t.Errorf("got %d lines in the log, want 1:\n%s", got, w.log)
		}
	})
}

// TestHealthEventLimit: the number of events of a round is limited. Later rounds create the others.
func TestHealthEventLimit(t *testing.T) {
	bubble(t, func(t *testing.T, c *cluster) {
		w := newHealthTest(t, c)
		var all []kube.VolumeCondition
		for i := range 700 {
			id := fmt.Sprintf("vol-%03d", i)
			pv := merge(w.get(volumesPath+"pv"), object{"metadata": object{"name": id}})
			spec := maps.Clone(pv["spec"].(object))
			spec["csi"] = object{"driver": driverName, "volumeHandle": id}
			spec["claimRef"] = object{"namespace": "ns", "name": id, "uid": "uid-" + id}
			pv["spec"] = spec
			c.put(volumesPath+id, pv)
			all = append(all, kube.VolumeCondition{Volume: id, Node: "a", Reason: "ServerSilent"})
		}
		w.next(all...)
		if n := len(w.paths(eventsPath)); n != 500 {
			t.Errorf("got %d events in one round, want 500", n)
		}
		w.next(all...)
		if n := len(w.paths(eventsPath)); n != 700 {
			t.Errorf("got %d events in two rounds, want 700", n)
		}
	})
}
