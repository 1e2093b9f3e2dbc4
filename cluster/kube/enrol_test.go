package kube_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"errors"
	"net"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/trivet-csi/trivet/cluster/kube"
	"github.com/trivet-csi/trivet/cluster/pki"
)

const podsPath = "/api/v1/namespaces/" + namespace + "/pods/"

// putPod creates a pod of the driver on a node.
func putPod(c *cluster, name, uid, node string) object {
	pod := object{"metadata": object{"name": name, "uid": uid}, "spec": object{"nodeName": node}, "status": object{"phase": "Running"}}
	c.put(podsPath+name, pod)
	return pod
}

// startNode starts Enrol for a node with the identity of a pod.
func startNode(t *testing.T, c *cluster, node string, pod object) participant {
	t.Helper()
	return startNodeIn(t, c, node, pod, pki.OpenDirectory(t.TempDir()))
}

// startNodeIn is startNode with an existing certificate directory.
func startNodeIn(t *testing.T, c *cluster, node string, pod object, dir *pki.Directory) participant {
	t.Helper()
	log, stop := start(t, func(ctx context.Context) {
		kube.Enrol(ctx, user{c, pod}.connect, kube.EnrolOptions{Namespace: namespace, Authority: "trivet-ca", Driver: driver, Node: node, Certificates: dir})
	})
	return participant{dir, log, stop}
}

// handshake connects a controller to a node over TLS, and returns the joined errors of the two.
func handshake(t *testing.T, controller, server *pki.Directory, node string) error {
	t.Helper()
	a, b := net.Pipe()
	served := make(chan error, 1)
	go func() {
		conn := tls.Server(b, server.Server(pki.ControllerURI(driver)))
		err := conn.HandshakeContext(t.Context())
		if err == nil {
			_, err = conn.Write([]byte("x"))
		}
		_ = b.Close()
		served <- err
	}()
	client := tls.Client(a, controller.Client(pki.NodeURI(driver, node)))
	err := client.HandshakeContext(t.Context())
	if err == nil {
		_, err = client.Read(make([]byte, 1))
	}
	_ = a.Close()
	return errors.Join(err, <-served)
}

// requests returns all CertificateSigningRequests of the cluster.
func requests(c *cluster) []object {
	var out []object
	for _, path := range c.paths(requestsPath) {
		out = append(out, c.get(path))
	}
	return out
}

// TestEnrol: a node gets a certificate whether the node or the controller starts first.
func TestEnrol(t *testing.T) {
	for _, nodeFirst := range []bool{true, false} {
		bubble(t, func(t *testing.T, c *cluster) {
			name := "worker/1 ä" // characters that a URI must escape
			pod := putPod(c, "p", "uid", name)
			var n, ctl participant
			if nodeFirst {
				n = startNode(t, c, name, pod)
				time.Sleep(time.Hour)
				ctl = startController(t, c)
			} else {
				ctl = startController(t, c)
				time.Sleep(time.Hour)
				n = startNode(t, c, name, pod)
			}
			time.Sleep(2 * time.Second)
			if err := handshake(t, ctl.Directory, n.Directory, name); err != nil {
				t.Error(err)
			}
			if all := requests(c); len(all) != 1 || n.log.count("failed") != 0 {
				t.Errorf("got %d requests, want 1 and no failure:\n%s", len(all), n.log)
			}
			leaf := parseCert(t, []byte(certIn(t, n.Directory)))
			if !slices.Equal(leaf.ExtKeyUsage, []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}) || time.Until(leaf.NotAfter) > 30*day {
				t.Errorf("the certificate has usages %v and expires on %s, want server authentication for at most 30 days", leaf.ExtKeyUsage, leaf.NotAfter)
			}
		})
	}
}

// TestEnrolOnce: a restarted process requests no new certificate before the renewal is due.
func TestEnrolOnce(t *testing.T) {
	bubble(t, func(t *testing.T, c *cluster) {
		pod := putPod(c, "p", "uid", "n")
		startController(t, c)
		n := startNode(t, c, "n", pod)
		synctest.Wait()
		first := certIn(t, n.Directory)
		for range 3 {
			n.stop()
			n = startNodeIn(t, c, "n", pod, n.Directory)
			synctest.Wait()
		}
		time.Sleep(19 * day)
		if certIn(t, n.Directory) != first || len(requests(c)) != 1 {
			t.Errorf("before the renewal is due: got %d requests, want 1 and the first certificate:\n%s", len(requests(c)), n.log)
		}
		time.Sleep(2 * day)
		if certIn(t, n.Directory) == first || len(requests(c)) != 2 {
			t.Errorf("after the renewal is due: got %d requests, want 2 and another certificate:\n%s", len(requests(c)), n.log)
		}
	})
}

// TestRotation: controller and node accept each other at all times while the CA is replaced. In the 42 days of
// the test, the node requests its first certificate and two renewals.
func TestRotation(t *testing.T) {
	for name, rotate := range map[string]func(t *testing.T, c *cluster){
		"CA replaced": func(t *testing.T, c *cluster) { cert, key := newCA(t, 365*day); putCA(c, cert, key, nil) },
		"CA deleted":  func(_ *testing.T, c *cluster) { c.remove(secretPath) },
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T, c *cluster) {
				pod := putPod(c, "p", "uid", "n")
				ctl, n := startController(t, c), startNode(t, c, "n", pod)
				time.Sleep(day)
				old := caCert(t, c)
				rotate(t, c)
				synctest.Wait()
				next := caCert(t, c)
				if want := string(old) + string(next); rootsIn(t, n.Directory) != want {
					t.Errorf("the node trusts %s, want %s", rootsIn(t, n.Directory), want)
				}
				for _, wait := range []time.Duration{0, 3 * time.Minute, 3 * time.Minute, time.Hour, 18 * day, 3 * day, 20 * day} {
					time.Sleep(wait)
					if err := handshake(t, ctl.Directory, n.Directory, "n"); err != nil {
						t.Errorf("handshake after another %s: %v", wait, err)
					}
				}
				if !signedBy(t, ctl.Directory, next) || !signedBy(t, n.Directory, next) || len(requests(c)) != 3 {
					t.Errorf("got %d requests, want 3 and certificates of the new CA:\n%s", len(requests(c)), n.log)
				}
			})
		})
	}
}

// TestDistrusted: a CA that an administrator removes from the ConfigMap, for example because its key was
// disclosed, is not trusted any more.
func TestDistrusted(t *testing.T) {
	bubble(t, func(t *testing.T, c *cluster) {
		pod := putPod(c, "p", "uid", "n")
		ctl, n := startController(t, c), startNode(t, c, "n", pod)
		time.Sleep(day)
		ca, key := newCA(t, 365*day)
		putCA(c, ca, key, nil)
		synctest.Wait()
		c.put(configMapPath, object{"data": object{"ca.crt": string(ca)}})
		time.Sleep(time.Second)
		if !signedBy(t, ctl.Directory, ca) || !signedBy(t, n.Directory, ca) || rootsIn(t, n.Directory) != string(ca) {
			t.Errorf("the node trusts %s, want only the new CA, which issued both certificates", rootsIn(t, n.Directory))
		}
		if err := handshake(t, ctl.Directory, n.Directory, "n"); err != nil {
			t.Error(err)
		}
	})
}

// TestInvalidConfigMap: the node keeps its CA certificates while the published list is invalid or missing.
func TestInvalidConfigMap(t *testing.T) {
	bubble(t, func(t *testing.T, c *cluster) {
		pod := putPod(c, "p", "uid", "n")
		ctl, n := startController(t, c), startNode(t, c, "n", pod)
		time.Sleep(day)
		ctl.stop()
		trusted, own := rootsIn(t, n.Directory), certIn(t, n.Directory)
		c.put(configMapPath, object{"data": object{"ca.crt": "garbage"}})
		time.Sleep(time.Hour)
		if rootsIn(t, n.Directory) != trusted || n.log.count("configmaps/trivet-ca: ca.crt contains no valid CA certificate") != 1 {
			t.Errorf("the node trusts %s, want %s and one error about the invalid list:\n%s", rootsIn(t, n.Directory), trusted, n.log)
		}
		c.remove(configMapPath)
		time.Sleep(time.Hour)
		if rootsIn(t, n.Directory) != trusted || certIn(t, n.Directory) != own {
			t.Errorf("the node trusts %s, want %s and an unchanged certificate:\n%s", rootsIn(t, n.Directory), trusted, n.log)
		}
	})
}

// TestInvalidFiles: the node replaces invalid files, and a certificate for another node name.
func TestInvalidFiles(t *testing.T) {
	otherKey, _, err := pki.NewRequest(pki.NodeURI(driver, "n"))
	if err != nil {
		t.Fatal(err)
	}
	for name, damage := range map[string]func(d *pki.Directory) error{
		"certificate": func(d *pki.Directory) error { return d.Write([]byte("garbage"), nil, nil) },
		"key":         func(d *pki.Directory) error { return d.Write(nil, otherKey, nil) },
		"roots":       func(d *pki.Directory) error { return d.Write(nil, nil, []byte("garbage")) },
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T, c *cluster) {
				pod := putPod(c, "p", "uid", "n")
				ctl, n := startController(t, c), startNode(t, c, "n", pod)
				synctest.Wait()
				n.stop()
				if err := damage(n.Directory); err != nil {
					t.Fatal(err)
				}
				startNodeIn(t, c, "n", pod, n.Directory)
				time.Sleep(2 * time.Second)
				if err := handshake(t, ctl.Directory, n.Directory, "n"); err != nil {
					t.Error(err)
				}
			})
		})
	}
	// The node was renamed.
	bubble(t, func(t *testing.T, c *cluster) {
		ctl, n := startController(t, c), startNode(t, c, "n", putPod(c, "p", "uid", "n"))
		synctest.Wait()
		n.stop()
		startNodeIn(t, c, "m", putPod(c, "q", "uid2", "m"), n.Directory)
		synctest.Wait()
		if err := handshake(t, ctl.Directory, n.Directory, "m"); err != nil {
			t.Error(err)
		}
	})
}

// TestEnrolRefused: the reason of a refusal is logged once, the number of requests is bounded, and the node
// gets a certificate when the reason no longer exists.
func TestEnrolRefused(t *testing.T) {
	bubble(t, func(t *testing.T, c *cluster) {
		pod := putPod(c, "p", "uid", "elsewhere")
		ctl, n := startController(t, c), startNode(t, c, "n", pod)
		time.Sleep(day)
		if n.log.count("CertificateSigningRequest denied: the request is for spiffe://csi.trivet.dev/node/n") != 1 {
			t.Errorf("want 1 line with the reason of the refusal:\n%s", n.log)
		}
		if got := len(requests(c)); got < 10 || got > 400 {
			t.Errorf("got %d requests in a day, want 10 to 400", got)
		}
		if err := n.Usable(); err == nil {
			t.Error("the node has a certificate although its requests were refused")
		}
		putPod(c, "p", "uid", "n")
		time.Sleep(time.Hour)
		if err := handshake(t, ctl.Directory, n.Directory, "n"); err != nil {
			t.Error(err)
		}
	})
}

// TestEnrolUnanswered: without a controller, a node has one request at a time. The node replaces the request
// after it expired or was deleted.
func TestEnrolUnanswered(t *testing.T) {
	bubble(t, func(t *testing.T, c *cluster) {
		pod := putPod(c, "p", "uid", "n")
		n := startNode(t, c, "n", pod)
		time.Sleep(23 * time.Hour)
		if len(requests(c)) != 1 {
			t.Errorf("before the request expires: got %d requests, want 1:\n%s", len(requests(c)), n.log)
		}
		time.Sleep(2 * time.Hour)
		if len(requests(c)) != 2 || n.log.count("not answered") != 1 {
			t.Errorf("after the request expired: got %d requests, want 2 and 1 line about the expiry:\n%s", len(requests(c)), n.log)
		}
		for _, path := range c.paths(requestsPath) {
			c.remove(path)
		}
		time.Sleep(time.Minute)
		if len(requests(c)) != 1 || n.log.count("deleted") != 1 {
			t.Errorf("after the requests were deleted: got %d requests, want 1 and 1 line about the deletion:\n%s", len(requests(c)), n.log)
		}
	})
}

// TestEnrolForbidden: calls are retried after refusals and server errors.
func TestEnrolForbidden(t *testing.T) {
	bubble(t, func(t *testing.T, c *cluster) {
		for _, call := range []string{"WATCH certificatesigningrequests", "GET certificatesigningrequests", "POST certificatesigningrequests", "WATCH configmaps", "GET configmaps"} {
			c.fail[call] = []int{403, 500, 403}
		}
		n := startNode(t, c, "n", putPod(c, "p", "uid", "n"))
		time.Sleep(time.Hour)
		ctl := startController(t, c)
		time.Sleep(time.Hour)
		if err := handshake(t, ctl.Directory, n.Directory, "n"); err != nil {
			t.Errorf("%v:\n%s", err, n.log)
		}
	})
}

// TestForeignCertificate: a node refuses a certificate for another key or another node name. name is the node
// name in the certificate: the certificate for "n" has a foreign key, and that for "another" has the node's key.
func TestForeignCertificate(t *testing.T) {
	for _, name := range []string{"n", "another"} {
		bubble(t, func(t *testing.T, c *cluster) {
			ca := must(pki.NewAuthority(driver))(t)
			_, request, err := pki.NewRequest(pki.NodeURI(driver, name))
			if err != nil {
				t.Fatal(err)
			}
			n := startNode(t, c, "n", putPod(c, "p", "uid", "n"))
			synctest.Wait()
			for _, path := range c.paths(requestsPath) {
				if name == "another" {
					request, err = base64.StdEncoding.DecodeString(text(c.get(path), "spec", "request"))
					if err != nil {
						t.Fatal(err)
					}
				}
				pub, _, err := pki.ParseRequest(request)
				if err != nil {
					t.Fatal(err)
				}
				cert := must(ca.Issue(pub, pki.NodeURI(driver, name), x509.ExtKeyUsageServerAuth, day))(t)
				o := c.get(path)
				c.put(path, merge(o, object{"status": object{"certificate": cert}}))
			}
			time.Sleep(time.Minute)
			if _, _, _, err := n.Read(); err == nil || n.log.count("signer csi.trivet.dev/node: ") != 1 {
				t.Errorf("the certificate for %s was accepted:\n%s", name, n.log)
			}
		})
	}
}

// TestNodeWithoutAPIServer: the certificates remain in use while the API server does not answer, and are renewed
// when it answers again.
func TestNodeWithoutAPIServer(t *testing.T) {
	bubble(t, func(t *testing.T, c *cluster) {
		pod := putPod(c, "p", "uid", "n")
		ctl, n := startController(t, c), startNode(t, c, "n", pod)
		time.Sleep(day)
		c.setUnreachable(true)
		time.Sleep(3 * time.Hour)
		if err := handshake(t, ctl.Directory, n.Directory, "n"); err != nil {
			t.Error(err)
		}
		n.stop()
		ctl.stop()
		time.Sleep(40 * day)
		if err := n.Usable(); err == nil || !strings.Contains(err.Error(), "expired") {
			t.Errorf("after 40 days: got %v, want an error about the expiry", err)
		}
		startControllerIn(t, c, ctl.Directory)
		startNodeIn(t, c, "n", pod, n.Directory)
		time.Sleep(time.Hour)
		c.setUnreachable(false)
		time.Sleep(time.Hour)
		if err := handshake(t, ctl.Directory, n.Directory, "n"); err != nil {
			t.Error(err)
		}
	})
}
