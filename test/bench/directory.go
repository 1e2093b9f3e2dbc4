package main

import (
	"context"
	"fmt"
	"slices"
	"strconv"

	"github.com/trivet-csi/trivet/test/markdown"
)

// Names of the drivers whose volumes are directories and images.
const (
	localName = "local"
	loopName  = "loop"
)

// localTarget has the directories of this driver, in package targets.
const localTarget = "directories-unlimited"

// directoryLife is the life of a directory without the calls that do not depend on the kind.
var directoryLife = []call{create, stage, publish, stats, unpublish, unstage, remove}

// directoryResult has the times of the calls for directories on a filesystem.
type directoryResult struct {
	fsType  string
	samples samples
	callers []int
	volumes int
}

// measureDirectories measures the life of directories beside floors and beside images of
// another driver on the same filesystem.
func measureDirectories(ctx context.Context, g *ground, o options) (*directoryResult, error) {
	contenders, err := startDirectories(ctx, g, o)
	if err != nil {
		return nil, err
	}
	r := &directoryResult{fsType: g.fsType, samples: samples{}, callers: []int{1, manyCallers}, volumes: max(1, o.volumes/2)}
	p := pass{ground: g, contenders: contenders, samples: samples{}, prefix: "warm", volumes: 2, callers: 1}
	if err := p.run(ctx); err != nil {
		return nil, err
	}
	p.samples, p.volumes = r.samples, r.volumes
	for _, order := range []string{"forth", "back"} {
		for _, p.callers = range r.callers {
			p.prefix = fmt.Sprintf("%s-%d", order, p.callers)
			if err := p.run(ctx); err != nil {
				return nil, err
			}
		}
		slices.Reverse(p.contenders)
	}
	for _, c := range contenders {
		if err := c.stop(); err != nil {
			return nil, err
		}
	}
	return r, nil
}

func startDirectories(ctx context.Context, g *ground, o options) ([]*contender, error) {
	local, err := startTrivet(ctx, g, o.binary, localName, classOf(o.target, "dir", gib))
	if err != nil {
		return nil, err
	}
	loop, err := startTrivet(ctx, g, o.binary, loopName, ext4Of(gib))
	if err != nil {
		return nil, err
	}
	flags := []string{"--directories"}
	if g.fsType == btrfs {
		flags = append(flags, "--limits")
	}
	floors, err := startFloors(ctx, g, local.class, []floorKind{
		{floorName, flags, directoryLife},
		{floorDurable, append(slices.Clone(flags), "--durable"), []call{create, remove}},
	})
	return append(floors, local, loop), err
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
			if len(r.samples.of(floorDurable, one.name, callers).took) > 0 {
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

// microCells returns p50 and p99 in µs, and calls per second.
func (s *sample) microCells() []string {
	return []string{micros(s.p50()), micros(s.at(99)), fmt.Sprintf("%.0f", s.rate())}
}
