package volumemanager

import (
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"testing"
)

// manyFiles is a number of files whose group the manager cannot change before it is stopped.
const manyFiles = 30000

// TestOwnershipCutOff stops the manager while it changes the group of a volume's files. The next one
// completes this before the pod is ready, although the volume's root directory has the group.
func TestOwnershipCutOff(t *testing.T) {
	g := newTrivet(t)
	g.installFlex("loop")
	g.put("claim", claim("csi", "xfs", "1Gi", ""))
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
			g.put("writer", podOf("writer", volume))
			fillFor(t, g.await("writer")[kind].Path)
			g.remove("writer")
			g.gone("writer")

			g.put("reader", podWith(uid, fmt.Sprintf("securityContext: {fsGroup: %d}\n  containers: [{name: main, image: none}]", group), volume))
			names := g.begun(uid)
			end(g.manager)
			first, last := gidOf(t, names[0]), gidOf(t, names[len(names)-1])
			g.startManager()
			if first != group || last == group {
				t.Fatalf("%s with %s: not interrupted in the middle: %d and %d: raise manyFiles", kind, name, first, last)
			}
			path := g.await(uid)[kind].Path
			if n := wrongGroup(t, path); n > 0 {
				t.Errorf("%s after %s: %d of %d files are without the group", kind, name, n, manyFiles)
			}
			g.keepsMode(uid, kind, path)
			g.remove("reader")
			g.gone(uid)
		}
	}
	g.wantNothing()
	g.wantFlexClean()
}

// fillFor creates many files of group 0 in a directory with the pod's group.
func fillFor(t *testing.T, dir string) {
	t.Helper()
	for i := range manyFiles {
		file := filepath.Join(dir, fmt.Sprint(i))
		must(t, os.WriteFile(file, nil, 0o600))
		must(t, os.Lchown(file, 0, 0))
	}
	must(t, os.Chown(dir, 0, group))
	must(t, os.Chmod(dir, os.ModeSetgid|0o770))
}

// begun waits until the first file of a pod's volume has the group, and returns the files in the order
// in which they get it.
func (g *ground) begun(uid string) (names []string) {
	g.t.Helper()
	eventually(g.t, func() error {
		for _, pattern := range []string{"kubernetes.io~csi/*/mount", "trivet~loop/*"} {
			dirs, err := filepath.Glob(filepath.Join(g.root, "pods", uid, "volumes", pattern))
			if err != nil {
				return err
			}
			for _, dir := range dirs {
				if names == nil {
					names = listed(dir)
				}
			}
		}
		if len(names) < manyFiles {
			names = nil
			return fmt.Errorf("the volume of %s is not mounted", uid)
		}
		if gidOf(g.t, names[0]) != group {
			return fmt.Errorf("%s does not have the group", names[0])
		}
		return nil
	})
	return names
}

// listed returns the entries of a directory in their order on disk.
func listed(dir string) (paths []string) {
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

func gidOf(t *testing.T, path string) uint32 {
	t.Helper()
	info, err := os.Lstat(path)
	must(t, err)
	return info.Sys().(*syscall.Stat_t).Gid
}

func wrongGroup(t *testing.T, dir string) (n int) {
	t.Helper()
	for _, path := range listed(dir) {
		if gidOf(t, path) != group {
			n++
		}
	}
	return n
}

// keepsMode checks that a restarted manager does not change a mode that the pod has set.
func (g *ground) keepsMode(uid, volume, path string) {
	g.t.Helper()
	own := filepath.Join(path, "0")
	must(g.t, os.Chmod(own, 0o600))
	g.manager.kill()
	g.startManager()
	g.await(uid)
	info, err := os.Stat(own)
	must(g.t, err)
	if info.Mode() != 0o600 {
		g.t.Errorf("%s: the mode that the pod has set was changed to %v", volume, info.Mode())
	}
}
