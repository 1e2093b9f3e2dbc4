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

// reread is the time after which changed files are in use. Tests wait for it in synctest bubbles.
const reread = time.Second

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

// node is a node and a controller that accept each other, in a synctest bubble.
type node struct {
	*testing.T
	ca             *pki.Authority
	server, client *pki.Directory
	path           string // of the server
}

func withNode(t *testing.T, test func(node)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		n := node{T: t, ca: newAuthority(t)}
		n.server, n.path = newDirectory(t, n.ca, nodeA, x509.ExtKeyUsageServerAuth)
		n.client, _ = newDirectory(t, n.ca, controller, x509.ExtKeyUsageClientAuth)
		agree(t, n.server, n.client)
		test(n)
	})
}

// presents fails the test unless the server presents a certificate.
func (n node) presents(cert []byte) {
	n.Helper()
	if got := agree(n.T, n.server, n.client).PeerCertificates[0]; !got.Equal(parse(n, cert)) {
		n.Errorf("the server presents serial number %s", got.SerialNumber)
	}
}

// TestReplaced: another program writes the files one by one.
func TestReplaced(t *testing.T) {
	withNode(t, func(n node) {
		before, _, _, err := n.server.Read()
		if err != nil {
			t.Fatal(err)
		}
		cert, key := newPair(t, n.ca, nodeA, x509.ExtKeyUsageServerAuth)
		for _, step := range []struct {
			files map[string][]byte
			want  []byte
		}{
			{map[string][]byte{"tls.key": key}, before}, // does not match yet
			{map[string][]byte{"tls.crt": cert[:100]}, before},
			{map[string][]byte{"tls.crt": cert, "ca.crt": nil}, cert},
			{map[string][]byte{"ca.crt": []byte("garbage")}, cert},
			{map[string][]byte{"ca.crt": rootsOf(n.ca)}, cert},
		} {
			put(t, n.path, step.files)
			time.Sleep(reread)
			n.presents(step.want)
			if err := n.server.Usable(); err != nil {
				t.Error(err)
			}
		}
		if err := os.RemoveAll(n.path); err != nil {
			t.Fatal(err)
		}
		time.Sleep(reread)
		n.presents(cert)
	})
}

// TestSecretVolume replaces files as the kubelet does: they are links through a link to a directory,
// and that link is replaced.
func TestSecretVolume(t *testing.T) {
	withNode(t, func(n node) {
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
		n.server = pki.OpenDirectory(dir)
		for i, version := range []string{"..1", "..2", "..3"} {
			cert, key := newPair(t, n.ca, nodeA, x509.ExtKeyUsageServerAuth)
			files := map[string][]byte{"tls.crt": cert, "tls.key": key, "ca.crt": rootsOf(n.ca)}
			publish(version, files)
			for name := range files {
				if i > 0 {
					continue
				}
				if err := os.Symlink(filepath.Join("..data", name), filepath.Join(dir, name)); err != nil {
					t.Fatal(err)
				}
			}
			time.Sleep(reread)
			n.presents(cert)
		}
	})
}

// TestRotation: while roots of both CAs are trusted, certificates of both are accepted; after that,
// the next handshake refuses the old one.
func TestRotation(t *testing.T) {
	withNode(t, func(n node) {
		next := newAuthority(t)
		if err := n.server.Write(nil, nil, rootsOf(n.ca, next)); err != nil {
			t.Fatal(err)
		}
		agree(t, n.server, n.client)
		rotated, _ := newDirectory(t, next, controller, x509.ExtKeyUsageClientAuth)
		if err := rotated.Write(nil, nil, rootsOf(next, n.ca)); err != nil {
			t.Fatal(err)
		}
		agree(t, n.server, rotated)

		serving, calling := n.server.Server(controller), n.client.Client(nodeA)
		put(t, n.path, map[string][]byte{"ca.crt": rootsOf(next)})
		time.Sleep(reread)
		if _, err, _ := connect(t, serving, calling); !says(err, "signed by another CA") {
			t.Errorf("the old client: %v", err)
		}
		agree(t, n.server, rotated)
	})
}

// TestExpiry: a certificate expires while it is in use, and a new one replaces it.
func TestExpiry(t *testing.T) {
	withNode(t, func(n node) {
		time.Sleep(8 * 24 * time.Hour)
		if err := n.server.Usable(); !errors.Is(err, volume.ErrPrecondition) || !says(err, "tls.crt expired on 2000-01-08T00:00:00Z, the clock here says 2000-01-09T00:00:00Z") {
			t.Error(err)
		}
		if _, _, err := connect(t, n.server.Server(controller), n.client.Client(nodeA)); !says(err, "certificate expired on") {
			t.Error(err)
		}
		for d, s := range map[*pki.Directory]side{n.server: serverSide, n.client: clientSide} {
			cert, key := newPair(t, n.ca, s.identity, s.usage)
			if err := d.Write(cert, key, nil); err != nil {
				t.Fatal(err)
			}
			if err := d.Usable(); err != nil {
				t.Error(err)
			}
		}
		agree(t, n.server, n.client)
	})
}

// TestExpiredAndBroken: the error is that of the next pair, not that the last one has expired.
func TestExpiredAndBroken(t *testing.T) {
	withNode(t, func(n node) {
		time.Sleep(8 * 24 * time.Hour)
		put(t, n.path, map[string][]byte{"tls.crt": []byte("garbage")})
		time.Sleep(reread)
		if err := n.server.Usable(); !says(err, n.path) || !says(err, "PEM data in certificate input") {
			t.Error(err)
		}
	})
}

// TestAppears: the directory may be created later.
func TestAppears(t *testing.T) {
	withNode(t, func(n node) {
		cert, key, roots, err := n.server.Read()
		if err != nil {
			t.Fatal(err)
		}
		path := filepath.Join(t.TempDir(), "later", "certificates")
		n.server = pki.OpenDirectory(path)
		serving := n.server.Server(controller)
		if err := n.server.Usable(); !errors.Is(err, fs.ErrNotExist) || !errors.Is(err, volume.ErrPrecondition) {
			t.Errorf("before: %v", err)
		}
		if _, err, _ := connect(t, serving, n.client.Client(nodeA)); !says(err, path) {
			t.Errorf("before: %v", err)
		}
		put(t, path, map[string][]byte{"tls.crt": cert, "tls.key": key, "ca.crt": roots})
		time.Sleep(reread)
		n.presents(cert)
		if err := n.server.Usable(); err != nil {
			t.Error(err)
		}
	})
}

// TestFault: Usable and both sides of a connection return the error of the files.
func TestFault(t *testing.T) {
	ca := newAuthority(t)
	cert, key := newPair(t, ca, nodeA, x509.ExtKeyUsageServerAuth)
	_, otherKey := newPair(t, ca, nodeA, x509.ExtKeyUsageServerAuth)
	roots := rootsOf(ca)
	client, _ := newDirectory(t, ca, controller, x509.ExtKeyUsageClientAuth)
	server, _ := newDirectory(t, ca, nodeA, x509.ExtKeyUsageServerAuth)
	garbage := []byte("garbage")
	for _, tc := range []struct {
		name  string
		files map[string][]byte
		want  string
	}{
		{"empty folder", nil, "tls.crt: no such file"},
		{"no certificate", map[string][]byte{"tls.key": key, "ca.crt": roots}, "tls.crt: no such file"},
		{"no key", map[string][]byte{"tls.crt": cert, "ca.crt": roots}, "tls.key: no such file"},
		{"no roots", map[string][]byte{"tls.crt": cert, "tls.key": key}, "ca.crt: no such file"},
		{"empty files", map[string][]byte{"tls.crt": nil, "tls.key": nil, "ca.crt": nil}, "PEM data in certificate input"},
		{"garbage for a certificate", map[string][]byte{"tls.crt": garbage, "tls.key": key, "ca.crt": roots}, "PEM data in certificate input"},
		{"garbage in a certificate", map[string][]byte{"tls.crt": encode(garbage), "tls.key": key, "ca.crt": roots}, "x509: malformed certificate"},
		{"garbage for a key", map[string][]byte{"tls.crt": cert, "tls.key": garbage, "ca.crt": roots}, "PEM data in key input"},
		{"another's key", map[string][]byte{"tls.crt": cert, "tls.key": otherKey, "ca.crt": roots}, "private key does not match public key"},
		{"garbage for roots", map[string][]byte{"tls.crt": cert, "tls.key": key, "ca.crt": garbage}, "ca.crt has no CA certificate"},
		{"a leaf for roots", map[string][]byte{"tls.crt": cert, "tls.key": key, "ca.crt": cert}, "ca.crt has no CA certificate"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			dir := t.TempDir()
			put(t, dir, tc.files)
			d := pki.OpenDirectory(dir)
			_, serving, _ := connect(t, d.Server(controller), client.Client(nodeA))
			_, _, calling := connect(t, server.Server(controller), d.Client(nodeA))
			for _, err := range []error{d.Usable(), serving, calling} {
				if !errors.Is(err, volume.ErrPrecondition) || !says(err, dir) || !says(err, tc.want) {
					t.Errorf("%v, want %q of %s", err, tc.want, dir)
				}
			}
		})
	}
}

func TestWrite(t *testing.T) {
	ca := newAuthority(t)
	path := filepath.Join(t.TempDir(), "state", "certificates")
	d := pki.OpenDirectory(path)
	if cert, key, roots, err := d.Read(); cert != nil || key != nil || roots != nil || !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("of nothing there is %q, %q, %q: %v", cert, key, roots, err)
	}
	holds := func(wantCert, wantKey, wantRoots []byte) {
		t.Helper()
		cert, key, roots, err := d.Read()
		if !bytes.Equal(cert, wantCert) || !bytes.Equal(key, wantKey) || !bytes.Equal(roots, wantRoots) {
			t.Errorf("%q, %q, %q: %v", cert, key, roots, err)
		}
		if missing := cert == nil || key == nil || roots == nil; missing != errors.Is(err, fs.ErrNotExist) {
			t.Error(err)
		}
	}
	cert, key := newPair(t, ca, nodeA, x509.ExtKeyUsageServerAuth)
	for _, step := range []struct{ cert, key, roots, wantCert, wantKey, wantRoots []byte }{
		{nil, nil, rootsOf(ca), nil, nil, rootsOf(ca)},
		{cert, key, nil, cert, key, rootsOf(ca)},
		{nil, nil, nil, cert, key, rootsOf(ca)},
	} {
		if err := d.Write(step.cert, step.key, step.roots); err != nil {
			t.Fatal(err)
		}
		holds(step.wantCert, step.wantKey, step.wantRoots)
	}
	if err := d.Usable(); err != nil {
		t.Errorf("the written certificate is not in use at once: %v", err)
	}
	entries := must[[]os.DirEntry](t)(os.ReadDir(path))
	if len(entries) != 3 {
		t.Errorf("left behind: %v", entries)
	}
	for name, want := range map[string]fs.FileMode{".": fs.ModeDir | 0o700, "tls.key": 0o600} {
		if info, err := os.Stat(filepath.Join(path, name)); err != nil || info.Mode() != want {
			t.Errorf("%s: %v, %v", name, info.Mode(), err)
		}
	}
}

func TestWriteFails(t *testing.T) {
	dir := t.TempDir()
	put(t, dir, map[string][]byte{"file": nil})
	if err := pki.OpenDirectory(filepath.Join(dir, "file")).Write(nil, nil, nil); !says(err, filepath.Join(dir, "file")) {
		t.Errorf("below a file: %v", err)
	}
	if err := os.Mkdir(filepath.Join(dir, "tls.key"), 0o700); err != nil { // a rename cannot replace it
		t.Fatal(err)
	}
	if err := pki.OpenDirectory(dir).Write([]byte("cert"), []byte("key"), nil); !says(err, filepath.Join(dir, "tls.key")) {
		t.Errorf("over a folder: %v", err)
	}
	if _, err := os.Stat(filepath.Join(dir, "tls.crt")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a certificate without its key: %v", err)
	}
}

// TestWriteWhileServing: no handshake uses a certificate with the key of another.
func TestWriteWhileServing(t *testing.T) {
	ca := newAuthority(t)
	server, _ := newDirectory(t, ca, nodeA, x509.ExtKeyUsageServerAuth)
	client, _ := newDirectory(t, ca, controller, x509.ExtKeyUsageClientAuth)
	var writer sync.WaitGroup
	defer writer.Wait()
	writer.Go(func() {
		for range 10 {
			cert, key := newPair(t, ca, nodeA, x509.ExtKeyUsageServerAuth)
			if err := server.Write(cert, key, rootsOf(ca)); err != nil {
				t.Error(err)
			}
		}
	})
	for range 20 {
		agree(t, server, client)
	}
}

// TestUsableAs: a valid certificate with another name is refused.
func TestUsableAs(t *testing.T) {
	d, path := newDirectory(t, newAuthority(t), nodeA, x509.ExtKeyUsageServerAuth)
	if err := d.UsableAs(nodeA); err != nil {
		t.Error(err)
	}
	other := pki.NodeURI("csi.trivet.dev", "other")
	if err := d.UsableAs(other); !errors.Is(err, volume.ErrPrecondition) || !says(err, nodeA.String()) || !says(err, other.String()) || !says(err, path) {
		t.Errorf("as %s: %v", other, err)
	}
}
