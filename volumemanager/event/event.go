// Package event keeps what a person should know of volumes: what went wrong, and what to
// do about it.
package event

import (
	"context"
	"slices"
	"sync"
	"time"

	"k8s.io/klog/v2"
)

// Event is something that happened to an object. Equal ones are one, with a count.
type Event struct {
	// Time is that of the last.
	Time    time.Time `json:"time"`
	Warning bool      `json:"warning,omitempty"`
	// Object is as people call it: pod default/web, claim default/data, volume pvc-….
	Object string `json:"object"`
	// Reason is a word for programs: MountFailed.
	Reason string `json:"reason"`
	// Message says what to do. It has no secrets.
	Message string `json:"message"`
	Count   int    `json:"count"`
}

const (
	// kept is how many events there are at most; the oldest go first.
	kept = 500
	// quiet is for how long an event that goes on is not logged again.
	quiet = time.Minute
)

// Recorder keeps the last events. The zero value is ready, and safe for concurrent use.
type Recorder struct {
	mu sync.Mutex
	// events are in the order of their time.
	events []recorded
}

type recorded struct {
	Event
	logged time.Time
}

// Record adds an event, of now. It is logged if it is new, or was not for a minute.
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
	if len(r.events) > kept {
		r.events = slices.Delete(r.events, 0, 1)
	}
}

func (e recorded) same(o recorded) bool {
	return e.Object == o.Object && e.Reason == o.Reason && e.Message == o.Message && e.Warning == o.Warning
}

func (e recorded) log(ctx context.Context) {
	klog.FromContext(ctx).Info("Event", "object", e.Object, "reason", e.Reason, "message", e.Message, "warning", e.Warning, "count", e.Count)
}

// List has the events, the latest last.
func (r *Recorder) List() []Event {
	r.mu.Lock()
	defer r.mu.Unlock()
	all := make([]Event, len(r.events))
	for i, e := range r.events {
		all[i] = e.Event
	}
	return all
}
