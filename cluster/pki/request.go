package pki

import (
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/asn1"
	"encoding/pem"
	"net/url"

	"github.com/trivet-csi/trivet/volume"
)

const requestBlock = "CERTIFICATE REQUEST"

// subjectAltName and uriTag are defined in RFC 5280, section 4.2.1.6.
var subjectAltName = asn1.ObjectIdentifier{2, 5, 29, 17}

const uriTag = 6

// NewRequest creates a private key and the request for a certificate with the identity (both PEM).
func NewRequest(identity *url.URL) (key, request []byte, err error) {
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, err
	}
	der, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{URIs: []*url.URL{identity}}, private)
	if err != nil {
		return nil, nil, err
	}
	key, err = encodeKey(private)
	return key, pem.EncodeToMemory(&pem.Block{Type: requestBlock, Bytes: der}), err
}

// ParseRequest returns the public key and the URI in a request. The request is signed, which proves that
// its sender has the private key. ParseRequest fails with ErrInvalid unless the key is ECDSA P-256 and
// the URI is the only subject alternative name. It ignores the subject.
func ParseRequest(request []byte) (crypto.PublicKey, *url.URL, error) {
	block, rest := pem.Decode(request)
	if block == nil || block.Type != requestBlock || len(bytes.TrimSpace(rest)) > 0 {
		return nil, nil, volume.Errorf(volume.ErrInvalid, "certificate request: exactly one PEM block %s is needed", requestBlock)
	}
	csr, err := x509.ParseCertificateRequest(block.Bytes)
	if err == nil {
		err = csr.CheckSignature()
	}
	if err != nil {
		return nil, nil, volume.Errorf(volume.ErrInvalid, "certificate request: %w", err)
	}
	pub, ok := csr.PublicKey.(*ecdsa.PublicKey)
	if !ok || pub.Curve != elliptic.P256() {
		return nil, nil, volume.Errorf(volume.ErrInvalid, "certificate request: key is %s: ECDSA P-256 is needed", csr.PublicKeyAlgorithm)
	}
	if !namesOneURI(csr) {
		return nil, nil, volume.Errorf(volume.ErrInvalid, "certificate request: exactly one URI is needed as subject alternative name")
	}
	return pub, csr.URIs[0], nil
}

// namesOneURI reports whether a request has one URI as its only subject alternative name. It compares
// bytes, because x509 ignores unknown kinds of names.
func namesOneURI(csr *x509.CertificateRequest) bool {
	if len(csr.URIs) != 1 {
		return false
	}
	uri := asn1.RawValue{Class: asn1.ClassContextSpecific, Tag: uriTag, Bytes: []byte(csr.URIs[0].String())}
	want, err := asn1.Marshal([]asn1.RawValue{uri})
	for _, e := range csr.Extensions {
		if e.Id.Equal(subjectAltName) && !bytes.Equal(e.Value, want) {
			return false
		}
	}
	return err == nil
}
