package pki_test

import (
	"bytes"
	"crypto/x509"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/trivet-csi/trivet/cluster/pki"
	"github.com/trivet-csi/trivet/volume"
)

// reread is the time after which changed files are read. Tests wait for it in synctest bubbles.
const reread = time.Second

// put creates or replaces files in a directory.
func put(tb testing.TB, dir string, files map[string][]byte) {
	tb.Helper()
	if err := os.MkdirAll(dir, 0o700); err != nil {
		tb.Fatal(err)
	}
	for name, data := range files {
		if err := os.WriteFile(filepath.Join(dir, name), data, 0o600); err != nil {
			tb.Fatal(err)
		}
	}
}

// sides are the directories of a node, which is the server, and of a controller, which is the client. They
// accept each other.
type sides struct {
	*testing.T
	ca             *pki.Authority
	server, client *pki.Directory
	path           string // of the server's directory
}

// withSides runs a test in a synctest bubble.
func withSides(t *testing.T, test func(sides)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		s := sides{T: t, ca: newAuthority(t)}
		s.server, s.path = newDirectory(t, s.ca, nodeA, x509.ExtKeyUsageServerAuth)
		s.client, _ = newDirectory(t, s.ca, controller, x509.ExtKeyUsageClientAuth)
		mustConnect(t, s.server, s.client)
		test(s)
	})
}

// wantPresented fails the test unless the server presents the given certificate.
func (s sides) wantPresented(cert []byte) {
	s.Helper()
	if got := mustConnect(s.T, s.server, s.client).PeerCertificates[0]; !got.Equal(parse(s, cert)) {
		s.Errorf("the server presents a certificate with serial number %s, want %s", got.SerialNumber, parse(s, cert).SerialNumber)
	}
}

// TestReplaced: while another program replaces the files one by one, the last valid content is in use.
func TestReplaced(t *testing.T) {
	withSides(t, func(s sides) {
		before, _, _, err := s.server.Read()
		if err != nil {
			t.Fatal(err)
		}
		cert, key := newPair(t, s.ca, nodeA, x509.ExtKeyUsageServerAuth)
		for _, step := range []struct {
			files map[string][]byte
			want  []byte
		}{
			{map[string][]byte{"tls.key": key}, before},               // the key does not match tls.crt
			{map[string][]byte{"tls.crt": cert[:100]}, before},        // tls.crt is truncated
			{map[string][]byte{"tls.crt": cert, "ca.crt": nil}, cert}, // ca.crt is empty
			{map[string][]byte{"ca.crt": []byte("garbage")}, cert},
			{map[string][]byte{"ca.crt": certificatesOf(s.ca)}, cert},
		} {
			put(t, s.path, step.files)
			time.Sleep(reread)
			s.wantPresented(step.want)
			if err := s.server.Usable(); err != nil {
				t.Error(err)
			}
		}
		if err := os.RemoveAll(s.path); err != nil {
			t.Fatal(err)
		}
		time.Sleep(reread)
		s.wantPresented(cert)
	})
}

// TestSecretVolume: changes of a Secret volume are read. Its files are links into the directory ..data, which
// is a link that the kubelet replaces.
func TestSecretVolume(t *testing.T) {
	withSides(t, func(s sides) {
		dir := t.TempDir()
		publish := func(version string, files map[string][]byte) {
			put(t, filepath.Join(dir, version), files)
			next := filepath.Join(dir, "..data_tmp")
			if err := os.Symlink(version, next); err != nil {
				t.Fatal(err)
			}
			if err := os.Rename(next, filepath.Join(dir, "..data")); err != nil {
				t.Fatal(err)
			}
		}
		s.server = pki.OpenDirectory(dir)
		for i, version := range []string{"..1", "..2", "..3"} {
			cert, key := newPair(t, s.ca, nodeA, x509.ExtKeyUsageServerAuth)
			files := map[string][]byte{"tls.crt": cert, "tls.key": key, "ca.crt": certificatesOf(s.ca)}
			publish(version, files)
			if i == 0 {
				for name := range files {
					if err := os.Symlink(filepath.Join("..data", name), filepath.Join(dir, name)); err != nil {
						t.Fatal(err)
					}
				}
			}
			time.Sleep(reread)
			s.wantPresented(cert)
		}
	})
}

// TestRotation: while the server trusts the old and the new CA, it accepts certificates of both. When it
// trusts only the new CA, the next handshake refuses a certificate of the old one.
func TestRotation(t *testing.T) {
	withSides(t, func(s sides) {
		next := newAuthority(t)
		if err := s.server.Write(nil, nil, certificatesOf(s.ca, next)); err != nil {
			t.Fatal(err)
		}
		mustConnect(t, s.server, s.client)
		rotated, _ := newDirectory(t, next, controller, x509.ExtKeyUsageClientAuth)
		if err := rotated.Write(nil, nil, certificatesOf(next, s.ca)); err != nil {
			t.Fatal(err)
		}
		mustConnect(t, s.server, rotated)

		serving, calling := s.server.Server(controller), s.client.Client(nodeA)
		put(t, s.path, map[string][]byte{"ca.crt": certificatesOf(next)})
		time.Sleep(reread)
		if _, err, _ := connect(t, serving, calling); !hasText(err, "signed by another CA") {
			t.Errorf("client with a certificate of the old CA: got %v, want a refusal", err)
		}
		mustConnect(t, s.server, rotated)
	})
}

// TestExpiry: an expired certificate is reported and refused. After a new certificate replaces it, connections
// succeed.
func TestExpiry(t *testing.T) {
	withSides(t, func(s sides) {
		time.Sleep(8 * 24 * time.Hour)
		if err := s.server.Usable(); !errors.Is(err, volume.ErrPrecondition) || !hasText(err, "tls.crt expired on 2000-01-08T00:00:00Z, the clock here says 2000-01-09T00:00:00Z") {
			t.Errorf("Usable: got %v, want ErrPrecondition with the time of the expiry", err)
		}
		if _, _, err := connect(t, s.server.Server(controller), s.client.Client(nodeA)); !hasText(err, "certificate expired on") {
			t.Errorf("connection: got client error %v, want an error about the expired certificate", err)
		}
		for d, side := range map[*pki.Directory]side{s.server: serverSide, s.client: clientSide} {
			cert, key := newPair(t, s.ca, side.identity, side.usage)
			if err := d.Write(cert, key, nil); err != nil {
				t.Fatal(err)
			}
			if err := d.Usable(); err != nil {
				t.Error(err)
			}
		}
		mustConnect(t, s.server, s.client)
	})
}

// TestExpiredAndInvalid: if the certificate in use has expired and the current files are invalid, Usable
// returns the error of the files.
func TestExpiredAndInvalid(t *testing.T) {
	withSides(t, func(s sides) {
		time.Sleep(8 * 24 * time.Hour)
		put(t, s.path, map[string][]byte{"tls.crt": []byte("garbage")})
		time.Sleep(reread)
		if err := s.server.Usable(); !hasText(err, s.path) || !hasText(err, "PEM data in certificate input") {
			t.Errorf("got %v, want an error about the content of %s", err, s.path)
		}
	})
}

// TestCreatedLater: the directory may be created after OpenDirectory.
func TestCreatedLater(t *testing.T) {
	withSides(t, func(s sides) {
		cert, key, roots, err := s.server.Read()
		if err != nil {
			t.Fatal(err)
		}
		path := filepath.Join(t.TempDir(), "later", "certificates")
		s.server = pki.OpenDirectory(path)
		serving := s.server.Server(controller)
		if err := s.server.Usable(); !errors.Is(err, fs.ErrNotExist) || !errors.Is(err, volume.ErrPrecondition) {
			t.Errorf("Usable before the directory exists: got %v, want ErrNotExist and ErrPrecondition", err)
		}
		if _, err, _ := connect(t, serving, s.client.Client(nodeA)); !hasText(err, path) {
			t.Errorf("connection before the directory exists: got %v, want an error with %s", err, path)
		}
		put(t, path, map[string][]byte{"tls.crt": cert, "tls.key": key, "ca.crt": roots})
		time.Sleep(reread)
		s.wantPresented(cert)
		if err := s.server.Usable(); err != nil {
			t.Error(err)
		}
	})
}

// TestFault: Usable, Server and Client return the error of invalid files.
func TestFault(t *testing.T) {
	ca := newAuthority(t)
	cert, key := newPair(t, ca, nodeA, x509.ExtKeyUsageServerAuth)
	_, otherKey := newPair(t, ca, nodeA, x509.ExtKeyUsageServerAuth)
	roots := certificatesOf(ca)
	client, _ := newDirectory(t, ca, controller, x509.ExtKeyUsageClientAuth)
	server, _ := newDirectory(t, ca, nodeA, x509.ExtKeyUsageServerAuth)
	garbage := []byte("garbage")
	for _, tc := range []struct {
		name  string
		files map[string][]byte
		want  string
	}{
		{"empty directory", nil, "tls.crt: no such file"},
		{"no certificate", map[string][]byte{"tls.key": key, "ca.crt": roots}, "tls.crt: no such file"},
		{"no key", map[string][]byte{"tls.crt": cert, "ca.crt": roots}, "tls.key: no such file"},
		{"no roots", map[string][]byte{"tls.crt": cert, "tls.key": key}, "ca.crt: no such file"},
		{"empty files", map[string][]byte{"tls.crt": nil, "tls.key": nil, "ca.crt": nil}, "PEM data in certificate input"},
		{"certificate is not PEM", map[string][]byte{"tls.crt": garbage, "tls.key": key, "ca.crt": roots}, "PEM data in certificate input"},
		{"PEM block is no certificate", map[string][]byte{"tls.crt": encode(garbage), "tls.key": key, "ca.crt": roots}, "x509: malformed certificate"},
		{"key is not PEM", map[string][]byte{"tls.crt": cert, "tls.key": garbage, "ca.crt": roots}, "PEM data in key input"},
		{"key of another certificate", map[string][]byte{"tls.crt": cert, "tls.key": otherKey, "ca.crt": roots}, "private key does not match public key"},
		{"roots are not PEM", map[string][]byte{"tls.crt": cert, "tls.key": key, "ca.crt": garbage}, "ca.crt contains no valid CA certificate"},
		{"leaf certificate as root", map[string][]byte{"tls.crt": cert, "tls.key": key, "ca.crt": cert}, "ca.crt contains no valid CA certificate"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			dir := t.TempDir()
			put(t, dir, tc.files)
			d := pki.OpenDirectory(dir)
			_, serverErr, _ := connect(t, d.Server(controller), client.Client(nodeA))
			_, _, clientErr := connect(t, server.Server(controller), d.Client(nodeA))
			for _, err := range []error{d.Usable(), serverErr, clientErr} {
				if !errors.Is(err, volume.ErrPrecondition) || !hasText(err, dir) || !hasText(err, tc.want) {
					t.Errorf("got %v, want ErrPrecondition with %q and %s", err, tc.want, dir)
				}
			}
		})
	}
}

// TestWrite: Write creates the directory, replaces only the given files, and makes them readable only for the owner.
func TestWrite(t *testing.T) {
	ca := newAuthority(t)
	path := filepath.Join(t.TempDir(), "state", "certificates")
	d := pki.OpenDirectory(path)
	if cert, key, roots, err := d.Read(); cert != nil || key != nil || roots != nil || !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("Read of a missing directory: got %q, %q, %q, %v, want ErrNotExist", cert, key, roots, err)
	}
	wantFiles := func(wantCert, wantKey, wantRoots []byte) {
		t.Helper()
		cert, key, roots, err := d.Read()
		if !bytes.Equal(cert, wantCert) || !bytes.Equal(key, wantKey) || !bytes.Equal(roots, wantRoots) {
			t.Errorf("Read: got %q, %q, %q, %v, want %q, %q, %q", cert, key, roots, err, wantCert, wantKey, wantRoots)
		}
		if missing := cert == nil || key == nil || roots == nil; missing != errors.Is(err, fs.ErrNotExist) {
			t.Errorf("Read: got %v, want ErrNotExist only if a file is missing", err)
		}
	}
	cert, key := newPair(t, ca, nodeA, x509.ExtKeyUsageServerAuth)
	for _, step := range []struct{ cert, key, roots, wantCert, wantKey, wantRoots []byte }{
		{nil, nil, certificatesOf(ca), nil, nil, certificatesOf(ca)},
		{cert, key, nil, cert, key, certificatesOf(ca)},
		{nil, nil, nil, cert, key, certificatesOf(ca)},
	} {
		if err := d.Write(step.cert, step.key, step.roots); err != nil {
			t.Fatal(err)
		}
		wantFiles(step.wantCert, step.wantKey, step.wantRoots)
	}
	if err := d.Usable(); err != nil {
		t.Errorf("the written certificate is not in use immediately: %v", err)
	}
	entries := must[[]os.DirEntry](t)(os.ReadDir(path))
	if len(entries) != 3 {
		t.Errorf("the directory contains %v, want 3 files", entries)
	}
	for name, want := range map[string]fs.FileMode{".": fs.ModeDir | 0o700, "tls.key": 0o600} {
		if info, err := os.Stat(filepath.Join(path, name)); err != nil || info.Mode() != want {
			t.Errorf("mode of %s: got %v, %v, want %v", name, info.Mode(), err, want)
		}
	}
}

// TestWriteFails: a failed write returns the path, and writes no certificate without its key.
func TestWriteFails(t *testing.T) {
	dir := t.TempDir()
	put(t, dir, map[string][]byte{"file": nil})
	if err := pki.OpenDirectory(filepath.Join(dir, "file")).Write(nil, nil, nil); !hasText(err, filepath.Join(dir, "file")) {
		t.Errorf("Write to a directory whose path is a file: got %v, want an error with the path", err)
	}
	if err := os.Mkdir(filepath.Join(dir, "tls.key"), 0o700); err != nil { // a rename cannot replace a directory
		t.Fatal(err)
	}
	if err := pki.OpenDirectory(dir).Write([]byte("cert"), []byte("key"), nil); !hasText(err, filepath.Join(dir, "tls.key")) {
		t.Errorf("Write over a directory: got %v, want an error with the path", err)
	}
	if _, err := os.Stat(filepath.Join(dir, "tls.crt")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("tls.crt was written although tls.key failed: %v", err)
	}
}

// TestWriteWhileServing: handshakes succeed while certificate and key are replaced.
func TestWriteWhileServing(t *testing.T) {
	ca := newAuthority(t)
	server, _ := newDirectory(t, ca, nodeA, x509.ExtKeyUsageServerAuth)
	client, _ := newDirectory(t, ca, controller, x509.ExtKeyUsageClientAuth)
	var writer sync.WaitGroup
	defer writer.Wait()
	writer.Go(func() {
		for range 10 {
			cert, key := newPair(t, ca, nodeA, x509.ExtKeyUsageServerAuth)
			if err := server.Write(cert, key, certificatesOf(ca)); err != nil {
				t.Error(err)
			}
		}
	})
	for range 20 {
		mustConnect(t, server, client)
	}
}

// TestUsableAs: a valid certificate with another name is refused.
func TestUsableAs(t *testing.T) {
	d, path := newDirectory(t, newAuthority(t), nodeA, x509.ExtKeyUsageServerAuth)
	if err := d.UsableAs(nodeA); err != nil {
		t.Error(err)
	}
	other := pki.NodeURI("csi.trivet.dev", "other")
	if err := d.UsableAs(other); !errors.Is(err, volume.ErrPrecondition) || !hasText(err, nodeA.String()) || !hasText(err, other.String()) || !hasText(err, path) {
		t.Errorf("UsableAs(%s): got %v, want ErrPrecondition with both URIs and the path", other, err)
	}
}
