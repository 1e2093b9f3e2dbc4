package cgroup_test

import (
	"errors"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/linux/cgroup"
)

// hierarchy creates directories and files in a directory. The content of a file follows its path after a colon.
func hierarchy(t *testing.T, entries ...string) cgroup.Hierarchy {
	t.Helper()
	root := t.TempDir()
	for _, e := range entries {
		path, content, isFile := strings.Cut(e, ":")
		dir := filepath.Join(root, path)
		if isFile {
			dir = filepath.Dir(dir)
		}
		must(t, os.MkdirAll(dir, 0o755))
		if isFile {
			must(t, os.WriteFile(filepath.Join(root, path), []byte(content), 0o644))
		}
	}
	return cgroup.Hierarchy(root)
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

const v2 = "cgroup.controllers:cpuset cpu io memory pids\n"

// TestPods: pods are found in the cgroups that the kubelet creates with each of its drivers, and nothing else.
func TestPods(t *testing.T) {
	const uid, other = "0a1b2c3d-1111-2222-3333-444455556666", "f00d0000-1111-2222-3333-444455556666"
	for name, tc := range map[string]struct {
		entries []string
		want    map[string]string
	}{
		"systemd": {
			[]string{
				v2, "system.slice/kubelet.service", "user.slice/user-0.slice/user@0.service/kubepods.slice/kubepods-pod9.slice",
				"kubepods.slice/kubepods-pod0a1b2c3d_1111_2222_3333_444455556666.slice/cri-containerd-1.scope",
				"kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-podf00d0000_1111_2222_3333_444455556666.slice",
			},
			map[string]string{
				uid:   "kubepods.slice/kubepods-pod0a1b2c3d_1111_2222_3333_444455556666.slice",
				other: "kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-podf00d0000_1111_2222_3333_444455556666.slice",
			},
		},
		"cgroupfs": {
			[]string{v2, "kubepods/pod" + uid + "/1", "kubepods/burstable/pod" + other, "kubepods/besteffort"},
			map[string]string{uid: "kubepods/pod" + uid, other: "kubepods/burstable/pod" + other},
		},
		"static pod": {
			[]string{v2, "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod5f8d0f5a1c.slice"},
			map[string]string{"5f8d0f5a1c": "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod5f8d0f5a1c.slice"},
		},
		"kubelet with a root": {
			[]string{v2, "kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-burstable.slice/kubelet-kubepods-burstable-podf00d0000_1111_2222_3333_444455556666.slice"},
			map[string]string{other: "kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-burstable.slice/kubelet-kubepods-burstable-podf00d0000_1111_2222_3333_444455556666.slice"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			h := hierarchy(t, tc.entries...)
			pods, err := h.Pods()
			must(t, err)
			want := map[string]cgroup.Pod{}
			for uid, dir := range tc.want {
				want[uid] = cgroup.Pod(filepath.Join(string(h), dir))
			}
			if !maps.Equal(pods, want) {
				t.Errorf("got pods %v, want %v", pods, want)
			}
		})
	}
}

// TestCheck: a node that cannot limit I/O is recognised, with the reason.
func TestCheck(t *testing.T) {
	const all = "kubepods/cgroup.subtree_control:cpu io memory\n"
	for name, tc := range map[string]struct {
		entries []string
		says    string // empty if limits are possible
	}{
		"possible":              {[]string{v2, all, "kubepods/io.max:"}, ""},
		"no throttling":         {[]string{v2, all}, "CONFIG_BLK_DEV_THROTTLING"},
		"cgroup v1":             {[]string{"blkio/kubepods", all}, "not a cgroup v2 hierarchy"},
		"no controller io":      {[]string{"cgroup.controllers:cpu memory\n", all}, "without the controller io"},
		"no controller memory":  {[]string{"cgroup.controllers:cpu io\n", all}, "without the controller memory"},
		"not enabled for pods":  {[]string{v2, "kubepods/cgroup.subtree_control:cpu memory\n"}, "without the controller io"},
		"enabled for a class":   {[]string{v2, all, "kubepods/io.max:", "kubepods/burstable/cgroup.subtree_control:io memory\n", "kubepods/burstable/podx"}, ""},
		"not for a class":       {[]string{v2, all, "kubepods/io.max:", "kubepods/burstable/cgroup.subtree_control:cpu memory\n", "kubepods/burstable/podx"}, "without the controller io"},
		"a class without pods":  {[]string{v2, all, "kubepods/io.max:", "kubepods/burstable/cgroup.subtree_control:\n"}, ""},
		"no cgroup of all pods": {[]string{v2, "system.slice/kubelet.service"}, "no cgroup kubepods"},
	} {
		t.Run(name, func(t *testing.T) {
			err := hierarchy(t, tc.entries...).Check()
			switch {
			case tc.says == "" && err != nil:
				t.Errorf("got %v, want that limits are possible", err)
			case tc.says != "" && (!errors.Is(err, cgroup.ErrUnsupported) || !strings.Contains(err.Error(), tc.says)):
				t.Errorf("got %v, want ErrUnsupported with %q", err, tc.says)
			}
		})
	}
}

// TestLimit: limits are written in the format of io.max, and only if they change.
func TestLimit(t *testing.T) {
	device := unix.Mkdev(7, 3)
	for name, tc := range map[string]struct {
		before string
		limits cgroup.Limits
		want   string // the content afterwards; empty if nothing is written
	}{
		"first":     {"", cgroup.Limits{ReadBytes: 1, WriteBytes: 2, ReadIOPS: 3, WriteIOPS: 4}, "7:3 rbps=1 wbps=2 riops=3 wiops=4"},
		"changed":   {"8:0 rbps=5 wbps=max riops=max wiops=max\n7:3 rbps=1 wbps=max riops=max wiops=max\n", cgroup.Limits{WriteIOPS: 9}, "7:3 rbps=max wbps=max riops=max wiops=9"},
		"the same":  {"7:3 rbps=1 wbps=max riops=max wiops=max\n", cgroup.Limits{ReadBytes: 1}, ""},
		"removed":   {"7:3 rbps=1 wbps=max riops=max wiops=max\n", cgroup.Limits{}, "7:3 rbps=max wbps=max riops=max wiops=max"},
		"none":      {"7:31 rbps=1 wbps=max riops=max wiops=max\n", cgroup.Limits{}, ""},
		"unchanged": {"", cgroup.Limits{}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			h := hierarchy(t, v2, "kubepods/podx/io.max:"+tc.before)
			pods, err := h.Pods()
			must(t, err)
			must(t, pods["x"].Limit(device, tc.limits))
			b, err := os.ReadFile(filepath.Join(string(h), "kubepods/podx/io.max"))
			must(t, err)
			want := tc.want
			if want == "" {
				want = tc.before
			}
			if string(b) != want {
				t.Errorf("io.max contains %q, want %q", b, want)
			}
		})
	}
}

// TestLimitMissing: the cgroup of a pod that has ended, and one without the controller io, are told apart.
func TestLimitMissing(t *testing.T) {
	h := hierarchy(t, v2, "kubepods/poda", "kubepods/podb")
	pods, err := h.Pods()
	must(t, err)
	if got := slices.Sorted(maps.Keys(pods)); !slices.Equal(got, []string{"a", "b"}) {
		t.Fatalf("got pods %q, want a and b", got)
	}
	must(t, os.Remove(string(pods["a"])))
	if err := pods["a"].Limit(unix.Mkdev(7, 3), cgroup.Limits{}); !errors.Is(err, fs.ErrNotExist) || errors.Is(err, cgroup.ErrUnsupported) {
		t.Errorf("got %v for a pod that has ended, want ErrNotExist", err)
	}
	err = pods["b"].Limit(unix.Mkdev(7, 3), cgroup.Limits{ReadIOPS: 1})
	if !errors.Is(err, cgroup.ErrUnsupported) || errors.Is(err, fs.ErrNotExist) || !strings.Contains(err.Error(), "subtree_control") {
		t.Errorf("got %v for a pod without the controller io, want ErrUnsupported with the reason", err)
	}
}
