package export

import (
	"encoding/json"
	"testing"
	"time"
)

// TestSilentFor: the duration of an outage in a worker does not change if the clock is set while the worker
// starts.
func TestSilentFor(t *testing.T) {
	for _, clockError := range []time.Duration{-48 * time.Hour, 0, 48 * time.Hour} {
		b, err := json.Marshal(Job{SilentSince: time.Now().Add(clockError), SilentFor: time.Minute})
		if err != nil {
			t.Fatal(err)
		}
		job, err := ReadJob(func(v any) error { return json.Unmarshal(b, v) })
		if since := time.Since(job.SilentSince); err != nil || since < time.Minute || since > time.Hour {
			t.Errorf("clock error %v: got silent for %v, %v; want a minute", clockError, since, err)
		}
	}
	b, err := json.Marshal(Job{})
	if err != nil {
		t.Fatal(err)
	}
	if job, err := ReadJob(func(v any) error { return json.Unmarshal(b, v) }); err != nil || !job.SilentSince.IsZero() {
		t.Errorf("a server that answers: got silent since %v, %v; want the zero time", job.SilentSince, err)
	}
}
