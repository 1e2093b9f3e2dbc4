package kube_test

import (
	"context"
	"reflect"
	"testing"
	"time"

	"github.com/trivet-csi/trivet/cluster/kube"
	"github.com/trivet-csi/trivet/internal/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m) }

const (
	driver       = "csi.trivet.dev"
	csiNodesPath = "/apis/storage.k8s.io/v1/csinodes/"
)

type taint = map[string]any

var (
	startup          = taint{"key": driver + "/agent-not-ready", "effect": "NoSchedule"}
	startupNoExecute = taint{"key": driver + "/agent-not-ready", "effect": "NoExecute", "value": "yes", "timeAdded": "2026-11-20T12:00:00Z"}
	foreign          = taint{"key": "example.com/gpu", "effect": "NoSchedule", "futureField": "kept"}
)

// putTainted creates the Node n with taints, and its CSINode. The CSINode lists the driver with nodeID, or no
// driver if nodeID is empty.
func putTainted(c *cluster, nodeID string, taints ...taint) {
	drivers := []object{}
	if nodeID != "" {
		drivers = append(drivers, object{"name": driver, "nodeID": nodeID})
	}
	c.put(csiNodesPath+"n", object{"spec": object{"drivers": drivers}})
	c.put(nodesPath+"n", object{"spec": object{"taints": taints}})
}

// wantTaints fails the test unless the node n has the wanted taints, after the wanted number of PATCH calls.
func wantTaints(t *testing.T, c *cluster, patches int, want []taint) {
	t.Helper()
	got := field(c.get(nodesPath+"n"), "spec", "taints")
	if n := c.called("PATCH nodes"); n != patches || !reflect.DeepEqual(got, viaJSON(object{"taints": want})["taints"]) {
		t.Errorf("got taints %v after %d patches, want %v after %d", got, n, want, patches)
	}
}

// TestRemoveStartupTaint: the startup taint is removed, also after failed calls, and other taints are kept unchanged.
func TestRemoveStartupTaint(t *testing.T) {
	for name, tc := range map[string]struct {
		taints  []taint
		fail    map[string][]int
		want    []taint
		patches int
	}{
		"only the startup taint": {[]taint{startup}, nil, []taint{}, 1},
		"several taints":         {[]taint{startup, foreign, startupNoExecute}, nil, []taint{foreign}, 1},
		"only another taint":     {[]taint{foreign}, nil, []taint{foreign}, 0},
		"no taints":              {nil, nil, nil, 0},
		"forbidden at first":     {[]taint{startup}, map[string][]int{"GET csinodes": {403}, "GET nodes": {403}, "PATCH nodes": {403}}, []taint{}, 2},
		"server errors":          {[]taint{startup}, map[string][]int{"GET csinodes": {500, 503}, "PATCH nodes": {500}}, []taint{}, 2},
		"conflict":               {[]taint{startup}, map[string][]int{"PATCH nodes": {409}}, []taint{}, 2},
		"no CSINode yet":         {[]taint{startup}, map[string][]int{"GET csinodes": {404, 404}}, []taint{}, 1},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T, c *cluster) {
				putTainted(c, "n", tc.taints...)
				c.fail = tc.fail
				kube.RemoveStartupTaint(t.Context(), user{cluster: c}.connect, "n", driver)
				wantTaints(t, c, tc.patches, tc.want)
			})
		})
	}
}

// TestTaintAddedConcurrently: a taint that another client adds between the driver's GET and PATCH is kept.
func TestTaintAddedConcurrently(t *testing.T) {
	bubble(t, func(t *testing.T, c *cluster) {
		putTainted(c, "n", startup)
		c.before["PATCH nodes"] = func() { putTainted(c, "n", startup, foreign) }
		kube.RemoveStartupTaint(t.Context(), user{cluster: c}.connect, "n", driver)
		wantTaints(t, c, 2, []taint{foreign})
	})
}

// TestTaintKeptUntilRegistered: the taint is kept while the kubelet has not registered the driver, or has
// registered it with the ID of another node.
func TestTaintKeptUntilRegistered(t *testing.T) {
	for _, nodeID := range []string{"", "other"} {
		bubble(t, func(t *testing.T, c *cluster) {
			putTainted(c, nodeID, startup)
			ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
			defer cancel()
			kube.RemoveStartupTaint(ctx, user{cluster: c}.connect, "n", driver)
			wantTaints(t, c, 0, []taint{startup})
		})
	}
}

// TestTaintNoConnection: while it cannot connect to the API server, RemoveStartupTaint returns when its
// context ends.
func TestTaintNoConnection(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	kube.RemoveStartupTaint(ctx, kube.InCluster, "n", driver)
	if ctx.Err() == nil {
		t.Error("RemoveStartupTaint returned before its context ended")
	}
}
