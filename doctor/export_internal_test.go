package doctor

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/trivet-csi/trivet/backend"
	diskbackend "github.com/trivet-csi/trivet/backend/disk"
	"github.com/trivet-csi/trivet/backend/local"
	"github.com/trivet-csi/trivet/backend/loop"
	"github.com/trivet-csi/trivet/backend/nfs"
	"github.com/trivet-csi/trivet/cluster/kube"
	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// TestJudgeExport judges the possible results of the tests of an export.
func TestJudgeExport(t *testing.T) {
	one, two := netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("fd00::1")
	refused := errors.New("connection refused")
	lacks := fmt.Errorf("mount: %w", mount.ErrNFSVersion)
	for name, tc := range map[string]struct {
		check  Check
		result Result
		says   string
	}{
		"name":    {judgeName("n", "nas", []netip.Addr{one, two}, nil), OK, "nas is 10.0.0.1, fd00::1"},
		"no name": {judgeName("n", "nas", nil, errors.New("no such host")), Failure, "no such host"},

		"server":                       {judgeServer("n", "2049", map[netip.Addr]error{one: nil}), OK, "2049 of 10.0.0.1"},
		"no answer":                    {judgeServer("n", "2049", map[netip.Addr]error{one: refused, two: refused}), Failure, "10.0.0.1: connection refused; fd00::1"},
		"one of two addresses answers": {judgeServer("n", "2049", map[netip.Addr]error{one: nil, two: refused}), Warning, "10.0.0.1 answers, but fd00::1"},

		"mounted":       {judgeMounted("n", "nas:/e", "4.2", nil), OK, "nas:/e, with NFS 4.2"},
		"denied":        {judgeMounted("n", "nas:/e", "", fmt.Errorf("mount: %w", mount.ErrExportDenied)), Failure, "denies"},
		"missing":       {judgeMounted("n", "nas:/e", "", fmt.Errorf("mount: %w", mount.ErrExportMissing)), Failure, "no such directory"},
		"no client":     {judgeMounted("n", "nas:/e", "", fmt.Errorf("mount: %w", mount.ErrNoNFS)), Failure, "no NFS client"},
		"not root":      {judgeMounted("n", "nas:/e", "", syscall.EPERM), Failure, "not permitted"},
		"unknown cause": {judgeMounted("n", "nas:/e", "", errors.New("broken pipe")), Failure, "broken pipe"},

		"versions":                      {judgeVersions("n", []versionResult{{"4.2", nil}, {"4.1", nil}, {"4.0", lacks}, {"3", mount.ErrNoStatd}}), OK, "4.2, 4.1; not 4.0 (the NFS server or this kernel does not support that version), 3 (NFS version 3 locks need rpc.statd"},
		"old versions":                  {judgeVersions("n", []versionResult{{"4.2", lacks}, {"4.1", lacks}, {"4.0", nil}, {"3", nil}}), Warning, "4.0, 3; not 4.2, 4.1 (the"},
		"a version with another error":  {judgeVersions("n", []versionResult{{"4.2", nil}, {"3", errors.New("slow")}}), OK, "not 3 (slow)"},
		"no version":                    {judgeVersions("n", []versionResult{{"4.2", lacks}}), Warning, "none; not 4.2"},
		"export missing with version 4": {judgeVersions("n", []versionResult{{"4.2", mount.ErrExportMissing}, {"3", nil}}), Warning, "3; not 4.2 (the NFS server has no such directory)"},

		"writing":       {judgeWriting("n", nil), OK, "was created"},
		"read-only":     {judgeWriting("n", syscall.EROFS), Failure, "read-only"},
		"squashed":      {judgeWriting("n", syscall.EACCES), Failure, "denied"},
		"full":          {judgeWriting("n", syscall.ENOSPC), Failure, "no space"},
		"stale":         {judgeWriting("n", syscall.ESTALE), Failure, "stale"},
		"writing fails": {judgeWriting("n", syscall.EIO), Failure, "input/output"},

		"owners":                    {judgeOwners("n", owners{root: 0, other: unmappedUser}, false), OK, "can be changed"},
		"root squashed":             {judgeOwners("n", owners{root: 65534, other: unmappedUser}, false), Failure, "belong to 65534"},
		"all squashed":              {judgeOwners("n", owners{root: 1000, other: 1000}, false), Warning, "all users to 1000"},
		"chown fails":               {judgeOwners("n", owners{other: unmappedUser, chown: syscall.EPERM}, false), Failure, "not permitted"},
		"mapped":                    {judgeOwners("n", owners{other: 65534}, false), Warning, "belong to 65534"},
		"no ticket":                 {judgeOwners("n", owners{denied: true}, true), OK, "other users need tickets"},
		"other denied":              {judgeOwners("n", owners{denied: true}, false), Warning, "may not create files"},
		"root mapped with Kerberos": {judgeOwners("n", owners{root: 65534, denied: true}, true), Failure, "belong to 65534"},
		"owners failed":             {judgeOwners("n", owners{err: syscall.EIO}, false), Failure, "input/output"},

		"no gssd":                {judgeKerberos("n", kerberos{sure: true}), Failure, "rpc.gssd does not run"},
		"gssd in a container":    {judgeKerberos("n", kerberos{keytab: syscall.ENOENT}), Skipped, "cannot see"},
		"gssd without keytab":    {judgeKerberos("n", kerberos{gssd: true, sure: true, keytab: syscall.ENOENT}), Warning, "rpc.gssd runs; no such file"},
		"gssd and keytab":        {judgeKerberos("n", kerberos{gssd: true, sure: true}), OK, "/etc/krb5.keytab exists"},
		"mount without module":   {judgeMounted("n", "nas:/e", "", fmt.Errorf("mount: %w", mount.ErrKerberosRefused)), Failure, "rpcsec_gss_krb5"},
		"mount with krb5p":       {judgeMounted("n", "nas:/e", "", fmt.Errorf("mount: %w", mount.ErrPrivacy)), Failure, "krb5p"},
		"mount without gssd":     {judgeMounted("n", "nas:/e", "", fmt.Errorf("mount: %w", mount.ErrNoGSSD)), Failure, "rpc.gssd"},
		"mount without a ticket": {judgeMounted("n", "nas:/e", "", fmt.Errorf("mount: %w", mount.ErrKerberos)), Failure, "ticket"},

		"new pool":                     {judgePool("n", "u at nas:/e", false), OK, "u at nas:/e"},
		"pool with nfs.init still set": {judgePool("n", "u at nas:/e", true), Warning, "nfs.init"},
		"rename":                       {judgeRename("n", nil), OK, "renamed"},
		"no rename":                    {judgeRename("n", syscall.EMLINK), Failure, "too many links"},

		"clock":       {judgeClock("n", skew{ahead: 2 * time.Second}), OK, "as on this node"},
		"clock ahead": {judgeClock("n", skew{ahead: time.Minute}), Warning, "differs by 1m0s"},
		"clock late":  {judgeClock("n", skew{ahead: -time.Hour}), Warning, "differs by -1h0m0s"},
		"clock fails": {judgeClock("n", skew{err: syscall.EIO}), Failure, "input/output"},

		"features":             {judgeFeatures("n", []feature{{what: "holes", have: true}, {what: "clones of files"}}), OK, "has holes; lacks clones of files"},
		"no features":          {judgeFeatures("n", []feature{{what: "holes"}}), OK, "lacks holes"},
		"a feature test fails": {judgeFeatures("n", []feature{{what: "holes", err: syscall.EIO}}), Warning, "holes: input/output"},

		"locks":                    {judgeLocks("n", lockTest{visible: true}), OK, "the server supports locks"},
		"local locks":              {judgeLocks("n", lockTest{}), Warning, "local to this node"},
		"locks of one client":      {judgeLocks("n", lockTest{sameClient: mount.ErrNFSVersion}), Skipped, "second version of NFS failed"},
		"locks seen by one client": {judgeLocks("n", lockTest{sameClient: mount.ErrNFSVersion, visible: true}), OK, "supports locks"},
		"lock test fails":          {judgeLocks("n", lockTest{err: syscall.EIO}), Warning, "input/output"},

		"recover_lost_locks off":     {judgeLostLocks("n", "N"), OK, "cannot write"},
		"recover_lost_locks on":      {judgeLostLocks("n", "Y"), Warning, "recover_lost_locks is Y"},
		"recover_lost_locks unknown": {judgeLostLocks("n", ""), Skipped, "recover_lost_locks"},

		"own identity":    {judgeIdentity("n", "node-1", "identity", "node-1", nil), OK, "this node's"},
		"new identity":    {judgeIdentity("n", "node-1", "identity", "", nil), OK, "no node has"},
		"shared identity": {judgeIdentity("n", "node-1", "identity", "node-2", nil), Failure, `also the identity of node "node-2"`},
		"identity fails":  {judgeIdentity("n", "node-1", "", "", syscall.EIO), Warning, "input/output"},

		"quota":            {judgeQuota("n", 1, 3, nil), OK, "of 1 of 3 checked directories"},
		"quota test fails": {judgeQuota("n", 0, 3, syscall.EIO), Warning, "input/output"},

		"not a pool":   {judgeClosedExport("n", volume.Errorf(volume.ErrUnavailable, "not a pool yet")), Warning, "not a pool yet"},
		"another pool": {judgeClosedExport("n", volume.Errorf(volume.ErrPrecondition, "contains pool x")), Failure, "contains pool x"},
	} {
		expect(t, name, tc.check, tc.result, tc.says)
	}
}

// TestPort: the last port option applies, and 0 means the default.
func TestPort(t *testing.T) {
	for options, want := range map[string]string{"": "2049", "hard,port=0": "2049", "port=20049,hard": "20049", "port=1,port=2": "2"} {
		if got := portOf(strings.Split(options, ",")); got != want {
			t.Errorf("%q: got port %s, want %s", options, got, want)
		}
	}
}

// TestSilentServer: if the server accepts connections but does not answer, the examination ends before it mounts
// anything, which could hang in the kernel.
func TestSilentServer(t *testing.T) {
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	must(t, err)
	t.Cleanup(func() { must(t, listener.Close()) })
	port := listener.Addr().(*net.TCPAddr).Port
	e := Export{Config: pool.Config{Name: "nas", NFS: &pool.NFS{Server: "127.0.0.1", Export: "/e", MountOptions: []string{"port=" + strconv.Itoa(port)}}}}
	var checks []Check
	ExamineExport(t.Context(), allKinds, e, func(c Check) { checks = append(checks, c) })
	if len(checks) != 2 {
		t.Fatalf("got checks %+v, want 2", checks)
	}
	expect(t, "name", checks[0], OK, "127.0.0.1")
	expect(t, "server", checks[1], Failure, "no answer at port "+strconv.Itoa(port))
}

// TestHungExport: the result contains the checks that Examine reported before its time was up, and a failure. In the
// program, Examine is a child process that is killed.
func TestHungExport(t *testing.T) {
	o := Options{Patience: 10 * time.Millisecond, Examine: func(ctx context.Context, _ Export, report func(Check)) error {
		report(ok("pool nas, name", "nas is 10.0.0.1"))
		<-ctx.Done()
		return errors.New("no answer within 10ms")
	}}
	checks := ExportChecks(t.Context(), o, Export{Config: pool.Config{Name: "nas", NFS: &pool.NFS{Server: "nas", Export: "/e"}}})
	if len(checks) != 2 {
		t.Fatalf("got checks %+v, want 2", checks)
	}
	expect(t, "export that hangs", checks[1], Failure, `after the check "pool nas, name": no answer`)
}

var allKinds = backend.Kinds{loop.Kind, nfs.Kind, local.Kind, diskbackend.Kind}

// TestClasses judges StorageClasses on a node that has a directory pool and an nfs pool.
func TestClasses(t *testing.T) {
	pools := []pool.Config{{Name: "default"}, {Name: "nas", NFS: &pool.NFS{Server: "nas", Export: "/e"}}}
	class := func(binding string, parameters ...string) Check {
		c := kube.StorageClass{VolumeBindingMode: binding, Parameters: map[string]string{}}
		c.Metadata.Name = "c"
		for _, p := range parameters {
			key, value, _ := strings.Cut(p, "=")
			c.Parameters[key] = value
		}
		return judgeClass(c, allKinds, pools, false)
	}
	for name, tc := range map[string]struct {
		check  Check
		result Result
		says   string
	}{
		"local":                     {class("WaitForFirstConsumer", "pool=default"), OK, "valid"},
		"local, Immediate":          {class("Immediate", "pool=default"), Warning, "Immediate"},
		"nfs":                       {class("Immediate", "backend=nfs"), OK, "valid"},
		"nfs, WaitForFirstConsumer": {class("WaitForFirstConsumer", "backend=nfs", "pool=nas"), OK, "valid"},
		"image on an nfs pool":      {class("Immediate", "backend=loop", "pool=nas"), OK, "valid"},
		"server and share":          {class("Immediate", "server=nas", "share=/x"), OK, "valid"},
		"other pool":                {class("Immediate", "backend=nfs", "pool=missing"), Warning, `"missing" is not`},
		"no nfs pool":               {judgeClass(kube.StorageClass{Parameters: map[string]string{"backend": "nfs"}}, allKinds, pools[:1], false), Failure, "no nfs pool"},
	} {
		expect(t, name, tc.check, tc.result, tc.says)
	}
}
