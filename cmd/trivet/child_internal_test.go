package main

import (
	"errors"
	"io"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/trivet-csi/trivet/pool"
)

// TestLines: what a child found is handed on, up to what it failed with.
func TestLines(t *testing.T) {
	for _, tc := range []struct {
		name, in, err string
		found         []string
	}{
		{"nothing", "", "", nil},
		{"all", "{\"found\":\"a\"}\n{\"found\":\"b\"}\n", "", []string{"a", "b"}},
		{"a failure", "{\"found\":\"a\"}\n{\"error\":\"disk on fire\"}\n{\"found\":\"b\"}\n", "disk on fire", []string{"a"}},
		{"cut short", "{\"found\":\"a\"}\n{\"fou", "", []string{"a"}},
		{"no line of ours", "panic: x\n", "invalid character", nil},
	} {
		var found []string
		err := readLines(strings.NewReader(tc.in), func(s string) { found = append(found, s) })
		if !slices.Equal(found, tc.found) || (err == nil) != (tc.err == "") || err != nil && !strings.Contains(err.Error(), tc.err) {
			t.Errorf("%s: %q, %v", tc.name, found, err)
		}
	}
}

// TestHungChild: a child that says nothing is not waited for.
func TestHungChild(t *testing.T) {
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	defer w.Close()
	if err := r.SetReadDeadline(time.Now().Add(10 * time.Millisecond)); err != nil {
		t.Fatal(err)
	}
	if err := readLines(r, func(string) {}); !errors.Is(err, os.ErrDeadlineExceeded) || errors.Is(err, io.EOF) {
		t.Error(err)
	}
}

func TestPoolToInit(t *testing.T) {
	config := t.TempDir() + "/config.yaml"
	if err := os.WriteFile(config, []byte("pools:\n- {name: local, directory: {path: /x}}\n- {name: nas, nfs: {server: nas.lan, export: /e}}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		server, export string
		names          []string
		want           pool.NFS
		err            string
	}{
		{names: []string{"nas"}, want: pool.NFS{Server: "nas.lan", Export: "/e"}},
		{server: "[FD00::1]", export: "/e/", want: pool.NFS{Server: "fd00::1", Export: "/e"}},
		{server: "nas", export: "e", err: `--export="e": want`},
		{server: "nas/x", export: "/e", err: `--server="nas/x": want`},
		{server: "nas", export: "/e", names: []string{"nas"}, err: `unexpected argument "nas"`},
		{err: "want the name of one pool"},
		{names: []string{"gone"}, err: `pool "gone" is not in`},
		{names: []string{"local"}, err: "is a directory of a node"},
	} {
		c, err := poolToInit(config, t.TempDir(), tc.server, tc.export, tc.names)
		if (err == nil) != (tc.err == "") || err != nil && !strings.Contains(err.Error(), tc.err) {
			t.Errorf("%+v: %v", tc, err)
			continue
		}
		if err == nil && (c.NFS.Server != tc.want.Server || c.NFS.Export != tc.want.Export) {
			t.Errorf("%+v: %+v", tc, c.NFS)
		}
	}
}
