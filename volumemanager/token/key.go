package token

import (
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha256"
	"crypto/x509"
	"encoding/base64"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/go-jose/go-jose/v4"

	"github.com/trivet-csi/trivet/internal/atomicfile"
)

const (
	keyFile = "service-account.key"
	// keyBlock is the type of the PEM block (PKCS #8).
	keyBlock = "PRIVATE KEY"
	keyBits  = 2048
)

// openKey reads the key in a directory. If the key is missing, it creates one and makes it durable.
func openKey(dir string) (*jose.JSONWebKey, error) {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, err
	}
	defer root.Close()
	key, err := readKey(root)
	if errors.Is(err, fs.ErrNotExist) {
		key, err = makeKey(root)
	}
	if err != nil {
		return nil, fmt.Errorf("key of service-account tokens, %s: %w", filepath.Join(dir, keyFile), err)
	}
	id, err := keyID(key)
	return &jose.JSONWebKey{Key: key, KeyID: id, Algorithm: string(algorithm), Use: "sig"}, err
}

func readKey(root *os.Root) (*rsa.PrivateKey, error) {
	info, err := root.Lstat(keyFile)
	if err != nil {
		return nil, err
	}
	if info.Mode() != 0o600 {
		return nil, fmt.Errorf("file mode %s: it must be -rw-------: change the mode, or, if others may have read the key, remove the file, so that a new key is created", info.Mode())
	}
	b, err := root.ReadFile(keyFile)
	if err != nil {
		return nil, err
	}
	key, err := parseKey(b)
	if err != nil {
		return nil, fmt.Errorf("%w: the file must contain an RSA key (PKCS #8 in PEM): restore the file, or remove it, so that a new key is created, which invalidates existing tokens", err)
	}
	return key, nil
}

func parseKey(b []byte) (*rsa.PrivateKey, error) {
	block, _ := pem.Decode(b)
	if block == nil || block.Type != keyBlock {
		return nil, errors.New("no PEM block " + keyBlock)
	}
	key, err := x509.ParsePKCS8PrivateKey(block.Bytes)
	if err != nil {
		return nil, err
	}
	private, ok := key.(*rsa.PrivateKey)
	if !ok {
		return nil, fmt.Errorf("the key has the type %T", key)
	}
	return private, nil
}

// makeKey creates a key and writes it durably.
func makeKey(root *os.Root) (*rsa.PrivateKey, error) {
	key, err := rsa.GenerateKey(rand.Reader, keyBits)
	if err != nil {
		return nil, err
	}
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, err
	}
	return key, atomicfile.Write(root, keyFile, pem.EncodeToMemory(&pem.Block{Type: keyBlock, Bytes: der}))
}

// keyID returns a hash of the public key.
func keyID(key *rsa.PrivateKey) (string, error) {
	der, err := x509.MarshalPKIXPublicKey(key.Public())
	sum := sha256.Sum256(der)
	return base64.RawURLEncoding.EncodeToString(sum[:]), err
}
