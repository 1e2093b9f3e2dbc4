package kube_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/trivet-csi/trivet/cluster/kube"
)

const (
	driverName  = "csi.trivet.dev"
	lossDelay   = 10 * time.Minute
	volumesPath = "/api/v1/persistentvolumes/"
	claimsPath  = "/api/v1/namespaces/ns/persistentvolumeclaims/"
	eventsPath  = "/api/v1/namespaces/ns/events/"
	volumeEvent = "/api/v1/namespaces/default/events/"
	classesPath = "/apis/storage.k8s.io/v1/storageclasses/"
)

// lossTest is a cluster with a NodeLoss. The node "gone" has the volume "v", whose claim is "data".
type lossTest struct {
	*cluster
	t       *testing.T
	loss    *kube.NodeLoss
	log     *logBuffer
	checked []checkedPool

	checking  sync.Mutex // protects elsewhere and during
	elsewhere error      // the answer of CheckLost
	during    func()     // called by the first CheckLost
}

// checkedPool are the arguments of a call of CheckLost.
type checkedPool struct {
	volume string
	nodes  []string
}

// newLossTest creates the objects: the nodes a, b and gone, and a bound claim of a class with onNodeLoss: release.
func newLossTest(t *testing.T, c *cluster) *lossTest {
	t.Helper()
	l := &lossTest{cluster: c, t: t}
	for _, name := range []string{"a", "b", "gone"} {
		l.addNode(name)
	}
	c.put(classesPath+"released", object{"metadata": object{"creationTimestamp": "1999-01-01T00:00:00Z"}, "provisioner": driverName, "parameters": object{"onNodeLoss": "release"}})
	c.put(classesPath+"kept", object{"provisioner": driverName, "parameters": object{}})
	l.bind("v", "data", "gone", nil)
	return l
}

func (l *lossTest) addNode(name string) {
	l.put(nodesPath+name, nodeObject(object{"csi.trivet.dev/node": name}))
}

// bind creates a claim, and a PersistentVolume that is bound to it and has the class "released". change is merged into the
// PersistentVolume.
func (l *lossTest) bind(name, claim, node string, change object) {
	l.put(claimsPath+claim, object{"metadata": object{"namespace": "ns", "uid": "uid-" + claim}, "spec": object{"volumeName": name}})
	l.put(volumesPath+name, merge(viaJSON(object{
		"metadata": object{
			"uid": "uid-" + name, "finalizers": []any{"kubernetes.io/pv-protection"}, "creationTimestamp": "1999-01-01T00:00:01Z",
			"annotations": object{"pv.kubernetes.io/provisioned-by": driverName},
		},
		"status": object{"phase": "Bound"},
		"spec": object{
			"csi":      object{"driver": driverName, "volumeHandle": "loop:default.01234567:" + name},
			"claimRef": object{"namespace": "ns", "name": claim, "uid": "uid-" + claim}, "storageClassName": "released",
			"persistentVolumeReclaimPolicy": "Delete", "nodeAffinity": affinity(node),
		},
	}), viaJSON(change)))
}

// affinity returns the node affinity of a volume that only one node can reach.
func affinity(node string) object {
	return object{"required": object{"nodeSelectorTerms": []any{object{"matchExpressions": []any{
		object{"key": "csi.trivet.dev/node", "operator": "In", "values": []any{node}},
	}}}}}
}

// change merges fields into an object.
func (l *lossTest) change(path string, fields object) {
	l.put(path, merge(l.get(path), viaJSON(fields)))
}

// run starts the NodeLoss, and waits until it has examined the nodes.
func (l *lossTest) run() {
	l.t.Helper()
	l.loss = kube.NewNodeLoss(kube.NodeLossOptions{Driver: driverName, Delay: lossDelay, CheckLost: l.checkLost})
	l.log, _ = start(l.t, func(ctx context.Context) { l.loss.Run(ctx, user{cluster: l.cluster}.connect) })
	l.wait(2 * time.Second)
}

func (l *lossTest) checkLost(ctx context.Context, volumeID string, nodes []string) error {
	if _, limited := ctx.Deadline(); !limited {
		l.t.Error("CheckLost is called without a deadline")
	}
	l.checking.Lock()
	answer, during := l.elsewhere, l.during
	l.during = nil
	l.checking.Unlock()
	if during != nil {
		during()
	}
	slices.Sort(nodes)
	l.checked = append(l.checked, checkedPool{volumeID, nodes})
	return answer
}

// answerCheck sets the answer of CheckLost.
func (l *lossTest) answerCheck(err error) {
	l.checking.Lock()
	defer l.checking.Unlock()
	l.elsewhere = err
}

// duringCheck sets the function that the next CheckLost calls.
func (l *lossTest) duringCheck(f func()) {
	l.checking.Lock()
	defer l.checking.Unlock()
	l.during = f
}

// lose runs the NodeLoss, deletes the Node objects, and waits until the delay is over.
func (l *lossTest) lose(names ...string) {
	l.t.Helper()
	l.run()
	for _, name := range names {
		l.remove(nodesPath + name)
	}
	l.wait(lossDelay + time.Minute)
}

func (l *lossTest) wait(d time.Duration) {
	time.Sleep(d) // of the clock of testing/synctest
	synctest.Wait()
}

// reasons returns the reasons of the events in a list.
func (l *lossTest) reasons(list string) (reasons []string) {
	for _, path := range l.paths(list) {
		reasons = append(reasons, text(l.get(path), "reason"))
	}
	return reasons
}

// wantReleased fails the test unless the claim is deleted, and the PersistentVolume is retained and being deleted.
func (l *lossTest) wantReleased(volume, claim string) {
	l.t.Helper()
	v := l.get(volumesPath + volume)
	if got := l.get(claimsPath + claim); got != nil {
		l.t.Errorf("got claim %v, want none\n%s", got, l.log)
	}
	if text(v, "spec", "persistentVolumeReclaimPolicy") != "Retain" || field(v, "metadata", "deletionTimestamp") == nil || field(v, "metadata", "finalizers") == nil {
		l.t.Errorf("got PersistentVolume %v, want one with the policy Retain and its finalizers that is being deleted\n%s", v, l.log)
	}
}

// wantKept fails the test unless the claim and the PersistentVolume are unchanged.
func (l *lossTest) wantKept(volume, claim string) {
	l.t.Helper()
	v := l.get(volumesPath + volume)
	if l.get(claimsPath+claim) == nil || v == nil || field(v, "metadata", "annotations", kube.NodeLostKey) != nil || field(v, "metadata", "deletionTimestamp") != nil {
		l.t.Errorf("got claim %v and PersistentVolume %v, want both unchanged\n%s", l.get(claimsPath+claim), v, l.log)
	}
}

// wantCounts fails the test unless the numbers of volumes are as given.
func (l *lossTest) wantCounts(kept, waiting, stopped, released int) {
	l.t.Helper()
	counts, got := l.loss.Counts()
	if counts[kube.LostKept] != kept || counts[kube.LostWaiting] != waiting || counts[kube.LostStopped] != stopped || got != released {
		l.t.Errorf("got %v and %d released, want %d kept, %d waiting, %d stopped and %d released\n%s", counts, got, kept, waiting, stopped, released, l.log)
	}
}

// TestNodeLoss: the claims of a lost node are deleted after the delay, with events. The controllers that have added the
// finalizers of the PersistentVolume remove it.
func TestNodeLoss(t *testing.T) {
	bubble(t, func(t *testing.T, c *cluster) {
		l := newLossTest(t, c)
		l.run()
		l.remove(nodesPath + "gone")
		l.wait(lossDelay - time.Minute)
		l.wantKept("v", "data")
		l.wantCounts(0, 1, 0, 0)
		l.wait(2 * time.Minute)
		l.wantReleased("v", "data")
		if got := text(c.get(volumesPath+"v"), "metadata", "annotations", kube.NodeLostKey); got != "Delete" {
			t.Errorf("got annotation %q, want the policy Delete", got)
		}
		for _, list := range []string{eventsPath, volumeEvent} {
			if got := l.reasons(list); !slices.Equal(got, []string{"NodeLost"}) {
				t.Errorf("got events %q in %s, want NodeLost", got, list)
			}
		}
		l.wantCounts(0, 1, 0, 1)
		c.remove(volumesPath + "v")
		l.wait(time.Minute)
		l.wantCounts(0, 0, 0, 1)
	})
}

// TestNodeLossKept: in each case, the claim and the PersistentVolume are not changed.
func TestNodeLossKept(t *testing.T) {
	spec := func(fields object) object { return object{"spec": fields} }
	volume := func(l *lossTest, fields object) { l.change(volumesPath+"v", fields) }
	for name, tc := range map[string]struct {
		before  func(*lossTest) // before the nodes are deleted
		after   func(*lossTest) // after that
		gone    []string        // the deleted nodes; default: the node of the volume
		stopped string          // the reason in the event of the claim
	}{
		"node exists": {gone: []string{"b"}},
		"attribute keep": {before: func(l *lossTest) {
			volume(l, spec(object{"csi": object{"volumeAttributes": object{"onNodeLoss": "keep"}}}))
		}},
		"unknown value": {before: func(l *lossTest) {
			volume(l, spec(object{"csi": object{"volumeAttributes": object{"onNodeLoss": "delete"}}}))
		}},
		"class without the parameter":        {before: func(l *lossTest) { volume(l, spec(object{"storageClassName": "kept"})) }},
		"class deleted":                      {before: func(l *lossTest) { l.remove(classesPath + "released") }},
		"no class":                           {before: func(l *lossTest) { volume(l, spec(object{"storageClassName": ""})) }},
		"class of another driver":            {before: func(l *lossTest) { l.change(classesPath+"released", object{"provisioner": "x"}) }},
		"volume of another driver":           {before: func(l *lossTest) { volume(l, spec(object{"csi": object{"driver": "x"}})) }},
		"static volume":                      {before: func(l *lossTest) { volume(l, spec(object{"csi": object{"volumeHandle": "any text"}})) }},
		"volume on an export":                {before: func(l *lossTest) { volume(l, spec(object{"csi": object{"volumeHandle": "loop:nas:v"}})) }},
		"several nodes":                      {before: func(l *lossTest) { volume(l, spec(object{"nodeAffinity": withValues("gone", "other")})) }},
		"another expression in the affinity": {before: func(l *lossTest) { volume(l, spec(object{"nodeAffinity": withExpression()})) }},
		"no affinity": {before: func(l *lossTest) {
			volume(l, spec(object{"nodeAffinity": object{"required": object{"nodeSelectorTerms": []any{}}}}))
		}},
		"node with another label": {after: func(l *lossTest) { l.put(nodesPath+"gone", nodeObject(nil)) }},
		"node with another name":  {after: func(l *lossTest) { l.put(nodesPath+"new", nodeObject(object{"csi.trivet.dev/node": "gone"})) }},
		"node exists again":       {after: func(l *lossTest) { l.wait(lossDelay / 2); l.addNode("gone") }},
		"pool elsewhere":          {before: func(l *lossTest) { l.answerCheck(errors.New("it is on node b")) }, stopped: "it is on node b"},
		"a move runs": {before: func(l *lossTest) {
			l.change(claimsPath+"data", object{"metadata": object{"annotations": object{kube.MoveKey: "1 copy"}}})
		}, stopped: "is being moved"},
		"copy of a move": {before: func(l *lossTest) {
			l.change(claimsPath+"data", object{"metadata": object{"labels": object{kube.MoveKey: "1"}}})
		}, stopped: "is being moved"},
		"claim bound to another volume": {before: func(l *lossTest) { l.change(claimsPath+"data", spec(object{"volumeName": "w"})) }, stopped: "PersistentVolume w"},
		"all nodes deleted":             {gone: []string{"a", "b", "gone"}, stopped: "may have been deleted by mistake"},
		"two of three nodes deleted":    {before: func(l *lossTest) { l.bind("w", "other", "b", spec(object{"storageClassName": "kept"})) }, gone: []string{"b", "gone"}, stopped: "2 nodes that have volumes do not exist"},
		"five of ten nodes deleted": {before: func(l *lossTest) {
			for _, name := range []string{"c", "d", "e", "f", "g", "h", "i"} {
				l.addNode(name)
			}
			for _, name := range []string{"c", "d", "e", "f"} {
				l.bind("v-"+name, "data-"+name, name, nil)
			}
		}, gone: []string{"c", "d", "e", "f", "gone"}, stopped: "5 nodes that have volumes do not exist. At most 1 may be lost while 5 nodes"},
		"new node appears at the last moment": {after: func(l *lossTest) {
			l.duringCheck(func() { l.put(nodesPath+"new", newNode()) })
		}, stopped: `node "new" is new and has no driver yet`},
		"node registers while the pool is checked": {after: func(l *lossTest) {
			l.duringCheck(func() { l.addNode("other"); l.answerCheck(errors.New("not known yet")) })
		}, stopped: `node "other" is new`},
		"class newer than the volume": {before: func(l *lossTest) {
			l.change(classesPath+"released", object{"metadata": object{"creationTimestamp": "1999-01-01T00:00:02Z"}})
		}},
		"volume of another provisioner": {before: func(l *lossTest) {
			volume(l, object{"metadata": object{"annotations": object{"pv.kubernetes.io/provisioned-by": "x"}}})
		}},
		"reading Nodes fails": {before: func(l *lossTest) { l.refuseAll("GET nodes", http.StatusForbidden) }},
		"reading PersistentVolumes fails": {before: func(l *lossTest) {
			l.refuseAll("GET persistentvolumes", http.StatusInternalServerError)
		}},
		"reading claims fails": {before: func(l *lossTest) {
			l.refuseAll("GET persistentvolumeclaims", http.StatusForbidden)
		}},
		"reading StorageClasses fails":      {before: func(l *lossTest) { l.refuseAll("GET storageclasses", http.StatusForbidden) }},
		"API server unreachable":            {after: func(l *lossTest) { l.setUnreachable(true) }},
		"node exists again when it is read": {after: func(l *lossTest) { l.intercept("GET persistentvolumes", func() { l.addNode("gone") }) }, stopped: `node "gone" exists again`},
		"volume replaced when it is read": {after: func(l *lossTest) {
			l.intercept("GET persistentvolumes", func() { volume(l, spec(object{"nodeAffinity": affinity("a")})) })
		}},
		"class changed when it is read": {after: func(l *lossTest) {
			l.intercept("GET persistentvolumes", func() { volume(l, spec(object{"storageClassName": "kept"})) })
		}},
		"changing the PersistentVolume fails": {after: func(l *lossTest) {
			l.refuseAll("PATCH persistentvolumes", http.StatusForbidden)
		}},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T, c *cluster) {
				l := newLossTest(t, c)
				l.run()
				if tc.before != nil {
					tc.before(l)
				}
				l.wait(time.Second)
				gone := tc.gone
				if gone == nil {
					gone = []string{"gone"}
				}
				for _, name := range gone {
					c.remove(nodesPath + name)
				}
				l.wait(time.Second)
				if tc.after != nil {
					tc.after(l)
				}
				l.wait(lossDelay + time.Minute)
				l.wantKept("v", "data")
				var messages []string
				for _, path := range c.paths(eventsPath) {
					messages = append(messages, text(c.get(path), "message"))
				}
				if all := strings.Join(messages, "\n"); (tc.stopped != "") != (len(messages) > 0) || !strings.Contains(all, tc.stopped) {
					t.Errorf("got events %q, want %q", messages, tc.stopped)
				}
				if _, released := l.loss.Counts(); released != 0 {
					t.Errorf("got %d released volumes, want none", released)
				}
			})
		})
	}
}

// newNode returns a Node without the driver that is created now.
func newNode() object {
	return object{"metadata": object{"creationTimestamp": time.Now().UTC().Format(time.RFC3339)}}
}

// withValues returns a node affinity with several values.
func withValues(values ...any) object {
	return object{"required": object{"nodeSelectorTerms": []any{object{"matchExpressions": []any{
		object{"key": "csi.trivet.dev/node", "operator": "In", "values": values},
	}}}}}
}

// withExpression returns a node affinity with two expressions.
func withExpression() object {
	return object{"required": object{"nodeSelectorTerms": []any{object{"matchExpressions": []any{
		object{"key": "csi.trivet.dev/node", "operator": "In", "values": []any{"gone"}}, object{"key": "zone", "operator": "Exists"},
	}}}}}
}

// TestNodeLossSetting: the attributes of a volume have precedence over its class.
func TestNodeLossSetting(t *testing.T) {
	bubble(t, func(t *testing.T, c *cluster) {
		l := newLossTest(t, c)
		l.change(volumesPath+"v", object{"spec": object{"csi": object{"volumeAttributes": object{"onNodeLoss": "release"}}, "storageClassName": "kept"}})
		l.bind("w", "other", "gone", object{"spec": object{"storageClassName": "kept"}})
		l.lose("gone")
		l.wantReleased("v", "data")
		l.wantKept("w", "other")
		l.wantCounts(1, 1, 0, 1)
	})
}

// TestNodeLossClaim: a claim is deleted only if it has the UID in the PersistentVolume. Without its claim, a
// PersistentVolume is removed if its policy is Delete, because no driver can delete its volume.
func TestNodeLossClaim(t *testing.T) {
	for name, tc := range map[string]struct {
		uid      string // of the claim; empty: it does not exist
		policy   string
		released bool
	}{
		"bound, Delete":         {"uid-data", "Delete", true},
		"bound, Retain":         {"uid-data", "Retain", true},
		"deleted, Delete":       {"", "Delete", true},
		"deleted, Retain":       {"", "Retain", false},
		"another claim, Delete": {"uid-new", "Delete", true},
		"another claim, Retain": {"uid-new", "Retain", false},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T, c *cluster) {
				l := newLossTest(t, c)
				l.change(volumesPath+"v", object{"spec": object{"persistentVolumeReclaimPolicy": tc.policy}})
				l.change(claimsPath+"data", object{"metadata": object{"uid": tc.uid}, "spec": object{"volumeName": ""}})
				if tc.uid == "" {
					c.remove(claimsPath + "data")
				}
				l.lose("gone")
				if deleted := field(c.get(volumesPath+"v"), "metadata", "deletionTimestamp") != nil; deleted != tc.released {
					t.Errorf("got the PersistentVolume deleted: %t, want %t\n%s", deleted, tc.released, l.log)
				}
				if exists, want := c.get(claimsPath+"data") != nil, tc.uid == "uid-new"; exists != want {
					t.Errorf("got the claim present: %t, want %t\n%s", exists, want, l.log)
				}
			})
		})
	}
}

// TestNodeLossResumed: after each failed step, the release continues.
func TestNodeLossResumed(t *testing.T) {
	for call, codes := range map[string][]int{
		"PATCH persistentvolumes":       {http.StatusConflict, http.StatusInternalServerError},
		"DELETE persistentvolumeclaims": {http.StatusConflict, http.StatusInternalServerError, http.StatusForbidden},
		"DELETE persistentvolumes":      {http.StatusConflict, http.StatusInternalServerError},
		"POST events":                   {http.StatusForbidden, http.StatusForbidden},
	} {
		t.Run(call, func(t *testing.T) {
			bubble(t, func(t *testing.T, c *cluster) {
				l := newLossTest(t, c)
				c.fail[call] = codes
				l.lose("gone")
				l.wantReleased("v", "data")
				l.wantCounts(0, 1, 0, 1)
			})
		})
	}
}

// TestNodeLossRestart: the delay counts from the start of the process.
func TestNodeLossRestart(t *testing.T) {
	bubble(t, func(t *testing.T, c *cluster) {
		l := newLossTest(t, c)
		c.remove(nodesPath + "gone")
		l.run()
		l.wait(lossDelay - time.Minute)
		l.run()
		l.wait(time.Second)
		l.wantCounts(0, 1, 0, 0)
		l.wait(lossDelay)
		l.wantReleased("v", "data")
	})
}

// TestNodeLossAgain: the delay begins again when the node exists again.
func TestNodeLossAgain(t *testing.T) {
	bubble(t, func(t *testing.T, c *cluster) {
		l := newLossTest(t, c)
		l.run()
		c.remove(nodesPath + "gone")
		l.wait(lossDelay / 2)
		l.addNode("gone")
		l.wait(time.Minute)
		c.remove(nodesPath + "gone")
		l.wait(lossDelay - time.Minute)
		l.wantKept("v", "data")
		l.wait(2 * time.Minute)
		l.wantReleased("v", "data")
	})
}

// TestNodeLossAgainBetween: the delay begins again also if the watch has not reported the node.
func TestNodeLossAgainBetween(t *testing.T) {
	bubble(t, func(t *testing.T, c *cluster) {
		l := newLossTest(t, c)
		c.intercept("GET persistentvolumes", func() { l.addNode("gone") })
		c.intercept("POST events", func() { l.remove(nodesPath + "gone") }) // the event that the node exists again
		l.lose("gone")
		l.wantKept("v", "data")
		l.wait(lossDelay - 2*time.Minute)
		l.wantKept("v", "data")
		l.wait(2 * time.Minute)
		l.wantReleased("v", "data")
	})
}

// TestNodeLossRetainedBefore: a PersistentVolume without a claim that an administrator has retained is not released, although
// an earlier release has begun.
func TestNodeLossRetainedBefore(t *testing.T) {
	bubble(t, func(t *testing.T, c *cluster) {
		l := newLossTest(t, c)
		l.change(volumesPath+"v", object{
			"metadata": object{"annotations": object{kube.NodeLostKey: "Retain"}},
			"spec":     object{"persistentVolumeReclaimPolicy": "Retain"},
		})
		c.remove(claimsPath + "data")
		c.remove(nodesPath + "gone") // before the first examination, which would remove the annotation
		l.run()
		l.wait(lossDelay + time.Minute)
		if v := c.get(volumesPath + "v"); field(v, "metadata", "deletionTimestamp") != nil {
			t.Errorf("got PersistentVolume %v, want one that is not deleted\n%s", v, l.log)
		}
	})
}

// TestNodeLossInOrder: the claims of one node are released at a time. A node whose volumes cannot be released does not
// delay others.
func TestNodeLossInOrder(t *testing.T) {
	bubble(t, func(t *testing.T, c *cluster) {
		l := newLossTest(t, c)
		for i := range 15 { // up to 20 % of the existing nodes can be lost
			l.addNode(fmt.Sprint("node-", i))
		}
		l.bind("w", "other", "b", nil)
		l.bind("x", "moving", "a", nil)
		l.change(claimsPath+"moving", object{"metadata": object{"annotations": object{kube.MoveKey: "1 copy"}}})
		var order []string
		c.before["DELETE persistentvolumeclaims"] = func() {
			order = append(order, c.paths(claimsPath)...)
			l.addNode("gone") // the next release checks the nodes again
		}
		l.lose("a", "b", "gone")
		l.wantReleased("w", "other")
		l.wantKept("v", "data")
		l.wantKept("x", "moving")
		l.wantCounts(0, 1, 1, 1)
		if len(order) != 3 {
			t.Errorf("got claims %q at the first deletion, want all three", order)
		}
	})
}

// TestNodeLossReplicas: two replicas release a volume once.
func TestNodeLossReplicas(t *testing.T) {
	bubble(t, func(t *testing.T, c *cluster) {
		l := newLossTest(t, c)
		l.run()
		first := l.loss
		l.lose("gone")
		l.wantReleased("v", "data")
		_, one := first.Counts()
		_, two := l.loss.Counts()
		if one+two != 1 {
			t.Errorf("got %d and %d released volumes, want one", one, two)
		}
		if got := l.reasons(eventsPath); !slices.Equal(got, []string{"NodeLost"}) {
			t.Errorf("got events %q, want one", got)
		}
	})
}

// TestNodeLossNewNode: a new node without the driver delays the release until the time of its registration is over.
func TestNodeLossNewNode(t *testing.T) {
	bubble(t, func(t *testing.T, c *cluster) {
		l := newLossTest(t, c)
		l.run()
		c.remove(nodesPath + "gone")
		l.wait(lossDelay / 2)
		c.put(nodesPath+"other", newNode())
		l.wait(lossDelay - time.Minute)
		l.wantKept("v", "data")
		l.wait(2 * time.Minute)
		l.wantReleased("v", "data")
		if got := l.reasons(eventsPath); !slices.Equal(slices.Sorted(slices.Values(got)), []string{"NodeLossStopped", "NodeLost"}) {
			t.Errorf("got events %q, want that the release was stopped first", got)
		}
	})
}

// TestNodeLossChecksPoolOnce: CheckLost is called once for all volumes of a pool, with the names of all nodes.
func TestNodeLossChecksPoolOnce(t *testing.T) {
	bubble(t, func(t *testing.T, c *cluster) {
		l := newLossTest(t, c)
		l.bind("w", "other", "gone", nil)
		l.lose("gone")
		l.wantReleased("v", "data")
		l.wantReleased("w", "other")
		if len(l.checked) != 1 || !slices.Equal(l.checked[0].nodes, []string{"a", "b"}) {
			t.Errorf("got calls %+v, want one with the nodes a and b", l.checked)
		}
	})
}

// TestNodeLossRestored: if the node exists again before the PersistentVolume is deleted, it gets its policy again, unless the
// claim is deleted, because the data would be deleted then.
func TestNodeLossRestored(t *testing.T) {
	for name, tc := range map[string]struct {
		policy, want string // want is the policy after the node exists again
		failing      string
		change       func(*lossTest)
		annotated    bool
	}{
		"Delete":        {policy: "Delete", want: "Delete", failing: "DELETE persistentvolumeclaims"},
		"Retain":        {policy: "Retain", want: "Retain", failing: "DELETE persistentvolumeclaims"},
		"claim deleted": {policy: "Delete", want: "Retain", failing: "DELETE persistentvolumes", annotated: true},
		"claim being deleted": {policy: "Delete", want: "Retain", failing: "DELETE persistentvolumeclaims", annotated: true, change: func(l *lossTest) {
			l.change(claimsPath+"data", object{"metadata": object{"deletionTimestamp": "2000-01-01T00:00:00Z"}})
		}},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T, c *cluster) {
				l := newLossTest(t, c)
				l.change(volumesPath+"v", object{"spec": object{"persistentVolumeReclaimPolicy": tc.policy}})
				c.refuseAll(tc.failing, http.StatusForbidden)
				l.lose("gone")
				v := c.get(volumesPath + "v")
				if text(v, "metadata", "annotations", kube.NodeLostKey) != tc.policy || text(v, "spec", "persistentVolumeReclaimPolicy") != "Retain" {
					t.Fatalf("got PersistentVolume %v, want one whose release has begun\n%s", v, l.log)
				}
				if tc.change != nil {
					tc.change(l)
				}
				l.addNode("gone")
				l.wait(time.Minute)
				v = c.get(volumesPath + "v")
				_, annotated := field(v, "metadata", "annotations").(object)[kube.NodeLostKey]
				if got := text(v, "spec", "persistentVolumeReclaimPolicy"); got != tc.want || annotated != tc.annotated || field(v, "metadata", "deletionTimestamp") != nil {
					t.Errorf("got PersistentVolume %v, want the policy %s and annotation %t\n%s", v, tc.want, tc.annotated, l.log)
				}
			})
		})
	}
}

// TestNodeLossRestoredLater: a PersistentVolume gets its policy again only when another replica cannot release it any more.
func TestNodeLossRestoredLater(t *testing.T) {
	bubble(t, func(t *testing.T, c *cluster) {
		l := newLossTest(t, c)
		c.refuseAll("DELETE persistentvolumeclaims", http.StatusForbidden)
		l.lose("gone")
		c.put(nodesPath+"gone", merge(newNode(), object{"metadata": object{"labels": object{"csi.trivet.dev/node": "gone"}}}))
		for _, want := range []string{"Retain", "Delete"} {
			l.wait(40 * time.Second)
			if got := text(c.get(volumesPath+"v"), "spec", "persistentVolumeReclaimPolicy"); got != want {
				t.Errorf("got policy %s, want %s\n%s", got, want, l.log)
			}
		}
	})
}

// TestNodeLossNotBlocked: a node whose claim cannot be deleted does not delay others.
func TestNodeLossNotBlocked(t *testing.T) {
	bubble(t, func(t *testing.T, c *cluster) {
		l := newLossTest(t, c)
		for i := range 10 {
			l.addNode(fmt.Sprint("node-", i))
		}
		l.bind("w", "other", "a", nil)
		c.refused[claimsPath+"other"] = http.StatusForbidden // the node a is first
		l.lose("a", "gone")
		l.wantReleased("v", "data")
		if c.get(claimsPath+"other") == nil {
			t.Error("the refused claim does not exist")
		}
		l.wantCounts(0, 1, 1, 1)
	})
}

// TestNodeLossReported: an event with the same reason is created again after 30 minutes.
func TestNodeLossReported(t *testing.T) {
	bubble(t, func(t *testing.T, c *cluster) {
		l := newLossTest(t, c)
		l.answerCheck(errors.New("it is on node b"))
		l.lose("gone")
		for want := 1; want <= 2; want++ {
			if got := l.reasons(eventsPath); len(got) != want {
				t.Errorf("got events %q, want %d", got, want)
			}
			l.wait(31 * time.Minute)
		}
	})
}

// TestNodeLossCounts: a PersistentVolume without a claim is not counted as kept.
func TestNodeLossCounts(t *testing.T) {
	bubble(t, func(t *testing.T, c *cluster) {
		l := newLossTest(t, c)
		l.bind("w", "other", "gone", object{"spec": object{"storageClassName": "kept"}})
		l.bind("x", "third", "gone", object{"spec": object{"storageClassName": "kept"}, "status": object{"phase": "Released"}})
		l.lose("gone")
		l.wantCounts(1, 1, 0, 1)
	})
}
