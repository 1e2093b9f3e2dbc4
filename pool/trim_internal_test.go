package pool

import (
	"strings"
	"testing"
	"time"

	"github.com/trivet-csi/trivet/volume"
)

// TestTrimRate: the rate is configurable.
func TestTrimRate(t *testing.T) {
	for text, want := range map[string]int64{"": DefaultTrimRate, "10Mi": 10 << 20} {
		if got, _, err := (Config{TrimBytesPerSecond: text}).Trimming(); got.Rate != want || err != nil {
			t.Errorf("trimBytesPerSecond %q: got rate %d and error %v, want %d", text, got.Rate, err, want)
		}
	}
}

// TestTrimRefused: an error names the key.
func TestTrimRefused(t *testing.T) {
	for key, configs := range map[string][]Config{
		"trim":               {{Trim: "hourly"}, {Trim: "7d"}},
		"trimWindow":         {{TrimWindow: "01:00"}, {TrimWindow: "01:00-01:00"}, {TrimWindow: "1-5"}, {TrimWindow: "01:00-25:00"}},
		"trimBytesPerSecond": {{TrimBytesPerSecond: "0"}, {TrimBytesPerSecond: "fast"}},
	} {
		for _, c := range configs {
			if _, got, err := c.Trimming(); got != key || err == nil || !strings.HasPrefix(err.Error(), key+" ") {
				t.Errorf("%+v: got key %q and error %v, want %s", c, got, err, key)
			}
		}
	}
	c := Config{Name: "nas", NFS: &NFS{Server: "server.example", Export: "/export"}, Trim: Weekly}
	if key, err := c.Validate(); key != "trim" {
		t.Errorf("an export with trim: got key %q and error %v, want trim", key, err)
	}
}

// TestTrimmed: the time of the last trim is durable, and is at first the creation of the volume.
func TestTrimmed(t *testing.T) {
	p, _ := openPlain(t)
	v := volume.Volume{ID: p.ID("loop", "v"), Created: at(t, "01:00:00")}
	must(t, p.root.Mkdir(volumesDir+"/v", 0o700))
	want := func(want time.Time) {
		t.Helper()
		got, err := p.Trimmed(v)
		must(t, err)
		if !got.Equal(want) {
			t.Errorf("got %v, want %v", got, want)
		}
	}
	want(v.Created)
	for _, clock := range []string{"02:00:00", "03:00:00"} {
		must(t, p.SetTrimmed("v", at(t, clock).In(time.FixedZone("", 3600))))
		want(at(t, clock))
	}
	must(t, p.root.WriteFile(volumePath("v", trimmedFile), []byte("damaged"), 0o600))
	want(v.Created)
}
