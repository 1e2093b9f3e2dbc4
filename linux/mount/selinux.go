package mount

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/internal/mountflags"
	"github.com/trivet-csi/trivet/linux/sys"
)

var (
	// ErrNoSELinux means that this kernel has no SELinux, or that no policy is loaded.
	ErrNoSELinux = errors.New("SELinux is not enabled on this node, but the mount option context needs it: remove the option, or enable SELinux")
	// ErrUnknownContext means that the SELinux policy of this node does not contain a context.
	ErrUnknownContext = errors.New("the SELinux policy of this node does not contain the context: correct the mount option context, or seLinuxOptions of the pod")
	// ErrOtherContext means that the filesystem is already mounted with another SELinux context.
	ErrOtherContext = errors.New("the filesystem is already mounted with another SELinux context")
)

// ContextAt returns the SELinux context with which the filesystem at a path was mounted, in its canonical form. It is
// empty if nothing is mounted at the path, or if the filesystem was mounted without a context.
func ContextAt(path string) (string, error) {
	e, err := OnPath(path)
	if err != nil || e == nil {
		return "", err
	}
	return contextIn(e.VFSOptions), nil
}

// contextIn returns the SELinux context in the options of a filesystem in the mount table.
func contextIn(options string) string {
	for _, word := range mountflags.Split([]string{options}) {
		if value, ok := strings.CutPrefix(word, mountflags.Context+"="); ok {
			context, _ := mountflags.ParseContext(value)
			return context
		}
	}
	return ""
}

// CanonicalContext returns the form of an SELinux context that the mount table shows: the policy resolves aliases of
// types, and the kernel sorts the categories. Errors are ErrNoSELinux and ErrUnknownContext. CanonicalContext returns
// the context unchanged if this process may not ask SELinux.
func CanonicalContext(context string) (string, error) {
	answer, err := askSELinux(context)
	switch {
	case errors.Is(err, unix.EACCES), errors.Is(err, unix.EPERM):
		return context, nil
	case errors.Is(err, unix.EINVAL):
		return "", fmt.Errorf("context %s: %w", context, ErrUnknownContext)
	case errors.Is(err, unix.ENODEV), err == nil && !strings.Contains(answer, ":"): // without a policy, the answer is the name of an initial SID
		return "", fmt.Errorf("context %s: %w", context, ErrNoSELinux)
	}
	return answer, err
}

// otherContext returns ErrOtherContext if the filesystem on a device is mounted with another SELinux context than the given
// one, which may be empty. All mounts of a filesystem have the same context, and the kernel returns EINVAL for another one.
func otherContext(device, fsType, context string) error {
	canonical, err := CanonicalContext(context) // ErrUnknownContext if it is empty
	if errors.Is(err, ErrNoSELinux) {
		return nil
	}
	mounts, err := Table(func(e *Entry) bool { return e.FSType == fsType && IsOfDevice(e, device) })
	if err != nil {
		return err
	}
	if len(mounts) > 0 {
		return differentContext(mounts[0], canonical)
	}
	f, err := os.OpenFile(device, unix.O_RDONLY|unix.O_EXCL, 0)
	if errors.Is(err, unix.EBUSY) { // the kernel has the filesystem open
		return fmt.Errorf("%w in another mount namespace, and this one needs %s: find it in /proc/*/mountinfo", ErrOtherContext, cmp.Or(context, noContext))
	}
	if err == nil {
		f.Close()
	}
	return nil
}

// noContext is the text for a mount without a context.
const noContext = "(none)"

// differentContext returns ErrOtherContext if a mount has another SELinux context than the given one.
func differentContext(e *Entry, context string) error {
	mounted := contextIn(e.VFSOptions)
	if mounted == context {
		return nil
	}
	return fmt.Errorf("%w: at %s it has %s, and this mount needs %s", ErrOtherContext, e.Mountpoint, cmp.Or(mounted, noContext), cmp.Or(context, noContext))
}

// askSELinux writes a context to the file context of a selinuxfs, and returns the answer of the kernel. It mounts the
// filesystem, because that of the node is not visible in a container.
func askSELinux(context string) (string, error) {
	fs, err := detached("selinuxfs", "selinuxfs", Options{}, func(err error) error { return err })
	if err != nil {
		return "", err
	}
	defer func() { _ = fs.Close() }() // it has no writes
	root, err := fs.OpenRoot()
	if err != nil {
		return "", err
	}
	defer root.Close()
	f, err := sys.Open(root, "context", sys.OneMount, unix.O_RDWR)
	if err != nil {
		return "", err
	}
	defer f.Close()
	if _, err := f.WriteString(context); err != nil {
		return "", err
	}
	answer := make([]byte, 4096)
	n, err := f.Read(answer)
	return strings.TrimRight(string(answer[:n]), "\x00"), err
}

// ProbeContext mounts a filesystem with an SELinux context at no path, and unmounts it. An error is the reason why the
// context cannot be used.
func ProbeContext(context string) error {
	fs, err := Memory("selinux", MemoryLimit{Bytes: 4096}, Options{Context: context})
	if err != nil {
		return err
	}
	return fs.Close()
}
