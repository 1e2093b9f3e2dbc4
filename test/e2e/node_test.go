//go:build e2e

package e2e

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/moby/sys/mountinfo"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// What the driver keeps on the node.
const (
	stateDir    = "/var/lib/trivet"
	defaultPool = stateDir + "/pools/default"
)

// driverCommand is how the driver's command line begins.
var driverCommand = []string{"/usr/local/bin/trivet", "driver"}

// processes are those on the node whose command line starts with words.
func processes(words ...string) []int {
	var found []int
	all, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, path := range all {
		line, err := os.ReadFile(path)
		if err != nil || !strings.HasPrefix(string(line), strings.Join(words, "\x00")) {
			continue
		}
		if pid, err := strconv.Atoi(filepath.Base(filepath.Dir(path))); err == nil {
			found = append(found, pid)
		}
	}
	return found
}

// kill ends the processes at once; false if there were none.
func kill(words ...string) bool {
	killed := false
	for _, pid := range processes(words...) {
		killed = syscall.Kill(pid, syscall.SIGKILL) == nil || killed
	}
	return killed
}

// checkNothingLeft waits until nothing of any volume is left: no object in the
// cluster, no mount or loop device on the node, nothing in the default pool.
func checkNothingLeft(t *testing.T) {
	t.Helper()
	eventually(t, 2*time.Minute, "nothing left behind", func() (string, bool) {
		left := append(leftObjects(), append(leftMounts(t), append(leftDevices(), leftFiles()...)...)...)
		return strings.Join(left, "; "), len(left) == 0
	})
}

func leftObjects() []string {
	var left []string
	volumes, err := client.CoreV1().PersistentVolumes().List(context.Background(), metav1.ListOptions{})
	if err != nil {
		return []string{err.Error()}
	}
	for _, v := range volumes.Items {
		left = append(left, fmt.Sprintf("PersistentVolume %s (%s)", v.Name, v.Status.Phase))
	}
	attachments, err := client.StorageV1().VolumeAttachments().List(context.Background(), metav1.ListOptions{})
	if err != nil {
		return []string{err.Error()}
	}
	for _, a := range attachments.Items {
		left = append(left, "VolumeAttachment "+a.Name)
	}
	return left
}

// leftMounts are the mounts of volumes: staged ones and pods'.
func leftMounts(t *testing.T) []string {
	t.Helper()
	mounts, err := mountinfo.GetMounts(func(m *mountinfo.Info) (skip, stop bool) {
		staged := strings.Contains(m.Mountpoint, "/plugins/kubernetes.io/csi/")
		published := strings.Contains(m.Mountpoint, "/volumes/kubernetes.io~csi/") || strings.Contains(m.Mountpoint, "/volumeDevices/kubernetes.io~csi/")
		return !staged && !published, false
	})
	if err != nil {
		t.Fatal(err)
	}
	var left []string
	for _, m := range mounts {
		left = append(left, "mount "+m.Mountpoint)
	}
	return left
}

// leftDevices are the loop devices whose file lies, or lay, in a pool of the node.
func leftDevices() []string {
	var left []string
	files, _ := filepath.Glob("/sys/block/loop*/loop/backing_file")
	for _, f := range files {
		if backing, err := os.ReadFile(f); err == nil && strings.Contains(string(backing), "/volumes/pvc-") && ours(string(backing)) {
			left = append(left, "loop device of "+strings.TrimSpace(string(backing)))
		}
	}
	return left
}

// ours tells whether a loop device's file is of this cluster: loop devices are the
// machine's, and show their file's path as the namespace that asks sees it.
func ours(backing string) bool { return strings.HasPrefix(backing, stateDir) }

// leftFiles is what lies in the default pool: volumes, and what is being made or
// removed.
func leftFiles() []string {
	var left []string
	for _, dir := range []string{"volumes", ".trivet/tmp", ".trivet/trash"} {
		entries, err := os.ReadDir(filepath.Join(defaultPool, dir))
		if err != nil {
			left = append(left, err.Error())
		}
		for _, e := range entries {
			left = append(left, filepath.Join(defaultPool, dir, e.Name()))
		}
	}
	return left
}
