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

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/trivet-csi/trivet/cluster/pki"
)

const (
	authority       = "trivet-ca"
	certificatesDir = stateDir + "/certificates"
)

// TestCertificates checks that each node has a certificate for its own name from the installation's CA, that
// a request for another name is denied, and that only clients with the controller's certificate can
// connect.
func TestCertificates(t *testing.T) {
	ensureInstalled(t)
	waitDriver(t)
	all := nodes()
	for _, n := range all {
		t.Run(n.name, func(t *testing.T) { checkCertificate(t, n) })
	}
	t.Run("requested by another node", func(t *testing.T) {
		if why := requestAs(t, all[0], all[1].name); !strings.Contains(why, "the request is for "+pki.NodeURI(driverName, all[1].name).String()) {
			t.Errorf("got reason %q for denying the request, want one that names the node", why)
		}
	})
	clients := map[string]struct {
		certificate func(t *testing.T) *tls.Certificate
		log         string // the reason in the log of the driver
	}{
		"no certificate":              {func(*testing.T) *tls.Certificate { return nil }, "tls: client didn't provide a certificate"},
		"certificate of another node": {func(t *testing.T) *tls.Certificate { return pairOf(t, all[1]) }, "certificate of " + pki.NodeURI(driverName, all[1].name).String()},
		"certificate of another CA":   {forged, "signed by another CA"},
	}
	for name, c := range clients {
		t.Run(name, func(t *testing.T) { checkRefused(t, all[0], c.certificate(t), c.log) })
	}
}

// checkCertificate checks the key, the certificate and the trusted CA of a node's driver.
func checkCertificate(t *testing.T, n node) {
	dir := n.path(certificatesDir)
	for file, mode := range map[string]os.FileMode{"": os.ModeDir | 0o700, "tls.key": 0o600} {
		info, err := os.Stat(filepath.Join(dir, file))
		if err != nil || info.Mode() != mode {
			t.Errorf("%s: got file info %v and error %v, want mode %v", filepath.Join(dir, file), info, err, mode)
		}
	}
	if roots := read(t, filepath.Join(dir, "ca.crt")); roots != published(t) {
		t.Errorf("got trusted CAs %s of the node, want the published ones", roots)
	}
	cert := n.certificate(t)
	if uris, want := fmt.Sprint(cert.URIs), fmt.Sprint([]*url.URL{pki.NodeURI(driverName, n.name)}); uris != want {
		t.Errorf("got URIs %s of the certificate, want %s", uris, want)
	}
	if err := signedBy(cert, published(t)); err != nil {
		t.Error(err)
	}
}

// published returns the CA certificates in the ConfigMap of the installation.
func published(t *testing.T) string {
	t.Helper()
	return kubectl(t, "-n", namespace, "get", "configmap", authority, "-o", `jsonpath={.data.ca\.crt}`)
}

// certificate returns the certificate of the node's driver.
func (n node) certificate(t *testing.T) *x509.Certificate {
	t.Helper()
	block, _ := pem.Decode([]byte(read(t, filepath.Join(n.path(certificatesDir), "tls.crt"))))
	cert, err := x509.ParseCertificate(block.Bytes)
	must(t, err)
	return cert
}

// signedBy fails unless one of the CAs has signed a server certificate.
func signedBy(cert *x509.Certificate, roots string) error {
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM([]byte(roots))
	_, err := cert.Verify(x509.VerifyOptions{Roots: pool, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}})
	return err
}

// requestAs requests a certificate for a node name with the token of the driver's pod on another node. It
// returns the reason for which the request was denied, or an empty string.
func requestAs(t *testing.T, n node, name string) string {
	t.Helper()
	_, request, err := pki.NewRequest(pki.NodeURI(driverName, name))
	must(t, err)
	pod := clientOf(t, n)
	csr, err := pod.CertificatesV1().CertificateSigningRequests().Create(t.Context(), &certificatesv1.CertificateSigningRequest{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "other-node-"},
		Spec: certificatesv1.CertificateSigningRequestSpec{
			Request: request, SignerName: driverName + "/node",
			Usages: []certificatesv1.KeyUsage{certificatesv1.UsageDigitalSignature, certificatesv1.UsageServerAuth},
		},
	}, metav1.CreateOptions{})
	must(t, err)
	requests := client.CertificatesV1().CertificateSigningRequests()
	t.Cleanup(func() { _ = requests.Delete(context.Background(), csr.Name, metav1.DeleteOptions{}) })
	var why string
	eventually(t, time.Minute, "the request is approved or denied", func() (string, bool) {
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

// clientOf returns a Kubernetes client with the token of the driver's pod on a node.
func clientOf(t *testing.T, n node) kubernetes.Interface {
	t.Helper()
	pod, err := client.CoreV1().Pods(namespace).Get(t.Context(), n.driverPod(t), metav1.GetOptions{})
	must(t, err)
	return clientWithToken(t, token(t, pod.Spec.ServiceAccountName, pod))
}

// pairOf returns the certificate and key of a node.
func pairOf(t *testing.T, n node) *tls.Certificate {
	t.Helper()
	dir := n.path(certificatesDir)
	pair, err := tls.LoadX509KeyPair(filepath.Join(dir, "tls.crt"), filepath.Join(dir, "tls.key"))
	must(t, err)
	return &pair
}

// forged returns a certificate for the controller from another CA.
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

// checkRefused connects three times to the forwarding port of a node, with a certificate or none (nil). The
// driver must refuse each connection and log the reason only once.
func checkRefused(t *testing.T, n node, cert *tls.Certificate, why string) {
	config := &tls.Config{
		InsecureSkipVerify: true, // the test does not check the driver's certificate
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
			t.Fatal(err) // in TLS 1.3 the handshake succeeds before the server has seen the client's certificate
		}
		_ = conn.SetDeadline(time.Now().Add(10 * time.Second))
		_, err = conn.Read(make([]byte, 1))
		_ = conn.Close()
		if err == nil || !strings.Contains(err.Error(), "remote error: tls:") {
			t.Fatalf("got error %v, want a TLS alert of the driver", err)
		}
	}
	lines := 0
	log := kubectl(t, "-n", namespace, "logs", n.driverPod(t), "-c", "trivet")
	for line := range strings.Lines(log) {
		if hasLine(line, "Refused a connection to the forwarding port", why) {
			lines++
		}
	}
	if lines != 1 {
		t.Errorf("got %d lines with %q in the log, want 1 for 3 refused connections:\n%s", lines, why, tail(log, 20))
	}
}

// TestNewAuthority replaces the CA as docs/operations/certificates.md describes, while a pod writes. Afterwards all calls
// must work with the new CA, and the old CA must not be trusted any more.
func TestNewAuthority(t *testing.T) {
	ns := newNamespace(t, "authority")
	waitDriver(t)
	startCounting(t, ns, "trivet-loop")
	old := published(t)

	kubectl(t, "-n", namespace, "delete", "secret", authority)
	kubectl(t, "-n", namespace, "delete", "configmap", authority)
	eventually(t, time.Minute, "only a new CA is published", func() (string, bool) {
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
		eventually(t, time.Minute, n.name+" has a certificate of the new CA", func() (string, bool) {
			err := signedBy(n.certificate(t), published(t))
			return fmt.Sprint(err), err == nil
		})
		checkCertificate(t, n)
		startPod(t, ns, claimPod{name: "on-" + n.name, node: n.name})
	}
	before := numbers(t, ns)
	eventually(t, time.Minute, "the pod still writes", func() (string, bool) {
		n := numbers(t, ns)
		return fmt.Sprint(n), n > before
	})
	secret, err := client.CoreV1().Secrets(namespace).Get(t.Context(), authority, metav1.GetOptions{})
	if err != nil || secret.Type != corev1.SecretTypeTLS {
		t.Errorf("got type %s and error %v of the Secret, want %s", secret.Type, err, corev1.SecretTypeTLS)
	}
}
