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

// scriptDriver returns a driver that is a shell script.
func scriptDriver(t *testing.T, script string) *driver {
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
		wantErr      string // part of the error; empty for no error
		certain      bool   // the error is not a *plugins.UncertainError
	}{
		{"success", `echo '{"status":"Success","device":"/dev/x"}'`, "", true},
		{"success, and other output on stderr", `echo noise >&2; echo '{"status":"Success"}'`, "", true},
		{"failure", `echo '{"status":"Failure","message":"no ` + secret + ` such disk"}'; exit 1`, `acme/disk: mount: it failed: "no *** such disk"`, true},
		{"failure with status 0", `echo '{"status":"Failure"}'`, "it failed", true},
		{"not supported", `echo '{"status":"Not supported"}'; exit 1`, "does not support", true},
		{"garbage", `echo mounting "$2"`, `it printed "mounting ***\n", which is no answer`, false},
		{"garbage with status 5", `echo mounting; echo "$2" is wrong >&2; exit 5`, `and ended with status 5, with output "*** is wrong"`, false},
		{"no output", `:`, `it printed "", which is no answer`, false},
		{"part of an answer", `printf '{"status":"Succ'`, "which is no answer", false},
		{"two answers", `echo '{"status":"Success"}{"status":"Success"}'`, "which is no answer", false},
		{"a list", `echo '["Success"]'`, "which is no answer", false},
		{"too long", `yes '{"status":"Success"}'`, "more than 1048576 bytes", false},
		{"long garbage", `head -c 900000 /dev/zero | tr '\0' x`, `xxx…", which is no answer`, false},
		{"unknown status", `echo '{"status":"Fine"}'`, `answered with status "Fine"`, false},
		{"success with status 1", `echo '{"status":"Success"}'; exit 1`, "answered Success and ended with status 1", false},
		{"killed", `kill -9 $$`, "was ended by killed", false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			a, err := scriptDriver(t, tc.script).call(t.Context(), secrets{secret, "hidden"}, "mount", secret)
			if (err == nil) != (tc.wantErr == "") || err != nil && (!strings.Contains(err.Error(), tc.wantErr) || plugins.Uncertain(err) == tc.certain) {
				t.Errorf("got %+v, %v (uncertain %t); want error %q (certain %t)", a, err, plugins.Uncertain(err), tc.wantErr, tc.certain)
			}
			if err != nil && strings.Contains(err.Error(), secret) {
				t.Errorf("the error contains a secret: %v", err)
			}
		})
	}
}

// TestHang: a driver that hangs is killed, with its child processes.
func TestHang(t *testing.T) {
	d := scriptDriver(t, "echo '{'; sleep 1000 & wait")
	d.callTime = 100 * time.Millisecond
	_, err := d.call(t.Context(), nil, "mount")
	plugintest.WantUncertain(t, err, "no answer within 100ms")
}

// TestProbe: init is called once for each version of the executable.
func TestProbe(t *testing.T) {
	log := filepath.Join(t.TempDir(), "inits")
	d := scriptDriver(t, "echo x >>"+log+`; echo '{"status":"Success","capabilities":{"attach":false}}'`)
	inits := func() int {
		return len(plugintest.Value(os.ReadFile(log))(t)) / 2
	}
	for range 3 {
		if c, err := d.capabilities(t.Context()); err != nil || c.Attach || !c.FSGroup || !c.RequiresFSResize {
			t.Fatalf("got capabilities %+v, %v; want all but attach", c, err)
		}
	}
	if n := inits(); n != 1 {
		t.Errorf("got %d calls of init, want one", n)
	}
	newScript := "#!/bin/sh\necho x >>" + log + `; echo '{"status":"Success"}'`
	newFile := d.executable() + ".new"
	must(t, os.WriteFile(newFile, []byte(newScript), 0o755))
	must(t, os.Rename(newFile, d.executable()))
	if c, err := d.capabilities(t.Context()); err != nil || !c.Attach {
		t.Errorf("after the executable was replaced: got capabilities %+v, %v; want all", c, err)
	}
	must(t, os.Remove(d.executable()))
	_, err := d.capabilities(t.Context())
	plugintest.WantError(t, err, "put its executable at this path")
}

// TestNames: Named returns a plugin only for a valid name of a driver.
func TestNames(t *testing.T) {
	p := New(nil, mount.NewNFSUnmounter(), "/nowhere", nil)
	for name, valid := range map[string]bool{
		"acme/disk": true, "disk": true, "acme.com/my-disk_1": true,
		"": false, "..": false, "../disk": false, "acme/..": false, "acme/": false, "/disk": false, "a/b/c": false,
		"acme~x/disk": false, "kubernetes.io/csi": false, "kubernetes.io": false, ".hidden/disk": false, "a\x00/b": false,
		strings.Repeat("a", 250): false,
	} {
		if got := p.Named(name) != nil; got != valid {
			t.Errorf("%q: got valid %t, want %t", name, got, valid)
		}
	}
}

// TestIsDriver: other files in the directory of a driver are ignored.
func TestIsDriver(t *testing.T) {
	p := New(nil, mount.NewNFSUnmounter(), "/plugins/", nil)
	for path, want := range map[string]bool{
		"/plugins/acme~disk":          true,
		"/plugins/acme~disk/disk":     true,
		"/plugins/disk/disk":          true,
		"/plugins/acme~disk/disk.log": false,
		"/plugins/acme~disk/other":    false,
		"/plugins/acme~disk/d/disk":   false,
	} {
		if got := p.isDriver(path); got != want {
			t.Errorf("isDriver(%s): got %t, want %t", path, got, want)
		}
	}
}

// TestLateInit: capabilities does not wait long for init. changed is called when the driver has answered
// init.
func TestLateInit(t *testing.T) {
	release := filepath.Join(t.TempDir(), "release")
	d := scriptDriver(t, "until [ -e "+release+" ]; do sleep 0.01; done; echo '{\"status\":\"Success\"}'")
	changed := make(chan struct{})
	d.changed = func() { close(changed) }
	_, err := d.capabilities(t.Context())
	plugintest.WantError(t, err, "no answer yet")
	must(t, os.WriteFile(release, nil, 0o600))
	<-changed
	if c, err := d.capabilities(t.Context()); err != nil || !c.Attach {
		t.Errorf("after init: got capabilities %+v, %v; want all", c, err)
	}
}
