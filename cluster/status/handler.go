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
	"sync"
	"time"

	"github.com/trivet-csi/trivet/volume"
)

// maxAge is the age up to which a report is served again, so that several viewers cost as much as one.
const maxAge = time.Second

// Handle serves the report at /status as JSON, and at / as a page. Only clients on the loopback interface get
// it, which is where `kubectl port-forward` connects from, because names of volumes are no business of
// everybody who may scrape metrics.
func Handle(mux *http.ServeMux, source Source) {
	recent := &recent{source: source}
	mux.Handle("GET /status", localOnly(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(recent.report(r.Context())) // fails only if the client is gone
	}))
	mux.Handle("GET /{$}", localOnly(func(w http.ResponseWriter, r *http.Request) {
		servePage(w, recent.report(r.Context()))
	}))
}

// recent holds the last report.
type recent struct {
	source Source
	mu     sync.Mutex
	at     time.Time
	last   Report
}

// report returns a report that is at most maxAge old. Concurrent calls share one.
func (c *recent) report(ctx context.Context) Report {
	c.mu.Lock()
	defer c.mu.Unlock()
	if time.Since(c.at) > maxAge {
		// The report must not be incomplete for other callers if this caller ends.
		c.last = c.source(context.WithoutCancel(ctx))
		c.at = time.Now()
	}
	return c.last
}

// localOnly refuses clients of other machines. It also refuses names other than those of the loopback
// interface in the request, so that no page of another site can read the report through a forwarded port
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
