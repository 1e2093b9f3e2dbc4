//go:build e2e

package e2e

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// What the driver keeps on a node.
const (
	stateDir    = "/var/lib/trivet"
	defaultPool = stateDir + "/pools/default"
)

// node is one of the cluster's, as seen from beside the control plane: processes of
// all nodes are there, with one network and the machine's devices; mounts and files
// are each node's own.
type node struct {
	name string
	dir  string // the cluster's folder of it
}

// nodes are all of the cluster.
func nodes() []node {
	var all []node
	found, _ := filepath.Glob(filepath.Join(os.Getenv("TRIVET_E2E_STATE"), "n[1-9]"))
	for _, dir := range found {
		all = append(all, node{"node" + strings.TrimPrefix(filepath.Base(dir), "n"), dir})
	}
	return all
}

func nodeNamed(t *testing.T, name string) node {
	t.Helper()
	all := nodes()
	i := slices.IndexFunc(all, func(n node) bool { return n.name == name })
	if i < 0 {
		t.Fatalf("no node %q in %v", name, all)
	}
	return all[i]
}

// path is where a file below the node's /var/lib is found.
func (n node) path(file string) string {
	return filepath.Join(n.dir, "lib", strings.TrimPrefix(file, "/var/lib/"))
}

// mounts are those that the node sees and wanted returns true for.
func (n node) mounts(t *testing.T, wanted func(mountpoint string) bool) []*mountinfo.Info {
	t.Helper()
	f, err := os.Open(filepath.Join("/proc", strings.TrimSpace(read(t, filepath.Join(n.dir, "pid"))), "mountinfo"))
	must(t, err)
	defer f.Close()
	mounts, err := mountinfo.GetMountsFromReader(f, func(m *mountinfo.Info) (skip, stop bool) { return !wanted(m.Mountpoint), false })
	must(t, err)
	return mounts
}

// kubelet are the processes of the node's kubelet.
func (n node) kubelet() []int {
	return processes("kubelet", "--config="+filepath.Join(n.dir, "kubelet.yaml"))
}

// contained are all processes in the node's containers.
func (n node) contained() []int {
	return slices.DeleteFunc(processes(), func(pid int) bool { return !inGroup(pid, "/"+filepath.Base(n.dir)+"/kubepods/") })
}

// inGroup tells whether a process is in a cgroup whose path has a part.
func inGroup(pid int, part string) bool {
	groups, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	return strings.Contains(string(groups), part)
}

// processes are those of all nodes whose command line starts with words.
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

// kill ends the processes at once, and returns how many.
func kill(pids ...int) int {
	killed := 0
	for _, pid := range pids {
		if syscall.Kill(pid, syscall.SIGKILL) == nil {
			killed++
		}
	}
	return killed
}

// checkNothingLeft waits until nothing of any volume is left: no object in the
// cluster, on no node a mount, a loop device or anything in the default pool.
func checkNothingLeft(t *testing.T) {
	t.Helper()
	eventually(t, 2*time.Minute, "nothing left behind", func() (string, bool) {
		left := leftObjects()
		for _, n := range nodes() {
			left = append(left, n.leftInUse(t)...)
			left = append(left, n.leftFiles()...)
		}
		return strings.Join(left, "; "), len(left) == 0
	})
}

// checkDetached waits until no volume of the node is mounted or has a device.
func (n node) checkDetached(t *testing.T) {
	t.Helper()
	eventually(t, 2*time.Minute, "nothing mounted or attached on "+n.name, func() (string, bool) {
		left := n.leftInUse(t)
		return strings.Join(left, "; "), len(left) == 0
	})
}

// leftInUse are mounts and devices of volumes.
func (n node) leftInUse(t *testing.T) []string {
	t.Helper()
	return append(n.leftMounts(t), n.leftDevices()...)
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
func (n node) leftMounts(t *testing.T) []string {
	t.Helper()
	var left []string
	for _, m := range n.mounts(t, ofVolume) {
		left = append(left, n.name+" has mount "+m.Mountpoint)
	}
	return left
}

func ofVolume(mountpoint string) bool {
	return slices.ContainsFunc([]string{"/plugins/kubernetes.io/csi/", "/volumes/kubernetes.io~csi/", "/volumeDevices/kubernetes.io~csi/"},
		func(part string) bool { return strings.Contains(mountpoint, part) })
}

// leftDevices are the loop devices whose file is a volume of this node, or was one of
// any. Devices are the machine's, and the kernel shows the path of a file as the
// namespace saw it that bound it, which may be gone: inodes tell.
func (n node) leftDevices() []string {
	inodes, err := n.volumeInodes()
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
			left = append(left, n.name+" has "+device+" of "+backing)
		}
	}
	return left
}

func (n node) volumeInodes() (map[uint64]bool, error) {
	inodes := map[uint64]bool{}
	err := filepath.WalkDir(n.path(stateDir+"/pools"), func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() {
			var st unix.Stat_t
			err = unix.Stat(path, &st)
			inodes[st.Ino] = true
		}
		if errors.Is(err, fs.ErrNotExist) { // removed meanwhile
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

// leftFiles is what lies in the default pool: volumes, snapshots, and what is being made
// or removed.
func (n node) leftFiles() []string {
	var left []string
	for _, dir := range []string{"volumes", "snapshots", ".trivet/tmp", ".trivet/trash"} {
		names, err := n.inPool(dir)
		if err != nil {
			left = append(left, err.Error())
		}
		for _, name := range names {
			left = append(left, n.name+" has "+filepath.Join(dir, name))
		}
	}
	return left
}

// inPool is what a directory of the default pool holds.
func (n node) inPool(dir string) ([]string, error) {
	entries, err := os.ReadDir(n.path(filepath.Join(defaultPool, dir)))
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names, err
}
