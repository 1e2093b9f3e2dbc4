package kube_test

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/trivet-csi/trivet/cluster/kube"
	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/volume"
)

// TestKubelet checks directories and the propagation of real mounts.
func TestKubelet(t *testing.T) {
	dir := testenv.Filesystem(t, "ext4", "64M")
	if err := os.MkdirAll(filepath.Join(dir, "pods", "uid"), 0o750); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "pods", "file"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		name, dir, uid, want string
	}{
		{"own directory", dir, "uid", ""},
		{"no such pod", dir, "other", `kubernetes.kubeletDir "` + dir + `" is not the directory`},
		{"pod directory is a file", dir, "file", "is not the directory"},
		{"missing directory", dir + "/none", "uid", "is not the directory"},
		{"no pod UID", dir, "", "POD_UID"},
	} {
		if err := (kube.Kubelet{Dir: tc.dir, PodUID: tc.uid}).CheckDir(); !isPrecondition(err, tc.want) {
			t.Errorf("%s: got %v, want %q", tc.name, err, tc.want)
		}
	}
	for option, want := range map[string]string{
		"--make-shared": "", "--make-private": "mountPropagation: Bidirectional", "--make-slave": "mountPropagation: Bidirectional",
	} {
		testenv.Run(t, "mount", "--make-shared", dir)
		testenv.Run(t, "mount", option, dir)
		if err := (kube.Kubelet{Dir: dir, PodUID: "uid"}).CheckPropagation(); !isPrecondition(err, want) {
			t.Errorf("mount %s: got %v, want %q", option, err, want)
		}
	}
}

// TestPluginsUnshared: CheckPropagation fails if only the directory plugins is a mount that is not shared.
func TestPluginsUnshared(t *testing.T) {
	dir := testenv.Filesystem(t, "ext4", "64M")
	plugins := filepath.Join(dir, "plugins")
	for _, path := range []string{filepath.Join(dir, "pods", "uid"), plugins} {
		if err := os.MkdirAll(path, 0o750); err != nil {
			t.Fatal(err)
		}
	}
	testenv.Run(t, "mount", "--make-shared", dir)
	kubelet := kube.Kubelet{Dir: dir, PodUID: "uid"}
	if err := kubelet.CheckPropagation(); err != nil {
		t.Errorf("one shared mount: %v", err)
	}
	testenv.Run(t, "mount", "--bind", plugins, plugins)
	t.Cleanup(func() { testenv.Run(t, "umount", plugins) })
	testenv.Run(t, "mount", "--make-private", plugins)
	if err := kubelet.CheckPropagation(); !isPrecondition(err, "the mount at "+plugins+" is not shared") {
		t.Errorf("plugins is a private mount: got %v, want an error about %s", err, plugins)
	}
}

// isPrecondition reports whether an error is ErrPrecondition and contains a text. If the text is empty, it
// reports whether err is nil.
func isPrecondition(err error, text string) bool {
	if text == "" {
		return err == nil
	}
	return errors.Is(err, volume.ErrPrecondition) && strings.Contains(err.Error(), text)
}

// TestStaged: the records of the kubelet name the staged volumes of the driver. Torn records and those of other drivers are ignored.
func TestStaged(t *testing.T) {
	dir := t.TempDir()
	record := func(at, content string) {
		path := filepath.Join(dir, "plugins/kubernetes.io/csi", at)
		if err := errors.Join(os.MkdirAll(path, 0o700), os.WriteFile(filepath.Join(path, "vol_data.json"), []byte(content), 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	if got := (kube.Kubelet{Dir: dir}).Staged("d"); len(got) != 0 {
		t.Errorf("got %+v without records, want none", got)
	}
	record("d/0123", `{"driverName": "d", "volumeHandle": "loop:p.01234567:a", "specVolID": "pv"}`)
	record("d/4567", `{"driverName": "d", "vol`)
	record("other/0123", `{"driverName": "other", "volumeHandle": "b"}`)
	record("volumeDevices/pv-c/data", `{"driverName": "d", "volumeHandle": "c"}`)
	record("volumeDevices/pv-e/data", `{"driverName": "other", "volumeHandle": "e"}`)
	want := []kube.StagedVolume{
		{Handle: "loop:p.01234567:a", Path: filepath.Join(dir, "plugins/kubernetes.io/csi/d/0123/globalmount")}, {Handle: "c"},
	}
	if got := (kube.Kubelet{Dir: dir}).Staged("d"); !slices.Equal(got, want) {
		t.Errorf("got %+v, want %+v", got, want)
	}
}
