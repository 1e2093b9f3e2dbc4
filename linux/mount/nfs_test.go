package mount_test

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/trivet-csi/trivet/internal/mountflags"
	"github.com/trivet-csi/trivet/linux/mount"
)

// TestNFSSource: ParseNFSSource accepts the sources that String returns, and no others.
func TestNFSSource(t *testing.T) {
	for _, tc := range []struct {
		source, server, path string
		ok                   bool
	}{
		{"nas.lan:/tank/volumes", "nas.lan", "/tank/volumes", true},
		{"10.0.0.1:/", "10.0.0.1", "/", true},
		{"[fe80::1%eth0]:/a", "fe80::1%eth0", "/a", true},
		{"nas:/a:/b", "nas", "/a:/b", true},
		{"nas:/with a space", "nas", "/with a space", true},
		{"fe80::1:/a", "", "", false},
		{"[nas]:/a", "", "", false},
		{"nas:a", "", "", false},
		{":/a", "", "", false},
		{"/dev/sda", "", "", false},
		{"", "", "", false},
	} {
		server, path, ok := mount.ParseNFSSource(tc.source)
		if server != tc.server || path != tc.path || ok != tc.ok {
			t.Errorf("%q: got server %q, path %q, %t, want %q, %q, %t", tc.source, server, path, ok, tc.server, tc.path, tc.ok)
		}
		if n := (mount.NFS{Server: server, Path: path}); ok && n.String() != tc.source {
			t.Errorf("String: got %q, want %q", n.String(), tc.source)
		}
	}
}

// FuzzParseNFSSource: String returns the text that was parsed.
func FuzzParseNFSSource(f *testing.F) {
	for _, s := range []string{"nas:/a", "[::1]:/", "[a:b:/c", ":/", "a:/]:/b", "[[::]:/", "[x]:/y"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		server, path, ok := mount.ParseNFSSource(s)
		if !ok {
			return
		}
		if n := (mount.NFS{Server: server, Path: path}); n.String() != s || !strings.HasPrefix(path, "/") {
			t.Errorf("parsed as server %q and path %q, String returns %q, want %q", server, path, n.String(), s)
		}
	})
}

// TestCheckNFSOptions: the options that MountNFS cannot use are refused.
func TestCheckNFSOptions(t *testing.T) {
	for _, tc := range []struct {
		words string
		ok    bool
	}{
		{"", true},
		{"nfsvers=4.2 hard nosharecache", true},
		{"nfsvers=4.2,hard,timeo=600", true},
		{"noatime ro proto=tcp port=2050", true},
		{"nolock mountport=20048 vers=3", true},
		{"v4.1", true},
		{"v3", true},
		{"vers=4 minorversion=1", true},
		{"vers=4.2 minorversion=2", true},
		{"nfsvers=4.2 vers=4.2", true},
		{"sec=krb5p", true},
		{"sec=krb5p:krb5i,xprtsec=none", true},
		{"xprtsec=mtls", true},
		{"sec=krb4", false},
		{"sec=krb5:", false},
		{"sec", false},
		{"xprtsec=ssl", false},
		{"xprtsec=tls:mtls", false},
		{"vers=4.1 minorversion=2", false},
		{"vers=3 minorversion=1", false},
		{"nfsvers=4.2 vers=3", false},
		{"nfsvers=2", false},
		{"v2", false},
		{"nfsvers=5", false},
		{"nfsvers", false},
		{"v4.9", false},
		{"addr=10.0.0.1", false},
		{"clientaddr=10.0.0.1", false},
		{"mountaddr=10.0.0.1", false},
		{"source=other:/x", false},
		{"sharecache", false},
		{"bg", false},
		{"retry=5", false},
		{"bind", false},
		{"remount", false},
	} {
		err := mount.CheckNFSOptions(strings.Fields(tc.words))
		if (err == nil) != tc.ok || err != nil && !errors.Is(err, mount.ErrBadOption) {
			t.Errorf("%q: got %v, want valid %t", tc.words, err, tc.ok)
		}
	}
}

// TestUsesKerberos: every kind of Kerberos counts, also in a list.
func TestUsesKerberos(t *testing.T) {
	for words, want := range map[string]bool{"": false, "hard sec=sys": false, "hard,sec=krb5": true, "sec=sys:krb5p": true, "sec=krb4": false} {
		if got := mount.UsesKerberos(strings.Fields(words)); got != want {
			t.Errorf("%q: got %t, want %t", words, got, want)
		}
	}
}

// FuzzCheckNFSOptions: CheckNFSOptions accepts no option that names another server.
func FuzzCheckNFSOptions(f *testing.F) {
	f.Add("hard,addr=1.2.3.4")
	f.Add("vers=4,minorversion=2")
	f.Add(`context="u:object_r:t:s0:c1,c2",addr=1.2.3.4`)
	f.Add(`x-note="a,addr=1.2.3.4"`)
	f.Add(`x-note="a,addr=1.2.3.4`)
	f.Fuzz(func(t *testing.T, words string) {
		if mount.CheckNFSOptions([]string{words}) != nil {
			return
		}
		for _, word := range mountflags.Split([]string{words}) {
			key, _, _ := strings.Cut(word, "=")
			if slices.Contains([]string{"addr", "clientaddr", "source", "mountaddr"}, key) {
				t.Errorf("%q: got no error, want %v", words, mount.ErrBadOption)
			}
		}
	})
}
