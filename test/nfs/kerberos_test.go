//go:build vm

package nfs

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"google.golang.org/grpc/codes"
	"k8s.io/apimachinery/pkg/util/version"

	"github.com/trivet-csi/trivet/doctor"
	"github.com/trivet-csi/trivet/internal/testenv/nfsd"
)

// Users of the server and the nodes. Only alice has a ticket, on the first node.
const (
	alice = 1001
	bob   = 1002
	// nameless is the ID of a user without a name.
	nameless = 4711
)

// kerberos is two nodes of a realm.
type kerberos struct {
	pair
	realm *nfsd.Realm
}

// privacySince is the first Linux version on which this test runs sec=krb5p. On the Linux 6.1.192 of Debian 12 each
// mount fails with EIO, also by mount.nfs.
const privacySince = "6.12"

// tlsSince is the first Linux version with xprtsec= (nfs(5)).
const tlsSince = "6.5"

// kernelHas reports whether the running Linux has a version or a newer one.
func kernelHas(t *testing.T, wanted string) bool {
	t.Helper()
	release, err := os.ReadFile("/proc/sys/kernel/osrelease")
	must(t, err)
	running, err := version.ParseGeneric(string(bytes.TrimSpace(release)))
	must(t, err)
	return running.AtLeast(version.MustParseGeneric(wanted))
}

// TestKerberos uses exports that require Kerberos, in a realm whose KDC runs beside the server.
func TestKerberos(t *testing.T) {
	s := nfsd.Start(t, nfsd.Options{Lease: lease})
	k := &kerberos{pair: pair{server: s, export: s.Export(t, "volumes", "sec=krb5i")}, realm: s.StartRealm(t, "node-1", "node-2", "node-3")}
	k.realm.AddUser(t, "alice", alice)
	k.realm.AddUser(t, "bob", bob)
	first, second := s.Node(t, "node-1"), s.Node(t, "node-2")
	k.realm.Join(t, first, "node-1")
	k.realm.Join(t, second, "node-2")
	k.realm.StartGssd(t, first)
	k.realm.StartGssd(t, second)
	k.realm.Login(t, first, "alice", alice)
	all := []string{"krb5", "krb5i"}
	if kernelHas(t, privacySince) {
		all = append(all, "krb5p")
	}
	for _, p := range all {
		t.Run(p, func(t *testing.T) {
			testProtection(t, k, start(t, first, "node-1", k.pool(p, s.Export(t, p, "sec="+p), p)), p)
		})
	}
	k.first, k.second = k.start(t, first, "node-1"), k.start(t, second, "node-2")
	for _, tc := range []struct {
		name string
		run  func(*testing.T, *kerberos)
	}{
		{"cut off", func(t *testing.T, k *kerberos) { testCutOff(t, k.pair) }},
		{"expired", func(t *testing.T, k *kerberos) { testExpired(t, k.pair) }},
		{"owners", testKerberosOwners},
		{"class", testKerberosClass},
		{"mount options", testSecurityOptions},
		{"principal of another user", testStranger},
		{"without rpc.gssd", testWithoutGssd},
		{"changed key", testChangedKey},
	} {
		k.run(t, tc.name, tc.run)
	}
	wantEmpty(t, s, k.export)
}

// run runs a test, and logs the output of the drivers if it fails.
func (k *kerberos) run(t *testing.T, name string, test func(*testing.T, *kerberos)) {
	t.Helper()
	if !t.Run(name, func(t *testing.T) { test(t, k) }) {
		t.Logf("%s:\n%s", k.first.name, k.first.log())
		t.Logf("%s:\n%s", k.second.name, k.second.log())
	}
}

// pool returns an entry of `pools:` with the server's name, for which the server has a key.
func (k *kerberos) pool(name, export, security string) string {
	return namedPool(name, k.server, export, "sec="+security)
}

// testProtection: in a directory, a user with a ticket can write, and one without cannot. Everyone who may write to the
// filesystem of an image can write to the image. Only krb5p hides the data on the network.
func testProtection(t *testing.T, k *kerberos, m *machine, security string) {
	const marker = "this text is not encrypted"
	class := directoryIn(security)
	class["mode"] = "0777"
	d := m.create(t, "directory-"+security, mib, filesystem("", manyNodes), class)
	m.up(t, d)
	if at := mountTableAt(t, m.target(d)); !strings.Contains(at, "sec="+security+",") {
		t.Errorf("got mount %q, want sec=%s", at, security)
	}
	found := m.Capture(t)
	must(t, m.writeAs(d, alice, "text", strings.Repeat(marker, 64)))
	if got, want := found(marker), security != "krb5p"; got != want {
		t.Errorf("the text of the file in the packets: got %t, want %t", got, want)
	}
	st := statOf(t, filepath.Join(k.server.Dir("/"+security), "volumes", d.name, "data", "text"))
	if st.Uid != alice {
		t.Errorf("owner of the file on the server: got %d, want %d", st.Uid, alice)
	}
	if err := m.writeAs(d, bob, "bob", "x"); err == nil || !strings.Contains(err.Error(), "Permission denied") {
		t.Errorf("write of a user without a ticket: got %v, want Permission denied", err)
	}
	m.remove(t, d)

	i := m.image(t, security, "image-"+security, "ext4", 64*mib)
	m.up(t, i)
	must(t, os.Chmod(m.target(i), 0o777))
	must(t, m.writeAs(i, bob, "text", "x"))
	m.remove(t, i)
}

// writeAs writes a file in a published volume as a user.
func (m *machine) writeAs(v *vol, uid int, name, text string) error {
	id := strconv.Itoa(uid)
	// The user cannot enter the directories above the volume.
	cmd := m.Command("bash", "-c", `cd "$0" && exec setpriv --reuid "$1" --regid "$1" --clear-groups dd "of=$2" status=none conv=fsync`, m.target(v), id, name)
	cmd.Stdin = strings.NewReader(text)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%w: %s", err, out)
	}
	return nil
}

func statOf(t *testing.T, path string) (st syscall.Stat_t) {
	t.Helper()
	must(t, syscall.Stat(path, &st))
	return st
}

// testKerberosOwners: the owner of a directory must have a name on the node and on the server.
func testKerberosOwners(t *testing.T, k *kerberos) {
	class := directoryIn(pool)
	class["uid"], class["gid"], class["mode"] = strconv.Itoa(alice), strconv.Itoa(bob), "0770"
	v := k.first.create(t, "owned", mib, filesystem("", manyNodes), class)
	st := statOf(t, filepath.Join(k.server.Dir(k.export), "volumes/owned/data"))
	if st.Uid != alice || st.Gid != bob || st.Mode&0o7777 != 0o770 {
		t.Errorf("got owner %d:%d and mode %o, want %d:%d and 770", st.Uid, st.Gid, st.Mode&0o7777, alice, bob)
	}
	must(t, k.first.delete(t, v))
	class["uid"] = strconv.Itoa(nameless)
	_, err := k.first.tryCreate(t, "nameless", mib, filesystem("", manyNodes), class)
	wantCode(t, err, codes.FailedPrecondition, "uid", "name")
	t.Log(err)
}

// testKerberosClass: a class can name an export that requires Kerberos, because the node and the server negotiate it.
func testKerberosClass(t *testing.T, k *kerberos) {
	share := k.server.Export(t, "class", "sec=krb5i")
	v := k.first.create(t, "class", mib, filesystem("", manyNodes), map[string]string{"server": nfsd.ServerName, "share": share})
	k.first.up(t, v)
	if at := mountTableAt(t, k.first.target(v)); !strings.Contains(at, "sec=krb5i,") {
		t.Errorf("got mount %q, want sec=krb5i", at)
	}
	k.first.remove(t, v)
}

// testSecurityOptions: options of the class replace those of the pool, and the driver names the values that it accepts.
func testSecurityOptions(t *testing.T, k *kerberos) {
	v := k.first.directory(t, pool, "options")
	withoutTLS := "Linux 6.5"
	if kernelHas(t, tlsSince) {
		withoutTLS = "tlshd"
	}
	for _, tc := range []struct {
		flag  string
		code  codes.Code
		texts []string
	}{
		{"sec=krb5", codes.FailedPrecondition, []string{"denies", "keytab"}}, // the export accepts only krb5i
		{"sec=krb5i", codes.OK, nil},
		{"sec=krb4", codes.InvalidArgument, []string{"krb5, krb5i, krb5p"}},
		{"sec=krb5p", codes.FailedPrecondition, []string{"Kerberos", "sec="}}, // the error depends on the kernel
		{"xprtsec=mtls", codes.FailedPrecondition, []string{"xprtsec", withoutTLS}},
	} {
		flagged := *v
		flagged.capability = filesystem("", manyNodes)
		flagged.capability.GetMount().MountFlags = []string{tc.flag}
		err := k.first.stage(t, &flagged)
		wantCode(t, err, tc.code, tc.texts...)
		t.Log(tc.flag, err)
		must(t, k.first.unstage(t, v))
	}
	must(t, k.first.delete(t, v))
}

// testStranger: the server maps the principal of a node to nobody, so the node cannot open the pool.
func testStranger(t *testing.T, k *kerberos) {
	n := k.node(t, "stranger")
	k.realm.StartGssd(t, n)
	k.start(t, n, "stranger").wantClosed(t, "does not let this node's root read")
}

// testChangedKey: the KDC has another key of a node than its keytab, so the node cannot open the pool.
func testChangedKey(t *testing.T, k *kerberos) {
	n := k.node(t, "node-4")
	k.realm.ChangeKey(t, "node-4")
	k.realm.StartGssd(t, n)
	k.start(t, n, "node-4").wantClosed(t, "no valid Kerberos ticket")
}

// testWithoutGssd: without rpc.gssd a node cannot open the pool. When rpc.gssd runs, the pool is opened. After the first
// mount the kernel has credentials of the node, so it mounts without rpc.gssd.
func testWithoutGssd(t *testing.T, k *kerberos) {
	n := k.node(t, "node-3")
	m := k.start(t, n, "node-3")
	m.wantClosed(t, "check that rpc.gssd runs on the node")
	m.wantChecks(t, map[string]doctor.Result{"Kerberos": doctor.Failure, "export": doctor.Failure})
	stop := k.realm.StartGssd(t, n)
	v := m.directory(t, pool, "late")
	m.wantChecks(t, map[string]doctor.Result{
		"Kerberos": doctor.Warning, // the keytab has another path
		"export":   doctor.OK, "writing": doctor.OK, "owners": doctor.OK, "locks": doctor.OK,
	})
	stop()
	m.up(t, v)
	m.remove(t, v)
}

// node creates a node that has joined the realm, without rpc.gssd.
func (k *kerberos) node(t *testing.T, name string) *nfsd.Node {
	t.Helper()
	n := k.server.Node(t, name)
	k.realm.Join(t, n, name)
	return n
}

// start starts a driver with the pool of pair.
func (k *kerberos) start(t *testing.T, n *nfsd.Node, name string) *machine {
	t.Helper()
	return start(t, n, name, k.pool(pool, k.export, "krb5i"))
}

// wantChecks fails unless checks of the pool by `trivet doctor` have the results. The keys are the ends of their names.
func (m *machine) wantChecks(t *testing.T, want map[string]doctor.Result) {
	t.Helper()
	cmd := m.Command(os.Getenv(driverVariable), "doctor", "-o", "json", "--config", m.path("config.yaml"), "--state-dir", m.dir)
	out, _ := cmd.Output() // it fails if a check fails
	var checks []doctor.Check
	if err := json.Unmarshal(out, &checks); err != nil {
		t.Fatalf("trivet doctor: %v\n%s", err, out)
	}
	got := map[string]doctor.Check{}
	for _, c := range checks {
		got[c.Name] = c
	}
	for name, result := range want {
		c := got["pool "+pool+", "+name]
		t.Log(c)
		if c.Result != result {
			t.Errorf("check %s: got %+v, want %s", name, c, result)
		}
	}
}
