package pool

import (
	"strings"
	"testing"
	"time"

	"github.com/trivet-csi/trivet/volume"
)

// TestChecksRefused: an error names the key.
func TestChecksRefused(t *testing.T) {
	nfs := &NFS{Server: "server.example", Export: "/export"}
	for _, tc := range []struct {
		key string
		c   Config
	}{
		{"check", Config{Name: "p", Directory: Directory{Path: "/p"}, Check: "hourly"}},
		{"checkWindow", Config{Name: "p", Directory: Directory{Path: "/p"}, Check: Daily, CheckWindow: "1-5"}},
		{"check", Config{Name: "nas", NFS: nfs, Check: Weekly}},
		{"check", Config{Name: "nas", NFS: nfs, CheckWindow: "01:00-05:00"}},
	} {
		if key, err := tc.c.Validate(); key != tc.key || err == nil || !strings.HasPrefix(err.Error(), tc.key+" ") {
			t.Errorf("%+v: got key %q and error %v, want %s", tc.c, key, err, tc.key)
		}
	}
}

// TestChecked: the result of the last check is durable, and there is none at first.
func TestChecked(t *testing.T) {
	p, _ := openPlain(t)
	v := volume.Volume{ID: p.ID("loop", "v")}
	must(t, p.root.Mkdir(volumesDir+"/v", 0o700))
	if c, ok, err := p.Checked(v); ok || err != nil {
		t.Errorf("before the first check: got %+v, %t and error %v, want no result", c, ok, err)
	}
	for _, damaged := range []bool{true, false} {
		want := Checked{At: at(t, "02:00:00"), Damaged: damaged}
		must(t, p.SetChecked("v", Checked{At: want.At.In(time.FixedZone("", 3600)), Damaged: damaged}))
		if c, ok, err := p.Checked(v); c != want || !ok || err != nil {
			t.Errorf("got %+v, %t and error %v, want %+v", c, ok, err, want)
		}
	}
	must(t, p.root.WriteFile(volumePath("v", checkedFile), []byte("damaged"), 0o600))
	if c, ok, err := p.Checked(v); ok || err != nil {
		t.Errorf("an unreadable result: got %+v, %t and error %v, want no result", c, ok, err)
	}
}
