package nfsd

import (
	_ "embed"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/trivet-csi/trivet/internal/testenv"
)

var (
	//go:embed realm.sh
	realmScript string
	//go:embed gssd.sh
	gssdScript string
)

// Realm is a Kerberos realm. Its KDC runs in the network of an NFS server, so Link.Cut also cuts off the KDC.
type Realm struct {
	dir string // all users can enter it, because rpc.gssd reads the tickets of a user as that user
}

// ServerName is the name of the NFS server in its Kerberos principal, which is nfs/ServerName, and in its certificate.
const ServerName = "nas.trivet.test"

const (
	realmName = "TRIVET.TEST"
	domain    = "trivet.test"
)

// StartRealm starts a KDC beside the server, and the server's rpc.svcgssd and rpc.idmapd. The server maps the
// principals of the nodes with the hostnames asRoot to root. Other principals of nodes are anonymous. StartRealm changes
// files in /etc, so it fails outside of the virtual machine.
func (s *Server) StartRealm(tb testing.TB, asRoot ...string) *Realm {
	tb.Helper()
	requireVM(tb)
	testenv.Run(tb, "modprobe", "rpcsec_gss_krb5")
	r := &Realm{dir: tempDir(tb)}
	r.configure(tb, s.Address())
	mapPrincipals(tb, asRoot)
	addLine(tb, "/etc/hosts", s.Address()+" "+ServerName)
	startNamespaces(tb, daemonsOf(s.pid), realmScript, r.dir)
	tb.Cleanup(func() { r.logDaemons(tb) })
	return r
}

// requireVM fails a test that would change files in /etc of a machine.
func requireVM(tb testing.TB) {
	tb.Helper()
	if _, err := os.Stat("/run/vm"); err != nil {
		tb.Fatalf("this test changes files in /etc: run it with test/vm (%v)", err)
	}
}

// configure writes the configuration of the realm.
func (r *Realm) configure(tb testing.TB, kdc string) {
	tb.Helper()
	write(tb, filepath.Join(r.dir, "krb5.conf"), fmt.Sprintf(`[libdefaults]
default_realm = %[1]s
dns_lookup_kdc = false
rdns = false
udp_preference_limit = 1
[realms]
%[1]s = {
	kdc = %[2]s
}
[domain_realm]
.%[3]s = %[1]s
[logging]
kdc = FILE:%[4]s/kdc.log
`, realmName, kdc, domain, r.dir))
	write(tb, filepath.Join(r.dir, "kdc.conf"), fmt.Sprintf(`[realms]
%[1]s = {
	database_name = %[2]s/principal
	key_stash_file = %[2]s/stash
	kdc_tcp_ports = 88
}
`, realmName, r.dir))
}

// mapPrincipals maps the principals of nodes to root. The server and nfsidmap(8) of the nodes read the same file.
func mapPrincipals(tb testing.TB, hostnames []string) {
	tb.Helper()
	text := fmt.Sprintf(`[General]
Domain = %s
[Translation]
Method = nsswitch
GSS-Methods = static,nsswitch
[Mapping]
Nobody-User = nobody
Nobody-Group = nogroup
[Static]
`, domain)
	for _, host := range hostnames {
		text += principal(host) + " = root\n"
	}
	write(tb, "/etc/idmapd.conf", text)
}

// daemonsOf returns a command that runs daemons in the namespaces of a server or a node. They have a mount namespace of
// their own, so that they can be ended alone.
func daemonsOf(pid int) []string {
	return append(enter(pid, "net", "uts", "mount"), "unshare", "--mount", "--propagation", "slave")
}

// principal returns the principal of a node.
func principal(hostname string) string { return "nfs/" + hostname + "." + domain + "@" + realmName }

// Join adds a node to the realm: the node gets a principal and a keytab. StartGssd starts its rpc.gssd.
func (r *Realm) Join(tb testing.TB, n *Node, hostname string) {
	tb.Helper()
	addLine(tb, "/etc/hosts", fmt.Sprintf("%s %s.%s %[2]s", n.Address(), hostname, domain))
	if err := os.MkdirAll(r.nodeDir(n), 0o755); err != nil {
		tb.Fatal(err)
	}
	keytab := filepath.Join(r.nodeDir(n), "keytab")
	r.kadmin(tb, "addprinc -randkey "+principal(hostname), "ktadd -k "+keytab+" "+principal(hostname))
}

// ChangeKey changes the key of a node in the KDC, but not in the keytab of the node.
func (r *Realm) ChangeKey(tb testing.TB, hostname string) {
	tb.Helper()
	r.kadmin(tb, "cpw -randkey "+principal(hostname))
}

// StartGssd starts rpc.gssd on a node that has joined the realm. It ends with the test, or when stop is called.
func (r *Realm) StartGssd(tb testing.TB, n *Node) (stop func()) {
	tb.Helper()
	pid := startNamespaces(tb, daemonsOf(n.pid), gssdScript, r.dir, r.nodeDir(n))
	return func() { endAll(tb, pid) }
}

// AddUser creates a user without a principal on the server and on all nodes. Its group has the same name and ID.
func (r *Realm) AddUser(tb testing.TB, name string, uid int) {
	tb.Helper()
	addLine(tb, "/etc/passwd", fmt.Sprintf("%s:x:%d:%[2]d::/:/bin/sh", name, uid))
	addLine(tb, "/etc/group", fmt.Sprintf("%s:x:%d:", name, uid))
}

// Login creates a principal for a user, and gets a ticket for the user's processes on a node. rpc.gssd must have been
// started on the node.
func (r *Realm) Login(tb testing.TB, n *Node, name string, uid int) {
	tb.Helper()
	keytab, ticket := filepath.Join(r.dir, name+".keytab"), filepath.Join(r.tickets(n), fmt.Sprint("krb5cc_", uid))
	r.kadmin(tb, "addprinc -randkey "+name, "ktadd -k "+keytab+" "+name)
	kinit := n.Command("env", "KRB5_CONFIG="+r.dir+"/krb5.conf", "kinit", "-k", "-t", keytab, "-c", ticket, name)
	if out, err := kinit.CombinedOutput(); err != nil {
		tb.Fatalf("kinit: %v\n%s", err, out)
	}
	if err := os.Chown(ticket, uid, uid); err != nil {
		tb.Fatal(err)
	}
}

func (r *Realm) nodeDir(n *Node) string { return filepath.Join(r.dir, fmt.Sprint("node-", n.n)) }

func (r *Realm) tickets(n *Node) string { return filepath.Join(r.nodeDir(n), "tickets") }

// kadmin runs commands of kadmin.local(8), and fails if one of them fails.
func (r *Realm) kadmin(tb testing.TB, commands ...string) {
	tb.Helper()
	for _, c := range commands {
		cmd := exec.Command("kadmin.local", "-q", c)
		cmd.Env = append(os.Environ(), "KRB5_CONFIG="+r.dir+"/krb5.conf", "KRB5_KDC_PROFILE="+r.dir+"/kdc.conf")
		// kadmin.local ends with status 0 even if the command fails.
		out, err := cmd.CombinedOutput()
		if err != nil || strings.Contains(string(out), "while ") {
			tb.Fatalf("kadmin.local -q %q: %v\n%s", c, err, out)
		}
	}
}

// logDaemons logs the end of the logs of the daemons if the test has failed.
func (r *Realm) logDaemons(tb testing.TB) {
	tb.Helper()
	for _, pattern := range []string{"*.log", "node-*/gssd.log"} {
		logs, _ := filepath.Glob(filepath.Join(r.dir, pattern))
		for _, log := range logs {
			logEnd(tb, strings.TrimPrefix(log, r.dir+"/"), log)
		}
	}
}

// logTail is the number of bytes of each log that a failed test shows.
const logTail = 4 << 10

// logEnd logs the end of a file if the test has failed.
func logEnd(tb testing.TB, title, path string) {
	tb.Helper()
	if tb.Failed() {
		text, _ := os.ReadFile(path)
		tb.Logf("%s:\n%s", title, text[max(0, len(text)-logTail):])
	}
}

// tempDir returns a directory that all users can enter, unlike tb.TempDir. It is removed when the test ends.
func tempDir(tb testing.TB) string {
	tb.Helper()
	dir, err := os.MkdirTemp("/", "realm-")
	if err == nil {
		tb.Cleanup(func() { _ = os.RemoveAll(dir) })
		err = os.Chmod(dir, 0o755)
	}
	if err != nil {
		tb.Fatal(err)
	}
	return dir
}

func write(tb testing.TB, path, text string) {
	tb.Helper()
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		tb.Fatal(err)
	}
}

// addLine adds a line to a file.
func addLine(tb testing.TB, path, line string) {
	tb.Helper()
	old, err := os.ReadFile(path)
	if err != nil {
		tb.Fatal(err)
	}
	write(tb, path, strings.TrimSuffix(string(old), "\n")+"\n"+line+"\n")
}
