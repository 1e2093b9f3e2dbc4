package kube_test

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"k8s.io/client-go/rest"

	"github.com/trivet-csi/trivet/cluster/kube"
	"github.com/trivet-csi/trivet/internal/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m) }

const driver = "csi.trivet.dev"

type taint = map[string]any

var (
	startup      = taint{"key": driver + "/agent-not-ready", "effect": "NoSchedule"}
	startupOther = taint{"key": driver + "/agent-not-ready", "effect": "NoExecute", "value": "yes", "timeAdded": "2026-11-20T12:00:00Z"}
	foreign      = taint{"key": "example.com/gpu", "effect": "NoSchedule", "fieldOfTomorrow": "kept"}
)

// server stands in for the API server, with one node.
type server struct {
	mu         sync.Mutex
	registered string // the node ID in CSINode; empty: the driver is not there
	taints     []taint
	fail       map[string][]int // per "METHOD resource": statuses of the next answers
	before     func()           // runs before the next patch is looked at
	patches    int
}

func (s *server) client(t *testing.T) func() (*kube.Client, error) {
	t.Helper()
	web := httptest.NewServer(s)
	t.Cleanup(web.Close)
	return func() (*kube.Client, error) { return kube.New(&rest.Config{Host: web.URL}) }
}

func (s *server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	resource := map[string]string{
		"/api/v1/nodes/n": "nodes", "/apis/storage.k8s.io/v1/csinodes/n": "csinodes",
	}[r.URL.Path]
	key := r.Method + " " + resource
	if next := s.fail[key]; len(next) > 0 {
		s.fail[key] = next[1:]
		refuse(w, next[0])
		return
	}
	switch key {
	case "GET nodes":
		answer(w, map[string]any{"kind": "Node", "apiVersion": "v1", "metadata": taint{"name": "n"}, "spec": map[string]any{"taints": s.taints}})
	case "GET csinodes":
		var drivers []map[string]any
		if s.registered != "" {
			drivers = append(drivers, map[string]any{"name": driver, "nodeID": s.registered})
		}
		answer(w, map[string]any{"kind": "CSINode", "apiVersion": "storage.k8s.io/v1", "metadata": taint{"name": "n"}, "spec": map[string]any{"drivers": drivers}})
	case "PATCH nodes":
		s.patch(w, r)
	default:
		refuse(w, http.StatusNotFound)
	}
}

// patch does what the API server does with a patch of a test and a replacement.
func (s *server) patch(w http.ResponseWriter, r *http.Request) {
	s.patches++
	if s.before != nil {
		s.before()
		s.before = nil
	}
	var ops []struct {
		Op, Path string
		Value    []taint
	}
	b, err := io.ReadAll(r.Body)
	if err = errors.Join(err, json.Unmarshal(b, &ops)); err != nil || len(ops) != 2 || ops[0].Op != "test" || ops[1].Op != "replace" ||
		ops[0].Path != "/spec/taints" || ops[1].Path != "/spec/taints" || ops[1].Value == nil ||
		r.Header.Get("Content-Type") != "application/json-patch+json" {
		refuse(w, http.StatusBadRequest)
		return
	}
	if !reflect.DeepEqual(ops[0].Value, s.taints) {
		refuse(w, http.StatusUnprocessableEntity)
		return
	}
	s.taints = ops[1].Value
	answer(w, map[string]any{"kind": "Node", "apiVersion": "v1", "metadata": taint{"name": "n"}})
}

func answer(w http.ResponseWriter, object any) {
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(object)
}

func refuse(w http.ResponseWriter, code int, reason ...string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(map[string]any{"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": strings.Join(reason, ""), "message": "as told"})
}

func TestRemoveStartupTaint(t *testing.T) {
	for name, tc := range map[string]struct {
		server  *server
		want    []taint
		patches int
	}{
		"alone":              {&server{taints: []taint{startup}}, []taint{}, 1},
		"among others":       {&server{taints: []taint{startup, foreign, startupOther}}, []taint{foreign}, 1},
		"no such taint":      {&server{taints: []taint{foreign}}, []taint{foreign}, 0},
		"no taints":          {&server{}, nil, 0},
		"forbidden at first": {&server{taints: []taint{startup}, fail: map[string][]int{"GET csinodes": {403}, "GET nodes": {403}, "PATCH nodes": {403}}}, []taint{}, 1},
		"server errors":      {&server{taints: []taint{startup}, fail: map[string][]int{"GET csinodes": {500, 503}, "PATCH nodes": {500}}}, []taint{}, 1},
		"conflict":           {&server{taints: []taint{startup}, fail: map[string][]int{"PATCH nodes": {409}}}, []taint{}, 1},
		"no CSINode yet":     {&server{taints: []taint{startup}, fail: map[string][]int{"GET csinodes": {404, 404}}}, []taint{}, 1},
	} {
		t.Run(name, func(t *testing.T) {
			tc.server.registered = "n"
			kube.RemoveStartupTaint(t.Context(), tc.server.client(t), "n", driver)
			if !reflect.DeepEqual(tc.server.taints, tc.want) || tc.server.patches != tc.patches {
				t.Errorf("after %d patches the node has %v, want %v", tc.server.patches, tc.server.taints, tc.want)
			}
		})
	}
}

// TestTaintSetMeanwhile: a taint that is set between reading and writing stays.
func TestTaintSetMeanwhile(t *testing.T) {
	s := &server{registered: "n", taints: []taint{startup}}
	s.before = func() { s.taints = []taint{startup, foreign} }
	kube.RemoveStartupTaint(t.Context(), s.client(t), "n", driver)
	if want := []taint{foreign}; !reflect.DeepEqual(s.taints, want) || s.patches != 2 {
		t.Errorf("after %d patches the node has %v, want %v", s.patches, s.taints, want)
	}
}

// TestTaintStaysUntilRegistered: neither a kubelet without the driver nor one that
// knows it by another node's name is enough.
func TestTaintStaysUntilRegistered(t *testing.T) {
	for _, registered := range []string{"", "other"} {
		s := &server{registered: registered, taints: []taint{startup}}
		ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
		kube.RemoveStartupTaint(ctx, s.client(t), "n", driver)
		cancel()
		if len(s.taints) != 1 || s.patches != 0 {
			t.Errorf("registered as %q: the node has %v after %d patches", registered, s.taints, s.patches)
		}
	}
}

// TestNoConnection: without a way to the API server it ends when it is told to.
func TestNoConnection(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	kube.RemoveStartupTaint(ctx, kube.InCluster, "n", driver)
	if ctx.Err() == nil {
		t.Error("it gave up")
	}
}
