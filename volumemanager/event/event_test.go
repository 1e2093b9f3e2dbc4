package event_test

import (
	"bytes"
	"context"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/klog/v2"
	"k8s.io/klog/v2/textlogger"

	"github.com/trivet-csi/trivet/volumemanager/event"
)

// TestEqualEvents: equal events are stored once, with a count, and logged once a minute.
func TestEqualEvents(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		ctx := klog.NewContext(t.Context(), textlogger.NewLogger(textlogger.NewConfig(textlogger.Output(&out))))
		var r event.Recorder
		e := event.Event{Warning: true, Object: "pod default/web", Reason: "FailedMount", Message: "volume data: create it"}
		other := e
		other.Message = "volume logs: create it"
		for _, step := range []struct {
			pause  time.Duration
			e      event.Event
			logged int
		}{
			{0, e, 1},
			{30 * time.Second, e, 1},
			{0, other, 2},
			{29 * time.Second, e, 2},
			{time.Second, e, 3},
			{59 * time.Second, e, 3},
		} {
			time.Sleep(step.pause)
			r.Record(ctx, step.e)
			if got := strings.Count(out.String(), "\n"); got != step.logged {
				t.Errorf("got %d log lines, want %d:\n%s", got, step.logged, &out)
			}
		}
		all := r.List()
		if len(all) != 2 || all[0].Message != other.Message || all[0].Count != 1 || all[1].Message != e.Message || all[1].Count != 5 {
			t.Errorf("got %+v, want %q with count 1, then %q with count 5", all, other.Message, e.Message)
		}
		if got := all[1].Time; !got.Equal(time.Now()) {
			t.Errorf("time of the last event: got %v, want %v", got, time.Now())
		}
	})
}

// TestOldEvents: the oldest events are dropped.
func TestOldEvents(t *testing.T) {
	var r event.Recorder
	ctx := klog.NewContext(context.Background(), klog.Logger{})
	for i := range 700 {
		r.Record(ctx, event.Event{Object: "pod default/web", Message: fmt.Sprint(i)})
	}
	all := r.List()
	if len(all) != 500 || all[0].Message != "200" || all[499].Message != "699" {
		t.Errorf("got %d events, from %s to %s; want 500, from 200 to 699", len(all), all[0].Message, all[len(all)-1].Message)
	}
}
