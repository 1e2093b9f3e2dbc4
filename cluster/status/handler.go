package status

import (
	"context"
	"crypto/rand"
	_ "embed"
	"encoding/json"
	"fmt"
	"html/template"
	"net"
	"net/http"
	"time"

	"github.com/trivet-csi/trivet/volume"
)

// maxAge is the age up to which a report is served again, so that several viewers cost as much as one.
const maxAge = time.Second

// Handle serves the report at /status as JSON, and at / as a page. With the query parameter fresh, /status collects a new
// report. It refuses clients that do not connect through the loopback interface, because the report contains the names of
// all volumes, and other pods may reach the port to read metrics. `kubectl port-forward` connects through the loopback
// interface.
func Handle(mux *http.ServeMux, source Source) {
	recent, fresh := shared(source)
	mux.Handle("GET /status", localOnly(func(w http.ResponseWriter, r *http.Request) {
		source := recent
		if r.URL.Query().Has("fresh") {
			source = fresh
		}
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(source(r.Context())) // fails only if the client is gone
	}))
	mux.Handle("GET /{$}", localOnly(func(w http.ResponseWriter, r *http.Request) {
		servePage(w, recent(r.Context()))
	}))
}

// shared returns Sources that collect one report at a time. The reports of recent are at most maxAge old, those of fresh are new. A
// report that hangs, because the disk of a pool does not answer, therefore blocks one goroutine only: other calls end with their
// context.
func shared(source Source) (recent, fresh Source) {
	var last Report
	var at time.Time
	turn := make(chan struct{}, 1)
	within := func(age time.Duration) Source {
		return func(ctx context.Context) Report {
			select {
			case turn <- struct{}{}:
			case <-ctx.Done():
				return Report{Processes: []Process{{Problem: "an earlier report has not ended: a pool may not answer"}}}
			}
			defer func() { <-turn }()
			if time.Since(at) >= age {
				// The report must not be incomplete for other callers if this caller ends.
				last = source(context.WithoutCancel(ctx))
				at = time.Now()
			}
			return last
		}
	}
	return within(maxAge), within(0)
}

// localOnly refuses clients of other machines. It also refuses a request whose Host header does not name the
// loopback interface, so that no page of another site can read the report through a forwarded port
// (DNS rebinding).
func localOnly(f http.HandlerFunc) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		client, _, err := net.SplitHostPort(r.RemoteAddr)
		if ip := net.ParseIP(client); err != nil || !ip.IsLoopback() {
			http.Error(w, "the status is only served to clients on the loopback interface: use `kubectl trivet ui`, or kubectl port-forward", http.StatusForbidden)
			return
		}
		name := r.Host
		if host, _, err := net.SplitHostPort(r.Host); err == nil {
			name = host
		}
		if ip := net.ParseIP(name); name != "localhost" && (ip == nil || !ip.IsLoopback()) {
			http.Error(w, fmt.Sprintf("unexpected host %q: use localhost", name), http.StatusForbidden)
			return
		}
		f(w, r)
	})
}

//go:embed page.html
var pageText string

var page = template.Must(template.New("page").Funcs(template.FuncMap{
	"size": volume.FormatSize,
	"plural": func(n int, word string) string {
		if n != 1 {
			word += "s"
		}
		return word
	},
}).Parse(pageText))

// servePage writes the page. It contains its style and script, and loads nothing else.
func servePage(w http.ResponseWriter, r Report) {
	nonce := rand.Text()
	h := w.Header()
	h.Set("Content-Type", "text/html; charset=utf-8")
	h.Set("Content-Security-Policy", fmt.Sprintf("default-src 'none'; style-src 'nonce-%s'; script-src 'nonce-%[1]s'; connect-src 'self'; form-action 'none'; frame-ancestors 'none'; base-uri 'none'", nonce))
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Referrer-Policy", "no-referrer")
	h.Set("Cache-Control", "no-store")
	_ = page.Execute(w, newView(r, nonce)) // fails only if the client is gone
}
