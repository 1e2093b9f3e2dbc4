package pki_test

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"testing"
	"time"

	"github.com/trivet-csi/trivet/cluster/pki"
	"github.com/trivet-csi/trivet/volume"
)

// TestSigned: a statement is verified with the signer's purpose, identity and usage only, for each type of key.
func TestSigned(t *testing.T) {
	ca, other := newAuthority(t), newAuthority(t)
	verifier := pki.OpenDirectory(t.TempDir())
	writeKey(t, ca, verifier, must[*ecdsa.PrivateKey](t)(ecdsa.GenerateKey(elliptic.P256(), rand.Reader)))
	_, edKey := must2(ed25519.GenerateKey(rand.Reader))(t)
	for name, key := range map[string]crypto.Signer{
		"ECDSA P-256": must[*ecdsa.PrivateKey](t)(ecdsa.GenerateKey(elliptic.P256(), rand.Reader)),
		"ECDSA P-384": must[*ecdsa.PrivateKey](t)(ecdsa.GenerateKey(elliptic.P384(), rand.Reader)),
		"RSA":         must[*rsa.PrivateKey](t)(rsa.GenerateKey(rand.Reader, 2048)),
		"Ed25519":     edKey,
	} {
		t.Run(name, func(t *testing.T) {
			signer, foreign := pki.OpenDirectory(t.TempDir()), pki.OpenDirectory(t.TempDir())
			writeKey(t, ca, signer, key)
			writeKey(t, other, foreign, key)
			signed := must[[]byte](t)(signer.Sign("purpose", []byte("statement")))
			got, err := verifier.VerifySigned("purpose", signed, controller, x509.ExtKeyUsageClientAuth)
			if err != nil || string(got) != "statement" {
				t.Errorf("got %q, %v, want the statement", got, err)
			}
			for name, err := range map[string]error{
				"another purpose":  second(verifier.VerifySigned("another purpose", signed, controller, x509.ExtKeyUsageClientAuth)),
				"another identity": second(verifier.VerifySigned("purpose", signed, nodeA, x509.ExtKeyUsageClientAuth)),
				"another usage":    second(verifier.VerifySigned("purpose", signed, controller, x509.ExtKeyUsageServerAuth)),
				"another CA":       second(verifier.VerifySigned("purpose", must[[]byte](t)(foreign.Sign("purpose", []byte("statement"))), controller, x509.ExtKeyUsageClientAuth)),
			} {
				if !errors.Is(err, volume.ErrInvalid) {
					t.Errorf("%s: got %v, want ErrInvalid", name, err)
				}
			}
		})
	}
}

func second[T any](_ T, err error) error { return err }

// writeKey writes a key, with a certificate of the controller from an authority, into a directory.
func writeKey(t *testing.T, ca *pki.Authority, dir *pki.Directory, key crypto.Signer) {
	t.Helper()
	cert := must[[]byte](t)(ca.Issue(key.Public(), controller, x509.ExtKeyUsageClientAuth, time.Hour))
	der := must[[]byte](t)(x509.MarshalPKCS8PrivateKey(key))
	if err := dir.Write(cert, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}), certificatesOf(ca)); err != nil {
		t.Fatal(err)
	}
}
