package emptydir

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

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	podresource "k8s.io/component-helpers/resource"

	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/volumemanager/ownership"
	"github.com/trivet-csi/trivet/volumemanager/plugins"
)

// Types of filesystems.
const (
	memory    = "tmpfs"
	hugePages = "hugetlbfs"
)

// source is what the mount table calls the filesystem.
const source = "empty-dir"

// setUpMemory mounts the filesystem if it is not there: what was in one is gone with the
// last boot.
func (m *mounter) setUpMemory(ctx context.Context, at *mount.Entry, args plugins.MounterArgs) error {
	var err error
	switch {
	case at == nil:
		err = m.show()
	case m.page == 0:
		err = m.resize()
	}
	if err != nil {
		return err
	}
	// The root alone tells whether a call was cut off; all else is the pod's.
	args.FSGroupChangePolicy = corev1.FSGroupChangeOnRootMismatch
	return ownership.Set(ctx, m.path, args)
}

// memorySize is the size of a volume in memory, in bytes, as with a kubelet: the least of
// its limit, that of the pod and the memory that pods can have.
func memorySize(limit int64, pod *corev1.Pod) (int64, error) {
	size, err := plugins.AllocatableMemory()
	for _, n := range []int64{podMemory(pod), limit} {
		if n > 0 && n < size {
			size = n
		}
	}
	return size, err
}

// podMemory is what a pod may have of memory, in bytes; 0 unless the pod, or each of its
// containers, has a limit.
func podMemory(pod *corev1.Pod) int64 {
	unlimited := func(c corev1.Container) bool { return c.Resources.Limits.Memory().IsZero() }
	own := pod.Spec.Resources
	if (own == nil || own.Limits.Memory().IsZero()) &&
		(slices.ContainsFunc(pod.Spec.InitContainers, unlimited) || slices.ContainsFunc(pod.Spec.Containers, unlimited)) {
		return 0
	}
	limits := podresource.PodLimits(pod, podresource.PodResourcesOptions{})
	return limits.Memory().Value()
}

func (m *mounter) show() (err error) {
	if err := m.makeAbove(); err != nil {
		return err
	}
	if err := os.Mkdir(m.path, 0o750); err != nil && !errors.Is(err, os.ErrExist) {
		return err
	}
	made, err := m.filesystem()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, made.Close()) }()
	return made.MoveTo(m.path)
}

func (m *mounter) filesystem() (*mount.Detached, error) {
	if m.page == 0 {
		return m.tmpfs()
	}
	if err := requirePages(m.page); err != nil {
		return nil, err
	}
	words := []string{fmt.Sprintf("pagesize=%d", m.page), fmt.Sprintf("mode=%#o", mode)}
	if m.size > 0 {
		words = append(words, fmt.Sprintf("size=%d", (m.size+m.page-1)/m.page*m.page))
	}
	return mount.Filesystem(source, hugePages, mount.Options{Data: words})
}

// tmpfs has the mode that the kernel gives it: users remove only what is theirs.
func (m *mounter) tmpfs() (_ *mount.Detached, err error) {
	made, err := mount.Memory(source, mount.MemoryLimit{Bytes: m.size}, mount.Options{})
	if err != nil {
		return nil, err
	}
	root, err := made.OpenRoot()
	if err == nil {
		err = errors.Join(root.Chmod(mode|fs.ModeSticky), root.Close())
	}
	if err != nil {
		return nil, errors.Join(err, made.Close())
	}
	return made, nil
}

func (m *mounter) resize() error {
	err := mount.ResizeMemory(m.path, mount.MemoryLimit{Bytes: m.size})
	switch {
	case !errors.Is(err, syscall.EINVAL):
		return err
	case m.limit == "":
		m.warnings = append(m.warnings, fmt.Sprintf("the emptyDir in memory can have %d bytes by the pod's memory limit and the machine's memory, and has more in it: its size is not changed", m.size))
		return nil
	}
	return fmt.Errorf("sizeLimit %s: more than that is in the volume: remove some of it, or raise the limit: %w", m.limit, err)
}

// pageSize is the size of the huge pages of a medium, in bytes. It is what the pod's
// containers ask for, as a kubelet has it: a medium without a size takes the only one.
func pageSize(medium corev1.StorageMedium, pod *corev1.Pod) (int64, error) {
	asked := requestedPages(pod)
	if medium == corev1.StorageMediumHugePages {
		if len(asked) != 1 {
			return 0, plugins.Invalidf("emptyDir.medium %q: the containers ask for %d sizes of huge pages (resources.requests, hugepages-<size>): have them ask for one, or name it: HugePages-2Mi", medium, len(asked))
		}
		for size := range asked {
			return size, nil
		}
	}
	text := strings.TrimPrefix(string(medium), string(corev1.StorageMediumHugePagesPrefix))
	size, err := resource.ParseQuantity(text)
	if err != nil || size.Value() <= 0 {
		return 0, plugins.Invalidf("emptyDir.medium %q: want a size of pages such as HugePages-2Mi", medium)
	}
	if !asked[size.Value()] {
		return 0, plugins.Invalidf("emptyDir.medium %q: no container asks for such pages: add hugepages-%s to its resources.requests", medium, text)
	}
	return size.Value(), nil
}

// requestedPages are the sizes of huge pages that containers ask for, in bytes. A limit
// is a request, too, where there is none.
func requestedPages(pod *corev1.Pod) map[int64]bool {
	sizes := map[int64]bool{}
	for _, containers := range [][]corev1.Container{pod.Spec.InitContainers, pod.Spec.Containers} {
		for _, c := range containers {
			for _, list := range []corev1.ResourceList{c.Resources.Requests, c.Resources.Limits} {
				addPages(sizes, list)
			}
		}
	}
	return sizes
}

func addPages(sizes map[int64]bool, list corev1.ResourceList) {
	for name, amount := range list {
		text, ok := strings.CutPrefix(string(name), corev1.ResourceHugePagesPrefix)
		if size, err := resource.ParseQuantity(text); ok && err == nil && !amount.IsZero() {
			sizes[size.Value()] = true
		}
	}
}

// requirePages makes sure that the kernel has huge pages of a size (hugetlbpage.rst): a
// program that writes to the volume is killed else.
func requirePages(size int64) error {
	dir := fmt.Sprintf("/sys/kernel/mm/hugepages/hugepages-%dkB", size/1024)
	if _, err := os.Stat(dir); err != nil {
		return fmt.Errorf("medium: this kernel has no huge pages of %d bytes: use a size of /sys/kernel/mm/hugepages", size)
	}
	for _, file := range []string{"nr_hugepages", "nr_overcommit_hugepages"} {
		b, err := os.ReadFile(filepath.Join(dir, file))
		if err != nil {
			return err
		}
		if n, err := strconv.ParseUint(strings.TrimSpace(string(b)), 10, 64); err == nil && n > 0 {
			return nil
		}
	}
	return fmt.Errorf("medium: this machine has reserved no huge pages of %d bytes: write how many to %s/nr_hugepages", size, dir)
}
