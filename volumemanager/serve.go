package volumemanager

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"time"

	"github.com/prometheus/client_golang/prometheus/promhttp"
	"k8s.io/apimachinery/pkg/types"

	"github.com/trivet-csi/trivet/internal/webserver"
	"github.com/trivet-csi/trivet/volumemanager/token"
)

// listen opens the manager's Unix socket, which only root can access, and the public HTTP port. The
// returned functions serve them.
func (m *Manager) listen(ctx context.Context) (serve []func(context.Context) error, err error) {
	path, err := socket(m.options.RootDir)
	if err != nil {
		return nil, err
	}
	// No running manager uses an existing socket, because this manager holds the lock of the directory.
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	local, err := (&net.ListenConfig{}).Listen(ctx, "unix", path) // only root can access the directory
	if err != nil {
		return nil, err
	}
	serve = append(serve, m.afterSync(local, m.serveLocal))
	if m.options.HTTPAddress == "" {
		return serve, nil
	}
	public, err := (&net.ListenConfig{}).Listen(ctx, "tcp", m.options.HTTPAddress)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("--http-address %s: %w: use another address, or '' for none", m.options.HTTPAddress, err), local.Close())
	}
	return append(serve, m.afterSync(public, func(ctx context.Context, l net.Listener) error {
		return webserver.Serve(ctx, l, m.publicHandler())
	})), nil
}

// afterSync returns a function that waits for the first sync and then serves until ctx ends. Responses
// before the first sync would be empty.
func (m *Manager) afterSync(l net.Listener, serve func(context.Context, net.Listener) error) func(context.Context) error {
	return func(ctx context.Context) error {
		select {
		case <-ctx.Done():
			return l.Close()
		case <-m.synced:
		}
		return serve(ctx, l)
	}
}

// serveLocal serves the Unix socket until ctx ends. Requests have no time limit, because a client may
// wait for a pod.
func (m *Manager) serveLocal(ctx context.Context, l net.Listener) error {
	server := &http.Server{Handler: m.localHandler(), ReadHeaderTimeout: 5 * time.Second, BaseContext: func(net.Listener) context.Context { return ctx }}
	defer context.AfterFunc(ctx, func() { _ = server.Close() })()
	if err := server.Serve(l); ctx.Err() == nil {
		return err
	}
	return nil
}

// localHandler handles the requests of trivet volume-manager status and wait.
func (m *Manager) localHandler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /status", func(w http.ResponseWriter, _ *http.Request) { writeJSON(w, m.status()) })
	mux.HandleFunc("GET /pods/{namespace}/{name}", func(w http.ResponseWriter, r *http.Request) {
		wait, err := time.ParseDuration(r.URL.Query().Get("wait"))
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		ctx, cancel := context.WithTimeout(r.Context(), wait)
		defer cancel()
		writeJSON(w, m.awaitPod(ctx, types.NamespacedName{Namespace: r.PathValue("namespace"), Name: r.PathValue("name")}))
	})
	return mux
}

// publicHandler handles requests of Prometheus and of programs that verify tokens. Its responses
// contain no secrets.
func (m *Manager) publicHandler() http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(m.metrics.registry, promhttp.HandlerOpts{}))
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	mux.HandleFunc("GET "+token.DiscoveryPath, serveDocument(m.host.Discovery))
	mux.HandleFunc("GET "+token.JWKSPath, serveDocument(m.host.JWKS))
	return mux
}

// issuer returns the issuer of tokens: the URL of the HTTP server that publishes their public keys. If the
// server's address is unspecified, the URL contains the machine's name, which other machines can resolve.
// Without an HTTP server, the issuer is the default of Kubernetes, and nobody can verify the tokens.
func issuer(o Options) (string, error) {
	if o.HTTPAddress == "" {
		return "https://kubernetes.default.svc", nil
	}
	host, port, err := net.SplitHostPort(o.HTTPAddress)
	if err != nil {
		return "", fmt.Errorf("--http-address %s: %w: want HOST:PORT", o.HTTPAddress, err)
	}
	if ip, err := netip.ParseAddr(host); host == "" || err == nil && ip.IsUnspecified() {
		host = o.NodeName
	}
	return "http://" + net.JoinHostPort(host, port), nil
}

// serveDocument returns a handler that responds with the JSON document that get returns.
func serveDocument(get func() ([]byte, error)) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		b, err := get()
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		_, _ = w.Write(b)
	}
}

func writeJSON(w http.ResponseWriter, response any) {
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(response) // fails if the client has closed the connection
}
