package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// diskSize is the size of the filesystem in bytes; the file behind it is sparse.
const diskSize = 256 << 30

// ground is the temporary folder of all servers, with a new filesystem on a loop device or a
// mount of an NFS export.
type ground struct {
	base    string
	fsType  string // xfs, or btrfs, which has simple quotas
	disk    string // where the filesystem or the export is mounted
	served  string // where the export is on the server; empty: no NFS
	loops   []string
	servers []*server
}

func newGround(ctx context.Context, fsType, served string) (*ground, error) {
	base, err := os.MkdirTemp("", "trivet-bench-")
	if err != nil {
		return nil, err
	}
	g := &ground{base: base, fsType: fsType, disk: filepath.Join(base, "disk"), served: served, loops: loopNodes()}
	if err := g.build(ctx); err != nil {
		return nil, errors.Join(err, g.clear())
	}
	return g, nil
}

func (g *ground) build(ctx context.Context) error {
	if err := os.Mkdir(g.disk, 0o755); err != nil {
		return err
	}
	if g.served != "" {
		return g.mount(ctx)
	}
	f, err := os.Create(g.image())
	if err != nil {
		return err
	}
	if err := errors.Join(f.Truncate(diskSize), f.Close()); err != nil {
		return err
	}
	if err := command(ctx, "mkfs."+g.fsType, "-q", g.image()); err != nil {
		return err
	}
	if err := g.mount(ctx); err != nil || g.fsType != btrfs {
		return err
	}
	return enableSimpleQuotas(g.disk)
}

func (g *ground) image() string { return filepath.Join(g.base, g.fsType) }

func (g *ground) mount(ctx context.Context) error {
	if g.served != "" {
		return command(ctx, "mount", "-t", "nfs", "-o", "vers=4.2,nosharecache", nfsServer+":/", g.disk)
	}
	return command(ctx, "mount", "-t", g.fsType, "-o", "loop", g.image(), g.disk)
}

func command(ctx context.Context, name string, args ...string) error {
	out, err := exec.CommandContext(ctx, name, args...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("%s %s: %w: %s", name, strings.Join(args, " "), err, out)
	}
	return nil
}

// kubelet creates a folder for the mounts of a server's volumes.
func (g *ground) kubelet(name string) (string, error) {
	path := filepath.Join(g.disk, "kubelet", name)
	if g.served != "" {
		path = filepath.Join(g.base, "kubelet", name)
	}
	return path, os.MkdirAll(path, 0o755)
}

// folder creates a folder on the filesystem or the export.
func (g *ground) folder(name string) (string, error) {
	path := filepath.Join(g.disk, name)
	return path, os.MkdirAll(path, 0o755)
}

// settle writes everything to the disk, so that the next measurement does not pay for it.
func (g *ground) settle() error {
	d, err := os.Open(g.disk)
	if err != nil {
		return err
	}
	defer d.Close()
	return unix.Syncfs(int(d.Fd()))
}

// forgetCaches empties the kernel's caches of this filesystem alone, as a restart of the
// machine does.
func (g *ground) forgetCaches(ctx context.Context) error {
	if err := unix.Unmount(g.disk, 0); err != nil {
		return fmt.Errorf("unmounting %s: %w", g.disk, err)
	}
	return g.mount(ctx)
}

// clear removes everything. It returns an error if the calls have left something.
func (g *ground) clear() error {
	var errs []error
	for _, s := range slices.Backward(g.servers) {
		errs = append(errs, s.stop())
	}
	errs = append(errs, g.unmountAll(), g.awaitLoops(), removeLoopNodes(g.loops))
	if mounts, err := g.mounts(); err != nil || len(mounts) > 0 {
		return errors.Join(append(errs, fmt.Errorf("%s is kept: it has mounts %q", g.base, mounts))...)
	}
	return errors.Join(append(errs, os.RemoveAll(g.base))...)
}

// unmountAll unmounts everything in the folder, the filesystem last.
func (g *ground) unmountAll() error {
	mounts, err := g.mounts()
	errs := []error{err}
	if len(mounts) > 1 {
		errs = append(errs, fmt.Errorf("%d mounts were left, the last at %s", len(mounts)-1, mounts[len(mounts)-1]))
	}
	for _, path := range slices.Backward(mounts) {
		if err := unix.Unmount(path, 0); err != nil {
			errs = append(errs, fmt.Errorf("unmounting %s: %w", path, err))
		}
	}
	return errors.Join(errs...)
}

// mounts lists the mounts in the folder, in the order of mounting.
func (g *ground) mounts() ([]string, error) {
	table, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	var paths []string
	for line := range strings.Lines(string(table)) {
		if path := strings.Fields(line)[4]; strings.HasPrefix(path, g.base+"/") {
			paths = append(paths, path)
		}
	}
	return paths, nil
}

// awaitLoops waits until no loop device has a file of the folder.
func (g *ground) awaitLoops() error {
	var bound []string
	for range 100 {
		bound = nil
		for _, loop := range loopNodes() {
			if strings.HasPrefix(backingFile(loop), g.base+"/") {
				bound = append(bound, loop)
			}
		}
		if len(bound) == 0 {
			return nil
		}
		time.Sleep(20 * time.Millisecond)
	}
	return fmt.Errorf("%q are still bound", bound)
}

// loopNodes lists the names of all loop devices, bound or not.
func loopNodes() []string {
	paths, _ := filepath.Glob("/sys/block/loop*") // the pattern is good
	for i := range paths {
		paths[i] = filepath.Base(paths[i])
	}
	return paths
}

func backingFile(loop string) string {
	b, _ := os.ReadFile("/sys/block/" + loop + "/loop/backing_file") // unbound: none
	return strings.TrimSpace(string(b))
}

// removeLoopNodes removes the unbound loop devices that the run has created. Every search for
// a free device reads all of them.
func removeLoopNodes(before []string) error {
	control, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer control.Close()
	for _, loop := range loopNodes() {
		var number int
		if slices.Contains(before, loop) || backingFile(loop) != "" {
			continue
		}
		if _, err := fmt.Sscanf(loop, "loop%d", &number); err != nil {
			return err
		}
		err := unix.IoctlSetInt(int(control.Fd()), unix.LOOP_CTL_REMOVE, number)
		if err != nil && !errors.Is(err, unix.EBUSY) && !errors.Is(err, unix.ENODEV) { // another took it
			return fmt.Errorf("removing %s: %w", loop, err)
		}
	}
	return nil
}
