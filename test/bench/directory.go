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

// Names of the drivers whose volumes are directories and images.
const (
	localName = "local"
	loopName  = "loop"
)

// localTarget is the target of package targets whose directories are measured.
const localTarget = "directories-unlimited"

// btrfs is the filesystem with simple quotas.
const btrfs = "btrfs"

// enableSimpleQuotas enables the quotas of a btrfs.
func enableSimpleQuotas(path string) {
	const quotaCtl, enable = 0xc0109428, 4 // BTRFS_IOC_QUOTA_CTL, BTRFS_QUOTA_CTL_ENABLE_SIMPLE_QUOTA
	dir := measure.Get(os.Open(path))
	defer dir.Close()
	args := [2]uint64{enable}
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, dir.Fd(), quotaCtl, uintptr(unsafe.Pointer(&args))); errno != 0 {
		measure.Must(fmt.Errorf("BTRFS_IOC_QUOTA_CTL of %s: %w", path, errno))
	}
}

// directoryLife is the life of a directory without the calls that do not depend on the kind.
var directoryLife = []call{create, stage, publish, stats, unpublish, unstage, remove}

// directoryResult has the times of the calls for directories on a filesystem.
type directoryResult struct {
	*lifeResult
	fsType string
}

// directoryOf returns the kind of volume of a target whose volumes are directories.
func directoryOf(name string) backendtest.Kind {
	kinds := targetNamed(name).Volumes()
	i := slices.IndexFunc(kinds, func(k backendtest.Kind) bool { return k.Has(backendtest.Directory) })
	if i < 0 {
		measure.Must(fmt.Errorf("--target: %s has no directories", name))
	}
	return kinds[i]
}

// measureDirectories measures the life of directories beside floors and beside images of
// another driver on the same filesystem.
func measureDirectories(ctx context.Context, g *ground, o options) *directoryResult {
	local := startTrivet(ctx, g, o.binary, localName, classOf(directoryOf(o.target), gib))
	loop := startTrivet(ctx, g, o.binary, loopName, ext4Of(gib))
	contenders := append(startFloors(ctx, g, local.class, g.directoryFloors()), local, loop)
	r := measurePasses(ctx, g, contenders, max(1, o.volumes/2), 2)
	stopAll(contenders)
	return &directoryResult{r, g.fsType}
}

func (g *ground) directoryFloors() []floorKind {
	flags := []string{"--directories"}
	if g.fsType == btrfs {
		flags = append(flags, "--limits")
	}
	return []floorKind{
		{floorName, flags, directoryLife},
		{floorDurable, append(slices.Clone(flags), "--durable"), []call{create, remove}},
	}
}

// title says what limits the directories.
func title(fsType string) string {
	if fsType == btrfs {
		return "btrfs with simple quotas"
	}
	return fsType + " without quota"
}

// String shows directories beside the floors and beside images.
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

func (r *directoryResult) row(t *markdown.Table, label, name, floor string, callers int) {
	own := r.samples.of(localName, name, callers)
	row := slices.Concat([]string{label, strconv.Itoa(callers)}, own.microCells())
	for _, server := range []string{floor, loopName} {
		other := r.samples.of(server, name, callers)
		row = slices.Concat(row, other.microCells(), []string{times(own.slower(other)), times(own.rate() / other.rate())})
	}
	t.Row(row...)
}
