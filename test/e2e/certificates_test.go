//go:build e2e

package e2e

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/trivet-csi/trivet/cluster/pki"
)

const (
	authority       = "trivet-ca"
	certificatesDir = stateDir + "/certificates"
)

// TestCertificates: each node has a certificate for its own name from the installation's CA. A
// request for another name is denied, and only clients with the controller's certificate connect.
func TestCertificates(t *testing.T) {
	installed(t)
	waitDriver(t)
	all := nodes()
	for _, n := range all {
		t.Run(n.name, func(t *testing.T) { checkCertificate(t, n) })
	}
	t.Run("asked for by another node", func(t *testing.T) {
		if why := askAs(t, all[0], all[1].name); !strings.Contains(why, "the request is for "+pki.NodeURI(driverName, all[1].name).String()) {
			t.Errorf("not refused, or for another reason: %q", why)
		}
	})
	strangers := map[string]struct {
		shows func(t *testing.T) *tls.Certificate
		log   string
	}{
		"no certificate":    {func(*testing.T) *tls.Certificate { return nil }, "tls: client didn't provide a certificate"},
		"another node's":    {func(t *testing.T) *tls.Certificate { return pairOf(t, all[1]) }, "certificate of " + pki.NodeURI(driverName, all[1].name).String()},
		"one of another CA": {forged, "signed by another CA"},
	}
	for name, s := range strangers {
		t.Run(name, func(t *testing.T) { checkRefused(t, all[0], s.shows(t), s.log) })
	}
}

func checkCertificate(t *testing.T, n node) {
	dir := n.path(certificatesDir)
	for file, mode := range map[string]os.FileMode{"": os.ModeDir | 0o700, "tls.key": 0o600} {
		info, err := os.Stat(filepath.Join(dir, file))
		if err != nil || info.Mode() != mode {
			t.Errorf("%s has mode %v, want %v: %v", file, info.Mode(), mode, err)
		}
	}
	if roots := read(t, filepath.Join(dir, "ca.crt")); roots != published(t) {
		t.Error("the node does not trust what is published")
	}
	cert := n.certificate(t)
	if uris, want := fmt.Sprint(cert.URIs), fmt.Sprint([]*url.URL{pki.NodeURI(driverName, n.name)}); uris != want {
		t.Errorf("the certificate is of %s, want %s", uris, want)
	}
	if err := signedBy(cert, published(t)); err != nil {
		t.Error(err)
	}
}

// published are the CA certificates that are to be trusted.
func published(t *testing.T) string {
	t.Helper()
	return kubectl(t, "-n", namespace, "get", "configmap", authority, "-o", `jsonpath={.data.ca\.crt}`)
}

// certificate is the one that the node's driver has.
func (n node) certificate(t *testing.T) *x509.Certificate {
	t.Helper()
	block, _ := pem.Decode([]byte(read(t, filepath.Join(n.path(certificatesDir), "tls.crt"))))
	cert, err := x509.ParseCertificate(block.Bytes)
	must(t, err)
	return cert
}

func signedBy(cert *x509.Certificate, roots string) error {
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM([]byte(roots))
	_, err := cert.Verify(x509.VerifyOptions{Roots: pool, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}})
	return err
}

// askAs asks for a certificate in a name with the token of the driver's pod on a node,
// and returns why it was denied.
func askAs(t *testing.T, n node, name string) string {
	t.Helper()
	_, request, err := pki.NewRequest(pki.NodeURI(driverName, name))
	must(t, err)
	pod := clientOf(t, n)
	csr, err := pod.CertificatesV1().CertificateSigningRequests().Create(t.Context(), &certificatesv1.CertificateSigningRequest{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "stranger-"},
		Spec: certificatesv1.CertificateSigningRequestSpec{
			Request: request, SignerName: driverName + "/node",
			Usages: []certificatesv1.KeyUsage{certificatesv1.UsageDigitalSignature, certificatesv1.UsageServerAuth},
		},
	}, metav1.CreateOptions{})
	must(t, err)
	requests := client.CertificatesV1().CertificateSigningRequests()
	t.Cleanup(func() { _ = requests.Delete(context.Background(), csr.Name, metav1.DeleteOptions{}) })
	var why string
	eventually(t, time.Minute, "the request is answered", func() (string, bool) {
		r, err := requests.Get(t.Context(), csr.Name, metav1.GetOptions{})
		if err != nil {
			return err.Error(), false
		}
		for _, c := range r.Status.Conditions {
			if c.Type == certificatesv1.CertificateDenied {
				why = c.Message
			}
		}
		return fmt.Sprint(r.Status), len(r.Status.Conditions) > 0
	})
	return why
}

// clientOf talks to the API server as the driver's pod on a node.
func clientOf(t *testing.T, n node) kubernetes.Interface {
	t.Helper()
	pod, err := client.CoreV1().Pods(namespace).Get(t.Context(), n.driverPod(t), metav1.GetOptions{})
	must(t, err)
	token, err := client.CoreV1().ServiceAccounts(namespace).CreateToken(t.Context(), pod.Spec.ServiceAccountName, &authenticationv1.TokenRequest{
		Spec: authenticationv1.TokenRequestSpec{BoundObjectRef: &authenticationv1.BoundObjectReference{Kind: "Pod", APIVersion: "v1", Name: pod.Name, UID: pod.UID}},
	}, metav1.CreateOptions{})
	must(t, err)
	config, err := clientcmd.BuildConfigFromFlags("", os.Getenv("KUBECONFIG"))
	must(t, err)
	config = rest.AnonymousClientConfig(config)
	config.BearerToken = token.Status.Token
	c, err := kubernetes.NewForConfig(config)
	must(t, err)
	return c
}

// pairOf is a node's certificate and key.
func pairOf(t *testing.T, n node) *tls.Certificate {
	t.Helper()
	dir := n.path(certificatesDir)
	pair, err := tls.LoadX509KeyPair(filepath.Join(dir, "tls.crt"), filepath.Join(dir, "tls.key"))
	must(t, err)
	return &pair
}

// forged is a certificate for the controller from another CA.
func forged(t *testing.T) *tls.Certificate {
	t.Helper()
	ca, err := pki.NewAuthority(driverName)
	must(t, err)
	key, request, err := pki.NewRequest(pki.ControllerURI(driverName))
	must(t, err)
	pub, who, err := pki.ParseRequest(request)
	must(t, err)
	cert, err := ca.Issue(pub, who, x509.ExtKeyUsageClientAuth, time.Hour)
	must(t, err)
	pair, err := tls.X509KeyPair(cert, key)
	must(t, err)
	return &pair
}

// checkRefused knocks at a node's port several times with a certificate or without; it
// is let in never, and the log says so once.
func checkRefused(t *testing.T, n node, cert *tls.Certificate, why string) {
	config := &tls.Config{
		InsecureSkipVerify: true, // who is asked does not matter here
		NextProtos:         []string{"h2"},
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
			if cert == nil {
				return &tls.Certificate{}, nil
			}
			return cert, nil
		},
	}
	for range 3 {
		dialer := &tls.Dialer{Config: config}
		conn, err := dialer.DialContext(t.Context(), "tcp", n.driverAddress(t)+":9811")
		if err != nil {
			t.Fatal(err) // in TLS 1.3 the server answers before it has seen the certificate
		}
		_ = conn.SetDeadline(time.Now().Add(10 * time.Second))
		_, err = conn.Read(make([]byte, 1))
		_ = conn.Close()
		if err == nil || !strings.Contains(err.Error(), "remote error: tls:") {
			t.Fatalf("not refused: %v", err)
		}
	}
	lines := 0
	log := kubectl(t, "-n", namespace, "logs", n.driverPod(t), "-c", "trivet")
	for line := range strings.Lines(log) {
		if has(line, "Refused a connection to the forwarding port", why) {
			lines++
		}
	}
	if lines != 1 {
		t.Errorf("3 refusals, and %d lines in the log say %q:\n%s", lines, why, tail(log, 20))
	}
}

// TestNewAuthority replaces the CA as docs/kubernetes.md says, while a pod writes. All calls then
// work with the new CA, and the old one is no longer trusted.
func TestNewAuthority(t *testing.T) {
	ns := newNamespace(t, "authority")
	waitDriver(t)
	applyText(t, ns, counting)
	waitReady(t, ns)
	old := published(t)

	kubectl(t, "-n", namespace, "delete", "secret", authority)
	kubectl(t, "-n", namespace, "delete", "configmap", authority)
	eventually(t, time.Minute, "a new CA alone is published", func() (string, bool) {
		cm, err := client.CoreV1().ConfigMaps(namespace).Get(t.Context(), authority, metav1.GetOptions{})
		if err != nil {
			return err.Error(), false
		}
		now := cm.Data["ca.crt"]
		return now, now != "" && !strings.Contains(now, strings.TrimSpace(old))
	})
	requests := kubectl(t, "get", "csr", "-o", "name")
	for request := range strings.FieldsSeq(requests) {
		if strings.Contains(request, "/"+driverName+"-node-") {
			kubectl(t, "delete", request)
		}
	}
	restart(t)
	waitDriver(t)
	for _, n := range nodes() {
		eventually(t, time.Minute, "a new certificate on "+n.name, func() (string, bool) {
			err := signedBy(n.certificate(t), published(t))
			return fmt.Sprint(err), err == nil
		})
		checkCertificate(t, n)
		moveIn(t, ns, tenant{name: "on-" + n.name, node: n.name})
	}
	before := numbers(t, ns)
	eventually(t, time.Minute, "the pod still writes", func() (string, bool) {
		n := numbers(t, ns)
		return fmt.Sprint(n), n > before
	})
	secret, err := client.CoreV1().Secrets(namespace).Get(t.Context(), authority, metav1.GetOptions{})
	if err != nil || secret.Type != corev1.SecretTypeTLS {
		t.Errorf("the Secret is of type %s: %v", secret.Type, err)
	}
}
