package main

import (
	"bytes"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/trivet-csi/trivet/volumemanager"
	"github.com/trivet-csi/trivet/volumemanager/event"
	"github.com/trivet-csi/trivet/volumemanager/reconciler"
	"github.com/trivet-csi/trivet/volumemanager/state"
)

// TestNotReady: each volume that keeps a pod waiting is named, one whose driver hangs
// too, which has no error.
func TestNotReady(t *testing.T) { synctest.Test(t, testNotReady) }

func testNotReady(t *testing.T) {
	web := types.NamespacedName{Namespace: "default", Name: "web"}
	volumes := []reconciler.VolumeStatus{
		{Volume: "hangs", Phase: state.Mounting, Since: time.Now().Add(-time.Hour)},
		{Volume: "again", Phase: state.Attaching, Since: time.Now().Add(-time.Minute), Message: "no answer in 2m0s"},
		{Volume: "fresh", Phase: state.Pending},
		{Volume: "config", Phase: state.Failed, Message: "ConfigMap default/none: add one"},
		{Volume: "cache", Phase: state.Mounted, Message: "emptyDir.sizeLimit 1Mi is not enforced"},
	}
	err := notReady(web, volumemanager.PodStatus{Known: true, Volumes: volumes})
	want := "pod default/web is not ready: hangs is Mounting: for 1h0m0s; again is Attaching: for 1m0s, after: no answer in 2m0s; fresh is Pending; config is Failed: ConfigMap default/none: add one"
	if err == nil || err.Error() != want {
		t.Errorf("%v\nwant %s", err, want)
	}
	var out bytes.Buffer
	if err := writeStatus(&out, volumemanager.Status{Volumes: volumes}); err != nil || !strings.Contains(out.String(), "for 1h0m0s\n") {
		t.Errorf("the table says, %v:\n%s", err, &out)
	}
}

// TestLatestEvents: a table has the last of them alone.
func TestLatestEvents(t *testing.T) {
	var s volumemanager.Status
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.Local)
	for i := range 2 * shownEvents {
		s.Events = append(s.Events, event.Event{Time: at, Object: fmt.Sprint("pod default/", i), Reason: "FailedMount", Message: "volume data: add one", Count: 7})
	}
	var out bytes.Buffer
	if err := writeStatus(&out, s); err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	last := strings.Join(strings.Fields(lines[len(lines)-1]), " ")
	if want := fmt.Sprintf("2026-01-02 03:04:05 pod default/%d FailedMount 7 volume data: add one", 2*shownEvents-1); len(lines) != shownEvents+1 || last != want {
		t.Errorf("%d lines, the last is %q; want %d, %q", len(lines), last, shownEvents+1, want)
	}
}
