package kube_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/trivet-csi/trivet/cluster/kube"
	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/volume"
)

// TestKubelet uses real mounts, as the kubelet makes them for a container.
func TestKubelet(t *testing.T) {
	dir := testenv.Filesystem(t, "ext4", "64M")
	if err := os.MkdirAll(filepath.Join(dir, "pods", "uid"), 0o750); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "pods", "file"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		name, dir, uid, dirSays string
	}{
		{"own directory", dir, "uid", ""},
		{"no such pod", dir, "other", `kubernetes.kubeletDir "` + dir + `" is not the directory`},
		{"a file", dir, "file", "is not the directory"},
		{"missing", dir + "/none", "uid", "is not the directory"},
		{"no UID", dir, "", "POD_UID"},
	} {
		if err := (kube.Kubelet{Dir: tc.dir, PodUID: tc.uid}).CheckDir(); !says(err, tc.dirSays) {
			t.Errorf("%s: %v, want %q", tc.name, err, tc.dirSays)
		}
	}
	for how, want := range map[string]string{
		"--make-shared": "", "--make-private": "mountPropagation: Bidirectional", "--make-slave": "mountPropagation: Bidirectional",
	} {
		testenv.Run(t, "mount", "--make-shared", dir)
		testenv.Run(t, "mount", how, dir)
		if err := (kube.Kubelet{Dir: dir, PodUID: "uid"}).CheckPropagation(); !says(err, want) {
			t.Errorf("mount %s: %v, want %q", how, err, want)
		}
	}
}

// TestPluginsUnshared: volumes are staged below plugins, which may be a separate mount.
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
		t.Errorf("one mount: %v", err)
	}
	testenv.Run(t, "mount", "--bind", plugins, plugins)
	t.Cleanup(func() { testenv.Run(t, "umount", plugins) })
	testenv.Run(t, "mount", "--make-private", plugins)
	if err := kubelet.CheckPropagation(); !says(err, "the mount at "+plugins+" is not shared") {
		t.Errorf("plugins private: %v", err)
	}
}

// says reports whether an error is ErrPrecondition and contains a text; if the text is empty, whether there is
// no error.
func says(err error, text string) bool {
	if text == "" {
		return err == nil
	}
	return errors.Is(err, volume.ErrPrecondition) && strings.Contains(err.Error(), text)
}
