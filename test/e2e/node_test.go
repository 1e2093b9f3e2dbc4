//go:build e2e

package e2e

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
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

// leftDevices are the loop devices whose file is, or was, a volume of this node.
// Devices are the machine's, and the kernel shows the path of a file as the
// namespace saw it that bound it, which may be gone: inodes tell.
func leftDevices() []string {
	inodes, err := volumeInodes()
	if err != nil {
		return []string{err.Error()}
	}
	var left []string
	files, _ := filepath.Glob("/sys/block/loop*/loop/backing_file")
	for _, f := range files {
		device := "/dev/" + strings.Split(f, "/")[3]
		info, backing := loopInfo(device), backingFile(f)
		deleted := strings.HasSuffix(backing, "(deleted)") && strings.Contains(backing, "/pools/default/")
		if inodes[info.Inode] || deleted {
			left = append(left, device+" of "+backing)
		}
	}
	return left
}

func volumeInodes() (map[uint64]bool, error) {
	inodes := map[uint64]bool{}
	err := filepath.WalkDir(stateDir+"/pools", func(path string, d fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) { // removed meanwhile
			return nil
		}
		if err == nil && d.Type().IsRegular() {
			var st unix.Stat_t
			err = unix.Stat(path, &st)
			inodes[st.Ino] = true
		}
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		return err
	})
	return inodes, err
}

// loopInfo is what the kernel says of a loop device; nothing if it is free by now.
func loopInfo(device string) unix.LoopInfo64 {
	f, err := os.Open(device)
	if err != nil {
		return unix.LoopInfo64{}
	}
	defer f.Close()
	info, err := unix.IoctlLoopGetStatus64(int(f.Fd()))
	if err != nil {
		return unix.LoopInfo64{}
	}
	return *info
}

// backingFile is the path that the kernel shows.
func backingFile(path string) string {
	b, _ := os.ReadFile(path)
	return strings.TrimSpace(string(b))
}

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
