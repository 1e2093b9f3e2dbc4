//go:build e2e

package e2e

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/yaml"

	"github.com/trivet-csi/trivet/volumemanager"
)

// side is the kubelet of a node, or the volume manager that runs beside it.
type side struct {
	name string
	node node
	// root is the root directory of the kubelet or the manager. host is the directory that replaces HOST in
	// manifests.
	root, host string
	// uids contains the UIDs of all objects, by kind and name.
	uids map[string]string
	// wanted contains the manager's objects, by manifest file.
	wanted map[string][]object
}

type object = *unstructured.Unstructured

// decode decodes YAML documents, or a list in JSON.
func decode(t *testing.T, text string) (all []object) {
	t.Helper()
	for document := range strings.SplitSeq(text, "\n---\n") {
		o := &unstructured.Unstructured{}
		must(t, yaml.Unmarshal([]byte(document), &o.Object))
		switch {
		case o.IsList():
			must(t, o.EachListItem(func(item runtime.Object) error {
				all = append(all, item.(object))
				return nil
			}))
		case len(o.Object) > 0:
			o.SetManagedFields(nil)
			all = append(all, o)
		}
	}
	return all
}

// encode returns objects as YAML documents.
func encode(t *testing.T, all []object) string {
	t.Helper()
	var b strings.Builder
	for _, o := range all {
		document, err := yaml.Marshal(o.Object)
		must(t, err)
		b.Write(document)
		b.WriteString("---\n")
	}
	return b.String()
}

// manifest returns the path of one of the manager's manifest files.
func (s *side) manifest(name string) string {
	return s.node.path(filepath.Join(parityDir, "manifests", name+".yaml"))
}

// put writes a manifest file of the manager. It renames the complete file into place.
func (s *side) put(t *testing.T, name string, objects ...object) {
	t.Helper()
	if s.wanted == nil {
		s.wanted = map[string][]object{}
	}
	s.wanted[name] = objects
	file := s.node.path(filepath.Join(parityDir, name+".new"))
	write(t, file, encode(t, objects), 0o600)
	must(t, os.Rename(file, s.manifest(name)))
}

// replace replaces the manager's object with the same kind and name.
func (s *side) replace(t *testing.T, o object) {
	t.Helper()
	objects := s.wanted["objects"]
	for i, have := range objects {
		if have.GetKind() == o.GetKind() && have.GetName() == o.GetName() {
			o.SetUID(have.GetUID())
			o.SetNamespace(have.GetNamespace())
			objects[i] = o
		}
	}
	s.put(t, "objects", objects...)
}

// statusOf returns the manager's status of the volumes of a pod, and the problems of the pod's manifest.
func (s *side) statusOf(ns, pod string) (volumes, problems []string, err error) {
	status, err := volumemanager.ReadStatus(context.Background(), s.node.path(s.root))
	for _, v := range status.Volumes {
		if v.Pod == ns+"/"+pod {
			volumes = append(volumes, fmt.Sprintf("%s %s: %s", v.Phase, v.Volume, v.Message))
		}
	}
	for _, p := range status.Problems {
		if strings.HasSuffix(p.Object, "/"+pod) {
			problems = append(problems, p.Message)
		}
	}
	return volumes, problems, err
}

// left returns the manager's volumes of pods and its PersistentVolumes as text. none is true if the manager
// has no volumes of pods and, if persistent is true, no PersistentVolumes, or if the manager does not run.
func (s *side) left(persistent bool) (text string, none bool) {
	status, err := volumemanager.ReadStatus(context.Background(), s.node.path(s.root))
	if err != nil {
		return err.Error(), errors.Is(err, volumemanager.ErrNotRunning)
	}
	none = len(status.Volumes) == 0 && (!persistent || len(status.PersistentVolumes) == 0)
	return fmt.Sprintf("%+v, %+v", status.Volumes, status.PersistentVolumes), none
}

// tree contains a description of each file of a pod: below the pod's directory and, for the pod host, below
// HOST.
type tree map[string]string

// podDir returns the path, on the node, of the directory of a pod.
func (s *side) podDir(pod string) string { return filepath.Join(s.root, "pods", s.uids["Pod/"+pod]) }

// content returns the content of a file in a pod's directory, or the text of the error.
func (s *side) content(pod, path string) string {
	b, err := os.ReadFile(s.node.throughMounts(filepath.Join(s.podDir(pod), path)))
	if err != nil {
		return err.Error()
	}
	return string(b)
}

// tree returns the tree of a pod.
func (s *side) tree(t *testing.T, pod string) tree {
	t.Helper()
	all := tree{}
	for _, part := range []string{"volumes", "volumeDevices", "volume-subpaths"} {
		s.walk(t, all, part, filepath.Join(s.podDir(pod), part))
	}
	for _, path := range slices.Collect(maps.Keys(all)) {
		if volume, ok := strings.CutPrefix(path, "volumeDevices/kubernetes.io~csi/"); ok {
			s.walk(t, all, "device", filepath.Join(s.root, "plugins/kubernetes.io/csi/volumeDevices", volume, "dev"))
		}
	}
	if pod == "host" {
		s.walk(t, all, "host", s.host+"/host")
	}
	return all
}

// walk adds all files below a directory of the node to a tree, in which the directory has the given name.
func (s *side) walk(t *testing.T, all tree, name, dir string) {
	t.Helper()
	at := s.node.throughMounts(dir)
	err := filepath.WalkDir(at, func(path string, _ fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) { // missing, or replaced during the walk
			return nil
		}
		if err != nil {
			return err
		}
		return s.describe(all, s.normalize(name+strings.TrimPrefix(path, at)), path)
	})
	must(t, err)
}

// describe adds the type, mode and owner of a file to a tree and, as separate entries, its content and the
// filesystem that is mounted at the path.
func (s *side) describe(all tree, name, path string) error {
	var st, above unix.Stat_t
	if err := errors.Join(unix.Lstat(path, &st), unix.Lstat(filepath.Dir(path), &above)); err != nil {
		return err
	}
	all[name] = fmt.Sprintf("%#o %04o %d:%d", st.Mode&unix.S_IFMT, st.Mode&0o7777, st.Uid, st.Gid)
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFLNK:
		to, err := os.Readlink(path)
		all[name] += " to " + s.normalize(to)
		return err
	case unix.S_IFREG:
		b, err := os.ReadFile(path)
		all[name+" content"] = fmt.Sprintf("%q", s.normalize(string(b)))
		return err
	case unix.S_IFBLK, unix.S_IFCHR:
		// The minor number of a loop device differs for each volume.
		all[name] += fmt.Sprintf(" device %d", unix.Major(st.Rdev))
	}
	if st.Mode&unix.S_IFMT == unix.S_IFDIR && st.Dev != above.Dev {
		return describeFilesystem(all, name, path)
	}
	return nil
}

// describeFilesystem adds the mounted filesystem to a tree and, if it is a tmpfs, its size.
func describeFilesystem(all tree, name, path string) error {
	var st unix.Statfs_t
	if err := unix.Statfs(path, &st); err != nil {
		return err
	}
	all[name+" filesystem"] = fmt.Sprintf("%#x, read-only: %t", st.Type, st.Flags&unix.ST_RDONLY != 0)
	if st.Type == unix.TMPFS_MAGIC {
		all[name+" size"] = fmt.Sprint(int64(st.Blocks) * st.Bsize)
		all[name+" inodes"] = fmt.Sprint(st.Files)
	}
	return nil
}

var (
	// version matches the name of the directory with a version of a volume's content, which is its date.
	version = regexp.MustCompile(`\.\.\d{4}_\d\d_\d\d_\d\d_\d\d_\d\d\.\d+`)
	loops   = regexp.MustCompile(`/dev/loop\d+`)
)

// normalize replaces the parts of a text that differ for each side or at each run.
func (s *side) normalize(text string) string {
	text = strings.NewReplacer(s.root, "ROOT", s.host, "HOST").Replace(text)
	return loops.ReplaceAllString(version.ReplaceAllString(text, "..DATE"), "/dev/loopN")
}

// start starts a program in the namespaces of the node. words are its path, a subcommand and the flags. The
// program runs until stop ends it. Its output goes to the log directory of the cluster.
func (n node) start(t *testing.T, words ...string) {
	t.Helper()
	log, err := os.Create(filepath.Join(filepath.Dir(n.dir), "log", fmt.Sprintf("parity-%s.log", words[1])))
	must(t, err)
	defer log.Close()
	c := exec.Command("nsenter", append([]string{"-t", strings.TrimSpace(read(t, filepath.Join(n.dir, "pid"))), "-m", "-p", "--"}, words...)...)
	c.Stdout, c.Stderr = log, log
	must(t, c.Start())
	go func() { _ = c.Wait() }() // the log contains the reason
}

// stop ends the driver and the manager that start has started.
func (n node) stop(t *testing.T) {
	t.Helper()
	eventually(t, time.Minute, "the driver and the manager have ended", func() (string, bool) {
		var running []int
		for _, command := range []string{"driver", "volume-manager"} {
			running = append(running, processes(program(), command)...)
		}
		for _, pid := range running {
			_ = syscall.Kill(pid, syscall.SIGTERM) // it may have ended
		}
		return fmt.Sprint(running), len(running) == 0
	})
}
