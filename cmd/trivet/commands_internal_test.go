package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/trivet-csi/trivet/backend/disk"
	"github.com/trivet-csi/trivet/cluster/status"
	"github.com/trivet-csi/trivet/flexvolume"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
	"github.com/trivet-csi/trivet/volumemanager"
	"github.com/trivet-csi/trivet/volumemanager/event"
	"github.com/trivet-csi/trivet/volumemanager/reconciler"
	"github.com/trivet-csi/trivet/volumemanager/state"
)

// TestReadLines: readLines reports the results of a child up to the first error.
func TestReadLines(t *testing.T) {
	for _, tc := range []struct {
		name, in, err string
		found         []string
	}{
		{"no output", "", "", nil},
		{"two results", "{\"found\":\"a\"}\n{\"found\":\"b\"}\n", "", []string{"a", "b"}},
		{"an error after a result", "{\"found\":\"a\"}\n{\"error\":\"disk failed\"}\n{\"found\":\"b\"}\n", "disk failed", []string{"a"}},
		{"an incomplete line", "{\"found\":\"a\"}\n{\"fou", "", []string{"a"}},
		{"not JSON", "panic: x\n", "invalid character", nil},
	} {
		var found []string
		err := readLines(strings.NewReader(tc.in), func(s string) { found = append(found, s) })
		if !slices.Equal(found, tc.found) || (err == nil) != (tc.err == "") || err != nil && !strings.Contains(err.Error(), tc.err) {
			t.Errorf("%s: got %q, error %v, want %q, error %q", tc.name, found, err, tc.found, tc.err)
		}
	}
}

// TestHungChild: reading from a child without output ends at the deadline.
func TestHungChild(t *testing.T) {
	r, w, err := os.Pipe()
	check(t, err)
	defer r.Close()
	defer w.Close()
	check(t, r.SetReadDeadline(time.Now().Add(10*time.Millisecond)))
	if err := readLines(r, func(string) {}); !errors.Is(err, os.ErrDeadlineExceeded) || errors.Is(err, io.EOF) {
		t.Errorf("got error %v, want os.ErrDeadlineExceeded", err)
	}
}

// TestPoolToInit: the pool is that of the flags or the named pool of the configuration.
func TestPoolToInit(t *testing.T) {
	config := t.TempDir() + "/config.yaml"
	check(t, os.WriteFile(config, []byte("pools:\n- {name: local, directory: {path: /x}}\n- {name: nas, nfs: {server: nas.lan, export: /e}}\n"), 0o600))
	for _, tc := range []struct {
		export namedExport
		names  []string
		want   pool.NFS
		err    string
	}{
		{names: []string{"nas"}, want: pool.NFS{Server: "nas.lan", Export: "/e"}},
		{export: namedExport{"[FD00::1]", "/e/"}, want: pool.NFS{Server: "fd00::1", Export: "/e"}},
		{export: namedExport{"nas", "e"}, err: `--export="e": expected`},
		{export: namedExport{"nas/x", "/e"}, err: `--server="nas/x": expected`},
		{names: []string{"missing"}, err: `pool "missing" is not in`},
		{names: []string{"local"}, err: "is not an nfs pool"},
	} {
		c, err := poolToInit(config, t.TempDir(), tc.export, tc.names)
		if (err == nil) != (tc.err == "") || err != nil && !strings.Contains(err.Error(), tc.err) {
			t.Errorf("%+v: got error %v, want %q", tc, err, tc.err)
			continue
		}
		if err == nil && (c.NFS.Server != tc.want.Server || c.NFS.Export != tc.want.Export) {
			t.Errorf("%+v: got %+v", tc, c.NFS)
		}
	}
	if names := sharedPoolNames(config, t.TempDir()); !slices.Equal(names, []string{"nas"}) {
		t.Errorf("got completions %q, want nas", names)
	}
}

// TestHungPool: listPool returns the problem of a pool whose disk does not answer.
func TestHungPool(t *testing.T) {
	state, path := t.TempDir(), t.TempDir()
	fifo := state + "/known-pools/p"
	check(t, errors.Join(os.Mkdir(state+"/known-pools", 0o700), syscall.Mkfifo(fifo, 0o600)))
	t.Cleanup(func() { // ends the read that hangs
		f, err := os.OpenFile(fifo, os.O_RDWR, 0)
		if err := errors.Join(err, f.Close()); err != nil {
			t.Error(err)
		}
	})
	all := listPool(10*time.Millisecond, listInput{Config: pool.Config{Name: "p", Directory: pool.Directory{Path: path}}, StateDir: state})
	if len(all) != 1 || all[0].Pool != "p" || !strings.Contains(all[0].Problem, "no answer within 10ms") {
		t.Errorf("got %+v, want one entry with a timeout", all)
	}
}

// TestInlinePod: the list shows the pod of an inline volume.
func TestInlinePod(t *testing.T) {
	v := volume.Volume{Version: volume.RecordVersion, FSType: "ext4", Ephemeral: &volume.Ephemeral{Pod: volume.Pod{Namespace: "shop", Name: "web"}}}
	inline := newListed("p", pool.Entry{Volume: v}, nil)
	claimed := newListed("p", pool.Entry{Volume: volume.Volume{Version: volume.RecordVersion, FSType: "ext4"}}, nil)
	if inline.Pod != "shop/web" || claimed.Pod != "" {
		t.Errorf("got pods %q and %q, want shop/web and none", inline.Pod, claimed.Pod)
	}
	all := volumeTable([]status.Volume{inline, claimed}, false)
	at := slices.IndexFunc(all.columns, func(c tableColumn) bool { return c.name == "POD" })
	if at < 0 || !slices.Equal(all.columns[at].cells, []string{"shop/web", "-"}) {
		t.Errorf("got table %+v, want the column POD with shop/web and -", all)
	}
}

// TestBlank: a volume without a recorded state is listed as blank only if it could be read completely.
func TestBlank(t *testing.T) {
	v := volume.Volume{Version: volume.RecordVersion, FSType: "ext4"}
	for _, tc := range []struct {
		entry pool.Entry
		want  string
	}{
		{pool.Entry{Volume: v}, "blank"},
		{pool.Entry{Volume: volume.Volume{Version: volume.RecordVersion, FSType: "ext4", Section: disk.Kind.Section()}, Device: "/dev/sda"}, "blank"},
		{pool.Entry{Volume: v, State: pool.Formatting}, "formatting"},
		{pool.Entry{Volume: v, Err: volume.ErrDamaged}, ""},
		{pool.Entry{Volume: v, State: pool.Formatted, Nodes: []string{"n"}, Err: volume.ErrDamaged}, "formatted"},
	} {
		if got := newListed("p", tc.entry, nil); got.State != tc.want {
			t.Errorf("%+v: got state %q, want %q", tc.entry, got.State, tc.want)
		}
	}
}

// TestNotReady: the error names each volume that is not mounted, even if the volume's driver hangs and has
// returned no error.
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
		t.Errorf("got error  %v\nwant error %s", err, want)
	}
	var out bytes.Buffer
	if err := writeTables(&out, statusTables(volumemanager.Status{Volumes: volumes}), false, false); err != nil || !strings.Contains(out.String(), "for 1h0m0s\n") {
		t.Errorf("got error %v, table:\n%s\nwant a volume in progress for 1h0m0s", err, &out)
	}
}

// TestLatestEvents: the table of events contains only the latest events.
func TestLatestEvents(t *testing.T) {
	var s volumemanager.Status
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.Local)
	for i := range 2 * shownEvents {
		s.Events = append(s.Events, event.Event{Time: at, Object: fmt.Sprint("pod default/", i), Reason: "FailedMount", Message: "volume data: add one", Count: 7})
	}
	var out bytes.Buffer
	check(t, writeTables(&out, statusTables(s), false, false))
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	last := strings.Join(strings.Fields(lines[len(lines)-1]), " ")
	if want := fmt.Sprintf("2026-01-02 03:04:05 pod default/%d FailedMount 7 volume data: add one", 2*shownEvents-1); len(lines) != shownEvents+1 || last != want {
		t.Errorf("got %d lines, the last is %q, want %d lines, the last is %q", len(lines), last, shownEvents+1, want)
	}
}

// TestAnswerInTime: a call that hangs is answered within the two minutes for which the volume manager waits, and
// the process ends as after a failed call.
func TestAnswerInTime(t *testing.T) {
	for name, tc := range map[string]struct {
		call   func(ctx context.Context, end <-chan struct{}) flexvolume.Answer
		answer string
		took   time.Duration
		err    error
	}{
		"done": {
			func(context.Context, <-chan struct{}) flexvolume.Answer {
				return flexvolume.Answer{Status: flexvolume.Success}
			},
			`{"status":"Success"}`, 0, nil,
		},
		"timeout that the call observes": {
			func(ctx context.Context, _ <-chan struct{}) flexvolume.Answer {
				<-ctx.Done()
				return flexvolume.Answer{Status: flexvolume.Failure, Message: ctx.Err().Error()}
			},
			`{"status":"Failure","message":"context deadline exceeded"}`, 110 * time.Second, errAnswered,
		},
		"timeout that the call ignores": {
			func(_ context.Context, end <-chan struct{}) flexvolume.Answer {
				<-end
				return flexvolume.Answer{Status: flexvolume.Success}
			},
			`{"status":"Failure","message":"timed out after 1m50s: the storage of the volume does not answer; the kubelet retries"}`, 115 * time.Second, errAnswered,
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				end := make(chan struct{})
				defer close(end)
				var out bytes.Buffer
				began := time.Now()
				err := answerInTime(&out, func(ctx context.Context) flexvolume.Answer { return tc.call(ctx, end) })
				if took := time.Since(began); !errors.Is(err, tc.err) || out.String() != tc.answer+"\n" || took != tc.took {
					t.Errorf("got %s, error %v after %v, want %s, error %v after %v", &out, err, took, tc.answer, tc.err, tc.took)
				}
			})
		})
	}
}
