package kube_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"

	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/textlogger"

	"github.com/trivet-csi/trivet/cluster/kube"
)

type object = map[string]any

// cluster is a fake API server: it stores objects, and answers lists, watches, creations and patches. It uses
// no network, so that tests can use the clock of testing/synctest.
type cluster struct {
	mu          sync.Mutex
	objects     map[string]object // by path
	events      []event
	changed     chan struct{} // closed and replaced at each change
	cut         chan struct{} // closed to end all watches, and replaced
	unreachable bool
	fail        map[string][]int  // by "METHOD resource": statuses of the next responses
	refused     map[string]int    // by path: the status of all deletions
	before      map[string]func() // by "METHOD resource": called before the next request is handled
	calls       map[string]int    // by "METHOD resource"
}

type event struct {
	kind, path string
	object     object
}

func newCluster() *cluster {
	return &cluster{
		objects: map[string]object{}, changed: make(chan struct{}), cut: make(chan struct{}),
		fail: map[string][]int{}, refused: map[string]int{}, before: map[string]func(){}, calls: map[string]int{},
	}
}

// user is a client of a cluster. It has the identity of a pod, or none if pod is nil.
type user struct {
	*cluster
	pod object
}

func (u user) connect() (*kube.Client, error) {
	return kube.New(&rest.Config{Host: "http://cluster", Transport: u})
}

func (u user) RoundTrip(r *http.Request) (*http.Response, error) {
	if u.isUnreachable() {
		return nil, &net.OpError{Op: "dial", Net: "tcp", Err: syscall.ECONNREFUSED}
	}
	if r.URL.Query().Get("watch") != "" {
		return u.watch(r)
	}
	w := httptest.NewRecorder()
	u.serve(w, r)
	return w.Result(), nil
}

// target is the parsed path of a request. object is empty if the path names a list.
type target struct {
	resource, list, object, subresource string
}

func parsePath(path string) target {
	p := strings.Split(path, "/") // "", api, v1 or "", apis, group, v1
	at := 3                       // the index of the resource in p
	if p[1] == "apis" {
		at++
	}
	if p[at] == "namespaces" {
		at += 2
	}
	t := target{resource: p[at], list: strings.Join(p[:at+1], "/") + "/"}
	if len(p) > at+1 {
		t.object = t.list + p[at+1]
	}
	if len(p) > at+2 {
		t.subresource = p[at+2]
	}
	return t
}

func (u user) serve(w http.ResponseWriter, r *http.Request) {
	t := parsePath(r.URL.Path)
	if before := u.countCall(r.Method + " " + t.resource); before != nil {
		before()
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	if code := u.nextFailure(r.Method + " " + t.resource); code != 0 {
		refuse(w, code)
		return
	}
	current := u.objects[t.object]
	switch {
	case r.Method == http.MethodPost:
		u.post(w, r, t)
	case t.object == "":
		u.list(w, r, t)
	case current == nil:
		refuse(w, http.StatusNotFound)
	case r.Method == http.MethodPatch:
		u.patch(w, r, t, current)
	case r.Method == http.MethodDelete:
		u.delete(w, r, t, current)
	default:
		answer(w, current)
	}
}

// intercept sets the function that is called before the next request is handled. It can be called while requests are handled.
func (c *cluster) intercept(call string, f func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.before[call] = f
}

// refuseAll makes the next 1000 requests fail with a status. It can be called while requests are handled.
func (c *cluster) refuseAll(call string, code int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.fail[call] = slices.Repeat([]int{code}, 1000)
}

// countCall counts a call, and removes and returns its function in before.
func (c *cluster) countCall(call string) func() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.calls[call]++
	before := c.before[call]
	delete(c.before, call)
	return before
}

// nextFailure removes and returns the first status in fail for a call, or 0 if there is none.
func (c *cluster) nextFailure(call string) int {
	next := c.fail[call]
	if len(next) == 0 {
		return 0
	}
	c.fail[call] = next[1:]
	return next[0]
}

func (u user) post(w http.ResponseWriter, r *http.Request, t target) {
	o := decode(r.Body)
	path := t.list + o["metadata"].(object)["name"].(string)
	if u.objects[path] != nil {
		refuse(w, http.StatusConflict, "AlreadyExists")
		return
	}
	if spec, ok := o["spec"].(object); ok && t.resource == "certificatesigningrequests" && u.pod != nil {
		maps.Copy(spec, u.identity())
	}
	answer(w, u.store(path, o))
}

// identity returns the fields that the API server adds to the spec of a CertificateSigningRequest to
// identify its client.
func (u user) identity() object {
	metadata := u.pod["metadata"].(object)
	return object{
		"username": "system:serviceaccount:" + namespace + ":trivet-node",
		"extra": object{
			"authentication.kubernetes.io/pod-name": []any{metadata["name"]},
			"authentication.kubernetes.io/pod-uid":  []any{metadata["uid"]},
		},
	}
}

func (u user) patch(w http.ResponseWriter, r *http.Request, t target, current object) {
	if r.Header.Get("Content-Type") == "application/json-patch+json" {
		u.patchTaints(w, r, t, current)
		return
	}
	p := decode(r.Body)
	metadata, _ := p["metadata"].(object)
	switch {
	case r.Header.Get("Content-Type") != "application/merge-patch+json":
		refuse(w, http.StatusUnsupportedMediaType)
	case metadata["resourceVersion"] != current["metadata"].(object)["resourceVersion"]:
		refuse(w, http.StatusConflict, "Conflict")
	default:
		answer(w, u.store(t.object, merge(current, p)))
	}
}

// delete deletes an object that has the UID and the version of the preconditions. An object with finalizers only gets a
// deletionTimestamp.
func (u user) delete(w http.ResponseWriter, r *http.Request, t target, current object) {
	if code := u.refused[t.object]; code != 0 {
		refuse(w, code)
		return
	}
	want, _ := field(decode(r.Body), "preconditions").(object)
	metadata := current["metadata"].(object)
	for key, value := range want {
		if metadata[key] != value {
			refuse(w, http.StatusConflict, "Conflict")
			return
		}
	}
	if finalizers, _ := metadata["finalizers"].([]any); len(finalizers) > 0 {
		answer(w, u.store(t.object, merge(current, object{"metadata": object{"deletionTimestamp": "2026-01-01T00:00:00Z"}})))
		return
	}
	u.removeLocked(t.object)
	answer(w, current)
}

// patchTaints applies a JSON patch (RFC 6902) that tests and replaces the taints of a node.
func (u user) patchTaints(w http.ResponseWriter, r *http.Request, t target, current object) {
	var ops []struct {
		Op, Path string
		Value    []any
	}
	if err := json.NewDecoder(r.Body).Decode(&ops); err != nil || len(ops) != 2 || ops[0].Op != "test" || ops[1].Op != "replace" ||
		ops[0].Path != "/spec/taints" || ops[1].Path != "/spec/taints" || ops[1].Value == nil {
		refuse(w, http.StatusBadRequest)
		return
	}
	if !reflect.DeepEqual(any(ops[0].Value), field(current, "spec", "taints")) {
		refuse(w, http.StatusUnprocessableEntity)
		return
	}
	answer(w, u.store(t.object, merge(current, object{"spec": object{"taints": ops[1].Value}})))
}

// merge applies a JSON merge patch (RFC 7396). It does not change its arguments.
func merge(into, patch object) object {
	out := maps.Clone(into)
	for k, v := range patch {
		if v == nil {
			delete(out, k)
			continue
		}
		if inner, ok := v.(object); ok {
			old, _ := into[k].(object)
			v = merge(old, inner)
		}
		if out == nil {
			out = object{}
		}
		out[k] = v
	}
	return out
}

// store sets the object at a path, with a new resourceVersion, and adds an event. The caller holds mu.
func (c *cluster) store(path string, o object) object {
	kind := "ADDED"
	if c.objects[path] != nil {
		kind = "MODIFIED"
	}
	o = merge(o, object{"metadata": object{"resourceVersion": strconv.Itoa(len(c.events) + 1)}})
	c.objects[path] = o
	c.addEvent(event{kind, path, o})
	return o
}

func (c *cluster) addEvent(e event) {
	c.events = append(c.events, e)
	close(c.changed)
	c.changed = make(chan struct{})
}

// put replaces or creates an object. It sets apiVersion, kind and name if o does not contain them.
func (c *cluster) put(path string, o object) {
	c.mu.Lock()
	defer c.mu.Unlock()
	name := path[strings.LastIndex(path, "/")+1:]
	c.store(path, merge(object{"apiVersion": "v1", "kind": "Any", "metadata": object{"name": name}}, viaJSON(o)))
}

func (c *cluster) remove(path string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.removeLocked(path)
}

// removeLocked removes an object. The caller holds mu.
func (c *cluster) removeLocked(path string) {
	if o := c.objects[path]; o != nil {
		delete(c.objects, path)
		c.addEvent(event{"DELETED", path, merge(o, object{"metadata": object{"resourceVersion": strconv.Itoa(len(c.events) + 1)}})})
	}
}

func (c *cluster) get(path string) object {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.objects[path]
}

// paths returns the sorted paths of the objects in a list.
func (c *cluster) paths(list string) []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	var out []string
	for path := range c.objects {
		if strings.HasPrefix(path, list) {
			out = append(out, path)
		}
	}
	slices.Sort(out)
	return out
}

func (c *cluster) called(call string) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.calls[call]
}

// setUnreachable ends all watches. While unreachable is true, the API server refuses connections.
func (c *cluster) setUnreachable(unreachable bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.unreachable = unreachable
	close(c.cut)
	c.cut = make(chan struct{})
}

func (c *cluster) isUnreachable() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.unreachable
}

func (c *cluster) list(w http.ResponseWriter, r *http.Request, t target) {
	items := []any{}
	for path, o := range c.objects {
		if selected(r, t, path, o) {
			items = append(items, representation(r, o))
		}
	}
	list := object{"apiVersion": "v1", "kind": "AnyList", "metadata": object{"resourceVersion": strconv.Itoa(len(c.events))}, "items": items}
	if onlyMetadata(r) {
		list["apiVersion"], list["kind"] = "meta.k8s.io/v1", "PartialObjectMetadataList"
	}
	answer(w, list)
}

// onlyMetadata reports whether a request accepts only metadata of objects.
func onlyMetadata(r *http.Request) bool {
	return strings.Contains(r.Header.Get("Accept"), "as=PartialObjectMetadata")
}

// representation returns an object, or its metadata if the request accepts only that.
func representation(r *http.Request, o object) object {
	if !onlyMetadata(r) {
		return o
	}
	return object{"apiVersion": "meta.k8s.io/v1", "kind": "PartialObjectMetadata", "metadata": o["metadata"]}
}

// selected reports whether an object is in the list of a request and matches its selectors.
func selected(r *http.Request, t target, path string, o object) bool {
	q := r.URL.Query()
	everywhere := !strings.Contains(t.list, "/namespaces/") && parsePath(path).resource == t.resource // also the objects of namespaces
	if !everywhere && !strings.HasPrefix(path, t.list) {
		return false
	}
	metadata := o["metadata"].(object)
	for _, selector := range []string{q.Get("fieldSelector"), q.Get("labelSelector")} {
		key, want, equal := strings.Cut(selector, "=")
		var got any
		switch key {
		case "":
			continue
		case "metadata.name":
			got = metadata["name"]
		case "spec.signerName":
			got = o["spec"].(object)["signerName"]
		default:
			labels, _ := metadata["labels"].(object)
			got = labels[key]
		}
		if equal && got != want || !equal && got == nil {
			return false
		}
	}
	return true
}

// watch answers a watch request. The events begin with the current objects (sendInitialEvents), or after
// resourceVersion, and end when cut is closed.
func (u user) watch(r *http.Request) (*http.Response, error) {
	t := parsePath(r.URL.Path)
	u.countCall("WATCH " + t.resource)
	u.mu.Lock()
	code := u.nextFailure("WATCH " + t.resource)
	cut := u.cut
	u.mu.Unlock()
	if code != 0 {
		w := httptest.NewRecorder()
		refuse(w, code)
		return w.Result(), nil
	}
	from, to := io.Pipe()
	go func() {
		defer func() { _ = to.Close() }()
		u.stream(r, t, json.NewEncoder(to), cut)
	}()
	return &http.Response{StatusCode: http.StatusOK, Header: http.Header{"Content-Type": {"application/json"}}, Body: from, Request: r}, nil
}

// stream sends the events of a watch until the client disconnects or cut is closed.
func (u user) stream(r *http.Request, t target, to *json.Encoder, cut chan struct{}) {
	next, _ := strconv.Atoi(r.URL.Query().Get("resourceVersion"))
	if r.URL.Query().Get("sendInitialEvents") == "true" {
		var initial []event
		initial, next = u.initial()
		for _, e := range initial {
			if selected(r, t, e.path, e.object) && to.Encode(object{"type": e.kind, "object": representation(r, e.object)}) != nil {
				return
			}
		}
		end := object{"apiVersion": "v1", "kind": "Any", "metadata": object{"resourceVersion": strconv.Itoa(next), "annotations": object{"k8s.io/initial-events-end": "true"}}}
		if to.Encode(object{"type": "BOOKMARK", "object": representation(r, end)}) != nil {
			return
		}
	}
	for {
		u.mu.Lock()
		events, changed := u.events[next:], u.changed
		next = len(u.events)
		u.mu.Unlock()
		for _, e := range events {
			if selected(r, t, e.path, e.object) && to.Encode(object{"type": e.kind, "object": representation(r, e.object)}) != nil {
				return
			}
		}
		select {
		case <-r.Context().Done():
			return
		case <-cut:
			return
		case <-changed:
		}
	}
}

// initial returns an ADDED event for each object, and the number of events so far.
func (c *cluster) initial() ([]event, int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	var out []event
	for path, o := range c.objects {
		out = append(out, event{"ADDED", path, o})
	}
	return out, len(c.events)
}

func answer(w http.ResponseWriter, object any) {
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(object)
}

// refuse answers with an HTTP error and, if given, one reason of meta/v1 Status.
func refuse(w http.ResponseWriter, code int, reason ...string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(map[string]any{"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": strings.Join(reason, ""), "message": "requested by the test"})
}

func decode(r io.Reader) object {
	var o object
	if err := json.NewDecoder(r).Decode(&o); err != nil {
		panic(err)
	}
	return o
}

// viaJSON encodes an object as JSON and decodes it, so that it has the types of a decoded object.
func viaJSON(o object) object {
	b, err := json.Marshal(o)
	if err != nil {
		panic(err)
	}
	return decode(bytes.NewReader(b))
}

// logBuffer collects the log of a test.
type logBuffer struct {
	mu   sync.Mutex
	text strings.Builder
}

func (l *logBuffer) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(b)
}

// count returns the number of lines that contain a text.
func (l *logBuffer) count(text string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := 0
	for line := range strings.Lines(l.text.String()) {
		if strings.Contains(line, text) {
			n++
		}
	}
	return n
}

func (l *logBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// bubble runs a test with the clock of testing/synctest, which advances only while all
// goroutines of the test are blocked.
func bubble(t *testing.T, test func(t *testing.T, c *cluster)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) { test(t, newCluster()) })
}

// start calls run in a goroutine. The context of run is canceled when the test ends or stop is called.
func start(t *testing.T, run func(context.Context)) (log *logBuffer, stop func()) {
	t.Helper()
	return startVerbose(t, 0, run)
}

// startVerbose is start with a log verbosity.
func startVerbose(t *testing.T, verbosity int, run func(context.Context)) (log *logBuffer, stop func()) {
	t.Helper()
	log = &logBuffer{}
	ctx, cancel := context.WithCancel(klog.NewContext(t.Context(), textlogger.NewLogger(textlogger.NewConfig(textlogger.Output(log), textlogger.Verbosity(verbosity)))))
	done := make(chan struct{})
	go func() {
		defer close(done)
		run(ctx)
	}()
	stop = func() { cancel(); <-done }
	t.Cleanup(stop)
	return log, stop
}

// must returns a function that fails the test if err is not nil, and otherwise returns v.
func must[T any](v T, err error) func(*testing.T) T {
	return func(t *testing.T) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

// field returns the value at a path of field names, or nil if there is none.
func field(o object, path ...string) any {
	for _, name := range path[:len(path)-1] {
		o, _ = o[name].(object)
	}
	return o[path[len(path)-1]]
}

// text returns the value at a path of field names as a string.
func text(o object, path ...string) string { return fmt.Sprint(field(o, path...)) }
