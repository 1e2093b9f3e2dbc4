package emptydir

import (
	"os"
	"strings"
	"testing"

	"github.com/trivet-csi/trivet/volumemanager/plugins/plugintest"
)

var must = plugintest.Must

// TestOtherVersion: a record of another version is refused with the remedy.
func TestOtherVersion(t *testing.T) {
	p := New(plugintest.NewHost(t.TempDir()))
	must(t, os.MkdirAll(p.records(), 0o750))
	must(t, os.WriteFile(p.records()+"/pod.data"+suffix, []byte(`{"version":2,"limits":[]}`), 0o600))
	const want = "version 2, this driver reads version 1: run a driver that reads version 2"
	if r, err := p.load("pod.data"); err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("got %+v, %v; want an error with %q", r, err, want)
	}
}

// TestForgetExisting: forget keeps the record of a volume whose directory exists, even if the record
// cannot be read.
func TestForgetExisting(t *testing.T) {
	p := New(plugintest.NewHost(t.TempDir()))
	v := plugintest.Value(p.volume("data", "pod"))(t)
	file := p.records() + "/" + v.key + suffix
	must(t, p.save(v.key, &record{}))
	must(t, os.MkdirAll(v.path, 0o700))
	must(t, p.forget(v.key))
	plugintest.WantText(t, file, `{"version":1}`)
	must(t, os.WriteFile(file, []byte("{"), 0o600))
	must(t, p.forget(v.key))
	plugintest.WantText(t, file, "{")
	must(t, p.save(v.key, &record{}))
	must(t, os.Remove(v.path))
	must(t, p.forget(v.key))
	plugintest.WantMissing(t, file)
}
