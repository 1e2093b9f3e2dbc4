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
	createdLabel  = driver + "/made"
)

// participant is a running replica of the controller, or a node's driver, with its certificate directory.
type participant struct {
	*pki.Directory
	log  *logBuffer
	stop func()
}

func startController(t *testing.T, c *cluster) participant {
	t.Helper()
	return startControllerIn(t, c, pki.OpenDirectory(t.TempDir()))
}

// startControllerIn starts a replica of the controller with an existing certificate directory.
func startControllerIn(t *testing.T, c *cluster, dir *pki.Directory) participant {
	t.Helper()
	log, stop := start(t, maintainAuthority(c, dir))
	return participant{dir, log, stop}
}

func maintainAuthority(c *cluster, dir *pki.Directory) func(context.Context) {
	return func(ctx context.Context) {
		kube.MaintainAuthority(ctx, user{cluster: c}.connect, kube.AuthorityOptions{
			Namespace: namespace, Name: "trivet-ca", Driver: driver, NodeServiceAccount: "trivet-node", Certificates: dir,
		})
	}
}

// TestKeyIsNotLogged: the log does not contain the CA's key at any verbosity.
func TestKeyIsNotLogged(t *testing.T) {
	bubble(t, func(t *testing.T, c *cluster) {
		log, _ := startVerbose(t, 10, maintainAuthority(c, pki.OpenDirectory(t.TempDir())))
		time.Sleep(day)
		if log.count("Created a certificate authority") == 0 {
			t.Fatalf("no CA was created:\n%s", log)
		}
		if log.count("tls.key") != 0 {
			t.Errorf("the log contains a key:\n%s", log)
		}
	})
}

// newCA returns a CA that is valid for a lifetime from now on.
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

// putCA replaces the CA in the Secret, as an administrator does.
func putCA(c *cluster, cert, key []byte, labels object) {
	c.put(secretPath, object{"metadata": object{"labels": labels}, "type": "kubernetes.io/tls", "data": object{"tls.crt": cert, "tls.key": key}})
}

// caCert returns the CA certificate in the Secret.
func caCert(t *testing.T, c *cluster) []byte {
	t.Helper()
	return must(base64.StdEncoding.DecodeString(text(c.get(secretPath), "data", "tls.crt")))(t)
}

// published returns the trusted CA certificates in the ConfigMap.
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
		t.Fatalf("got %q, want a PEM block", b)
	}
	return must(x509.ParseCertificate(block.Bytes))(t)
}

func certIn(t *testing.T, d *pki.Directory) string {
	t.Helper()
	cert, _, _, err := d.Read()
	if err != nil {
		t.Fatal(err)
	}
	return string(cert)
}

func rootsIn(t *testing.T, d *pki.Directory) string {
	t.Helper()
	_, _, roots, err := d.Read()
	if err != nil {
		t.Fatal(err)
	}
	return string(roots)
}

// TestAuthority: a controller creates the CA, the ConfigMap and its certificate, also if its first calls fail.
func TestAuthority(t *testing.T) {
	for name, fail := range map[string]map[string][]int{
		"no errors":     {},
		"forbidden":     {"GET secrets": {403, 403}, "WATCH secrets": {403, 403}, "POST secrets": {403, 403}, "POST configmaps": {403}},
		"server errors": {"WATCH configmaps": {500, 503}, "POST secrets": {500}, "POST configmaps": {500, 503}},
		"conflicts":     {"POST secrets": {409, 409}, "POST configmaps": {409}},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T, c *cluster) {
				c.fail = fail
				ctl := startController(t, c)
				time.Sleep(time.Hour)
				ca := caCert(t, c)
				secret := c.get(secretPath)
				if text(secret, "type") != "kubernetes.io/tls" || text(secret, "metadata", "labels", createdLabel) != fingerprint(ca) {
					t.Errorf("got Secret %v, want type kubernetes.io/tls and the fingerprint of the CA as a label", secret)
				}
				if left := time.Until(parseCert(t, ca).NotAfter); left < 9*365*day {
					t.Errorf("the CA is valid for %s, want at least 9 years", left)
				}
				if published(c) != string(ca) || rootsIn(t, ctl.Directory) != string(ca) || !signedBy(t, ctl.Directory, ca) {
					t.Errorf("published %s, the controller trusts %s, want the CA %s in both and as its issuer", published(c), rootsIn(t, ctl.Directory), ca)
				}
				leaf := parseCert(t, []byte(certIn(t, ctl.Directory)))
				if leaf.URIs[0].String() != "spiffe://"+driver+"/controller" || !slices.Equal(leaf.ExtKeyUsage, []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}) {
					t.Errorf("the controller's certificate has URIs %v and usages %v, want the controller and client authentication", leaf.URIs, leaf.ExtKeyUsage)
				}
			})
		})
	}
}

// TestTwoControllers: all replicas use the CA of the first Secret. In the second part the Secret appears
// between a replica's read and its creation.
func TestTwoControllers(t *testing.T) {
	bubble(t, func(t *testing.T, c *cluster) {
		a, b := startController(t, c), startController(t, c)
		synctest.Wait()
		time.Sleep(time.Hour)
		ca := caCert(t, c)
		if !signedBy(t, a.Directory, ca) || !signedBy(t, b.Directory, ca) || published(c) != string(ca) {
			t.Errorf("published %s, want the CA %s as issuer of both controllers", published(c), ca)
		}
	})
	bubble(t, func(t *testing.T, c *cluster) {
		external, key := newCA(t, 365*day)
		c.before["POST secrets"] = func() { putCA(c, external, key, nil) }
		c.before["POST configmaps"] = func() { c.put(configMapPath, object{"data": object{"ca.crt": string(external)}}) }
		ctl := startController(t, c)
		time.Sleep(time.Hour)
		if !signedBy(t, ctl.Directory, external) || published(c) != string(external) || c.called("POST secrets") == 0 || c.called("POST configmaps") == 0 {
			t.Errorf("published %s, want the external CA %s after conflicts", published(c), external)
		}
		if ctl.log.count("retrying") != 0 {
			t.Errorf("a lost race was logged as an error:\n%s", ctl.log)
		}
	})
}

// TestInvalidSecret: the controller does not replace an invalid Secret, and keeps its valid certificates.
func TestInvalidSecret(t *testing.T) {
	for name, damage := range map[string]func(cert, key []byte) (damagedCert, damagedKey []byte){
		"no certificate":    func(_, key []byte) ([]byte, []byte) { return []byte("garbage"), key },
		"no key":            func(cert, _ []byte) ([]byte, []byte) { return cert, nil },
		"key of another CA": func(cert, _ []byte) ([]byte, []byte) { _, other := newCA(t, day); return cert, other },
		"expired":           func(_, _ []byte) ([]byte, []byte) { return newCA(t, -time.Minute) },
		"empty fields":      func(_, _ []byte) ([]byte, []byte) { return []byte{}, []byte{} },
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T, c *cluster) {
				ctl := startController(t, c)
				synctest.Wait()
				before, bundle := certIn(t, ctl.Directory), published(c)
				damagedCert, damagedKey := damage(newCA(t, day))
				putCA(c, damagedCert, damagedKey, nil)
				time.Sleep(time.Hour)
				if got := caCert(t, c); !bytes.Equal(got, damagedCert) {
					t.Errorf("the Secret was replaced by %s", got)
				}
				if certIn(t, ctl.Directory) != before || published(c) != bundle {
					t.Error("the controller replaced its valid certificate or the published CA certificates")
				}
				if got := ctl.log.count("secrets/trivet-ca"); got != 1 {
					t.Errorf("got %d error lines, want 1:\n%s", got, ctl.log)
				}
				c.remove(secretPath)
				time.Sleep(time.Hour)
				if !signedBy(t, ctl.Directory, caCert(t, c)) || !strings.HasPrefix(published(c), bundle) {
					t.Errorf("after a new CA was created: published %s, want %s and the new CA", published(c), bundle)
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
				ctl := startController(t, c)
				synctest.Wait()
				before := certIn(t, ctl.Directory)
				edit(c)
				time.Sleep(time.Second)
				if ca := string(caCert(t, c)); published(c) != ca || rootsIn(t, ctl.Directory) != ca || certIn(t, ctl.Directory) != before {
					t.Errorf("published %q, the controller trusts %q, want %q in both and an unchanged certificate", published(c), rootsIn(t, ctl.Directory), ca)
				}
			})
		})
	}
}

// TestConfigMapMerged: the controller keeps other data and other CA certificates in the ConfigMap.
func TestConfigMapMerged(t *testing.T) {
	bubble(t, func(t *testing.T, c *cluster) {
		other, _ := newCA(t, 365*day)
		c.put(configMapPath, object{"data": object{"ca.crt": string(other), "note": "mine"}})
		ctl := startController(t, c)
		synctest.Wait()
		if want := string(other) + string(caCert(t, c)); published(c) != want || rootsIn(t, ctl.Directory) != want || text(c.get(configMapPath), "data", "note") != "mine" {
			t.Errorf("got ConfigMap %v, the controller trusts %s, want %s", c.get(configMapPath), rootsIn(t, ctl.Directory), want)
		}
	})
}

// TestControllerRenews: the controller renews its certificate, which is valid for 7 days, after two thirds of
// this time. A restart does not renew it.
func TestControllerRenews(t *testing.T) {
	bubble(t, func(t *testing.T, c *cluster) {
		ctl := startController(t, c)
		synctest.Wait()
		first := certIn(t, ctl.Directory)
		time.Sleep(4 * day)
		if certIn(t, ctl.Directory) != first {
			t.Error("the certificate was renewed too early")
		}
		time.Sleep(day)
		second := certIn(t, ctl.Directory)
		if second == first || !signedBy(t, ctl.Directory, caCert(t, c)) {
			t.Error("the certificate was not renewed")
		}
		ctl.stop()
		startControllerIn(t, c, ctl.Directory)
		time.Sleep(day)
		if certIn(t, ctl.Directory) != second {
			t.Error("a restarted controller replaced its valid certificate")
		}
		time.Sleep(365 * day)
		if err := ctl.Usable(); err != nil {
			t.Error(err)
		}
	})
}

// TestNewCA: the controller publishes a new CA certificate before it presents a certificate that the new CA
// issued. It does not renew a CA that another program created.
func TestNewCA(t *testing.T) {
	bubble(t, func(t *testing.T, c *cluster) {
		ctl := startController(t, c)
		synctest.Wait()
		old, before := caCert(t, c), certIn(t, ctl.Directory)
		external, key := newCA(t, 30*day)
		putCA(c, external, key, object{createdLabel: fingerprint(old)})
		synctest.Wait()
		if both := string(old) + string(external); published(c) != both || rootsIn(t, ctl.Directory) != both {
			t.Errorf("published %s, want %s", published(c), both)
		}
		time.Sleep(4 * time.Minute)
		if certIn(t, ctl.Directory) != before {
			t.Error("the controller replaced its certificate less than 5 minutes after the new CA was published")
		}
		time.Sleep(2 * time.Minute)
		if !signedBy(t, ctl.Directory, external) {
			t.Error("the controller's certificate was not issued by the new CA")
		}
		time.Sleep(29 * day)
		if got := caCert(t, c); !bytes.Equal(got, external) {
			t.Error("the external CA was renewed")
		}
		if err := ctl.Usable(); err != nil {
			t.Error(err)
		}
		if n := ctl.log.count("Issued the controller's"); n > 30 {
			t.Errorf("got %d certificates in 29 days, want at most 30:\n%s", n, ctl.log)
		}
		time.Sleep(2 * day)
		if got := ctl.log.count("expired"); got != 1 || published(c) != string(old)+string(external) {
			t.Errorf("published %s and logged %d lines about the expiry, want both CA certificates and 1 line:\n%s", published(c), got, ctl.log)
		}
	})
}

// TestNewCAWithoutCertificate: a controller without a valid certificate uses a new CA without a delay.
func TestNewCAWithoutCertificate(t *testing.T) {
	bubble(t, func(t *testing.T, c *cluster) {
		ctl := startController(t, c)
		synctest.Wait()
		external, key := newCA(t, 30*day)
		ctl.stop()
		putCA(c, external, key, nil)
		c.put(configMapPath, object{"data": object{"ca.crt": string(external)}}) // the old CA is not trusted any more
		startControllerIn(t, c, ctl.Directory)
		synctest.Wait()
		if !signedBy(t, ctl.Directory, external) || rootsIn(t, ctl.Directory) != string(external) {
			t.Error("the controller's certificate was not issued by the new CA, or the controller trusts another CA")
		}
	})
}

// TestOwnCARenewed: one of two replicas renews the CA after two thirds of the CA's lifetime. In the second
// part no replica runs before the CA expires. An expired CA certificate is not trusted.
func TestOwnCARenewed(t *testing.T) {
	bubble(t, func(t *testing.T, c *cluster) {
		old, key := newCA(t, 90*day)
		putCA(c, old, key, object{createdLabel: fingerprint(old), "mine": "kept"})
		a, b := startController(t, c), startController(t, c)
		time.Sleep(59 * day)
		if !bytes.Equal(caCert(t, c), old) {
			t.Error("the CA was renewed too early")
		}
		time.Sleep(2 * day)
		next := caCert(t, c)
		if bytes.Equal(next, old) || published(c) != string(old)+string(next) || text(c.get(secretPath), "metadata", "labels", "mine") != "kept" {
			t.Errorf("published %s, want the old and the renewed CA certificate; the Secret is %v", published(c), c.get(secretPath))
		}
		if !signedBy(t, a.Directory, next) || !signedBy(t, b.Directory, next) {
			t.Error("the renewed CA did not issue the certificates of both controllers")
		}
		time.Sleep(40 * day)
		if published(c) != string(next) || rootsIn(t, a.Directory) != string(next) || rootsIn(t, b.Directory) != string(next) {
			t.Errorf("published %s, want only the renewed CA %s, trusted by both controllers", published(c), next)
		}
	})
	bubble(t, func(t *testing.T, c *cluster) {
		old, key := newCA(t, 90*day)
		putCA(c, old, key, object{createdLabel: fingerprint(old)})
		c.put(configMapPath, object{"data": object{"ca.crt": string(old)}})
		time.Sleep(91 * day)
		ctl := startController(t, c)
		synctest.Wait()
		if next := caCert(t, c); bytes.Equal(next, old) || published(c) != string(next) || !signedBy(t, ctl.Directory, next) {
			t.Errorf("published %s, want the renewed CA; the Secret is %v", published(c), c.get(secretPath))
		}
	})
}

// TestControllerWithoutAPIServer: the certificates remain in use while the API server does not answer.
func TestControllerWithoutAPIServer(t *testing.T) {
	bubble(t, func(t *testing.T, c *cluster) {
		ctl := startController(t, c)
		synctest.Wait()
		c.setUnreachable(true)
		time.Sleep(3 * time.Hour)
		if err := ctl.Usable(); err != nil {
			t.Error(err)
		}
		external, key := newCA(t, 365*day)
		putCA(c, external, key, nil)
		c.setUnreachable(false)
		time.Sleep(time.Hour)
		if !signedBy(t, ctl.Directory, external) || !strings.Contains(published(c), string(external)) {
			t.Error("the new CA is not in use after the outage")
		}
		if n := ctl.log.count("connection refused"); n > 6 {
			t.Errorf("got %d error lines, want at most 6:\n%s", n, ctl.log)
		}
	})
}
