package flexvolume

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/volumemanager/plugins"
	"github.com/trivet-csi/trivet/volumemanager/plugins/plugintest"
)

var must = plugintest.Must

// scripted returns a driver that is a shell script.
func scripted(t *testing.T, script string) *driver {
	t.Helper()
	dir := t.TempDir()
	at := filepath.Join(dir, "acme~disk")
	must(t, os.Mkdir(at, 0o755))
	must(t, os.WriteFile(filepath.Join(at, "disk"), []byte("#!/bin/sh\n"+script+"\n"), 0o755))
	return New(nil, mount.NewNFSUnmounter(), dir, nil).Named("acme/disk").(*driver)
}

// TestAnswers: the result of a call for each output of a driver. Errors contain no secrets.
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
				t.Errorf("the error contains a secret: %v", err)
			}
		})
	}
}

// TestHang: a driver that hangs is killed, with its child processes.
func TestHang(t *testing.T) {
	d := scripted(t, "echo '{'; sleep 1000 & wait")
	d.callTime = 100 * time.Millisecond
	_, err := d.call(t.Context(), nil, "mount")
	plugintest.WantUncertain(t, err, "no answer within 100ms")
}

// TestProbe: init is called once for each version of the executable.
func TestProbe(t *testing.T) {
	counted := filepath.Join(t.TempDir(), "inits")
	d := scripted(t, "echo x >>"+counted+`; echo '{"status":"Success","capabilities":{"attach":false}}'`)
	inits := func() int {
		return len(plugintest.Value(os.ReadFile(counted))(t)) / 2
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
	must(t, os.WriteFile(next, []byte(other), 0o755))
	must(t, os.Rename(next, d.executable()))
	if c, err := d.can(t.Context()); err != nil || !c.Attach {
		t.Errorf("after the executable was replaced: %+v, %v", c, err)
	}
	must(t, os.Remove(d.executable()))
	_, err := d.can(t.Context())
	plugintest.WantError(t, err, "put its executable there")
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

// TestConcerns: other files beside the executables are ignored.
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

// TestLate: a call does not wait long for init. changed is called when init has answered.
func TestLate(t *testing.T) {
	release := filepath.Join(t.TempDir(), "release")
	d := scripted(t, "until [ -e "+release+" ]; do sleep 0.01; done; echo '{\"status\":\"Success\"}'")
	changed := make(chan struct{})
	d.changed = func() { close(changed) }
	_, err := d.can(t.Context())
	plugintest.WantError(t, err, "no answer yet")
	must(t, os.WriteFile(release, nil, 0o600))
	<-changed
	if c, err := d.can(t.Context()); err != nil || !c.Attach {
		t.Errorf("%+v, %v", c, err)
	}
}
