//go:build vm

package nfs

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/streaming/pkg/httpstream"
	"k8s.io/streaming/pkg/httpstream/spdy"

	"github.com/trivet-csi/trivet/internal/retry"
)

const (
	// clusterVariable is the path of a directory with the programs etcd and kube-apiserver.
	clusterVariable = "TRIVET_TEST_CLUSTER"

	apiHost, apiPort = "127.0.0.1", "6443"
	apiToken         = "administrator"

	// accountDir is where client-go expects the service account of a pod.
	accountDir = "/var/run/secrets/kubernetes.io/serviceaccount"
)

// apiServer is an API server of Kubernetes without controllers. Its only user may do everything.
type apiServer struct {
	kubernetes.Interface
	// kubeconfig is the path of a kubeconfig.
	kubeconfig string
}

// startAPIServer starts etcd and an API server, which run until the test ends. Programs that the test starts connect to it as if they
// ran in a pod.
func startAPIServer(t *testing.T) *apiServer {
	t.Helper()
	dir := t.TempDir()
	key, tokens, certificate := filepath.Join(dir, "key"), filepath.Join(dir, "tokens"), filepath.Join(dir, "apiserver.crt")
	writeKey(t, key)
	must(t, os.WriteFile(tokens, []byte(apiToken+",administrator,administrator,system:masters\n"), 0o600))
	const client, peer = "http://127.0.0.1:2379", "http://127.0.0.1:2380"
	startDaemon(t, "etcd", "--data-dir", filepath.Join(dir, "etcd"), "--unsafe-no-fsync", "--log-level=warn",
		"--listen-client-urls", client, "--advertise-client-urls", client,
		"--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", "default="+peer)
	startDaemon(t, "kube-apiserver", "--etcd-servers", client, "--bind-address", apiHost, "--secure-port", apiPort, "--cert-dir", dir,
		"--advertise-address=10.96.0.1", "--service-cluster-ip-range=10.96.0.0/16", "--endpoint-reconciler-type=none",
		"--service-account-issuer=https://kubernetes.default.svc", "--service-account-key-file", key, "--service-account-signing-key-file", key,
		"--token-auth-file", tokens, "--authorization-mode=AlwaysAllow", "--anonymous-auth=false", "--enable-priority-and-fairness=false",
		"--disable-admission-plugins=ServiceAccount", "--kubelet-preferred-address-types=InternalIP")

	config := &rest.Config{Host: "https://" + net.JoinHostPort(apiHost, apiPort), BearerToken: apiToken, TLSClientConfig: rest.TLSClientConfig{CAFile: certificate}}
	s := &apiServer{kubeconfig: filepath.Join(dir, "kubeconfig")}
	must(t, retry.For(t.Context(), waitTimeout, func() (bool, error) {
		api, err := kubernetes.NewForConfig(config) // fails until the certificate exists
		if err == nil {
			_, err = api.Discovery().RESTClient().Get().AbsPath("/readyz").DoRaw(t.Context())
		}
		s.Interface = api
		return err != nil, err
	}))
	must(t, os.WriteFile(s.kubeconfig, fmt.Appendf(nil, `{apiVersion: v1, kind: Config, current-context: c, contexts: [{name: c, context: {cluster: c, user: u}}],
  clusters: [{name: c, cluster: {server: %q, certificate-authority: %q}}], users: [{name: u, user: {token: %q}}]}`, config.Host, certificate, apiToken), 0o600))
	account, err := os.ReadFile(certificate)
	must(t, err)
	must(t, os.MkdirAll(accountDir, 0o755))
	must(t, os.WriteFile(filepath.Join(accountDir, "ca.crt"), account, 0o600))
	must(t, os.WriteFile(filepath.Join(accountDir, "token"), []byte(apiToken), 0o600))
	t.Setenv("KUBERNETES_SERVICE_HOST", apiHost)
	t.Setenv("KUBERNETES_SERVICE_PORT", apiPort)
	return s
}

// writeKey writes a new private key, with which the API server signs service accounts.
func writeKey(t *testing.T, file string) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must(t, err)
	der, err := x509.MarshalECPrivateKey(key)
	must(t, err)
	must(t, os.WriteFile(file, pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der}), 0o600))
}

// startDaemon starts a program of clusterVariable, which runs until the test ends. If the test has failed, it logs the program's output.
func startDaemon(t *testing.T, name string, args ...string) {
	t.Helper()
	programs := os.Getenv(clusterVariable)
	if programs == "" {
		t.Fatalf("%s is not set to a directory with %s: run this test with test/vm", clusterVariable, name)
	}
	log, err := os.Create(filepath.Join(t.TempDir(), name+".log"))
	must(t, err)
	defer log.Close()
	cmd := exec.Command(filepath.Join(programs, name), args...)
	cmd.Stdout, cmd.Stderr = log, log
	must(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait() // it was killed
		if t.Failed() {
			t.Logf("%s:\n%s", name, lastLines(log.Name()))
		}
	})
}

// addNode creates the Node object of a machine with an address, and starts a server in place of its kubelet. The server only forwards
// ports, to programs in the network namespace of the test.
func (s *apiServer) addNode(t *testing.T, name, address string) {
	t.Helper()
	listener, err := net.Listen("tcp", net.JoinHostPort(address, "0"))
	must(t, err)
	kubelet := httptest.NewUnstartedServer(http.HandlerFunc(forwardPorts))
	must(t, kubelet.Listener.Close())
	kubelet.Listener = listener
	kubelet.StartTLS()
	t.Cleanup(kubelet.Close)
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
	node.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: address}}
	node.Status.DaemonEndpoints.KubeletEndpoint.Port = int32(listener.Addr().(*net.TCPAddr).Port)
	_, err = s.CoreV1().Nodes().Create(t.Context(), node, metav1.CreateOptions{})
	must(t, err)
}

// forwardPorts serves requests for /portForward of a kubelet. Each connection of the client has two streams with the same ID: one
// for errors, which is opened first, and one for data.
func forwardPorts(w http.ResponseWriter, r *http.Request) {
	if _, err := httpstream.Handshake(r, w, []string{"portforward.k8s.io"}); err != nil {
		return // Handshake has answered
	}
	failures := map[string]httpstream.Stream{}
	spdy.NewResponseUpgrader().UpgradeResponse(w, r, func(s httpstream.Stream, accepted <-chan struct{}) error {
		id := s.Headers().Get(corev1.PortForwardRequestIDHeader)
		if s.Headers().Get(corev1.StreamType) == corev1.StreamTypeError {
			failures[id] = s
			return nil
		}
		failure := failures[id]
		go func() {
			<-accepted
			forward(s, failure)
		}()
		return nil
	})
}

// forward connects a stream with the port in its headers.
func forward(data, failure httpstream.Stream) {
	defer failure.Close()
	defer data.Close()
	conn, err := net.Dial("tcp", net.JoinHostPort("127.0.0.1", data.Headers().Get(corev1.PortHeader)))
	if err != nil {
		_, _ = fmt.Fprint(failure, err)
		return
	}
	closeConn := sync.OnceFunc(func() { _ = conn.Close() })
	defer closeConn()
	go func() {
		defer closeConn() // ends the copy below
		_, _ = io.Copy(conn, data)
	}()
	_, _ = io.Copy(data, conn)
}

// addDriver creates the pod of a driver in the namespace of the installation.
func (s *apiServer) addDriver(t *testing.T, component, node string, port int32) {
	t.Helper()
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: component, Labels: map[string]string{"app.kubernetes.io/name": "trivet", "app.kubernetes.io/component": component}}}
	pod.Spec.NodeName = node
	pod.Spec.Containers = []corev1.Container{{Name: "trivet", Image: "trivet", Ports: []corev1.ContainerPort{{Name: "metrics", ContainerPort: port}}}}
	s.addPod(t, driversNamespace, pod)
}

// addPod creates a pod that is running.
func (s *apiServer) addPod(t *testing.T, namespace string, pod *corev1.Pod) {
	t.Helper()
	pod, err := s.CoreV1().Pods(namespace).Create(t.Context(), pod, metav1.CreateOptions{})
	must(t, err)
	pod.Status.Phase = corev1.PodRunning
	pod.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}
	_, err = s.CoreV1().Pods(namespace).UpdateStatus(t.Context(), pod, metav1.UpdateOptions{})
	must(t, err)
}
