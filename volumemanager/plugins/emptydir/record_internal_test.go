package emptydir

import (
	"os"
	"testing"

	"github.com/trivet-csi/trivet/volumemanager/plugins/plugintest"
)

var must = plugintest.Must

// TestForgetExisting: forget keeps the record of a volume whose directory exists, even if the record
// cannot be read.
func TestForgetExisting(t *testing.T) {
	p := New(plugintest.NewHost(t.TempDir()))
	v := plugintest.Value(p.volume("data", "pod"))(t)
	file := p.records() + "/" + v.key + suffix
	must(t, p.save(v.key, &record{}))
	must(t, os.MkdirAll(v.path, 0o700))
	must(t, p.forget(v.key))
	plugintest.WantText(t, file, "{}")
	must(t, os.WriteFile(file, []byte("{"), 0o600))
	must(t, p.forget(v.key))
	plugintest.WantText(t, file, "{")
	must(t, p.save(v.key, &record{}))
	must(t, os.Remove(v.path))
	must(t, p.forget(v.key))
	plugintest.WantMissing(t, file)
}
