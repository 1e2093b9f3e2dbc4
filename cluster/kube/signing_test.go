package kube_test

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/base64"
	"encoding/pem"
	"net/url"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/trivet-csi/trivet/cluster/pki"
)

const requestsPath = "/apis/certificates.k8s.io/v1/certificatesigningrequests/"

// request returns the request that pod p on node n creates.
func request(t *testing.T) object {
	t.Helper()
	_, csr, err := pki.NewRequest(pki.NodeURI(driver, "n"))
	if err != nil {
		t.Fatal(err)
	}
	return object{"spec": object{
		"request": csr, "signerName": driver + "/node", "usages": []any{"server auth", "digital signature"},
		"username": "system:serviceaccount:" + namespace + ":trivet-node",
		"extra": object{
			"authentication.kubernetes.io/pod-name": []any{"p"},
			"authentication.kubernetes.io/pod-uid":  []any{"uid"},
		},
	}}
}

// encoded returns a certificate request (PEM) with a new key on a curve.
func encoded(t *testing.T, curve elliptic.Curve, template *x509.CertificateRequest) []byte {
	t.Helper()
	key := must(ecdsa.GenerateKey(curve, rand.Reader))(t)
	der := must(x509.CreateCertificateRequest(rand.Reader, template, key))(t)
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der})
}

// conditions returns type, status and reason of each condition.
func conditions(o object) []string {
	var out []string
	all, _ := field(o, "status", "conditions").([]any)
	for _, c := range all {
		c := c.(object)
		out = append(out, text(c, "type")+" "+text(c, "status")+" "+text(c, "reason"))
	}
	return out
}

// spec returns a change that sets a field of the spec of a request.
func spec(key string, value any) func(r, pod object) {
	return func(r, _ object) { r["spec"].(object)[key] = value }
}

// extra returns a change that sets a field of spec.extra of a request.
func extra(key string, value ...any) func(r, pod object) {
	return func(r, _ object) {
		r["spec"].(object)["extra"].(object)["authentication.kubernetes.io/"+key] = value
	}
}

// TestRefusedRequests: an invalid request is denied, or marked as failed if a user has approved it, and gets
// no certificate.
func TestRefusedRequests(t *testing.T) {
	own := pki.NodeURI(driver, "n")
	for name, tc := range map[string]struct {
		change  func(r, pod object)
		message string
	}{
		"another service account":          {spec("username", "system:serviceaccount:"+namespace+":default"), "requested by"},
		"another namespace":                {spec("username", "system:serviceaccount:default:trivet-node"), "requested by"},
		"a user without a service account": {spec("username", "trivet-node"), "requested by"},
		"no pod":                           {spec("extra", object{}), "not bound to a pod"},
		"no pod name":                      {extra("pod-name"), "not bound to a pod"},
		"no pod UID":                       {extra("pod-uid"), "not bound to a pod"},
		"two pods":                         {extra("pod-uid", "uid", "uid"), "not bound to a pod"},
		"a deleted pod":                    {extra("pod-name", "deleted"), "does not exist"},
		"a pod with another UID":           {extra("pod-uid", "before"), "does not exist"},
		"a pod that has ended":             {func(_, pod object) { pod["status"].(object)["phase"] = "Succeeded" }, "has ended"},
		"a pod that has failed":            {func(_, pod object) { pod["status"].(object)["phase"] = "Failed" }, "has ended"},
		"a pod without a node":             {func(_, pod object) { pod["spec"].(object)["nodeName"] = "" }, "not scheduled"},
		"another node's pod":               {func(_, pod object) { pod["spec"].(object)["nodeName"] = "m" }, "the request is for spiffe://csi.trivet.dev/node/n"},
		"usage client auth":                {spec("usages", []any{"client auth", "digital signature"}), "usages"},
		"usages client and server auth":    {spec("usages", []any{"client auth", "digital signature", "server auth"}), "usages"},
		"one usage is missing":             {spec("usages", []any{"server auth"}), "usages"},
		"usage cert sign":                  {spec("usages", []any{"cert sign", "digital signature", "server auth"}), "usages"},
		"the controller's name":            {spec("request", encoded(t, elliptic.P256(), &x509.CertificateRequest{URIs: []*url.URL{pki.ControllerURI(driver)}})), "the request is for"},
		"another driver's name":            {spec("request", encoded(t, elliptic.P256(), &x509.CertificateRequest{URIs: []*url.URL{pki.NodeURI("other.example.com", "n")}})), "the request is for"},
		"two URIs":                         {spec("request", encoded(t, elliptic.P256(), &x509.CertificateRequest{URIs: []*url.URL{own, pki.NodeURI(driver, "m")}})), "one URI"},
		"no URI":                           {spec("request", encoded(t, elliptic.P256(), &x509.CertificateRequest{})), "one URI"},
		"URI and host name":                {spec("request", encoded(t, elliptic.P256(), &x509.CertificateRequest{URIs: []*url.URL{own}, DNSNames: []string{"n"}})), "one URI"},
		"URI and mail address":             {spec("request", encoded(t, elliptic.P256(), &x509.CertificateRequest{URIs: []*url.URL{own}, EmailAddresses: []string{"n@example.com"}})), "one URI"},
		"P-384 key":                        {spec("request", encoded(t, elliptic.P384(), &x509.CertificateRequest{URIs: []*url.URL{own}})), "P-256"},
		"garbage":                          {spec("request", []byte("garbage")), "PEM"},
		"a damaged request":                {func(r, _ object) { damage(r["spec"].(object)["request"].([]byte)) }, "certificate request"},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T, c *cluster) {
				r, pod := request(t), putPod(c, "p", "uid", "n")
				tc.change(r, pod)
				c.put(podsPath+"p", pod)
				c.put(requestsPath+"r", r)
				approved := merge(viaJSON(r), object{"status": object{"conditions": []any{object{"type": "Approved", "status": "True", "reason": "ByAUser"}}}})
				c.put(requestsPath+"approved", approved)
				ctl := startController(t, c)
				time.Sleep(time.Minute)
				got := c.get(requestsPath + "r")
				if !slices.Equal(conditions(got), []string{"Denied True Refused"}) || field(got, "status", "certificate") != nil {
					t.Errorf("got status %v, want condition Denied and no certificate", got["status"])
				}
				if !strings.Contains(text(got, "status"), tc.message) {
					t.Errorf("got status %v, want a message with %q", got["status"], tc.message)
				}
				got = c.get(requestsPath + "approved")
				if !slices.Equal(conditions(got), []string{"Approved True ByAUser", "Failed True Refused"}) || field(got, "status", "certificate") != nil {
					t.Errorf("approved request: got status %v, want conditions Approved and Failed, and no certificate", got["status"])
				}
				if ctl.log.count("Refused") != 2 || ctl.log.count("retrying") != 0 {
					t.Errorf("want 2 lines about refused requests and no error:\n%s", ctl.log)
				}
			})
		})
	}
}

// damage overwrites bytes in the middle of a request (PEM).
func damage(request []byte) {
	middle := request[len(request)/2-8 : len(request)/2+8]
	for i := range middle {
		if middle[i] != '\n' {
			middle[i] = 'A'
		}
	}
}

// TestSigned: pending requests and requests that a user has approved are signed, also after errors.
func TestSigned(t *testing.T) {
	for name, tc := range map[string]struct {
		status object
		fail   map[string][]int
		want   []string
	}{
		"pending":        {nil, nil, []string{"Approved True NodePod"}},
		"approved":       {object{"conditions": []any{object{"type": "Approved", "status": "True", "reason": "ByAUser"}}}, nil, []string{"Approved True ByAUser"}},
		"several errors": {nil, map[string][]int{"GET pods": {500, 403}, "PATCH certificatesigningrequests": {500, 403, 503}}, []string{"Approved True NodePod"}},
		"one error":      {nil, map[string][]int{"GET pods": {500}}, []string{"Approved True NodePod"}},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T, c *cluster) {
				putPod(c, "p", "uid", "n")
				c.fail = tc.fail
				if c.fail == nil {
					c.fail = map[string][]int{}
				}
				for _, path := range []string{"r", "s"} {
					c.put(requestsPath+path, merge(viaJSON(request(t)), object{"status": tc.status}))
				}
				startController(t, c)
				time.Sleep(time.Minute)
				for _, path := range []string{"r", "s"} {
					expectSigned(t, c, requestsPath+path, tc.want)
				}
			})
		})
	}
}

// expectSigned fails the test unless a request has the wanted conditions and a certificate for node n.
func expectSigned(t *testing.T, c *cluster, path string, want []string) {
	t.Helper()
	got := c.get(path)
	b, err := base64.StdEncoding.DecodeString(text(got, "status", "certificate"))
	if err != nil {
		t.Fatalf("decoding the certificate in status %v: %v", got["status"], err)
	}
	if leaf := parseCert(t, b); !slices.Equal(conditions(got), want) || leaf.URIs[0].String() != "spiffe://csi.trivet.dev/node/n" || leaf.CheckSignatureFrom(parseCert(t, caCert(t, c))) != nil {
		t.Errorf("got conditions %v and URIs %v, want conditions %v and a certificate of the CA for node n", conditions(got), leaf.URIs, want)
	}
}

// TestIgnoredRequests: requests to other signers and answered requests are not changed.
func TestIgnoredRequests(t *testing.T) {
	for name, change := range map[string]func(r object){
		"another signer": func(r object) { r["spec"].(object)["signerName"] = "example.com/node" },
		"denied":         func(r object) { r["status"] = object{"conditions": []any{object{"type": "Denied"}}} },
		"failed":         func(r object) { r["status"] = object{"conditions": []any{object{"type": "Failed"}}} },
		"signed":         func(r object) { r["status"] = object{"certificate": []byte("signed")} },
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T, c *cluster) {
				putPod(c, "p", "uid", "n")
				r := request(t)
				change(r)
				c.put(requestsPath+"r", r)
				startController(t, c)
				time.Sleep(time.Minute)
				if c.called("PATCH certificatesigningrequests") != 0 {
					t.Errorf("the request was changed: its status is %v", c.get(requestsPath + "r")["status"])
				}
			})
		})
	}
}

// TestSignedByAnotherReplica: no error is logged if another replica signs a request first, or if the request
// is deleted.
func TestSignedByAnotherReplica(t *testing.T) {
	bubble(t, func(t *testing.T, c *cluster) {
		putPod(c, "p", "uid", "n")
		ctl := startController(t, c)
		synctest.Wait()
		signed := merge(viaJSON(request(t)), object{"status": object{"certificate": []byte("signed")}})
		c.before["GET pods"] = func() { c.put(requestsPath+"r", signed) }
		c.put(requestsPath+"r", request(t))
		deleted := requestsPath + "s"
		synctest.Wait()
		c.before["GET pods"] = func() { c.remove(deleted) }
		c.put(deleted, request(t))
		time.Sleep(time.Minute)
		if got := c.get(requestsPath + "r"); len(conditions(got)) != 0 || ctl.log.count("retrying") != 0 || c.called("PATCH certificatesigningrequests") != 2 {
			t.Errorf("got status %v after %d patches, want no condition after 2 patches, and no error:\n%s", got["status"], c.called("PATCH certificatesigningrequests"), ctl.log)
		}
	})
	bubble(t, func(t *testing.T, c *cluster) {
		putPod(c, "p", "uid", "n")
		startController(t, c)
		startController(t, c)
		synctest.Wait()
		c.put(requestsPath+"r", request(t))
		time.Sleep(time.Minute)
		expectSigned(t, c, requestsPath+"r", []string{"Approved True NodePod"})
	})
}
