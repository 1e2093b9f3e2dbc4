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

// diskSize is the size of the xfs in bytes; the file behind it is sparse.
const diskSize = 64 << 30

// ground is a temporary directory with a new xfs on a loop device.
type ground struct {
	base      string
	disk      string // where the xfs is mounted
	processes []*process
}

func newGround(ctx context.Context) (*ground, error) {
	base, err := os.MkdirTemp("", "trivet-scale-")
	if err != nil {
		return nil, err
	}
	g := &ground{base: base, disk: filepath.Join(base, "disk")}
	if err := g.build(ctx); err != nil {
		return nil, errors.Join(err, g.clear())
	}
	return g, nil
}

func (g *ground) build(ctx context.Context) error {
	if err := os.Mkdir(g.disk, 0o755); err != nil {
		return err
	}
	f, err := os.Create(g.image())
	if err != nil {
		return err
	}
	if err := errors.Join(f.Truncate(diskSize), f.Close()); err != nil {
		return err
	}
	if err := command(ctx, "mkfs.xfs", "-q", g.image()); err != nil {
		return err
	}
	return command(ctx, "mount", "-t", "xfs", "-o", "loop", g.image(), g.disk)
}

func (g *ground) image() string { return filepath.Join(g.base, "xfs") }

func command(ctx context.Context, name string, args ...string) error {
	out, err := exec.CommandContext(ctx, name, args...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("%s %s: %w: %s", name, strings.Join(args, " "), err, out)
	}
	return nil
}

// clear unmounts and removes everything.
func (g *ground) clear() error {
	var errs []error
	for _, p := range slices.Backward(g.processes) {
		errs = append(errs, p.stop())
	}
	err := unix.Unmount(g.disk, 0)
	if err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) { // it was not mounted
		return errors.Join(append(errs, fmt.Errorf("%s is kept: unmounting %s: %w", g.base, g.disk, err))...)
	}
	return errors.Join(append(errs, g.awaitUnbound(), os.RemoveAll(g.base))...)
}

// awaitUnbound waits until no loop device has the image.
func (g *ground) awaitUnbound() error {
	for range 250 {
		if !g.bound() {
			return nil
		}
		time.Sleep(20 * time.Millisecond)
	}
	return fmt.Errorf("a loop device still has %s", g.image())
}

func (g *ground) bound() bool {
	files, _ := filepath.Glob("/sys/block/loop*/loop/backing_file") // the pattern is valid
	return slices.ContainsFunc(files, func(path string) bool {
		b, _ := os.ReadFile(path) // removed meanwhile: unbound
		return strings.TrimSpace(string(b)) == g.image()
	})
}
