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
	domain "github.com/trivet-csi/trivet/volume"
	"github.com/trivet-csi/trivet/volumemanager/ownership"
	"github.com/trivet-csi/trivet/volumemanager/plugins"
)

// Filesystem types in the mount table.
const (
	memory    = "tmpfs"
	hugePages = "hugetlbfs"
)

// source is the source of the filesystem in the mount table.
const source = "empty-dir"

// setUpMemory mounts the filesystem if it is not mounted. Otherwise it changes the size of a tmpfs.
func (m *mounter) setUpMemory(ctx context.Context, at *mount.Entry, args plugins.MounterArgs) error {
	var err error
	switch {
	case at == nil:
		err = m.mount()
	case m.page == 0:
		err = m.resize()
	}
	if err != nil {
		return err
	}
	// If the root directory lacks the group or mode, an earlier call was interrupted. Otherwise the files
	// belong to the pod and are not changed.
	args.FSGroupChangePolicy = corev1.FSGroupChangeOnRootMismatch
	return ownership.Set(ctx, m.path, args)
}

// memorySize returns the size of a volume in memory in bytes, as in a kubelet: the minimum of its
// limit, the pod's limit and the allocatable memory.
func memorySize(limit int64, pod *corev1.Pod) (int64, error) {
	size, err := plugins.AllocatableMemory()
	for _, n := range []int64{podMemory(pod), limit} {
		if n > 0 && n < size {
			size = n
		}
	}
	return size, err
}

// podMemory returns the memory limit of a pod in bytes; 0 unless the pod, or each of its
// containers, has a limit.
func podMemory(pod *corev1.Pod) int64 {
	unlimited := func(c corev1.Container) bool { return c.Resources.Limits.Memory().IsZero() }
	podResources := pod.Spec.Resources
	if (podResources == nil || podResources.Limits.Memory().IsZero()) &&
		(slices.ContainsFunc(pod.Spec.InitContainers, unlimited) || slices.ContainsFunc(pod.Spec.Containers, unlimited)) {
		return 0
	}
	limits := podresource.PodLimits(pod, podresource.PodResourcesOptions{})
	return limits.Memory().Value()
}

// mount creates the filesystem and mounts it at the volume's path.
func (m *mounter) mount() error {
	if err := m.makeParent(); err != nil {
		return err
	}
	if err := os.Mkdir(m.path, 0o750); err != nil && !errors.Is(err, os.ErrExist) {
		return err
	}
	detached, err := m.filesystem()
	if err != nil {
		return err
	}
	return errors.Join(detached.MoveTo(m.path), detached.Close())
}

// filesystem creates a tmpfs or a hugetlbfs.
func (m *mounter) filesystem() (*mount.Detached, error) {
	if m.page == 0 {
		return m.tmpfs()
	}
	if err := requirePages(m.page); err != nil {
		return nil, err
	}
	options := []string{fmt.Sprintf("pagesize=%d", m.page), fmt.Sprintf("mode=%#o", mode)}
	if m.size > 0 {
		options = append(options, fmt.Sprintf("size=%d", (m.size+m.page-1)/m.page*m.page))
	}
	return mount.Filesystem(source, hugePages, mount.Options{Data: options})
}

// tmpfs creates a tmpfs with the kernel's default mode 01777, so that only the owner of a file may
// remove the file.
func (m *mounter) tmpfs() (*mount.Detached, error) {
	detached, err := mount.Memory(source, mount.MemoryLimit{Bytes: m.size}, mount.Options{})
	if err != nil {
		return nil, err
	}
	root, err := detached.OpenRoot()
	if err == nil {
		err = errors.Join(root.Chmod(mode|fs.ModeSticky), root.Close())
	}
	if err != nil {
		return nil, errors.Join(err, detached.Close())
	}
	return detached, nil
}

// resize changes the size of a tmpfs.
func (m *mounter) resize() error {
	err := mount.ResizeMemory(m.path, mount.MemoryLimit{Bytes: m.size})
	switch {
	case !errors.Is(err, syscall.EINVAL): // EINVAL means that the tmpfs contains more than the new size
		return err
	case m.limit == "":
		m.warnings = append(m.warnings, fmt.Sprintf("the pod's memory limit and the node's memory allow the emptyDir in memory %s, but it contains more: its size is not changed", domain.ExactSize(m.size)))
		return nil
	}
	return fmt.Errorf("sizeLimit %s: the volume contains more: remove files, or raise the limit: %w", m.limit, err)
}

// pageSize returns the size of a medium's huge pages in bytes. As in a kubelet, the containers must
// request that size. For the medium HugePages, which names no size, they must request exactly one size.
func pageSize(medium corev1.StorageMedium, pod *corev1.Pod) (int64, error) {
	requested := requestedPages(pod)
	if medium == corev1.StorageMediumHugePages {
		if len(requested) != 1 {
			return 0, plugins.Invalidf("emptyDir.medium %q: the containers request %d sizes of huge pages (resources.requests, hugepages-<size>): request one size, or name it: HugePages-2Mi", medium, len(requested))
		}
		for size := range requested {
			return size, nil
		}
	}
	text := strings.TrimPrefix(string(medium), string(corev1.StorageMediumHugePagesPrefix))
	size, err := resource.ParseQuantity(text)
	if err != nil || size.Value() <= 0 {
		return 0, plugins.Invalidf("emptyDir.medium %q: want a page size, as in HugePages-2Mi", medium)
	}
	if !requested[size.Value()] {
		return 0, plugins.Invalidf("emptyDir.medium %q: no container requests such pages: add hugepages-%s to its resources.requests", medium, text)
	}
	return size.Value(), nil
}

// requestedPages returns the sizes of huge pages that containers request, in bytes. A limit without
// a request is also a request.
func requestedPages(pod *corev1.Pod) map[int64]bool {
	sizes := map[int64]bool{}
	for _, c := range slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers) {
		for _, list := range []corev1.ResourceList{c.Resources.Requests, c.Resources.Limits} {
			for name, amount := range list {
				text, ok := strings.CutPrefix(string(name), corev1.ResourceHugePagesPrefix)
				if size, err := resource.ParseQuantity(text); ok && err == nil && !amount.IsZero() {
					sizes[size.Value()] = true
				}
			}
		}
	}
	return sizes
}

// requirePages returns an error unless the kernel has reserved huge pages of a size, or may allocate
// surplus huge pages (hugetlbpage.rst). Without huge pages, a program that writes to the volume would be
// killed.
func requirePages(size int64) error {
	dir := fmt.Sprintf("/sys/kernel/mm/hugepages/hugepages-%dkB", size/1024)
	if _, err := os.Stat(dir); err != nil {
		return fmt.Errorf("medium: this kernel has no huge pages of %s: use a size in /sys/kernel/mm/hugepages", domain.FormatSize(size))
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
	return fmt.Errorf("medium: no huge pages of %s are reserved: write their number to %s/nr_hugepages", domain.FormatSize(size), dir)
}
