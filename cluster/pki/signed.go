package pki

import (
	"crypto"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha256"
	"crypto/x509"
	"encoding/json"
	"net/url"

	"github.com/trivet-csi/trivet/volume"
)

// signed is a statement with the signature of a driver, and the certificates that prove whose signature it is.
type signed struct {
	Statement    []byte   `json:"statement"`
	Signature    []byte   `json:"signature"`
	Certificates [][]byte `json:"certificates"`
}

// Sign signs a statement with the key of the directory's certificate. purpose separates statements of different kinds: a
// signature is valid for one purpose only.
func (d *Directory) Sign(purpose string, statement []byte) ([]byte, error) {
	c, err := d.current()
	if err != nil {
		return nil, err
	}
	key, ok := c.pair.PrivateKey.(crypto.Signer)
	algorithm, hash := algorithmOf(c.pair.Leaf)
	if !ok || algorithm == x509.UnknownSignatureAlgorithm {
		return nil, volume.Errorf(volume.ErrPrecondition, "%s: keys of type %s cannot sign tickets: use ECDSA, RSA or Ed25519", d.file(keyFile), c.pair.Leaf.PublicKeyAlgorithm)
	}
	message, opts := toSign(purpose, statement), crypto.SignerOpts(hash)
	if hash != 0 {
		digest := sha256.Sum256(message)
		message = digest[:]
	}
	if algorithm == x509.SHA256WithRSAPSS {
		opts = &rsa.PSSOptions{SaltLength: rsa.PSSSaltLengthEqualsHash, Hash: hash}
	}
	signature, err := key.Sign(rand.Reader, message, opts)
	if err != nil {
		return nil, err
	}
	return json.Marshal(signed{statement, signature, c.pair.Certificate})
}

// VerifySigned returns the statement that Sign has signed for the purpose, if the signer's certificate is valid now, is verified
// by the CA certificates of the directory, names only the identity and is for the usage. Otherwise it returns ErrInvalid.
func (d *Directory) VerifySigned(purpose string, text []byte, signer *url.URL, usage x509.ExtKeyUsage) ([]byte, error) {
	c, err := d.current()
	if err != nil {
		return nil, err
	}
	var s signed
	if err := json.Unmarshal(text, &s); err != nil {
		return nil, volume.Errorf(volume.ErrInvalid, "it is not in the expected format: %w", err)
	}
	var chain []*x509.Certificate
	for _, der := range s.Certificates {
		cert, err := x509.ParseCertificate(der)
		if err != nil {
			return nil, volume.Errorf(volume.ErrInvalid, "its certificate: %w", err)
		}
		chain = append(chain, cert)
	}
	if len(chain) == 0 {
		return nil, volume.Errorf(volume.ErrInvalid, "it has no certificate")
	}
	if err := verify(chain, c.roots, signer, usage); err != nil {
		return nil, volume.Errorf(volume.ErrInvalid, "%w", err)
	}
	algorithm, _ := algorithmOf(chain[0])
	if err := chain[0].CheckSignature(algorithm, toSign(purpose, s.Statement), s.Signature); err != nil {
		return nil, volume.Errorf(volume.ErrInvalid, "its signature is not that of %s: %w", signer, err)
	}
	return s.Statement, nil
}

// algorithmOf returns the algorithm with which the key of a certificate signs statements, and its hash.
func algorithmOf(cert *x509.Certificate) (x509.SignatureAlgorithm, crypto.Hash) {
	switch cert.PublicKeyAlgorithm {
	case x509.ECDSA:
		return x509.ECDSAWithSHA256, crypto.SHA256
	case x509.RSA:
		return x509.SHA256WithRSAPSS, crypto.SHA256
	case x509.Ed25519:
		return x509.PureEd25519, 0
	default:
		return x509.UnknownSignatureAlgorithm, 0
	}
}

// toSign returns the bytes that are signed. No message of TLS begins with them.
func toSign(purpose string, statement []byte) []byte {
	return append([]byte("trivet "+purpose+"\x00"), statement...)
}
