package volumemanager

import (
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"testing"
)

// manyFiles is a number of files that is so large that the manager is stopped before it has changed the
// group of all of them.
const manyFiles = 30000

// TestOwnershipInterrupted stops the manager while it changes the group of a volume's files. The
// restarted manager changes the rest before the pod is ready, although the volume's root directory
// already had the group before the test.
func TestOwnershipInterrupted(t *testing.T) {
	m := newMachineWithDriver(t)
	m.installFlex("loop")
	m.put("claim", claim("csi", "xfs", "1Gi", ""))
	volumes := map[string]string{
		"csi":  claimed("csi"),
		"flex": "{name: flex, flexVolume: {driver: trivet/loop, fsType: xfs, options: {size: 1Gi, volume: mine}}}",
	}
	for name, end := range map[string]func(*process){
		"kill":    (*process).kill,
		"SIGTERM": func(p *process) { must(t, p.stop()) },
	} {
		for kind, volume := range volumes {
			uid := "reader-" + kind
			m.put("writer", podOf("writer", volume))
			createFiles(t, m.await("writer")[kind].Path)
			m.remove("writer")
			m.awaitRemoved("writer")

			m.put("reader", podWith(uid, fmt.Sprintf("securityContext: {fsGroup: %d}\n  containers: [{name: main, image: none}]", group), volume))
			names := m.awaitFirstChange(uid)
			end(m.manager)
			first, last := gidOf(t, names[0]), gidOf(t, names[len(names)-1])
			m.startManager()
			if first != group || last == group {
				t.Fatalf("%s with %s: group of the first file is %d, of the last file %d, so the change was not interrupted: raise manyFiles", kind, name, first, last)
			}
			path := m.await(uid)[kind].Path
			if n := wrongGroup(t, path); n > 0 {
				t.Errorf("%s after %s: got %d of %d files without the group, want 0", kind, name, n, manyFiles)
			}
			m.checkModeKept(uid, kind, path)
			m.remove("reader")
			m.awaitRemoved(uid)
		}
	}
	m.removeAll()
	m.checkFlexClean()
}

// createFiles creates manyFiles files of group 0 in a directory, and gives the directory to the pod's
// group.
func createFiles(t *testing.T, dir string) {
	t.Helper()
	for i := range manyFiles {
		file := filepath.Join(dir, fmt.Sprint(i))
		must(t, os.WriteFile(file, nil, 0o600))
		must(t, os.Lchown(file, 0, 0))
	}
	must(t, os.Chown(dir, 0, group))
	must(t, os.Chmod(dir, os.ModeSetgid|0o770))
}

// awaitFirstChange waits until the first file of a pod's volume has the group. It returns the files in
// the order in which their group is changed.
func (m *machine) awaitFirstChange(uid string) (names []string) {
	m.t.Helper()
	eventually(m.t, func() error {
		for _, pattern := range []string{"kubernetes.io~csi/*/mount", "trivet~loop/*"} {
			dirs, err := filepath.Glob(filepath.Join(m.root, "pods", uid, "volumes", pattern))
			if err != nil {
				return err
			}
			for _, dir := range dirs {
				if names == nil {
					names = list(dir)
				}
			}
		}
		if len(names) < manyFiles {
			names = nil
			return fmt.Errorf("the volume of %s is not mounted", uid)
		}
		if gidOf(m.t, names[0]) != group {
			return fmt.Errorf("%s does not have the group", names[0])
		}
		return nil
	})
	return names
}

// list returns the entries of a directory in their order on disk; nil if it cannot be read.
func list(dir string) (paths []string) {
	f, err := os.Open(dir)
	if err != nil {
		return nil
	}
	defer f.Close()
	names, err := f.Readdirnames(-1)
	if err != nil {
		return nil
	}
	for _, name := range names {
		paths = append(paths, filepath.Join(dir, name))
	}
	return paths
}

// gidOf returns the group of a file.
func gidOf(t *testing.T, path string) uint32 {
	t.Helper()
	info, err := os.Lstat(path)
	must(t, err)
	return info.Sys().(*syscall.Stat_t).Gid
}

// wrongGroup returns the number of files that do not have the pod's group.
func wrongGroup(t *testing.T, dir string) (n int) {
	t.Helper()
	for _, path := range list(dir) {
		if gidOf(t, path) != group {
			n++
		}
	}
	return n
}

// checkModeKept checks that a restarted manager does not change a mode that the pod has set.
func (m *machine) checkModeKept(uid, volume, path string) {
	m.t.Helper()
	file := filepath.Join(path, "0")
	must(m.t, os.Chmod(file, 0o600))
	m.manager.kill()
	m.startManager()
	m.await(uid)
	info, err := os.Stat(file)
	must(m.t, err)
	if info.Mode() != 0o600 {
		m.t.Errorf("volume %s: mode of a file after the restart: got %v, want -rw------- as the pod has set", volume, info.Mode())
	}
}
