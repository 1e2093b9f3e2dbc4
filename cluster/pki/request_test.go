package pki_test

import (
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"encoding/pem"
	"errors"
	"net"
	"net/url"
	"testing"
	"time"

	"github.com/trivet-csi/trivet/cluster/pki"
	"github.com/trivet-csi/trivet/volume"
)

// sanExtension returns a subject alternative name extension. x509.CreateCertificateRequest does not
// encode all kinds of names.
func sanExtension(tb testing.TB, names ...asn1.RawValue) []pkix.Extension {
	tb.Helper()
	return []pkix.Extension{{Id: asn1.ObjectIdentifier{2, 5, 29, 17}, Value: must[[]byte](tb)(asn1.Marshal(names))}}
}

// generalName returns a GeneralName (RFC 5280, section 4.2.1.6).
func generalName(tag int, text string) asn1.RawValue {
	return asn1.RawValue{Class: asn1.ClassContextSpecific, Tag: tag, IsCompound: tag == 0 || tag == 4, Bytes: []byte(text)}
}

// TestParseRequest: only a request with a P-256 key and one URI as its only name is accepted.
func TestParseRequest(t *testing.T) {
	p256 := must[*ecdsa.PrivateKey](t)(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))
	p384 := must[*ecdsa.PrivateKey](t)(ecdsa.GenerateKey(elliptic.P384(), rand.Reader))
	rsaKey := must[*rsa.PrivateKey](t)(rsa.GenerateKey(rand.Reader, 2048))
	_, edKey := must2(ed25519.GenerateKey(rand.Reader))(t)
	oneURI := []*url.URL{nodeA}
	uri := generalName(6, nodeA.String())
	for _, tc := range []struct {
		name     string
		key      crypto.Signer
		template x509.CertificateRequest
		want     string
	}{
		{"valid", p256, x509.CertificateRequest{URIs: oneURI}, ""},
		{"with a subject, which is ignored", p256, x509.CertificateRequest{URIs: oneURI, Subject: pkix.Name{CommonName: "x"}}, ""},
		{"extension encoded by the test", p256, x509.CertificateRequest{ExtraExtensions: sanExtension(t, uri)}, ""},
		{"no URI", p256, x509.CertificateRequest{}, "exactly one URI"},
		{"two URIs", p256, x509.CertificateRequest{URIs: []*url.URL{nodeA, nodeB}}, "exactly one URI"},
		{"the same URI twice", p256, x509.CertificateRequest{URIs: []*url.URL{nodeA, nodeA}}, "exactly one URI"},
		{"URI and DNS name", p256, x509.CertificateRequest{URIs: oneURI, DNSNames: []string{"a"}}, "exactly one URI"},
		{"DNS name only", p256, x509.CertificateRequest{DNSNames: []string{"a"}}, "exactly one URI"},
		{"URI and IP address", p256, x509.CertificateRequest{URIs: oneURI, IPAddresses: []net.IP{net.IPv4(10, 0, 0, 1)}}, "exactly one URI"},
		{"URI and email address", p256, x509.CertificateRequest{URIs: oneURI, EmailAddresses: []string{"a@b.c"}}, "exactly one URI"},
		{"URI and otherName", p256, x509.CertificateRequest{ExtraExtensions: sanExtension(t, uri, generalName(0, "\x06\x01\x2a"))}, "exactly one URI"},
		{"directoryName and URI", p256, x509.CertificateRequest{ExtraExtensions: sanExtension(t, generalName(4, "0\x00"), uri)}, "exactly one URI"},
		{"URI and registeredID", p256, x509.CertificateRequest{ExtraExtensions: sanExtension(t, uri, generalName(8, "\x2a"))}, "exactly one URI"},
		{"URI with an uppercase scheme", p256, x509.CertificateRequest{ExtraExtensions: sanExtension(t, generalName(6, "SPIFFE://csi.trivet.dev/node/a"))}, "exactly one URI"},
		{"P-384", p384, x509.CertificateRequest{URIs: oneURI}, "ECDSA P-256 is needed"},
		{"RSA", rsaKey, x509.CertificateRequest{URIs: oneURI}, "key is RSA: ECDSA P-256 is needed"},
		{"Ed25519", edKey, x509.CertificateRequest{URIs: oneURI}, "ECDSA P-256 is needed"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			der := must[[]byte](t)(x509.CreateCertificateRequest(rand.Reader, &tc.template, tc.key))
			pub, identity, err := pki.ParseRequest(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der}))
			if !hasText(err, tc.want) {
				t.Fatalf("got error %v, want %q", err, tc.want)
			}
			if err != nil && (!errors.Is(err, volume.ErrInvalid) || pub != nil || identity != nil) {
				t.Errorf("got error %v, key %v, URI %v; want ErrInvalid without key and URI", err, pub, identity)
			}
			if err == nil && (identity.String() != nodeA.String() || !p256.PublicKey.Equal(pub)) {
				t.Errorf("got URI %s and key %v, want %s and the key of the request", identity, pub, nodeA)
			}
		})
	}
}

// TestParseRequestEncoding: only one PEM block with a correctly signed request is accepted.
func TestParseRequestEncoding(t *testing.T) {
	_, request := must2(pki.NewRequest(nodeA))(t)
	block, _ := pem.Decode(request)
	badSignature := bytes.Clone(block.Bytes)
	badSignature[len(badSignature)-1] ^= 1
	changedURI := bytes.Replace(block.Bytes, []byte("/node/a"), []byte("/node/b"), 1)
	csr := func(der []byte) []byte {
		return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der})
	}
	for _, tc := range []struct{ name, in, want string }{
		{"valid", string(request), ""},
		{"trailing blank lines", string(request) + "\n\n", ""},
		{"empty", "", "exactly one PEM block"},
		{"garbage", "garbage", "exactly one PEM block"},
		{"two requests", string(request) + string(request), "exactly one PEM block"},
		{"trailing text", string(request) + "x", "exactly one PEM block"},
		{"certificate instead of a request", string(certificatesOf(newAuthority(t))), "exactly one PEM block"},
		{"empty block", string(csr(nil)), "certificate request: "},
		{"truncated", string(csr(block.Bytes[:len(block.Bytes)-1])), "certificate request: "},
		{"changed signature", string(csr(badSignature)), "certificate request: "},
		{"URI changed after the signature", string(csr(changedURI)), "certificate request: "},
	} {
		if _, _, err := pki.ParseRequest([]byte(tc.in)); !hasText(err, tc.want) || (err != nil && !errors.Is(err, volume.ErrInvalid)) {
			t.Errorf("%s: got error %v, want %q", tc.name, err, tc.want)
		}
	}
}

// FuzzParseRequest: Issue succeeds for every request that ParseRequest accepts.
func FuzzParseRequest(f *testing.F) {
	ca := newAuthority(f)
	for _, identity := range []*url.URL{controller, nodeA, pki.NodeURI(driverName, "rack/1 ü")} {
		_, request := must2(pki.NewRequest(identity))(f)
		f.Add(request)
	}
	f.Add([]byte("-----BEGIN CERTIFICATE REQUEST-----\n-----END CERTIFICATE REQUEST-----\n"))
	f.Fuzz(func(t *testing.T, request []byte) {
		if pub, identity, err := pki.ParseRequest(request); err == nil {
			wantIssued(t, ca, pub, identity)
		}
	})
}

// FuzzRequestNames: if ParseRequest accepts a request with arbitrary names, the issued certificate has
// exactly one name.
func FuzzRequestNames(f *testing.F) {
	ca := newAuthority(f)
	key := must[*ecdsa.PrivateKey](f)(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))
	for _, names := range [][]asn1.RawValue{
		{generalName(6, nodeA.String())},
		{generalName(6, "mailto:a@b")},
		{generalName(6, "//user:pass@host:1/%2F?q#f")},
		{generalName(6, nodeA.String()), generalName(0, "\x06\x01\x2a")},
	} {
		f.Add(sanExtension(f, names...)[0].Value)
	}
	f.Fuzz(func(t *testing.T, names []byte) {
		template := &x509.CertificateRequest{ExtraExtensions: sanExtension(t)}
		template.ExtraExtensions[0].Value = names
		der, err := x509.CreateCertificateRequest(rand.Reader, template, key)
		if err != nil {
			return
		}
		if pub, identity, err := pki.ParseRequest(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der})); err == nil {
			wantIssued(t, ca, pub, identity)
		}
	})
}

// wantIssued fails the test unless the CA issues a certificate that contains the identity as its only
// name, and the key, and that is not a CA certificate.
func wantIssued(t *testing.T, ca *pki.Authority, pub crypto.PublicKey, identity *url.URL) {
	t.Helper()
	got := parse(t, must[[]byte](t)(ca.Issue(pub, identity, x509.ExtKeyUsageServerAuth, time.Hour)))
	names := len(got.URIs) + len(got.DNSNames) + len(got.IPAddresses) + len(got.EmailAddresses)
	if names != 1 || got.URIs[0].String() != identity.String() || !got.PublicKey.(*ecdsa.PublicKey).Equal(pub) || got.IsCA {
		t.Errorf("certificate for %s: got URIs %s, %d names, key %v, IsCA %t, want one URI, the key of the request, no CA", identity, got.URIs, names, got.PublicKey, got.IsCA)
	}
}
