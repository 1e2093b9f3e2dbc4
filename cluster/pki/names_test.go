package pki_test

import (
	"crypto/x509"
	"net/url"
	"strings"
	"testing"

	"github.com/trivet-csi/trivet/cluster/pki"
)

// TestNames: a certificate contains the URI of its request, and different names have different URIs.
func TestNames(t *testing.T) {
	ca := newAuthority(t)
	seen := map[string]string{}
	for _, driver := range []string{"csi.trivet.dev", "CSI.Trivet.dev", "x", "under_score", "a-b.c", strings.Repeat("d", 63)} {
		uris := map[string]*url.URL{"controller": pki.ControllerURI(driver)}
		for _, node := range []string{
			"worker-1", "", ".", "..", "a/b", "a%2Fb", "a%252Fb", "/a", "a b", "a+b", "a?b", "a#b", "a@b:1", "*", "ü", "é", "\xff", "\n\x00", "<>\"'\\", "a;b,c=d&e", "Worker-1", strings.Repeat("n", 253),
		} {
			uris["node "+node] = pki.NodeURI(driver, node)
		}
		for identity, uri := range uris {
			if other, ok := seen[uri.String()]; ok {
				t.Errorf("%q of driver %q has the same URI as %s: %s", identity, driver, other, uri)
			}
			seen[uri.String()] = identity + " of " + driver
			cert, _ := newPair(t, ca, uri, x509.ExtKeyUsageServerAuth)
			if got := parse(t, cert).URIs; len(got) != 1 || got[0].String() != uri.String() {
				t.Errorf("%q of driver %q: got URIs %s in the certificate, want %s", identity, driver, got, uri)
			}
		}
	}
	for uri, want := range map[*url.URL]string{
		controller:                          "spiffe://csi.trivet.dev/controller",
		nodeA:                               "spiffe://csi.trivet.dev/node/a",
		pki.NodeURI(driverName, "rack/1 ü"): "spiffe://csi.trivet.dev/node/rack%2F1%20%C3%BC",
	} {
		if uri.String() != want {
			t.Errorf("got %s, want %s", uri, want)
		}
	}
}

// TestInvalidDriverName: a request is refused if its URI cannot contain the name of the driver.
func TestInvalidDriverName(t *testing.T) {
	for _, driver := range []string{"a b", "a/b", "ü", "a."} {
		_, request, err := pki.NewRequest(pki.ControllerURI(driver))
		if err == nil {
			_, _, err = pki.ParseRequest(request)
		}
		if err == nil {
			t.Errorf("the request for driver %q was accepted", driver)
		}
	}
}

// FuzzNodeURI: the URI's text is parsed to the same URI, whose path contains the node's name.
func FuzzNodeURI(f *testing.F) {
	for _, s := range []string{"worker-1", "", "..", "a/b", "a%2Fb", "ü", "\xff"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, node string) {
		uri, err := url.Parse(pki.NodeURI(driverName, node).String())
		if err != nil || uri.Path != "/node/"+node || uri.String() != pki.NodeURI(driverName, node).String() {
			t.Errorf("node %q: parsed %v, %v", node, uri, err)
		}
	})
}
