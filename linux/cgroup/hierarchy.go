package cgroup

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// Root is the directory where systems mount the cgroup v2 hierarchy.
const Root = "/sys/fs/cgroup"

// ErrUnsupported means that the I/O of pods cannot be limited on this node.
var ErrUnsupported = errors.New("this node cannot limit the I/O of pods")

// Hierarchy is a directory where cgroup v2 is mounted.
type Hierarchy string

// controllers are the controllers that limits need. The kernel knows which cgroup has made a page dirty, and therefore
// whose limit applies to its write, only with the controller memory.
var controllers = []string{"io", "memory"}

// Check returns ErrUnsupported, with the reason and the remedy, unless the I/O of pods can be limited.
func (h Hierarchy) Check() error {
	if err := h.checkControllers(); err != nil {
		return err
	}
	roots, err := h.roots()
	if err != nil {
		return err
	}
	for _, dir := range roots {
		if err := hasControllers(filepath.Join(dir, "cgroup.subtree_control")); err != nil {
			return err
		}
		if err := checkClasses(dir); err != nil {
			return err
		}
		if _, err := os.Stat(filepath.Join(dir, ioMax)); err != nil {
			return fmt.Errorf("%w: %w: run a kernel with CONFIG_BLK_DEV_THROTTLING", ErrUnsupported, err)
		}
		if err := unix.Access(dir, unix.W_OK); err != nil {
			return fmt.Errorf("%w: %s is not writable: %w: mount %s of the node into the driver's container, writable", ErrUnsupported, dir, err, Root)
		}
	}
	return nil
}

// checkClasses returns ErrUnsupported if the pods of a quality-of-service class cannot have the controllers. In the cgroup of a class
// without pods, they may not be enabled yet.
func checkClasses(root string) error {
	names, err := children(root)
	if err != nil {
		return err
	}
	for _, name := range names {
		if _, ok := podUID(name); ok { // a pod of the class Guaranteed
			continue
		}
		dir, pods := filepath.Join(root, name), map[string]Pod{}
		if err := podsOfClass(dir, pods); err != nil {
			return err
		}
		if len(pods) == 0 {
			continue
		}
		if err := hasControllers(filepath.Join(dir, "cgroup.subtree_control")); err != nil {
			return err
		}
	}
	return nil
}

// checkControllers returns ErrUnsupported unless the directory is a cgroup v2 hierarchy with the controllers.
func (h Hierarchy) checkControllers() error {
	err := hasControllers(filepath.Join(string(h), "cgroup.controllers"))
	if errors.Is(err, fs.ErrNotExist) { // cgroup v1 has no such file
		return fmt.Errorf("%w: %s is not a cgroup v2 hierarchy: boot the node with cgroup v2 (systemd.unified_cgroup_hierarchy=1)", ErrUnsupported, h)
	}
	return err
}

// hasControllers returns ErrUnsupported unless a file lists the controllers.
func hasControllers(path string) error {
	b, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	for _, c := range controllers {
		if !slices.Contains(strings.Fields(string(b)), c) {
			return fmt.Errorf("%w: %s has %q, without the controller %s: enable it, as the kubelet and systemd do by default", ErrUnsupported, path, strings.TrimSpace(string(b)), c)
		}
	}
	return nil
}

// maxDepth limits the search for the cgroup of all pods. The kubelet's --cgroup-root is usually the root or one of its children.
const maxDepth = 3

// rootPattern matches the cgroup of all pods, whose name depends on the kubelet's cgroup driver.
var rootPattern = regexp.MustCompile(`^(kubepods|(.+-)?kubepods\.slice)$`)

// roots finds the cgroups that contain those of all pods. There are several if several kubelets run on the node.
// ErrUnsupported if there is none.
func (h Hierarchy) roots() ([]string, error) {
	level := []string{string(h)}
	for range maxDepth {
		var found, next []string
		for _, dir := range level {
			names, err := children(dir)
			if err != nil {
				return nil, err
			}
			for _, name := range names {
				path := filepath.Join(dir, name)
				if next = append(next, path); rootPattern.MatchString(name) {
					found = append(found, path)
				}
			}
		}
		if len(found) > 0 {
			return found, nil
		}
		level = next
	}
	return nil, fmt.Errorf("%w: %s contains no cgroup kubepods or kubepods.slice: start the kubelet with --cgroups-per-qos, and give the driver the hierarchy of the node", ErrUnsupported, h)
}

// children returns the names of the cgroups in a cgroup; none if it does not exist.
func children(dir string) (names []string, err error) {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	for _, e := range entries {
		if e.IsDir() {
			names = append(names, e.Name())
		}
	}
	return names, err
}

// podPattern matches the cgroup of a pod. In a slice of systemd, each - of the UID is replaced by _.
var podPattern = regexp.MustCompile(`^(?:pod([0-9a-zA-Z-]+)|.+-pod([0-9a-zA-Z_]+)\.slice)$`)

// podUID returns the UID of the pod of a cgroup, by the name of the cgroup. ok is false if it is not the cgroup of a pod.
func podUID(name string) (uid string, ok bool) {
	m := podPattern.FindStringSubmatch(name)
	if m == nil {
		return "", false
	}
	return m[1] + strings.ReplaceAll(m[2], "_", "-"), true
}

// Pods returns the cgroups of the pods by the UIDs of the pods. ErrUnsupported if there can be none.
func (h Hierarchy) Pods() (map[string]Pod, error) {
	if err := h.checkControllers(); err != nil {
		return nil, err
	}
	roots, err := h.roots()
	if err != nil {
		return nil, err
	}
	pods := map[string]Pod{}
	for _, root := range roots {
		names, err := children(root)
		if err != nil {
			return nil, err
		}
		for _, name := range names {
			dir := filepath.Join(root, name)
			if uid, ok := podUID(name); ok { // a pod of the class Guaranteed
				pods[uid] = Pod(dir)
				continue
			}
			if err := podsOfClass(dir, pods); err != nil {
				return nil, err
			}
		}
	}
	return pods, nil
}

// podsOfClass adds the pods of a quality-of-service class, which has the cgroup dir.
func podsOfClass(dir string, pods map[string]Pod) error {
	names, err := children(dir)
	for _, name := range names {
		if uid, ok := podUID(name); ok {
			pods[uid] = Pod(filepath.Join(dir, name))
		}
	}
	return err
}
