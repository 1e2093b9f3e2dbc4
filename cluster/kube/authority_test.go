package kube_test

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/hex"
	"encoding/pem"
	"math/big"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/trivet-csi/trivet/cluster/kube"
	"github.com/trivet-csi/trivet/cluster/pki"
)

const (
	day           = 24 * time.Hour
	secretPath    = "/api/v1/namespaces/" + namespace + "/secrets/trivet-ca"
	configMapPath = "/api/v1/namespaces/" + namespace + "/configmaps/trivet-ca"
	madeLabel     = driver + "/made"
)

// controller is a replica of the controller, or a node's driver.
type controller struct {
	*pki.Directory
	log  *logBuffer
	stop func()
}

func startController(t *testing.T, c *cluster) controller {
	t.Helper()
	return startControllerIn(t, c, pki.OpenDirectory(t.TempDir()))
}

func startControllerIn(t *testing.T, c *cluster, dir *pki.Directory) controller {
	t.Helper()
	log, stop := start(t, keepAuthority(c, dir))
	return controller{dir, log, stop}
}

func keepAuthority(c *cluster, dir *pki.Directory) func(context.Context) {
	return func(ctx context.Context) {
		kube.MaintainAuthority(ctx, user{cluster: c}.connect, kube.AuthorityOptions{
			Namespace: namespace, Name: "trivet-ca", Driver: driver, NodeServiceAccount: "trivet-node", Certificates: dir,
		})
	}
}

// TestKeyIsNotLogged: the log does not contain the CA's key at any verbosity.
func TestKeyIsNotLogged(t *testing.T) {
	bubble(t, func(t *testing.T, c *cluster) {
		log, _ := startVerbose(t, 10, keepAuthority(c, pki.OpenDirectory(t.TempDir())))
		time.Sleep(day)
		if log.count("Created a certificate authority") == 0 {
			t.Fatalf("no CA was created:\n%s", log)
		}
		if log.count("tls.key") != 0 {
			t.Errorf("the log contains a key:\n%s", log)
		}
	})
}

// newCA returns a CA that is valid from now on for a lifetime.
func newCA(t *testing.T, lifetime time.Duration) (cert, key []byte) {
	t.Helper()
	private := must(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))(t)
	template := &x509.Certificate{
		Subject: pkix.Name{CommonName: driver}, SerialNumber: big.NewInt(time.Now().UnixNano()), NotBefore: time.Now(), NotAfter: time.Now().Add(lifetime),
		KeyUsage: x509.KeyUsageCertSign, BasicConstraintsValid: true, IsCA: true,
	}
	der := must(x509.CreateCertificate(rand.Reader, template, template, private.Public(), private))(t)
	pkcs8 := must(x509.MarshalPKCS8PrivateKey(private))(t)
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: pkcs8})
}

func fingerprint(cert []byte) string {
	sum := sha256.Sum256(cert)
	return hex.EncodeToString(sum[:16])
}

func putCA(c *cluster, cert, key []byte, labels object) {
	c.put(secretPath, object{"metadata": object{"labels": labels}, "type": "kubernetes.io/tls", "data": object{"tls.crt": cert, "tls.key": key}})
}

// caCert returns the CA certificate in the Secret.
func caCert(t *testing.T, c *cluster) []byte {
	t.Helper()
	cert := must(base64.StdEncoding.DecodeString(text(c.get(secretPath), "data", "tls.crt")))(t)
	return cert
}

func published(c *cluster) string { return text(c.get(configMapPath), "data", "ca.crt") }

// signedBy reports whether a CA signed a directory's certificate.
func signedBy(t *testing.T, d *pki.Directory, ca []byte) bool {
	t.Helper()
	if err := d.Usable(); err != nil {
		t.Fatal(err)
	}
	cert, _, _, err := d.Read()
	if err != nil {
		t.Fatal(err)
	}
	return parseCert(t, cert).CheckSignatureFrom(parseCert(t, ca)) == nil
}

func parseCert(t *testing.T, b []byte) *x509.Certificate {
	t.Helper()
	block, _ := pem.Decode(b)
	if block == nil {
		t.Fatalf("no PEM: %q", b)
	}
	cert := must(x509.ParseCertificate(block.Bytes))(t)
	return cert
}

func cert(t *testing.T, d *pki.Directory) string {
	t.Helper()
	cert, _, _, err := d.Read()
	if err != nil {
		t.Fatal(err)
	}
	return string(cert)
}

func roots(t *testing.T, d *pki.Directory) string {
	t.Helper()
	_, _, roots, err := d.Read()
	if err != nil {
		t.Fatal(err)
	}
	return string(roots)
}

// TestAuthority: a controller creates all objects, also if its first calls fail.
func TestAuthority(t *testing.T) {
	for name, fail := range map[string]map[string][]int{
		"at once":       {},
		"forbidden":     {"GET secrets": {403, 403}, "WATCH secrets": {403, 403}, "POST secrets": {403, 403}, "POST configmaps": {403}},
		"server errors": {"WATCH configmaps": {500, 503}, "POST secrets": {500}, "POST configmaps": {500, 503}},
		"conflicts":     {"POST secrets": {409, 409}, "POST configmaps": {409}},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T, c *cluster) {
				c.fail = fail
				k := startController(t, c)
				time.Sleep(time.Hour)
				ca := caCert(t, c)
				secret := c.get(secretPath)
				if text(secret, "type") != "kubernetes.io/tls" || text(secret, "metadata", "labels", madeLabel) != fingerprint(ca) {
					t.Errorf("the Secret is %v", secret)
				}
				if left := time.Until(parseCert(t, ca).NotAfter); left < 9*365*day {
					t.Errorf("the CA is valid for %s", left)
				}
				if published(c) != string(ca) || roots(t, k.Directory) != string(ca) || !signedBy(t, k.Directory, ca) {
					t.Errorf("published %s, the controller trusts %s", published(c), roots(t, k.Directory))
				}
				leaf := parseCert(t, []byte(cert(t, k.Directory)))
				if leaf.URIs[0].String() != "spiffe://"+driver+"/controller" || !slices.Equal(leaf.ExtKeyUsage, []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}) {
					t.Errorf("the controller's certificate names %v, for %v", leaf.URIs, leaf.ExtKeyUsage)
				}
			})
		})
	}
}

// TestTwoControllers: all replicas use the CA of the first Secret, also a replica that read no Secret before it
// created one.
func TestTwoControllers(t *testing.T) {
	bubble(t, func(t *testing.T, c *cluster) {
		a, b := startController(t, c), startController(t, c)
		synctest.Wait()
		time.Sleep(time.Hour)
		ca := caCert(t, c)
		if !signedBy(t, a.Directory, ca) || !signedBy(t, b.Directory, ca) || published(c) != string(ca) {
			t.Errorf("published: %s, the CA: %s", published(c), ca)
		}
	})
	bubble(t, func(t *testing.T, c *cluster) {
		theirs, key := newCA(t, 365*day)
		c.before["POST secrets"] = func() { putCA(c, theirs, key, nil) }
		c.before["POST configmaps"] = func() { c.put(configMapPath, object{"data": object{"ca.crt": string(theirs)}}) }
		k := startController(t, c)
		time.Sleep(time.Hour)
		if !signedBy(t, k.Directory, theirs) || published(c) != string(theirs) || c.called("POST secrets") == 0 || c.called("POST configmaps") == 0 {
			t.Errorf("published: %s, theirs: %s", published(c), theirs)
		}
		if k.log.count("retrying") != 0 {
			t.Errorf("an error was logged:\n%s", k.log)
		}
	})
}

// TestInvalidSecret: the controller does not replace an invalid Secret, and keeps its valid certificates.
func TestInvalidSecret(t *testing.T) {
	for name, spoil := range map[string]func(cert, key []byte) (c, k []byte){
		"no certificate":    func(_, key []byte) (c, k []byte) { return []byte("garbage"), key },
		"no key":            func(cert, _ []byte) (c, k []byte) { return cert, nil },
		"key of another CA": func(cert, _ []byte) (c, k []byte) { _, other := newCA(t, day); return cert, other },
		"expired":           func(_, _ []byte) (c, k []byte) { return newCA(t, -time.Minute) },
		"both empty":        func(_, _ []byte) (c, k []byte) { return []byte{}, []byte{} },
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T, c *cluster) {
				k := startController(t, c)
				synctest.Wait()
				good, bundle := cert(t, k.Directory), published(c)
				garbage, key := spoil(newCA(t, day))
				putCA(c, garbage, key, nil)
				time.Sleep(time.Hour)
				if got := caCert(t, c); !bytes.Equal(got, garbage) {
					t.Errorf("the Secret was replaced by %s", got)
				}
				if cert(t, k.Directory) != good || published(c) != bundle {
					t.Error("a valid certificate was lost")
				}
				if k.log.count("secrets/trivet-ca") != 1 {
					t.Errorf("want one line about it:\n%s", k.log)
				}
				c.remove(secretPath)
				time.Sleep(time.Hour)
				if !signedBy(t, k.Directory, caCert(t, c)) || !strings.HasPrefix(published(c), bundle) {
					t.Errorf("with a new CA, published %s", published(c))
				}
			})
		})
	}
}

// TestConfigMapEdited: the controller restores the CA certificate after any change of the ConfigMap.
func TestConfigMapEdited(t *testing.T) {
	for name, edit := range map[string]func(c *cluster){
		"garbage": func(c *cluster) { c.put(configMapPath, object{"data": object{"ca.crt": "garbage"}}) },
		"emptied": func(c *cluster) { c.put(configMapPath, object{"data": object{}}) },
		"deleted": func(c *cluster) { c.remove(configMapPath) },
		"doubled": func(c *cluster) { c.put(configMapPath, object{"data": object{"ca.crt": published(c) + published(c)}}) },
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T, c *cluster) {
				k := startController(t, c)
				synctest.Wait()
				good := cert(t, k.Directory)
				edit(c)
				time.Sleep(time.Second)
				if ca := string(caCert(t, c)); published(c) != ca || roots(t, k.Directory) != ca || cert(t, k.Directory) != good {
					t.Errorf("published %q, the controller trusts %q, the CA is %q", published(c), roots(t, k.Directory), ca)
				}
			})
		})
	}
}

// TestConfigMapMerged: the ConfigMap keeps other data and other CA certificates.
func TestConfigMapMerged(t *testing.T) {
	bubble(t, func(t *testing.T, c *cluster) {
		other, _ := newCA(t, 365*day)
		c.put(configMapPath, object{"data": object{"ca.crt": string(other), "note": "mine"}})
		k := startController(t, c)
		synctest.Wait()
		if want := string(other) + string(caCert(t, c)); published(c) != want || roots(t, k.Directory) != want || text(c.get(configMapPath), "data", "note") != "mine" {
			t.Errorf("the ConfigMap is %v", c.get(configMapPath))
		}
	})
}

func TestControllerRenews(t *testing.T) {
	bubble(t, func(t *testing.T, c *cluster) {
		k := startController(t, c)
		synctest.Wait()
		first := cert(t, k.Directory)
		time.Sleep(4 * day)
		if cert(t, k.Directory) != first {
			t.Error("renewed too early")
		}
		time.Sleep(day)
		second := cert(t, k.Directory)
		if second == first || !signedBy(t, k.Directory, caCert(t, c)) {
			t.Error("not renewed")
		}
		k.stop()
		startControllerIn(t, c, k.Directory)
		time.Sleep(day)
		if cert(t, k.Directory) != second {
			t.Error("a new process issued another certificate")
		}
		time.Sleep(365 * day)
		if err := k.Usable(); err != nil {
			t.Error(err)
		}
	})
}

// TestNewCA: the controller publishes a new CA certificate before it presents a certificate of that CA, and
// does not renew a CA of another program.
func TestNewCA(t *testing.T) {
	bubble(t, func(t *testing.T, c *cluster) {
		k := startController(t, c)
		synctest.Wait()
		old, shown := caCert(t, c), cert(t, k.Directory)
		theirs, key := newCA(t, 30*day)
		putCA(c, theirs, key, object{madeLabel: fingerprint(old)})
		synctest.Wait()
		if both := string(old) + string(theirs); published(c) != both || roots(t, k.Directory) != both {
			t.Errorf("published %s", published(c))
		}
		time.Sleep(4 * time.Minute)
		if cert(t, k.Directory) != shown {
			t.Error("the new certificate was issued too early")
		}
		time.Sleep(2 * time.Minute)
		if !signedBy(t, k.Directory, theirs) {
			t.Error("the certificate is still of the old CA")
		}
		time.Sleep(29 * day)
		if got := caCert(t, c); !bytes.Equal(got, theirs) {
			t.Error("the CA of another program was renewed")
		}
		if err := k.Usable(); err != nil {
			t.Error(err)
		}
		if n := k.log.count("Issued the controller's"); n > 30 {
			t.Errorf("%d certificates in 29 days:\n%s", n, k.log)
		}
		time.Sleep(2 * day)
		if k.log.count("expired") != 1 || published(c) != string(old)+string(theirs) {
			t.Errorf("want one line about it:\n%s", k.log)
		}
	})
}

// TestNewCAWithoutCertificate: a controller without a valid certificate uses a new CA without a delay.
func TestNewCAWithoutCertificate(t *testing.T) {
	bubble(t, func(t *testing.T, c *cluster) {
		k := startController(t, c)
		synctest.Wait()
		theirs, key := newCA(t, 30*day)
		k.stop()
		putCA(c, theirs, key, nil)
		c.put(configMapPath, object{"data": object{"ca.crt": string(theirs)}}) // the old CA is not trusted any more
		startControllerIn(t, c, k.Directory)
		synctest.Wait()
		if !signedBy(t, k.Directory, theirs) || roots(t, k.Directory) != string(theirs) {
			t.Error("the certificate is still of the old CA")
		}
	})
}

// TestOwnCARenewed: one of two replicas renews the CA after two thirds of its lifetime, or later if no replica
// ran. An expired CA certificate is not trusted.
func TestOwnCARenewed(t *testing.T) {
	bubble(t, func(t *testing.T, c *cluster) {
		old, key := newCA(t, 90*day)
		putCA(c, old, key, object{madeLabel: fingerprint(old), "mine": "kept"})
		a, b := startController(t, c), startController(t, c)
		time.Sleep(59 * day)
		if !bytes.Equal(caCert(t, c), old) {
			t.Error("renewed too early")
		}
		time.Sleep(2 * day)
		next := caCert(t, c)
		if bytes.Equal(next, old) || published(c) != string(old)+string(next) || text(c.get(secretPath), "metadata", "labels", "mine") != "kept" {
			t.Errorf("not renewed: %v", c.get(secretPath))
		}
		if !signedBy(t, a.Directory, next) || !signedBy(t, b.Directory, next) {
			t.Error("the certificate is still of the old CA")
		}
		time.Sleep(40 * day)
		if published(c) != string(next) || roots(t, a.Directory) != string(next) || roots(t, b.Directory) != string(next) {
			t.Errorf("published %s, the CA is %s", published(c), next)
		}
	})
	bubble(t, func(t *testing.T, c *cluster) {
		old, key := newCA(t, 90*day)
		putCA(c, old, key, object{madeLabel: fingerprint(old)})
		c.put(configMapPath, object{"data": object{"ca.crt": string(old)}})
		time.Sleep(91 * day)
		k := startController(t, c)
		synctest.Wait()
		if next := caCert(t, c); bytes.Equal(next, old) || published(c) != string(next) || !signedBy(t, k.Directory, next) {
			t.Errorf("not renewed: %v", c.get(secretPath))
		}
	})
}

// TestControllerWithoutAPIServer: the certificates remain in use while the API server does not answer.
func TestControllerWithoutAPIServer(t *testing.T) {
	bubble(t, func(t *testing.T, c *cluster) {
		k := startController(t, c)
		synctest.Wait()
		c.setUnreachable(true)
		time.Sleep(3 * time.Hour)
		if err := k.Usable(); err != nil {
			t.Error(err)
		}
		theirs, key := newCA(t, 365*day)
		putCA(c, theirs, key, nil)
		c.setUnreachable(false)
		time.Sleep(time.Hour)
		if !signedBy(t, k.Directory, theirs) || !strings.Contains(published(c), string(theirs)) {
			t.Error("the new CA is not in use")
		}
		if n := k.log.count("connection refused"); n > 6 {
			t.Errorf("%d lines:\n%s", n, k.log)
		}
	})
}
