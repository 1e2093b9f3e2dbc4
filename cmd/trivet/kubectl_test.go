package main_test

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"k8s.io/streaming/pkg/httpstream/wsstream"
)

// driverPods is a list of the pods of a controller and of two nodes, as the API server returns it. The driver on
// worker-1 is not running.
const driverPods = `{"apiVersion":"v1","kind":"PodList","metadata":{},"items":[
{"apiVersion":"v1","kind":"Pod","metadata":{"name":"c","labels":{"app.kubernetes.io/component":"controller"}},"spec":{"nodeName":"worker-1","containers":[{"name":"trivet"}]}},
{"apiVersion":"v1","kind":"Pod","metadata":{"name":"a","namespace":"storage","labels":{"app.kubernetes.io/component":"node"}},"spec":{"nodeName":"worker-1","containers":[{"name":"trivet"}]},
 "status":{"phase":"Running","containerStatuses":[{"name":"trivet","state":{"waiting":{"reason":"CrashLoopBackOff","message":"back-off 40s"}}}]}},
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
	link := filepath.Join(t.TempDir(), "kubectl_complete-trivet")
	must(t, os.Symlink(program, link))
	kubeconfig := writeKubeconfig(t, server.URL)
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

// writeKubeconfig writes the kubeconfig of an API server, and returns its path.
func writeKubeconfig(t *testing.T, server string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "config")
	must(t, os.WriteFile(file, fmt.Appendf(nil, `{apiVersion: v1, kind: Config, current-context: c, contexts: [{name: c, context: {cluster: c, user: u}}],
  clusters: [{name: c, cluster: {server: %q}}], users: [{name: u, user: {}}]}`, server), 0o600))
	return file
}

// TestKubectlDoctor: a pod whose container is starting has a finding with its reason, and the other pods have theirs.
func TestKubectlDoctor(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case r.URL.Path == "/api/v1/namespaces/trivet-system/pods":
			w.Header().Set("Content-Type", "application/json")
			_, _ = fmt.Fprint(w, driverPods)
		case strings.HasSuffix(r.URL.Path, "/pods/a/exec"):
			http.Error(w, `container not found ("trivet")`, http.StatusInternalServerError)
		default:
			serveExec(w, r, `[{"name":"nodes","result":"warning","seen":"something","remedy":"repair it"}]`)
		}
	}))
	defer server.Close()
	link := filepath.Join(t.TempDir(), "kubectl-trivet")
	must(t, os.Symlink(program, link))
	cmd := exec.Command(link, "doctor")
	cmd.Env = append(os.Environ(), "KUBECONFIG="+writeKubeconfig(t, server.URL))
	out, err := cmd.CombinedOutput()
	want := strings.Join([]string{
		"DRIVER      CHECK      RESULT   SEEN                                                                              REMEDY",
		"controller  nodes      warning  something                                                                         repair it",
		"worker-1    container  failure  the container trivet of the pod a is not running: CrashLoopBackOff: back-off 40s  see `kubectl -n storage describe pod a` and `kubectl -n storage logs a -c trivet`",
		"worker-2    nodes      warning  something                                                                         repair it",
		"",
	}, "\n")
	if !strings.HasPrefix(string(out), want) || cmd.ProcessState.ExitCode() != 1 {
		t.Errorf("got error %v and output\n%swant exit status 1 and\n%s", err, out, want)
	}
}

// serveExec answers a request for pods/exec over WebSocket: the command writes a text and succeeds.
func serveExec(w http.ResponseWriter, r *http.Request, stdout string) {
	channels := []wsstream.ChannelType{wsstream.IgnoreChannel, wsstream.WriteChannel, wsstream.WriteChannel, wsstream.WriteChannel}
	conn := wsstream.NewConn(map[string]wsstream.ChannelProtocolConfig{"v5.channel.k8s.io": {Binary: true, Channels: channels}})
	_, streams, err := conn.Open(w, r)
	if err != nil {
		return
	}
	defer func() { _ = conn.Close() }()
	_, _ = fmt.Fprint(streams[1], stdout)
	_, _ = fmt.Fprint(streams[3], `{"status":"Success"}`)
}
