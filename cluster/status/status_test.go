package status_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"reflect"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	grpcstatus "google.golang.org/grpc/status"

	"github.com/trivet-csi/trivet/cluster/status"
)

const (
	uuid   = "01234567"
	volume = "loop:fast.01234567:pvc-1"
)

func sample() status.Report {
	return status.Report{
		Driver:    "csi.trivet.dev",
		Processes: []status.Process{{Node: "a", Version: "v1", Calls: []status.Call{{Method: "CreateVolume", Running: 2}}}},
		Pools:     []status.Pool{{Name: "fast", UUID: uuid, Node: "a", SizeBytes: 100 << 30, UsedBytes: 10 << 30, PromisedBytes: 40 << 30, FreeBytes: 90 << 30}},
		Volumes: []status.Volume{{
			ID: volume, Name: "pvc-1", Pool: "fast", Node: "a", SizeBytes: 1 << 30, UsedBytes: 1 << 20, Staged: true,
			Health: []status.Health{{Status: "DEGRADED", Reason: "PoolAlmostFull", Message: "<script>alert(1)</script>"}},
		}},
		Snapshots: []status.Snapshot{{ID: "loop:fast.01234567:s", Source: volume, Pool: "fast", Node: "a"}},
	}
}

// TestFrom: the controller ignores what a node reports about pools, volumes and nodes that are not its own.
func TestFrom(t *testing.T) {
	serves := func(pool, id string) bool { return pool == "fast" && id == uuid }
	r := sample()
	r.Volumes[0].Claim = "ns/claim"
	r.Pools = append(r.Pools, status.Pool{Name: "foreign", UUID: "ffffffff"}, status.Pool{Name: "closed", Problem: "not mounted"})
	r.Volumes = append(r.Volumes,
		status.Volume{ID: "loop:foreign.ffffffff:pvc-2", Pool: "foreign"},
		status.Volume{ID: "loop:foreign.ffffffff:pvc-3", Pool: "fast"}, // the ID names another pool
		status.Volume{ID: "garbage", Pool: "fast"},
		status.Volume{Name: "damaged", Pool: "fast"},
		status.Volume{Name: "damaged", Pool: "closed"},
	)
	r.Snapshots = append(r.Snapshots, status.Snapshot{ID: "x", Source: "loop:foreign.ffffffff:pvc-2", Pool: "foreign"})
	got := r.From("b", serves)
	if len(got.Processes) != 1 || got.Processes[0].Node != "b" || got.Processes[0].Version != "v1" {
		t.Errorf("got processes %+v, want one of node b", got.Processes)
	}
	var names []string
	for _, v := range got.Volumes {
		if v.Claim != "" {
			t.Errorf("got the claim %s of %s from a node, want none", v.Claim, v.Name)
		}
		names = append(names, v.Node+"/"+v.Name)
	}
	if want := []string{"b/pvc-1", "b/damaged"}; !slices.Equal(names, want) {
		t.Errorf("got volumes %v, want %v", names, want)
	}
	if len(got.Snapshots) != 1 || len(got.Pools) != 3 || got.Pools[1].Problem == "" || got.Pools[2].Problem != "not mounted" {
		t.Errorf("got snapshots %+v and pools %+v, want one snapshot, and three pools of which the last two have a problem", got.Snapshots, got.Pools)
	}
	many := status.Report{Processes: make([]status.Process, 3)}
	if got := many.From("b", serves); len(got.Processes) != 1 || got.Processes[0].Node != "b" {
		t.Errorf("got processes %+v from a node that reports three, want one", got.Processes)
	}
}

func TestMissing(t *testing.T) {
	r := sample()
	if got := r.Missing(); len(got) != 0 {
		t.Errorf("got %q for a complete report, want nothing", got)
	}
	r.Processes[0].Problem, r.Pools[0].Problem = "no answer", "not mounted"
	if got, want := r.Missing(), []string{"a: no answer", "pool fast on a: not mounted"}; !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
	r.Processes[0].Problem = "no answer\nnot mounted"
	if got := r.Missing(); len(got) != 2 {
		t.Errorf("got %q, want the problem of the pool once", got)
	}
}

// TestTransfer: Fetch and FetchExamination return what Register serves, and survive a source that panics.
func TestTransfer(t *testing.T) {
	fail, examined := true, false
	server := grpc.NewServer()
	status.Register(server, func(context.Context) status.Report {
		if fail {
			panic("broken")
		}
		return sample()
	}, func() (status.Examination, error) {
		if !examined {
			return status.Examination{}, errors.New("not yet")
		}
		return examination(), nil
	})
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	go func() { _ = server.Serve(l) }()
	t.Cleanup(server.Stop)
	conn, err := grpc.NewClient(l.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	must(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	if r, err := status.Fetch(t.Context(), conn); err == nil {
		t.Errorf("got %+v from a source that panics, want an error", r)
	}
	fail = false
	r, err := status.Fetch(t.Context(), conn)
	must(t, err)
	if got, want := text(t, r), text(t, sample()); got != want {
		t.Errorf("got %s, want %s", got, want)
	}
	if e, err := status.FetchExamination(t.Context(), conn); grpcstatus.Code(err) != codes.Unavailable {
		t.Errorf("got %+v, %v before the first examination, want Unavailable", e, err)
	}
	examined = true
	e, err := status.FetchExamination(t.Context(), conn)
	if must(t, err); !reflect.DeepEqual(e, examination()) {
		t.Errorf("got %+v, want %+v", e, examination())
	}
}

// examination contains conditions of a listed volume, of one whose pool is not open, and of a static volume.
func examination() status.Examination {
	return status.Examination{
		Volumes: []status.Examined{
			{ID: volume, Health: []status.Health{{Status: "DEGRADED", Reason: "PoolAlmostFull"}, {Status: "DEGRADED", Reason: "FilesystemErrors"}}},
			{ID: "loop:slow.01234567:pvc-2", Health: []status.Health{{Status: "INACCESSIBLE", Reason: "PoolUnavailable"}}},
			{ID: "nas/export", Health: []status.Health{{Status: "INACCESSIBLE", Reason: "ServerSilent"}}},
		},
		Unexamined: []string{"slow"},
	}
}

// TestAddHealth: a volume has each reason once, and a volume that the report lacks is added.
func TestAddHealth(t *testing.T) {
	r := sample()
	r.AddHealth("a", examination())
	r.AddHealth("b", examination())
	var got []string
	for _, v := range r.Volumes {
		row := fmt.Sprintf("%s %s %s %s", v.Node, v.Pool, v.Backend, v.Name)
		for _, h := range v.Health {
			row += " " + h.Reason
		}
		got = append(got, row)
	}
	want := []string{"a fast  pvc-1 PoolAlmostFull FilesystemErrors", "a slow loop pvc-2 PoolUnavailable", "   nas/export ServerSilent"}
	if !slices.Equal(got, want) {
		t.Errorf("got volumes %q, want %q", got, want)
	}
}

// TestHandler: only local clients that name the loopback interface get the report.
func TestHandler(t *testing.T) {
	mux := http.NewServeMux()
	status.Handle(mux, func(context.Context) status.Report { return sample() })
	for name, tc := range map[string]struct {
		client, host string
		code         int
	}{
		"local":              {"127.0.0.1:5000", "localhost:9810", http.StatusOK},
		"local by address":   {"[::1]:5000", "[::1]:9810", http.StatusOK},
		"without a port":     {"127.0.0.1:5000", "127.0.0.1", http.StatusOK},
		"another machine":    {"10.0.0.7:5000", "localhost:9810", http.StatusForbidden},
		"name of a web site": {"127.0.0.1:5000", "attacker.example:9810", http.StatusForbidden},
		"another address":    {"127.0.0.1:5000", "10.0.0.7:9810", http.StatusForbidden},
	} {
		t.Run(name, func(t *testing.T) {
			for _, path := range []string{"/", "/status"} {
				req := httptest.NewRequest(http.MethodGet, path, nil)
				req.RemoteAddr, req.Host = tc.client, tc.host
				w := httptest.NewRecorder()
				mux.ServeHTTP(w, req)
				if w.Code != tc.code || strings.Contains(w.Body.String(), "pvc-1") != (tc.code == http.StatusOK) {
					t.Errorf("%s: got code %d and %q, want code %d", path, w.Code, w.Body, tc.code)
				}
			}
		})
	}
}

// TestPage: the page shows the report, escapes its texts, and allows only its own script.
func TestPage(t *testing.T) {
	r := sample()
	r.Volumes[0].Claim, r.Volumes[0].Phase = "shop/data", "Bound"
	w := page(t, r)
	body := w.Body.String()
	for _, want := range []string{"csi.trivet.dev", "pvc-1", "PoolAlmostFull", "&lt;script&gt;alert(1)", "CreateVolume", "1 of 1", `pvc-1 <span class="soft">shop/data</span>`, "volume pvc-1 on a of shop/data", `width="10.0"`, `x="10.0" width="30.0"`} {
		if !strings.Contains(body, want) {
			t.Errorf("the page lacks %q", want)
		}
	}
	if want := `<td data-label="In use on">a</td>`; !strings.Contains(body, want) {
		t.Errorf("the page lacks %q for a staged volume of node a", want)
	}
	if !strings.Contains(body, `<b>1</b><span class="soft">volume</span>`) || !strings.Contains(body, "0 volumes, 0 snapshots") {
		t.Error("the page does not use singular and plural")
	}
	if strings.Contains(body, "<script>alert") {
		t.Error("the page contains the script of a report")
	}
	policy := w.Header().Get("Content-Security-Policy")
	_, after, _ := strings.Cut(policy, "script-src 'nonce-")
	nonce, _, _ := strings.Cut(after, "'")
	if nonce == "" || !strings.Contains(body, `<script nonce="`+nonce+`">`) || !strings.Contains(policy, "default-src 'none'") {
		t.Errorf("got the policy %q, want one that allows only the page's script", policy)
	}
	if again := page(t, sample()).Header().Get("Content-Security-Policy"); again == policy {
		t.Error("two answers have the same nonce")
	}
	if empty := page(t, status.Report{}).Body.String(); !strings.Contains(empty, "No pools.") || !strings.Contains(empty, "No volumes.") {
		t.Error("the page of an empty report does not say that there are no pools and volumes")
	}
}

// TestShared: requests at the same time share one report, unless it must be fresh.
func TestShared(t *testing.T) {
	var reports atomic.Int32
	mux := http.NewServeMux()
	status.Handle(mux, func(context.Context) status.Report {
		reports.Add(1)
		return sample()
	})
	server := httptest.NewServer(mux)
	t.Cleanup(server.Close)
	get := func(path string) {
		resp, err := http.Get(server.URL + path)
		must(t, err)
		var r status.Report
		must(t, json.NewDecoder(resp.Body).Decode(&r))
		must(t, resp.Body.Close())
		if len(r.Volumes) != 1 {
			t.Errorf("got %d volumes, want 1", len(r.Volumes))
		}
	}
	begin := time.Now()
	for range 5 {
		get("/status")
	}
	if most := int32(time.Since(begin)/time.Second) + 1; reports.Load() > most {
		t.Errorf("five requests caused %d reports, want at most %d", reports.Load(), most)
	}
	before := reports.Load()
	for range 5 {
		get("/status?fresh")
	}
	if got := reports.Load() - before; got != 5 {
		t.Errorf("five requests for a fresh report caused %d reports, want 5", got)
	}
}

// TestHanging: while a report hangs, other calls end with their context, and do not start another report.
func TestHanging(t *testing.T) {
	var reports atomic.Int32
	release := make(chan struct{})
	mux := http.NewServeMux()
	status.Handle(mux, func(context.Context) status.Report {
		reports.Add(1)
		<-release
		return sample()
	})
	get := func(ctx context.Context) string {
		req := httptest.NewRequestWithContext(ctx, http.MethodGet, "/status", nil)
		req.RemoteAddr, req.Host = "127.0.0.1:5000", "localhost"
		w := httptest.NewRecorder()
		mux.ServeHTTP(w, req)
		return w.Body.String()
	}
	first := make(chan string)
	go func() { first <- get(context.Background()) }()
	for reports.Load() == 0 {
		time.Sleep(time.Millisecond)
	}
	ended, end := context.WithCancel(t.Context())
	end()
	if got := get(ended); !strings.Contains(got, "has not ended") || reports.Load() != 1 {
		t.Errorf("got %s and %d reports, want a problem and one report", got, reports.Load())
	}
	close(release)
	if got := <-first; !strings.Contains(got, "pvc-1") {
		t.Errorf("got %s after the end of the report, want the report", got)
	}
}

func page(t *testing.T, r status.Report) *httptest.ResponseRecorder {
	t.Helper()
	mux := http.NewServeMux()
	status.Handle(mux, func(context.Context) status.Report { return r })
	req := httptest.NewRequest(http.MethodGet, "/", nil)
	req.RemoteAddr, req.Host = "127.0.0.1:5000", "localhost"
	w := httptest.NewRecorder()
	mux.ServeHTTP(w, req)
	if w.Code != http.StatusOK {
		t.Fatalf("got code %d: %s", w.Code, w.Body)
	}
	return w
}

func text(t *testing.T, r status.Report) string {
	t.Helper()
	b, err := json.Marshal(r)
	must(t, err)
	return string(b)
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
