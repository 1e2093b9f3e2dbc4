package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/backend/backendtest/targets"
	"github.com/trivet-csi/trivet/test/measure"
)

// targetNamed returns the target of package targets with a name.
func targetNamed(name string) backendtest.Target {
	i := slices.IndexFunc(targets.All, func(t backendtest.Target) bool { return t.Name == name })
	if i < 0 {
		measure.Must(fmt.Errorf("--target %s: package backend/backendtest/targets has no such target", name))
	}
	return targets.All[i]
}

// filesystemOf returns the filesystem with which a target's name ends, or xfs if it ends with none.
func filesystemOf(target string) string {
	last := target[strings.LastIndex(target, "-")+1:]
	if slices.Contains([]string{"ext4", btrfs}, last) {
		return last
	}
	return "xfs"
}

// printTarget measures all calls of a volume's life for each kind of volume of a target.
func printTarget(ctx context.Context, g *testbed, o options, out io.Writer) {
	target := targetNamed(o.target)
	if target.Features.Has(backendtest.Shared) && g.served == "" {
		measure.Must(fmt.Errorf("--target %s: the target's pool is on an export: add --nfs", target.Name))
	}
	for i, k := range target.Volumes() {
		r := measureKind(ctx, g, o, k, fmt.Sprintf("kind%d", i))
		heading := fmt.Sprintf("### %s %s\n\n%d volumes of 1 GiB, %d passes; times in µs.\n", target.Name, k.Name(), r.volumes, r.passes)
		fmt.Fprintln(out, heading)
		fmt.Fprintln(out, r.tables("####"))
	}
}

// disks is the number of disks of a pool of disks. Each volume occupies one disk.
const disks = 8

// measureKind measures all calls of a volume's life for one kind of volume in a new pool, beside
// the floors of the kind if there are any.
func measureKind(ctx context.Context, g *testbed, o options, k backendtest.Kind, name string) *lifeResult {
	volumes, pool, trash := o.volumes, g.poolConfig(name), g.trash(name)
	switch {
	case k.Has(backendtest.WholeDisk):
		volumes = min(volumes, disks)
		devices := g.blankDisks(ctx, name, disks, gib)
		defer freeDisks(ctx, devices)
		pool, trash = poolOfDisks(devices), filepath.Join(g.state(name), "disks", poolName, ".trivet/trash")
	case g.served != "":
		measure.Must(os.Mkdir(g.poolPath(name), 0o755))
	}
	s := g.launchTrivetWith(o.binary, name, pool)
	driver := &contender{server: s, clients: s.connect(ctx, manyCallers), class: classOf(k, gib), calls: life, trash: trash}
	contenders := append([]*contender{driver}, startFloors(ctx, g, driver.class, g.floorsOf(k))...)
	driver.Name = trivet // the name of the driver's samples in the tables
	r := measurePasses(ctx, g, contenders, volumes, 2*o.rounds)
	stopAll(contenders)
	return r
}

// floorsOf returns the floors of a kind. There are none for raw devices, disks, and filesystems
// other than ext4.
func (g *testbed) floorsOf(k backendtest.Kind) []floorKind {
	switch {
	case k.Has(backendtest.Image) && k.FSType == "ext4":
		return imageFloors
	case k.Has(backendtest.Directory):
		return g.directoryFloors()
	}
	return nil
}

// poolOfDisks returns the configuration of a pool of disks without its name.
func poolOfDisks(devices []string) string {
	return fmt.Sprintf("disks: {match: [%s]}", strings.Join(devices, ", "))
}

// blankDisks creates n loop devices for a pool of disks, each for a volume of size bytes, and returns their paths.
func (g *testbed) blankDisks(ctx context.Context, name string, n int, size int64) (devices []string) {
	const overhead = 4 << 20 // bytes; more than the partition tables take
	for i := range n {
		image := filepath.Join(g.directory(name), fmt.Sprintf("disk%d", i))
		measure.Must(os.WriteFile(image, nil, 0o600))
		measure.Must(os.Truncate(image, size+overhead))
		device := measure.Get(exec.CommandContext(ctx, "losetup", "--find", "--show", "--direct-io=on", image).Output())
		devices = append(devices, strings.TrimSpace(string(device)))
	}
	return devices
}

// freeDisks unbinds the devices, also when the benchmark is interrupted. A remaining partition would keep its device
// bound.
func freeDisks(ctx context.Context, devices []string) {
	ctx = context.WithoutCancel(ctx)
	for _, device := range devices {
		_ = measure.Command(ctx, "delpart", device, "1") // fails if the device has no partition
		measure.Must(measure.Command(ctx, "losetup", "-d", device))
	}
}
