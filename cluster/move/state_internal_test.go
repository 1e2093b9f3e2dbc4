package move

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"path"
	"strings"
	"sync"
	"testing"

	"k8s.io/client-go/rest"

	"github.com/trivet-csi/trivet/cluster/kube"
	"github.com/trivet-csi/trivet/cluster/kubectl"
)

// apiServer is an API server with objects by path. It checks resource versions.
type apiServer struct {
	mu      sync.Mutex
	objects map[string]kube.Object
	version int
	reads   map[string]int // the number of reads by path
}

func (s *apiServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	w.Header().Set("Content-Type", "application/json")
	var body kube.Object
	_ = json.NewDecoder(r.Body).Decode(&body) // a GET has none
	at := r.URL.Path
	if r.Method == http.MethodPost {
		at = path.Join(at, body["metadata"].(map[string]any)["name"].(string))
	}
	if r.Method == http.MethodGet {
		s.reads[at]++
	}
	object, found := s.objects[at]
	switch {
	case r.Method == http.MethodPost && found:
		answer(w, http.StatusConflict, "AlreadyExists")
		return
	case r.Method == http.MethodPost:
		object = body
	case !found:
		answer(w, http.StatusNotFound, "NotFound")
		return
	case wanted(body) != "" && wanted(body) != wanted(object):
		answer(w, http.StatusConflict, "Conflict")
		return
	case r.Method == http.MethodDelete:
		delete(s.objects, at)
	case r.Method == http.MethodPatch:
		merge(object, body)
	}
	if r.Method != http.MethodGet {
		s.version++
		object["metadata"].(map[string]any)["resourceVersion"] = fmt.Sprint(s.version)
	}
	if r.Method == http.MethodPost {
		object["metadata"].(map[string]any)["namespace"] = "trivet-system"
		if strings.HasPrefix(at, "/api/v1/persistentvolumes/") {
			object["status"] = map[string]any{"phase": "Bound"}
		}
		s.objects[at] = object
	}
	object["kind"], object["apiVersion"] = "Object", "v1"
	if _, isList := object["items"]; isList && r.Method == http.MethodGet {
		s.fill(at, object)
	}
	_ = json.NewEncoder(w).Encode(object)
}

// fill adds the objects of a list. It ignores selectors.
func (s *apiServer) fill(at string, list kube.Object) {
	items := []any{}
	for name, object := range s.objects {
		if path.Dir(name) == at {
			object["kind"], object["apiVersion"] = "Object", "v1"
			items = append(items, object)
		}
	}
	list["items"] = items
}

// wanted returns the resource version in an object, or in the preconditions of a deletion.
func wanted(object kube.Object) string {
	for _, key := range []string{"metadata", "preconditions"} {
		if in, ok := object[key].(map[string]any); ok {
			version, _ := in["resourceVersion"].(string)
			return version
		}
	}
	return ""
}

// merge applies a JSON merge patch.
func merge(in, patch kube.Object) {
	for key, value := range patch {
		inner, isMap := value.(map[string]any)
		current, exists := in[key].(map[string]any)
		switch {
		case value == nil:
			delete(in, key)
		case isMap && exists:
			merge(current, inner)
		default:
			in[key] = value
		}
	}
}

func answer(w http.ResponseWriter, code int, reason string) {
	w.WriteHeader(code)
	_, _ = fmt.Fprintf(w, `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":%q,"code":%d}`, reason, code)
}

const (
	claimPath  = "/api/v1/namespaces/ns/persistentvolumeclaims/data"
	copyPath   = "/api/v1/namespaces/ns/persistentvolumeclaims/trivet-move-1-1"
	pvPath     = "/api/v1/persistentvolumes/pv"
	recordPath = "/api/v1/namespaces/trivet-system/configmaps/trivet-move-u"
)

// begin starts an API server with a claim whose PersistentVolume has a volume, and with a move in the step swap.
func begin(t *testing.T, handle string) (*apiServer, func() *Mover) {
	t.Helper()
	old := manifestOf(object(t, before))
	text, err := json.Marshal(state{ID: "1", Namespace: "ns", Claim: "data", UID: "u", Holder: "first", From: "a", To: "b", Step: swapping, Round: 1, Old: old, New: newVolumeManifest(old, object(t, copied)), Copy: "pv-copy"})
	if err != nil {
		t.Fatal(err)
	}
	s := &apiServer{reads: map[string]int{}, objects: map[string]kube.Object{
		claimPath:  object(t, `{"metadata":{"namespace":"ns","name":"data","uid":"u","resourceVersion":"c"},"spec":{"volumeName":"pv"},"status":{"phase":"Bound"}}`),
		pvPath:     object(t, strings.NewReplacer(`"old"`, `"`+handle+`"`, `"uid":"x"`, `"uid":"x","resourceVersion":"p"`).Replace(before)),
		recordPath: {"metadata": map[string]any{"namespace": "trivet-system", "name": "trivet-move-u", "resourceVersion": "r"}, "data": map[string]any{"state": string(text)}},
	}}
	server := httptest.NewServer(s)
	t.Cleanup(server.Close)
	cluster, err := kubectl.Connect(&rest.Config{Host: server.URL}, "trivet-system")
	if err != nil {
		t.Fatal(err)
	}
	return s, func() *Mover {
		m, err := New(t.Context(), cluster, Options{Namespace: "ns", ClaimName: "data", Progress: func(string, ...any) {}})
		if err != nil {
			t.Fatal(err)
		}
		return m
	}
}

// TestForgedAnnotation: the state that a user has written into the claim is ignored.
func TestForgedAnnotation(t *testing.T) {
	s, open := begin(t, "old")
	s.objects[claimPath]["metadata"].(map[string]any)["annotations"] = map[string]any{moveLabel: `{"id":"2","to":"c","step":"clean"}`}
	if m := open(); m.state.ID != "1" || m.state.Step != swapping || m.Destination() != "b" {
		t.Errorf("got %+v, want the state of the ConfigMap", m.state)
	}
	delete(s.objects, recordPath)
	if begun := open().Begun(); begun != "" {
		t.Errorf("got %q without a ConfigMap, want no move", begun)
	}
}

// TestForeignCopy: a PersistentVolume that does not belong to the claim of a copy is neither used nor changed.
func TestForeignCopy(t *testing.T) {
	s, open := begin(t, "old")
	s.objects[copyPath] = object(t, `{"metadata":{"namespace":"ns","name":"trivet-move-1-1","uid":"v"},"spec":{"volumeName":"foreign"}}`)
	foreign := strings.NewReplacer("pv-copy", "foreign", `"uid":"v"`, `"uid":"other"`, `"name":"copy"`, `"name":"theirs"`).Replace(copied)
	s.objects["/api/v1/persistentvolumes/foreign"] = object(t, foreign)
	m := open()
	_, _, used := m.newestCopy(t.Context())
	for name, err := range map[string]error{"use": used, "removal": m.removeCopies(t.Context(), 1)} {
		if err == nil || !strings.Contains(err.Error(), "foreign") || !strings.Contains(err.Error(), "ns/theirs") {
			t.Errorf("%s: got %v, want an error with the PersistentVolume and its claim", name, err)
		}
	}
	if s.version != 0 {
		t.Errorf("got %d writes, want none", s.version)
	}
}

// TestCopyWithoutSnapshots: without a snapshot class, a copy is a clone of the claim on the other node. If a pod uses the volume
// meanwhile, or the command has ended, the copy is deleted and created again.
func TestCopyWithoutSnapshots(t *testing.T) {
	s, open := begin(t, "old")
	s.objects[claimPath]["spec"] = object(t, `{"volumeName":"pv","storageClassName":"fast","accessModes":["ReadWriteOnce"],"resources":{"requests":{"storage":"1Gi"}}}`)
	m := open()
	m.state.Step, m.state.Single = catching, true
	for range 2 { // the second time, the claim of the copy exists
		if err := m.copyVolume(t.Context(), func() error { return errUsed }); !errors.Is(err, errUsed) {
			t.Fatalf("got %v, want %v", err, errUsed)
		}
	}
	claim, err := m.api.Claim(t.Context(), "ns", "trivet-move-1-1")
	if source := claim.Spec.DataSource; err != nil || source.Kind != "PersistentVolumeClaim" || source.Name != "data" || claim.Metadata.Annotations[selectedNode] != "b" || claim.Metadata.Labels[moveLabel] != "1" {
		t.Errorf("got %+v, %v, want a clone of the claim on node b", claim, err)
	}
	if err := m.rewind(t.Context()); err != nil || m.state.Step != stopping {
		t.Errorf("got the step %q, %v after the command has ended, want stop", m.state.Step, err)
	}
	s.objects[copyPath]["spec"].(map[string]any)["dataSource"] = map[string]any{"kind": "PersistentVolumeClaim", "name": "other"}
	if err := m.copyVolume(t.Context(), func() error { return errUsed }); err == nil || !strings.Contains(err.Error(), `PersistentVolumeClaim "other"`) {
		t.Errorf("got %v for the clone of another claim, want an error with its source", err)
	}
}

// TestTwoProcesses: the process that began earlier removes and creates nothing after another one has begun.
func TestTwoProcesses(t *testing.T) {
	s, open := begin(t, "old")
	first, second := open(), open()
	if err := second.save(t.Context(), second.hold); err != nil {
		t.Fatal(err)
	}
	for name, err := range map[string]error{
		"removal":  first.removeObject(t.Context(), "pv", first.checkOld),
		"creation": first.createClaimed(t.Context(), first.state.New),
		"deletion": first.removeKept(t.Context(), true),
		"write":    first.enter(t.Context(), starting),
	} {
		if !errors.Is(err, errChanged) {
			t.Errorf("%s: got %v, want %v", name, err, errChanged)
		}
	}
	if version := wanted(s.objects[pvPath]); version != "p" {
		t.Errorf("got the PersistentVolume with the version %q, want that it does not change", version)
	}
	if err := second.verify(t.Context()); err != nil {
		t.Errorf("got %v for the second process, want that it can continue", err)
	}
}

// TestAbortTooLate: a move is not undone after the claim has the new volume, and can be completed.
func TestAbortTooLate(t *testing.T) {
	s, open := begin(t, "new")
	err := open().Abort(t.Context())
	if err == nil || !strings.Contains(err.Error(), "complete the move with --to b") {
		t.Errorf("got %v, want that the move can only be completed", err)
	}
	m := open()
	if resume, abort := m.Next(); m.state.Step != starting || !resume || abort {
		t.Errorf("got the step %q, resume %v, abort %v, want the step start, which can only be continued", m.state.Step, resume, abort)
	}
	if version := wanted(s.objects[pvPath]); version != "p" {
		t.Errorf("got the PersistentVolume with the version %q, want that it does not change", version)
	}
}

// TestScheduled: a pod on a node uses the volume, and so does one that has completed since the pods were stopped.
func TestScheduled(t *testing.T) {
	for name, tc := range map[string]struct {
		node, phase, uid string
		want             bool
	}{
		"pending":          {"", "Pending", "p", false},
		"running":          {"a", "Running", "p", true},
		"completed before": {"a", "Succeeded", "ended", false},
		"completed since":  {"a", "Succeeded", "p", true},
		"failed since":     {"a", "Failed", "p", true},
	} {
		var pod kube.Pod
		pod.Metadata.UID, pod.Spec.NodeName, pod.Status.Phase = tc.uid, tc.node, tc.phase
		if got := scheduled([]kube.Pod{pod}, []string{"ended"}); got != tc.want {
			t.Errorf("%s: got %v, want %v", name, got, tc.want)
		}
	}
}

// TestReleased: a volume whose attachment does not show that it is unused is used until the driver on its node reports that it is not
// staged. The reason why that does not report is shown once.
func TestReleased(t *testing.T) {
	for name, tc := range map[string]struct {
		required, attached, want bool
		lines                    int
	}{
		"attached":               {true, true, false, 1},
		"detached":               {true, false, true, 0},
		"without attachments":    {false, false, false, 1},
		"with an old attachment": {false, true, false, 1},
	} {
		s, open := begin(t, "old")
		s.objects["/apis/storage.k8s.io/v1/csidrivers/d"] = kube.Object{"metadata": map[string]any{"name": "d"}, "spec": map[string]any{"attachRequired": tc.required}}
		s.objects["/apis/storage.k8s.io/v1/volumeattachments"] = object(t, `{"items":[]}`)
		if tc.attached {
			s.objects["/apis/storage.k8s.io/v1/volumeattachments/a"] = object(t, `{"metadata":{"name":"a"},"spec":{"source":{"persistentVolumeName":"pv"}}}`)
		}
		s.objects["/api/v1/namespaces/trivet-system/pods"] = object(t, `{"items":[]}`)
		m, shown, lines := open(), "", 0
		m.Progress = func(string, ...any) { lines++ }
		for range 2 {
			if got, err := m.released(t.Context(), &shown); err != nil || got != tc.want {
				t.Errorf("%s: got %v and %v, want %v", name, got, err, tc.want)
			}
		}
		if lines != tc.lines {
			t.Errorf("%s: got %d lines, want %d: %s", name, lines, tc.lines, shown)
		}
	}
}
