package measure

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/linux/sys"
)

// Testbed is a temporary directory with a new filesystem, or a mount of an export, and the processes
// of a benchmark.
type Testbed struct {
	Dir       string
	Disk      string   // the mount point of the filesystem or the export, in Dir
	mount     []string // the arguments of mount(8); empty if Disk is a directory of an existing filesystem
	loops     []string // the loop devices before the benchmark
	processes []*Process
}

// OnFilesystem runs a measurement on a new filesystem with a size in bytes, whose image is sparse.
// Afterwards it removes the filesystem. It fails if the measurement has left mounts or loop devices.
func OnFilesystem(ctx context.Context, fsType string, size int64, run func(*Testbed)) error {
	return inTestbed(ctx, "", func(g *Testbed) {
		image := filepath.Join(g.Dir, fsType)
		Must(os.WriteFile(image, nil, 0o600))
		Must(os.Truncate(image, size))
		Must(Command(ctx, "mkfs."+fsType, "-q", image))
		g.mount = []string{"-t", fsType, "-o", "loop", image, g.Disk}
		Must(Command(ctx, "mount", g.mount...))
		run(g)
	})
}

// withoutDiscard are the options with which mkfs leaves the blocks of a device allocated.
var withoutDiscard = map[string][]string{
	"ext4":  {"-E", "nodiscard,lazy_itable_init=0,lazy_journal_init=0"},
	"xfs":   {"-K"},
	"btrfs": {"-K"},
}

// OnFullImage is OnFilesystem for measurements of I/O. All blocks of the image are written before, so that the filesystem
// below allocates none during the measurement, and the loop device does not use the page cache.
func OnFullImage(ctx context.Context, fsType string, size int64, run func(*Testbed)) error {
	return inTestbed(ctx, "", func(g *Testbed) {
		image := filepath.Join(g.Dir, fsType)
		Must(Command(ctx, "dd", "if=/dev/zero", "of="+image, "bs=1M", "count="+strconv.FormatInt(size>>20, 10), "oflag=direct"))
		Must(Command(ctx, "mkfs."+fsType, slices.Concat([]string{"-q"}, withoutDiscard[fsType], []string{image})...))
		device, err := exec.CommandContext(ctx, "losetup", "--find", "--show", "--direct-io=on", image).Output()
		Must(err)
		g.mount = []string{strings.TrimSpace(string(device)), g.Disk}
		// losetup detaches a mounted device when it is unmounted.
		Must(errors.Join(Command(ctx, "mount", g.mount...), Command(context.WithoutCancel(ctx), "losetup", "--detach", g.mount[0])))
		run(g)
	})
}

// InDirectory runs a measurement in a new directory in an existing one. It ends like OnFilesystem.
func InDirectory(ctx context.Context, parent string, run func(*Testbed)) error {
	return inTestbed(ctx, parent, run)
}

// OnExport runs a measurement on a mount of an NFS export. It ends like OnFilesystem.
func OnExport(ctx context.Context, source string, run func(*Testbed)) error {
	return onMount(ctx, run, "-t", "nfs", "-o", "vers=4.2,nosharecache", source)
}

// OnDevice runs a measurement on the filesystem of a device. It ends like OnFilesystem.
func OnDevice(ctx context.Context, device string, run func(*Testbed)) error {
	return onMount(ctx, run, device)
}

// onMount runs a measurement on what mount(8) mounts with the arguments.
func onMount(ctx context.Context, run func(*Testbed), args ...string) error {
	return inTestbed(ctx, "", func(g *Testbed) {
		g.mount = slices.Concat(args, []string{g.Disk})
		Must(Command(ctx, "mount", g.mount...))
		run(g)
	})
}

// inTestbed runs a measurement with a new directory in a parent directory, by default the one for temporary files. Then
// it ends the processes and removes the directory.
func inTestbed(ctx context.Context, parent string, run func(*Testbed)) error {
	base, err := os.MkdirTemp(parent, "trivet-bench-")
	if err != nil {
		return err
	}
	g := &Testbed{Dir: base, Disk: filepath.Join(base, "disk"), loops: loopNodes()}
	err = try(func() {
		Must(os.Mkdir(g.Disk, 0o755))
		run(g)
	})
	if ctx.Err() != nil {
		err = errors.New("interrupted")
	}
	if cerr := g.clear(); cerr != nil {
		err = errors.Join(err, fmt.Errorf("cleaning up: %w", cerr))
	}
	return err
}

// Command runs a program. The error of a failed program contains its output.
func Command(ctx context.Context, name string, args ...string) error {
	out, err := exec.CommandContext(ctx, name, args...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("%s %s: %w: %s", name, strings.Join(args, " "), err, out)
	}
	return nil
}

// Settle writes the filesystem's dirty data to the disk, so that it does not slow down the next
// measurement.
func (g *Testbed) Settle() { Sync(g.Disk) }

// Sync writes the dirty data of the filesystem that contains a file to the disk.
func Sync(path string) {
	f := Get(os.Open(path))
	defer f.Close()
	Must(unix.Syncfs(int(f.Fd())))
}

// Remount empties the kernel's caches of the filesystem, as a restart of the machine does. Other
// filesystems keep theirs.
func (g *Testbed) Remount(ctx context.Context) {
	Must(unmount(g.Disk))
	Must(Command(ctx, "mount", g.mount...))
}

func unmount(path string) error {
	if err := unix.Unmount(path, 0); err != nil {
		return fmt.Errorf("unmounting %s: %w", path, err)
	}
	return nil
}

// clear ends the processes and removes the directory. It fails if a mount or loop device was left.
func (g *Testbed) clear() error {
	var errs []error
	for _, p := range slices.Backward(g.processes) {
		errs = append(errs, p.Stop())
	}
	errs = append(errs, g.unmountAll(), g.awaitLoops(), removeLoopNodes(g.loops))
	if mounts, err := g.mounts(); err != nil || len(mounts) > 0 {
		return errors.Join(append(errs, fmt.Errorf("%s was not removed because it still has the mounts %q", g.Dir, mounts))...)
	}
	return errors.Join(append(errs, os.RemoveAll(g.Dir))...)
}

// unmountAll unmounts everything in the directory, the filesystem last. It fails if the measurement
// has left other mounts.
func (g *Testbed) unmountAll() error {
	mounts, err := g.mounts()
	errs := []error{err}
	if left := len(mounts) - min(len(g.mount), 1); left > 0 {
		errs = append(errs, fmt.Errorf("the measurement left %d mounts, the last at %s", left, mounts[len(mounts)-1]))
	}
	for _, path := range slices.Backward(mounts) {
		errs = append(errs, unmount(path))
	}
	return errors.Join(errs...)
}

// mounts lists the mounts in the directory, in the order of mounting.
func (g *Testbed) mounts() (paths []string, err error) {
	found, err := mountinfo.GetMounts(func(i *mountinfo.Info) (skip, stop bool) {
		return !strings.HasPrefix(i.Mountpoint, g.Dir+"/"), false
	})
	for _, m := range found {
		paths = append(paths, m.Mountpoint)
	}
	return paths, err
}

// awaitLoops waits, for at most five seconds, until no loop device is bound to a file in the directory.
func (g *Testbed) awaitLoops() error {
	var bound []string
	for range 250 {
		bound = slices.DeleteFunc(loopNodes(), func(loop string) bool { return !strings.HasPrefix(BackingFile(loop), g.Dir+"/") })
		if len(bound) == 0 {
			return nil
		}
		time.Sleep(20 * time.Millisecond)
	}
	return fmt.Errorf("loop devices %q are still bound to files in %s", bound, g.Dir)
}

// loopNodes lists the names of all loop devices, bound or not.
func loopNodes() []string {
	paths, _ := filepath.Glob("/sys/block/loop*") // the pattern is valid
	for i := range paths {
		paths[i] = filepath.Base(paths[i])
	}
	return paths
}

// BackingFile returns the file to which a loop device is bound, or an empty string.
func BackingFile(loop string) string {
	b, _ := os.ReadFile("/sys/block/" + loop + "/loop/backing_file")
	return strings.TrimSpace(string(b))
}

// removeLoopNodes removes the unbound loop devices that are not in before. Otherwise each search for
// a free device would read them.
func removeLoopNodes(before []string) error {
	control, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer control.Close()
	for _, loop := range loopNodes() {
		var number int
		if slices.Contains(before, loop) || BackingFile(loop) != "" {
			continue
		}
		if _, err := fmt.Sscanf(loop, "loop%d", &number); err != nil {
			return err
		}
		err := sys.RemoveLoop(control, number)
		if err != nil && !errors.Is(err, unix.EBUSY) && !errors.Is(err, unix.ENODEV) { // another process bound or removed it
			return fmt.Errorf("removing %s: %w", loop, err)
		}
	}
	return nil
}
