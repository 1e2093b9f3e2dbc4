//go:build vm

package nfs

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/trivet-csi/trivet/internal/testenv/nfsd"
)

// mutual is the mount option with which server and node verify the certificates of each other.
const mutual = "xprtsec=mtls"

// TestTLS uses NFS over TLS between two nodes and a server, whose certificates are of one authority.
func TestTLS(t *testing.T) {
	s, authority := nfsd.Start(t, nfsd.Options{Lease: lease}), nfsd.NewAuthority(t)
	s.ServeTLS(t, authority)
	first, second := s.Node(t, "node-1"), s.Node(t, "node-2")
	first.StartTlshd(t, authority, authority)
	second.StartTlshd(t, authority, authority)
	for _, security := range []string{"none", "tls", "mtls"} {
		t.Run("xprtsec="+security, func(t *testing.T) {
			testTransport(t, s, start(t, first, "node-1", namedPool(security, s, s.Export(t, security), "xprtsec="+security)), security)
		})
	}
	p := pair{server: s, export: s.Export(t, "volumes")}
	entry := namedPool(pool, s, p.export, mutual)
	p.first, p.second = start(t, first, "node-1", entry), start(t, second, "node-2", entry)
	for _, tc := range []struct {
		name string
		run  func(*testing.T, pair)
	}{
		{"cut off", testCutOff},
		{"expired", testExpired},
		{"without tlshd", testWithoutTlshd},
		{"untrusted server", func(t *testing.T, p pair) { testUntrusted(t, p, authority, nfsd.NewAuthority(t)) }},
		{"untrusted node", func(t *testing.T, p pair) { testUntrusted(t, p, nfsd.NewAuthority(t), authority) }},
	} {
		if !t.Run(tc.name, func(t *testing.T) { tc.run(t, p) }) {
			t.Logf("%s:\n%s\n%s:\n%s", p.first.name, p.first.log(), p.second.name, p.second.log())
		}
	}
	wantEmpty(t, s, p.export)
}

// namedPool returns an entry of `pools:` with a mount option and the name of the server, for which it has a key and a certificate.
func namedPool(name string, s *nfsd.Server, export, option string) string {
	entry := nfsPool(name, s, export, "mountOptions: ["+option+"]", "outage: 20s")
	return strings.Replace(entry, "server: "+s.Address(), "server: "+nfsd.ServerName, 1)
}

// testTransport: with TLS, the data of directories and images is not readable on the network.
func testTransport(t *testing.T, s *nfsd.Server, m *machine, security string) {
	const marker = "this text is not encrypted"
	d := m.directory(t, security, "directory-"+security)
	m.up(t, d)
	if at := mountTableAt(t, m.target(d)); strings.Contains(at, ",xprtsec="+security+",") != (security != "none") {
		t.Errorf("got mount %q, want xprtsec=%s, which the kernel omits for none", at, security)
	}
	i := m.image(t, security, "image-"+security, "ext4", 64*mib)
	m.up(t, i)
	found := m.Capture(t)
	write(t, m.file(d, "text"), strings.Repeat(marker, 64))
	write(t, m.file(i, "text"), strings.Repeat(marker, 64))
	if got, want := found(marker), security == "none"; got != want {
		t.Errorf("the text of the files in the packets: got %t, want %t", got, want)
	}
	wantText(t, filepath.Join(s.Dir("/"+security), "volumes", d.name, "data", "text"), strings.Repeat(marker, 64))
	m.remove(t, d)
	m.remove(t, i)
}

// testWithoutTlshd: a node without tlshd cannot open the pool.
func testWithoutTlshd(t *testing.T, p pair) {
	m := start(t, p.server.Node(t, "node-3"), "node-3", namedPool(pool, p.server, p.export, mutual))
	m.wantClosed(t, "xprtsec needs tlshd")
}

// testUntrusted: a node cannot open the pool if its certificate is of an authority that the server does not trust, or if it does not trust
// that of the server.
func testUntrusted(t *testing.T, p pair, own, trusted *nfsd.Authority) {
	n := p.server.Node(t, "node-4")
	n.StartTlshd(t, own, trusted)
	start(t, n, "node-4", namedPool(pool, p.server, p.export, mutual)).wantClosed(t, "certificate")
}
