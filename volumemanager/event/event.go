// Package event records events of volumes that are shown to users: what failed, and what to do.
package event

import (
	"context"
	"slices"
	"sync"
	"time"

	"k8s.io/klog/v2"
)

// Event is something that happened to an object. Events that differ only in their times are stored
// once, with a count.
type Event struct {
	// Time is the time of the last occurrence.
	Time    time.Time `json:"time"`
	Warning bool      `json:"warning,omitempty"`
	// Object is the kind and the name of the object, such as pod default/web, claim default/data or
	// volume pvc-….
	Object string `json:"object"`
	// Reason is a word that programs can match, such as MountFailed.
	Reason string `json:"reason"`
	// Message says what happened and what to do. It contains no secrets.
	Message string `json:"message"`
	// Count is the number of occurrences.
	Count int `json:"count"`
}

const (
	// maxEvents is the maximum number of events; the oldest are dropped first.
	maxEvents = 500
	// quiet is the time after a log line in which a repeated event is not logged again.
	quiet = time.Minute
)

// Recorder holds the last events. The zero value is ready to use. It is safe for concurrent use.
type Recorder struct {
	mu sync.Mutex
	// events are sorted by time.
	events []recorded
}

// recorded is an event in a Recorder.
type recorded struct {
	Event
	// logged is the time of the last log line.
	logged time.Time
}

// Record adds an event with the current time. The event is logged if it is new, or if it was not logged
// for a minute.
func (r *Recorder) Record(ctx context.Context, e Event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := time.Now()
	latest := recorded{Event: e}
	if i := slices.IndexFunc(r.events, latest.same); i >= 0 {
		latest = r.events[i]
		r.events = slices.Delete(r.events, i, i+1)
	}
	latest.Time = now
	latest.Count++
	if now.Sub(latest.logged) >= quiet {
		latest.logged = now
		latest.log(ctx)
	}
	r.events = append(r.events, latest)
	if len(r.events) > maxEvents {
		r.events = slices.Delete(r.events, 0, 1)
	}
}

// same reports whether two events differ at most in their times and counts.
func (e recorded) same(o recorded) bool {
	return e.Object == o.Object && e.Reason == o.Reason && e.Message == o.Message && e.Warning == o.Warning
}

func (e recorded) log(ctx context.Context) {
	klog.FromContext(ctx).Info("Event", "object", e.Object, "reason", e.Reason, "message", e.Message, "warning", e.Warning, "count", e.Count)
}

// List returns the events, the latest last.
func (r *Recorder) List() []Event {
	r.mu.Lock()
	defer r.mu.Unlock()
	all := make([]Event, len(r.events))
	for i, e := range r.events {
		all[i] = e.Event
	}
	return all
}
