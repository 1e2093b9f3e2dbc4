package flexvolume

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/volumemanager/plugins"
)

// scripted is a driver that is a shell script.
func scripted(t *testing.T, script string) *driver {
	t.Helper()
	dir := t.TempDir()
	at := filepath.Join(dir, "acme~disk")
	if err := errors.Join(os.Mkdir(at, 0o755), os.WriteFile(filepath.Join(at, "disk"), []byte("#!/bin/sh\n"+script+"\n"), 0o755)); err != nil {
		t.Fatal(err)
	}
	return New(nil, mount.NewNFSUnmounter(), dir, nil).Named("acme/disk").(*driver)
}

// TestAnswers: what a driver may print, and what that means. Nothing that is secret is in
// an error.
func TestAnswers(t *testing.T) {
	const secret = "aGlkZGVu"
	for _, tc := range []struct {
		name, script string
		says         string // of the error; empty: there is none
		certain      bool
	}{
		{"success", `echo '{"status":"Success","device":"/dev/x"}'`, "", true},
		{"noise beside it", `echo noise >&2; echo '{"status":"Success"}'`, "", true},
		{"failure", `echo '{"status":"Failure","message":"no ` + secret + ` such disk"}'; exit 1`, `acme/disk: mount: it failed: "no *** such disk"`, true},
		{"failure, status 0", `echo '{"status":"Failure"}'`, "it failed", true},
		{"not supported", `echo '{"status":"Not supported"}'; exit 1`, "does not support", true},
		{"garbage", `echo mounting "$2"`, `it printed "mounting ***\n", which is no answer`, false},
		{"garbage and a reason", `echo mounting; echo "$2" is wrong >&2; exit 5`, `and ended with status 5, with output "*** is wrong"`, false},
		{"nothing", `:`, `it printed "", which is no answer`, false},
		{"part of an answer", `printf '{"status":"Succ'`, "which is no answer", false},
		{"two answers", `echo '{"status":"Success"}{"status":"Success"}'`, "which is no answer", false},
		{"a list", `echo '["Success"]'`, "which is no answer", false},
		{"huge", `yes '{"status":"Success"}'`, "more than 1048576 bytes", false},
		{"huge in one", `head -c 900000 /dev/zero | tr '\0' x`, `xxx…", which is no answer`, false},
		{"another status", `echo '{"status":"Fine"}'`, `answered with status "Fine"`, false},
		{"success, and status 1", `echo '{"status":"Success"}'; exit 1`, "answered Success and ended with status 1", false},
		{"killed", `kill -9 $$`, "was ended by killed", false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			a, err := scripted(t, tc.script).call(t.Context(), secrets{secret, "hidden"}, "mount", secret)
			if (err == nil) != (tc.says == "") || err != nil && (!strings.Contains(err.Error(), tc.says) || plugins.Uncertain(err) == tc.certain) {
				t.Errorf("%+v, %v (uncertain %t); want %q", a, err, plugins.Uncertain(err), tc.says)
			}
			if err != nil && strings.Contains(err.Error(), secret) {
				t.Errorf("it tells a secret: %v", err)
			}
		})
	}
}

// TestHang: a driver that hangs is ended, with what it has started.
func TestHang(t *testing.T) {
	d := scripted(t, "echo '{'; sleep 1000 & wait")
	d.callTime = 100 * time.Millisecond
	if _, err := d.call(t.Context(), nil, "mount"); !plugins.Uncertain(err) || !strings.Contains(err.Error(), "no answer within 100ms") {
		t.Error(err)
	}
}

// TestProbe: init is asked once for each executable.
func TestProbe(t *testing.T) {
	counted := filepath.Join(t.TempDir(), "inits")
	d := scripted(t, "echo x >>"+counted+`; echo '{"status":"Success","capabilities":{"attach":false}}'`)
	inits := func() int {
		b, err := os.ReadFile(counted)
		if err != nil {
			t.Fatal(err)
		}
		return len(b) / 2
	}
	for range 3 {
		if c, err := d.can(t.Context()); err != nil || c.Attach || !c.FSGroup || !c.RequiresFSResize {
			t.Fatalf("%+v, %v", c, err)
		}
	}
	if n := inits(); n != 1 {
		t.Errorf("%d inits", n)
	}
	other := "#!/bin/sh\necho x >>" + counted + `; echo '{"status":"Success"}'`
	next := d.executable() + ".new"
	if err := errors.Join(os.WriteFile(next, []byte(other), 0o755), os.Rename(next, d.executable())); err != nil {
		t.Fatal(err)
	}
	if c, err := d.can(t.Context()); err != nil || !c.Attach {
		t.Errorf("after the executable was replaced: %+v, %v", c, err)
	}
	if err := os.Remove(d.executable()); err != nil {
		t.Fatal(err)
	}
	if _, err := d.can(t.Context()); err == nil || !strings.Contains(err.Error(), "put its executable there") {
		t.Errorf("after it was removed: %v", err)
	}
}

func TestNames(t *testing.T) {
	p := New(nil, mount.NewNFSUnmounter(), "/nowhere", nil)
	for name, ok := range map[string]bool{
		"acme/disk": true, "disk": true, "acme.com/my-disk_1": true,
		"": false, "..": false, "../disk": false, "acme/..": false, "acme/": false, "/disk": false, "a/b/c": false,
		"acme~x/disk": false, "kubernetes.io/csi": false, "kubernetes.io": false, ".hidden/disk": false, "a\x00/b": false,
		strings.Repeat("a", 250): false,
	} {
		if (p.Named(name) != nil) != ok {
			t.Errorf("%q", name)
		}
	}
}

// TestConcerns: what drivers write beside their executables is nobody's business.
func TestConcerns(t *testing.T) {
	p := New(nil, mount.NewNFSUnmounter(), "/plugins/", nil)
	for path, want := range map[string]bool{
		"/plugins/acme~disk":          true,
		"/plugins/acme~disk/disk":     true,
		"/plugins/disk/disk":          true,
		"/plugins/acme~disk/disk.log": false,
		"/plugins/acme~disk/other":    false,
		"/plugins/acme~disk/d/disk":   false,
	} {
		if p.concerns(path) != want {
			t.Errorf("%s: want %t", path, want)
		}
	}
}

// TestLate: nobody waits long for init; who gave up is told when it has answered.
func TestLate(t *testing.T) {
	release := filepath.Join(t.TempDir(), "release")
	d := scripted(t, "until [ -e "+release+" ]; do sleep 0.01; done; echo '{\"status\":\"Success\"}'")
	changed := make(chan struct{})
	d.changed = func() { close(changed) }
	if _, err := d.can(t.Context()); err == nil || !strings.Contains(err.Error(), "no answer yet") {
		t.Error(err)
	}
	if err := os.WriteFile(release, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	<-changed
	if c, err := d.can(t.Context()); err != nil || !c.Attach {
		t.Errorf("%+v, %v", c, err)
	}
}
