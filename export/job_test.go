package export

import (
	"encoding/json"
	"testing"
	"time"
)

// TestSilentFor: the duration of an outage does not depend on the clock, which may be set while a worker
// starts.
func TestSilentFor(t *testing.T) {
	for _, wrong := range []time.Duration{-48 * time.Hour, 0, 48 * time.Hour} {
		b, err := json.Marshal(Job{SilentSince: time.Now().Add(wrong), SilentFor: time.Minute})
		if err != nil {
			t.Fatal(err)
		}
		job, err := ReadJob(func(v any) error { return json.Unmarshal(b, v) })
		if since := time.Since(job.SilentSince); err != nil || since < time.Minute || since > time.Hour {
			t.Errorf("silent for %v, %v", since, err)
		}
	}
	b, err := json.Marshal(Job{})
	if err != nil {
		t.Fatal(err)
	}
	if job, err := ReadJob(func(v any) error { return json.Unmarshal(b, v) }); err != nil || !job.SilentSince.IsZero() {
		t.Errorf("a server that answers: %v, %v", job.SilentSince, err)
	}
}
