package main

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strconv"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/test/markdown"
	"github.com/trivet-csi/trivet/test/measure"
)

// Names of the driver whose volumes are directories, and of the one whose volumes are images.
const (
	localName = "local"
	loopName  = "loop"
)

// localTarget is the target of package targets whose directories are measured by default.
const localTarget = "directories-unlimited"

// btrfs is the filesystem whose simple quotas limit directories.
const btrfs = "btrfs"

// enableSimpleQuotas enables simple quotas on the btrfs that is mounted at a path.
func enableSimpleQuotas(path string) {
	const quotaCtl, enable = 0xc0109428, 4 // BTRFS_IOC_QUOTA_CTL, BTRFS_QUOTA_CTL_ENABLE_SIMPLE_QUOTA
	dir := measure.Get(os.Open(path))
	defer dir.Close()
	args := [2]uint64{enable}
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, dir.Fd(), quotaCtl, uintptr(unsafe.Pointer(&args))); errno != 0 {
		measure.Must(fmt.Errorf("BTRFS_IOC_QUOTA_CTL of %s: %w", path, errno))
	}
}

// directoryLife contains the calls of a volume's life that differ between directories and images.
var directoryLife = []call{create, stage, publish, stats, unpublish, unstage, remove}

// directoryResult contains the times of the calls for directories on a filesystem.
type directoryResult struct {
	*lifeResult
	fsType string
}

// directoryOf returns the kind of volume of a target that is a directory.
func directoryOf(name string) backendtest.Kind {
	kinds := targetNamed(name).Volumes()
	i := slices.IndexFunc(kinds, func(k backendtest.Kind) bool { return k.Has(backendtest.Directory) })
	if i < 0 {
		measure.Must(fmt.Errorf("--target %s: no kind of volume of the target is a directory", name))
	}
	return kinds[i]
}

// measureDirectories measures all calls of a directory's life, beside floors and beside a driver
// whose volumes are images on the same filesystem.
func measureDirectories(ctx context.Context, g *testbed, o options) *directoryResult {
	local := startTrivet(ctx, g, o.binary, localName, classOf(directoryOf(o.target), gib))
	loop := startTrivet(ctx, g, o.binary, loopName, ext4Of(gib))
	contenders := append(startFloors(ctx, g, local.class, g.directoryFloors()), local, loop)
	r := measurePasses(ctx, g, contenders, max(1, o.volumes/2), 2)
	stopAll(contenders)
	return &directoryResult{r, g.fsType}
}

// directoryFloors returns the floors of directories on the testbed's filesystem.
func (g *testbed) directoryFloors() []floorKind {
	flags := []string{"--directories"}
	if g.fsType == btrfs {
		flags = append(flags, "--limits")
	}
	return []floorKind{
		{floorName, flags, directoryLife},
		{floorDurable, append(slices.Clone(flags), "--durable"), []call{create, remove}},
	}
}

// title returns the filesystem and the quotas that limit its directories, for a heading.
func title(fsType string) string {
	if fsType == btrfs {
		return "btrfs with simple quotas"
	}
	return fsType + " without quota"
}

// String returns a table that compares directories with the floors and with images.
func (r *directoryResult) String() string {
	t := markdown.Table{{"call", "callers", "p50", "p99", "ops/s", "floor p50", "p99", "ops/s", "p50 ratio", "ops/s ratio", "loop p50", "p99", "ops/s", "p50 ratio", "ops/s ratio"}}
	for _, callers := range r.callers {
		for _, one := range directoryLife {
			r.row(&t, one.name, one.name, floorName, callers)
			if r.hasFloor(floorDurable, one.name, callers) {
				r.row(&t, one.name+", floor + fsyncs", one.name, floorDurable, callers)
			}
		}
	}
	return fmt.Sprintf("### Directories on %s\n\n%d volumes of 1 GiB, 2 passes, servers in turns; times in µs.\n\n%s", title(r.fsType), r.volumes, t.Text(true))
}

// row adds the times of one call: those of directories, then those of a floor and of images.
func (r *directoryResult) row(t *markdown.Table, label, name, floor string, callers int) {
	own := r.samples.of(localName, name, callers)
	row := slices.Concat([]string{label, strconv.Itoa(callers)}, own.microCells())
	for _, server := range []string{floor, loopName} {
		other := r.samples.of(server, name, callers)
		row = slices.Concat(row, other.microCells(), []string{times(own.slower(other)), times(own.rate() / other.rate())})
	}
	t.Row(row...)
}
