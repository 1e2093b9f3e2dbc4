package mount

import (
	"errors"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// TestNFSVersionsToTry: the words that set the version decide which versions are tried, and are removed from the
// options.
func TestNFSVersionsToTry(t *testing.T) {
	for words, want := range map[string]string{
		"hard":                    "4.2 4.1 4.0 3",
		"nfsvers=4":               "4.2 4.1 4.0",
		"v4":                      "4.2 4.1 4.0",
		"vers=4 minorversion=1":   "4.1",
		"minorversion=0":          "4.0",
		"vers=4.2":                "4.2",
		"nfsvers=3 nolock":        "3",
		"v4.1":                    "4.1",
		"vers=4.0,minorversion=0": "4.0",
	} {
		o, err := parseNFSOptions(strings.Fields(words))
		if err != nil || strings.Join(o.versions, " ") != want {
			t.Errorf("%s: got versions %v, %v, want %s", words, o.versions, err, want)
		}
		if slices.ContainsFunc(o.Data, func(w string) bool { return strings.Contains(w, "vers") }) {
			t.Errorf("%s: got options %v, want them without the version", words, o.Data)
		}
	}
}

// TestNFSWith: a version, a value of sec= and a context in the added flags replace the earlier ones, other options are
// combined, and With does not change its receiver.
func TestNFSWith(t *testing.T) {
	for _, tc := range []struct{ before, flags, versions, data string }{
		{"nfsvers=4.2,hard", "nfsvers=4.1", "4.1", "hard"},
		{"v4.1 hard", "vers=3,nolock", "3", "hard nolock"},
		{"vers=4,minorversion=1", "nfsvers=4.2", "4.2", ""},
		{"nfsvers=3", "minorversion=1", "4.1", ""},
		{"nfsvers=4.2,hard", "timeo=7", "4.2", "hard timeo=7"},
		{"hard", "", "4.2 4.1 4.0 3", "hard"},
		{"nfsvers=4.2,context=u:object_r:t:s0,hard", `timeo=7 context="u:object_r:t:s0:c1,c2"`, "4.2", `hard timeo=7 context="u:object_r:t:s0:c1,c2"`},
		{`nfsvers=4.2,context="u:object_r:t:s0:c1,c2"`, "hard", "4.2", `hard context="u:object_r:t:s0:c1,c2"`},
		{"sec=krb5,hard", "sec=krb5p", "4.2 4.1 4.0 3", "hard sec=krb5p"},
		{"sec=krb5i", "nfsvers=4.2", "4.2", "sec=krb5i"},
	} {
		n := NFS{Options: strings.Fields(tc.before)}
		o, err := parseNFSOptions(n.With(strings.Fields(tc.flags)).Options)
		if err != nil || strings.Join(o.versions, " ") != tc.versions || strings.Join(o.FilesystemFlags(), " ") != tc.data {
			t.Errorf("%q with %q: got versions %q, options %q, %v, want %q, %q", tc.before, tc.flags, o.versions, o.FilesystemFlags(), err, tc.versions, tc.data)
		}
		if strings.Join(n.Options, " ") != tc.before {
			t.Errorf("With changed the options of its receiver: got %q, want %q", n.Options, tc.before)
		}
	}
}

// TestProto: nfs(5) has two spellings of the protocol, and the last one applies.
func TestProto(t *testing.T) {
	for words, want := range map[string]string{"": "", "hard": "", "rdma": "rdma", "proto=rdma,port=20049": "rdma", "tcp,proto=tcp6": "tcp6"} {
		o, err := parseNFSOptions([]string{words})
		if err != nil || o.proto() != want {
			t.Errorf("%q: got protocol %q, %v, want %q", words, o.proto(), err, want)
		}
	}
}

// TestLocksThroughServer: the last of the options nolock, lock and local_lock decides.
func TestLocksThroughServer(t *testing.T) {
	for words, want := range map[string]bool{
		"":                 true,
		"nolock":           false,
		"nolock lock":      true,
		"local_lock=all":   false,
		"local_lock=flock": true,
	} {
		o, err := parseNFSOptions(strings.Fields(words))
		if err != nil || o.locksThroughServer() != want {
			t.Errorf("%q: got %t, %v, want %t", words, o.locksThroughServer(), err, want)
		}
	}
}

// TestResolveAddress: resolve accepts only addresses that fit the protocol.
func TestResolveAddress(t *testing.T) {
	for _, tc := range []struct {
		server, proto, want string
		err                 error
	}{
		{"10.0.0.1", "", "10.0.0.1", nil},
		{"::ffff:10.0.0.1", "tcp", "10.0.0.1", nil},
		{"fe80::1%eth0", "tcp6", "fe80::1%eth0", nil},
		{"10.0.0.1", "tcp6", "", ErrServerName},
		{"::1", "tcp", "", ErrServerName},
		{"no-such-name.invalid", "", "", ErrServerName},
	} {
		got, err := resolve(t.Context(), tc.server, tc.proto)
		if !errors.Is(err, tc.err) || tc.err == nil && !slices.Equal(got, []netip.Addr{netip.MustParseAddr(tc.want)}) {
			t.Errorf("%s proto=%s: got %v, %v, want %s, %v", tc.server, tc.proto, got, err, tc.want, tc.err)
		}
	}
}

// TestExplain: explain adds an error that describes the errno, and returns any other error unchanged.
func TestExplain(t *testing.T) {
	for errno, want := range map[unix.Errno]error{
		unix.ETIMEDOUT:       ErrServerSilent,
		unix.ENOENT:          ErrExportMissing,
		unix.EACCES:          ErrExportDenied,
		unix.EPROTONOSUPPORT: ErrNFSVersion,
		unix.EINVAL:          ErrBadOption,
	} {
		if err := (nfsOptions{}).explain(errno); !errors.Is(err, want) || !errors.Is(err, errno) {
			t.Errorf("%v: got %v, want %v", errno, err, want)
		}
	}
	for _, errno := range []unix.Errno{unix.ENOMEM, unix.ESRCH} {
		if err := (nfsOptions{}).explain(errno); err != error(errno) { //nolint:errorlint // the error must be unchanged
			t.Errorf("got %v, want %v unchanged", err, errno)
		}
	}
}

// TestExplainSecurity: with Kerberos and TLS, some errnos have other reasons.
func TestExplainSecurity(t *testing.T) {
	for _, tc := range []struct {
		flags string
		errno unix.Errno
		want  error
	}{
		{"hard,sec=krb5p", unix.EIO, ErrPrivacy},
		{"hard,sec=krb5i", unix.EIO, ErrServerSilent},
		{"hard,sec=krb5i", unix.ENOENT, ErrExportMissing},
		{"hard", unix.EIO, ErrServerSilent},
		{"xprtsec=tls", unix.ESRCH, ErrNoTLSHD},
		{"xprtsec=mtls", unix.EACCES, ErrTLSDenied},
		{"xprtsec=none", unix.EACCES, ErrExportDenied},
	} {
		o, err := parseNFSOptions([]string{tc.flags})
		if err != nil {
			t.Fatal(err)
		}
		if err := o.explain(tc.errno); !errors.Is(err, tc.want) || !errors.Is(err, tc.errno) {
			t.Errorf("%s, %v: got %v, want %v", tc.flags, tc.errno, err, tc.want)
		}
	}
}

// TestKerberosReason: an errno names rpc.gssd only if it certainly does not run.
func TestKerberosReason(t *testing.T) {
	for _, tc := range []struct {
		errno         unix.Errno
		running, sure bool
		want          error
	}{
		{unix.EINVAL, true, true, ErrKerberosRefused},
		{unix.EINVAL, false, false, ErrKerberosRefused},
		{unix.EINVAL, false, true, ErrNoGSSD},
		{unix.EACCES, true, true, ErrKerberos},
		{unix.EACCES, false, false, ErrKerberos},
		{unix.EACCES, false, true, ErrNoGSSD},
		{unix.EPERM, true, true, ErrKerberos},
		{unix.EPERM, false, false, ErrKerberos},
		{unix.EPERM, false, true, ErrNoGSSD},
		{unix.EKEYEXPIRED, true, true, ErrKerberos},
		{unix.EKEYEXPIRED, false, true, ErrNoGSSD},
		{unix.EIO, true, true, ErrPrivacy},
		{unix.EIO, false, false, ErrPrivacy},
		{unix.EIO, false, true, ErrPrivacy},
		{unix.ENOENT, false, true, nil},
	} {
		if got := kerberosReason(tc.errno, true, tc.running, tc.sure); !errors.Is(got, tc.want) {
			t.Errorf("%v, running %t, sure %t: got %v, want %v", tc.errno, tc.running, tc.sure, got, tc.want)
		}
	}
	if got := kerberosReason(unix.EIO, false, true, true); got != nil {
		t.Errorf("EIO without krb5p: got %v, want no reason", got)
	}
}

// TestTopmost: topmost finds the uppermost of several mounts at one path by their parents, in any order.
func TestTopmost(t *testing.T) {
	bottom, middle, top := &Entry{ID: 30, Parent: 1}, &Entry{ID: 50, Parent: 30}, &Entry{ID: 40, Parent: 50}
	if got := topmost([]*Entry{bottom, middle, top}); got != top {
		t.Errorf("got %+v, want %+v", got, top)
	}
	if got := topmost([]*Entry{middle, top, bottom}); got != top {
		t.Errorf("another order: got %+v, want %+v", got, top)
	}
	if got := topmost(nil); got != nil {
		t.Errorf("no entries: got %+v, want nil", got)
	}
}
