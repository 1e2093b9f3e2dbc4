package main

import (
	"errors"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/trivet-csi/trivet/backend/disk"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// TestHungPool: a pool that gives no answer is listed as such.
func TestHungPool(t *testing.T) {
	state, path := t.TempDir(), t.TempDir()
	fifo := state + "/known-pools/p"
	if err := errors.Join(os.Mkdir(state+"/known-pools", 0o700), syscall.Mkfifo(fifo, 0o600)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { // ends the read
		f, err := os.OpenFile(fifo, os.O_RDWR, 0)
		if err := errors.Join(err, f.Close()); err != nil {
			t.Error(err)
		}
	})
	all := listPool(10*time.Millisecond, listInput{Config: pool.Config{Name: "p", Directory: pool.Directory{Path: path}}, StateDir: state})
	if len(all) != 1 || all[0].Pool != "p" || !strings.Contains(all[0].Problem, "no answer within 10ms") {
		t.Errorf("%+v", all)
	}
}

// TestInlineIsMarked: whose an inline volume is can be seen.
func TestInlineIsMarked(t *testing.T) {
	v := volume.Volume{Version: volume.RecordVersion, FSType: "ext4", Ephemeral: &volume.Ephemeral{Pod: volume.Pod{Namespace: "shop", Name: "web"}}}
	inline := list("p", pool.Entry{Volume: v}, nil)
	claimed := list("p", pool.Entry{Volume: volume.Volume{Version: volume.RecordVersion, FSType: "ext4"}}, nil)
	if inline.Pod != "shop/web" || claimed.Pod != "" {
		t.Errorf("%q, %q", inline.Pod, claimed.Pod)
	}
	rows := table([]listed{inline, claimed})
	if at := slices.Index(rows[0], "POD"); at < 0 || rows[1][at] != "shop/web" || rows[2][at] != "-" {
		t.Errorf("%q", rows)
	}
}

// TestBlank: a volume is called blank only if all of it could be looked at.
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
		if got := list("p", tc.entry, nil); got.State != tc.want {
			t.Errorf("%+v: state %q, want %q", tc.entry, got.State, tc.want)
		}
	}
}
