package main_test

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// driverPods is a list of the pods of a controller and of two nodes, as the API server returns it.
const driverPods = `{"apiVersion":"v1","kind":"PodList","metadata":{},"items":[
{"apiVersion":"v1","kind":"Pod","metadata":{"name":"c","labels":{"app.kubernetes.io/component":"controller"}},"spec":{"nodeName":"worker-1","containers":[{"name":"trivet"}]}},
{"apiVersion":"v1","kind":"Pod","metadata":{"name":"a","labels":{"app.kubernetes.io/component":"node"}},"spec":{"nodeName":"worker-1","containers":[{"name":"trivet"}]}},
{"apiVersion":"v1","kind":"Pod","metadata":{"name":"b","labels":{"app.kubernetes.io/component":"node"}},"spec":{"nodeName":"worker-2","containers":[{"name":"trivet"}]}}]}`

// TestKubectlCompletion: under the name kubectl_complete-trivet, the program completes its arguments as a command line
// of `kubectl trivet`, with the names of nodes from the cluster. kubectl(1) passes the output to the shell.
func TestKubectlCompletion(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/api/v1/namespaces/storage/pods" {
			http.NotFound(w, r)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		_, _ = fmt.Fprint(w, driverPods)
	}))
	defer server.Close()
	dir := t.TempDir()
	link, kubeconfig := filepath.Join(dir, "kubectl_complete-trivet"), filepath.Join(dir, "config")
	must(t, os.Symlink(program, link))
	must(t, os.WriteFile(kubeconfig, fmt.Appendf(nil, `{apiVersion: v1, kind: Config, current-context: c, contexts: [{name: c, context: {cluster: c, user: u}}],
  clusters: [{name: c, cluster: {server: %q}}], users: [{name: u, user: {}}]}`, server.URL), 0o600))
	for _, tc := range []struct {
		args []string
		want string
	}{
		{[]string{"sta"}, "status\tShow the drivers and the pools\n:4\n"},
		{[]string{"volumes", "--output", ""}, "table\nwide\njson\nyaml\n:4\n"},
		{[]string{"--trivet-namespace", "storage", "logs", "--node", ""}, "worker-1\nworker-2\n:4\n"},
		{[]string{"doctor", "--trivet-namespace=storage", "--node=worker-"}, "worker-1\nworker-2\n:4\n"},
		{[]string{"logs", "--node", ""}, ":1\n"}, // ShellCompDirectiveError: the namespace does not exist
	} {
		cmd := exec.Command(link, tc.args...)
		cmd.Env = append(os.Environ(), "KUBECONFIG="+kubeconfig)
		if out, err := cmd.Output(); err != nil || string(out) != tc.want {
			t.Errorf("%q: got error %v, output %q, want %q", tc.args, err, out, tc.want)
		}
	}
}
