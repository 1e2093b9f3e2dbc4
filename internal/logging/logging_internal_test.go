package logging

import (
	"bytes"
	"encoding/json"
	"errors"
	"maps"
	"net/netip"
	"slices"
	"testing"
	"time"
)

// TestJSON: each message is one line with the keys ts, level, msg and those of the message. A message above the
// verbosity is not written.
func TestJSON(t *testing.T) {
	var out bytes.Buffer
	l := newJSONLogger(&out, 2)
	l.WithValues("pool", "fast").V(2).Info("Opened", "took", 1500*time.Millisecond, "address", netip.MustParseAddr("::1"), "volumes", 3)
	l.V(3).Info("Hidden")
	l.Error(errors.New("disk failed"), "Closed")
	lines := bytes.Split(bytes.TrimSpace(out.Bytes()), []byte("\n"))
	wants := []map[string]any{
		{"level": "info", "msg": "Opened", "pool": "fast", "took": "1.5s", "address": "::1", "volumes": 3.0},
		{"level": "error", "msg": "Closed", "err": "disk failed"},
	}
	if len(lines) != len(wants) {
		t.Fatalf("got %d lines, want %d:\n%s", len(lines), len(wants), &out)
	}
	for i, want := range wants {
		var got map[string]any
		if err := json.Unmarshal(lines[i], &got); err != nil {
			t.Fatal(err)
		}
		ts, ok := got["ts"].(string)
		if _, err := time.Parse(time.RFC3339Nano, ts); !ok || err != nil {
			t.Errorf("got ts %v, want a time of RFC 3339", got["ts"])
		}
		delete(got, "ts")
		if !maps.Equal(got, want) {
			t.Errorf("got %v, want %v", got, want)
		}
	}
}

// TestUnknownFormat: Apply refuses a format that is not in Formats.
func TestUnknownFormat(t *testing.T) {
	if err := (Options{Format: "xml"}).Apply(); err == nil || slices.Contains(Formats, "xml") {
		t.Errorf("got error %v, want one", err)
	}
}
