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

// side is the kubelet of a node, or the volume manager beside it.
type side struct {
	name string
	node node
	// root is its root directory, host its own directory of the node's files.
	root, host string
	// uids are those of all objects, by kind and name.
	uids map[string]string
	// wanted are the manager's objects, by file.
	wanted map[string][]object
}

type object = *unstructured.Unstructured

// decode reads YAML documents, or a list in JSON.
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

func (s *side) manifest(name string) string {
	return s.node.path(filepath.Join(parityDir, "manifests", name+".yaml"))
}

// put writes a manifest beside the others, and renames it there.
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

// replace puts another object in the place of the one with its kind and name.
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

// says is what the manager tells of the volumes of a pod, and what is wrong with its
// manifest.
func (s *side) says(ns, pod string) (volumes, problems []string, err error) {
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

// left tells whether the manager has no volumes of pods any more, or nothing at all.
func (s *side) left(nothing bool) (string, bool) {
	status, err := volumemanager.ReadStatus(context.Background(), s.node.path(s.root))
	if err != nil {
		return err.Error(), errors.Is(err, volumemanager.ErrNotRunning)
	}
	n := len(status.Volumes)
	if nothing {
		n += len(status.PersistentVolumes)
	}
	return fmt.Sprintf("%+v, %+v", status.Volumes, status.PersistentVolumes), n == 0
}

// tree is what a side has made of a pod: a description for each path below the directory
// of the pod, and below HOST.
type tree map[string]string

// inside is a path of the node in its mount namespace.
func (s *side) inside(t *testing.T, path string) string {
	t.Helper()
	return filepath.Join("/proc", strings.TrimSpace(read(t, filepath.Join(s.node.dir, "pid"))), "root", path)
}

func (s *side) podDir(pod string) string { return filepath.Join(s.root, "pods", s.uids["Pod/"+pod]) }

func (s *side) content(t *testing.T, pod, path string) string {
	t.Helper()
	b, err := os.ReadFile(s.inside(t, filepath.Join(s.podDir(pod), path)))
	if err != nil {
		return err.Error()
	}
	return string(b)
}

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

func (s *side) walk(t *testing.T, all tree, name, dir string) {
	t.Helper()
	at := s.inside(t, dir)
	err := filepath.WalkDir(at, func(path string, _ fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) { // none, or it was just replaced
			return nil
		}
		if err != nil {
			return err
		}
		return s.describe(all, s.plain(name+strings.TrimPrefix(path, at)), path)
	})
	must(t, err)
}

// describe adds type, mode and owner of a file; and, by names of their own, its content and
// what is mounted there.
func (s *side) describe(all tree, name, path string) error {
	var st, above unix.Stat_t
	if err := errors.Join(unix.Lstat(path, &st), unix.Lstat(filepath.Dir(path), &above)); err != nil {
		return err
	}
	all[name] = fmt.Sprintf("%#o %04o %d:%d", st.Mode&unix.S_IFMT, st.Mode&0o7777, st.Uid, st.Gid)
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFLNK:
		to, err := os.Readlink(path)
		all[name] += " to " + s.plain(to)
		return err
	case unix.S_IFREG:
		b, err := os.ReadFile(path)
		all[name+" content"] = fmt.Sprintf("%q", s.plain(string(b)))
		return err
	case unix.S_IFBLK, unix.S_IFCHR:
		// The minor number of a loop device is another for each volume.
		all[name] += fmt.Sprintf(" device %d", unix.Major(st.Rdev))
	}
	if st.Mode&unix.S_IFMT == unix.S_IFDIR && st.Dev != above.Dev {
		return describeFilesystem(all, name, path)
	}
	return nil
}

// describeFilesystem adds what is mounted; of one in memory also how much it holds.
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
	version = regexp.MustCompile(`\.\.\d{4}_\d\d_\d\d_\d\d_\d\d_\d\d\.\d+`)
	loops   = regexp.MustCompile(`/dev/loop\d+`)
)

// plain replaces what is each side's own, or each moment's.
func (s *side) plain(text string) string {
	text = strings.NewReplacer(s.root, "ROOT", s.host, "HOST").Replace(text)
	return loops.ReplaceAllString(version.ReplaceAllString(text, "..DATE"), "/dev/loopN")
}

// start runs a program in the namespaces of the node until stop. What it prints is in the
// log folder of the cluster.
func (n node) start(t *testing.T, words ...string) {
	t.Helper()
	log, err := os.Create(filepath.Join(filepath.Dir(n.dir), "log", fmt.Sprintf("parity-%s.log", words[1])))
	must(t, err)
	defer log.Close()
	c := exec.Command("nsenter", append([]string{"-t", strings.TrimSpace(read(t, filepath.Join(n.dir, "pid"))), "-m", "-p", "--"}, words...)...)
	c.Stdout, c.Stderr = log, log
	must(t, c.Start())
	go func() { _ = c.Wait() }() // how it ended is in the log
}

// stop ends what start has begun.
func (n node) stop(t *testing.T) {
	t.Helper()
	eventually(t, time.Minute, "the processes end", func() (string, bool) {
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
