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

	"github.com/trivet-csi/trivet/internal/testenv"
)

// Directories of the driver on a node.
const (
	stateDir    = "/var/lib/trivet"
	defaultPool = stateDir + "/pools/default"
)

// node is a node of the cluster. All nodes share the machine's devices and one network, and the tests see the
// processes of all nodes. Each node has its own mount namespace and its own files below /var/lib.
type node struct {
	name string
	dir  string // the node's directory in the state directory of the cluster
}

// nodes returns all nodes of the cluster.
func nodes() []node {
	var all []node
	found, _ := filepath.Glob(filepath.Join(os.Getenv("TRIVET_E2E_STATE"), "n[1-9]"))
	for _, dir := range found {
		all = append(all, node{"node" + strings.TrimPrefix(filepath.Base(dir), "n"), dir})
	}
	return all
}

// nodeNamed returns the node with a name, which must exist.
func nodeNamed(t *testing.T, name string) node {
	t.Helper()
	all := nodes()
	i := slices.IndexFunc(all, func(n node) bool { return n.name == name })
	if i < 0 {
		t.Fatalf("got nodes %v, want one with the name %q", all, name)
	}
	return all[i]
}

// path returns the path, on the machine, of a file below the node's /var/lib. The node's mounts are not
// visible there.
func (n node) path(file string) string {
	return filepath.Join(n.dir, "lib", strings.TrimPrefix(file, "/var/lib/"))
}

// throughMounts returns the path at which a file of the node is visible through the node's mounts.
func (n node) throughMounts(file string) string {
	pid, _ := os.ReadFile(filepath.Join(n.dir, "pid")) // without the PID, the path does not exist
	return filepath.Join("/proc", strings.TrimSpace(string(pid)), "root", file)
}

// mounts returns the mounts in the node's mount namespace for which wanted returns true.
func (n node) mounts(t *testing.T, wanted func(mountpoint string) bool) []*mountinfo.Info {
	t.Helper()
	f, err := os.Open(filepath.Join("/proc", strings.TrimSpace(read(t, filepath.Join(n.dir, "pid"))), "mountinfo"))
	must(t, err)
	defer f.Close()
	mounts, err := mountinfo.GetMountsFromReader(f, func(m *mountinfo.Info) (skip, stop bool) { return !wanted(m.Mountpoint), false })
	must(t, err)
	return mounts
}

// kubeletProcesses returns the processes of the node's kubelet.
func (n node) kubeletProcesses() []int {
	return processes("kubelet", "--config="+filepath.Join(n.dir, "kubelet.yaml"))
}

// containerProcesses returns all processes in the node's containers.
func (n node) containerProcesses() []int {
	return slices.DeleteFunc(processes(), func(pid int) bool { return !n.runs(pid) })
}

// runs reports whether a process is in a container of the node.
func (n node) runs(pid int) bool { return inCgroup(pid, "/"+filepath.Base(n.dir)+"/kubepods/") }

// driverProcesses returns the processes of the driver that serve the node.
func (n node) driverProcesses() []int {
	all := processes(driver, "driver", "--services=node")
	all = append(all, processes(driver, "driver", "--node-id=")...) // shape oneNode
	return slices.DeleteFunc(all, func(pid int) bool { return !n.runs(pid) })
}

// inCgroup reports whether the path of a process's cgroup contains a text.
func inCgroup(pid int, part string) bool {
	groups, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	return strings.Contains(string(groups), part)
}

// processes returns the processes of all nodes whose command line begins with the given words.
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

// kill sends SIGKILL to processes and returns how many existed.
func kill(pids ...int) int {
	killed := 0
	for _, pid := range pids {
		if syscall.Kill(pid, syscall.SIGKILL) == nil {
			killed++
		}
	}
	return killed
}

// checkNothingLeft waits until no volume has an object in the cluster, or a mount, a loop device or a file in
// the default pool of any node.
func checkNothingLeft(t *testing.T) {
	t.Helper()
	eventually(t, 2*time.Minute, "no objects, mounts, devices and files of volumes are left", func() (string, bool) {
		left := leftObjects()
		for _, n := range nodes() {
			left = append(left, n.leftInUse(t)...)
			left = append(left, n.leftFiles()...)
		}
		return strings.Join(left, "; "), len(left) == 0
	})
}

// checkDetached waits until no volume of the node is mounted or has a loop device.
func (n node) checkDetached(t *testing.T) {
	t.Helper()
	eventually(t, 2*time.Minute, "no volume is mounted or attached on "+n.name, func() (string, bool) {
		left := n.leftInUse(t)
		return strings.Join(left, "; "), len(left) == 0
	})
}

// leftInUse lists the mounts and loop devices of volumes.
func (n node) leftInUse(t *testing.T) []string {
	t.Helper()
	return append(n.leftMounts(t), n.leftDevices()...)
}

// leftObjects lists the PersistentVolumes and VolumeAttachments.
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

// leftMounts lists the staging mounts and the pods' mounts of volumes.
func (n node) leftMounts(t *testing.T) []string {
	t.Helper()
	var left []string
	for _, m := range n.mounts(t, isVolumeMount) {
		left = append(left, n.name+" has mount "+m.Mountpoint)
	}
	return left
}

// isVolumeMount reports whether a mount point belongs to a CSI volume.
func isVolumeMount(mountpoint string) bool {
	return slices.ContainsFunc([]string{"/plugins/kubernetes.io/csi/", "/volumes/kubernetes.io~csi/", "/volumeDevices/kubernetes.io~csi/"},
		func(part string) bool { return strings.Contains(mountpoint, part) })
}

// leftDevices lists the loop devices whose backing file is a file in the node's pools, or a deleted file of any
// node's default pool. It compares inodes, because the kernel shows the path that a backing file has in the
// mount namespace of the process that bound the device, and the paths of two nodes can be equal.
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

// volumeInodes returns the inodes of all files in the node's pools.
func (n node) volumeInodes() (map[uint64]bool, error) {
	inodes := map[uint64]bool{}
	err := filepath.WalkDir(n.path(stateDir+"/pools"), func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() {
			var st unix.Stat_t
			err = unix.Stat(path, &st)
			inodes[st.Ino] = true
		}
		if errors.Is(err, fs.ErrNotExist) { // removed during the walk
			return nil
		}
		return err
	})
	return inodes, err
}

// loopInfo returns the status of a loop device, or an empty one if the device is not bound.
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

// backingFile reads the path of a backing file from a file in /sys.
func backingFile(path string) string {
	b, _ := os.ReadFile(path)
	return strings.TrimSpace(string(b))
}

// leftFiles returns the paths of the volumes and snapshots in the default pool, including temporary and deleted
// ones.
func (n node) leftFiles() []string {
	left, err := testenv.PoolEntries(n.path(defaultPool))
	if err != nil {
		return []string{err.Error()}
	}
	return left
}
