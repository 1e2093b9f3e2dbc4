package main

import (
	"context"
	"fmt"

	"github.com/trivet-csi/trivet/backend/backendtest/targets"
	"github.com/trivet-csi/trivet/test/markdown"
)

// filesystemResult contains the times of the calls for images with a filesystem.
type filesystemResult struct {
	fsType string
	*lifeResult
}

// measureFilesystems measures one caller's calls for images with each filesystem other than ext4.
func measureFilesystems(ctx context.Context, g *testbed, o options) (all []*filesystemResult) {
	for _, fsType := range []string{"xfs", btrfs} {
		driver := startTrivet(ctx, g, o.binary, trivet+"-"+fsType, classOf(targets.Volume("images-xfs", fsType), gib))
		contenders := append([]*contender{driver}, startFloors(ctx, g, driver.class, []floorKind{
			{floorName, nil, []call{create, stage, unstage, remove}},
			{floorDurable, []string{"--durable"}, []call{create, remove}},
		})...)
		driver.Name = trivet // the name of the driver's samples
		r := &lifeResult{samples: samples{}, calls: []call{create, stage, unstage, remove}, callers: []int{1}, volumes: o.volumes, passes: 2 * o.rounds}
		r.measure(ctx, g, contenders)
		stopAll(contenders)
		all = append(all, &filesystemResult{fsType, r})
	}
	return all
}

// filesystemTable returns a table that compares the creation and staging of images with the floors.
func filesystemTable(all []*filesystemResult) string {
	t := markdown.Table{{"filesystem", "call", "p50", "p99", "floor p50", "p99", "p50 ratio"}}
	for _, r := range all {
		for _, c := range []struct {
			label, name, floor string
		}{
			{"create, floor + fsyncs", create.name, floorDurable},
			{stage.name, stage.name, floorName},
			{unstage.name, unstage.name, floorName},
		} {
			own, floor := r.samples.of(trivet, c.name, 1), r.samples.of(c.floor, c.name, 1)
			t.Row(r.fsType, c.label, micros(own.P50()), micros(own.At(99)), micros(floor.P50()), micros(floor.At(99)), times(own.slower(floor)))
		}
	}
	return fmt.Sprintf("### Other filesystems\n\n%d volumes of 1 GiB, %d passes, one caller; times in µs.\n\n%s", all[0].volumes, all[0].passes, t.Text(true))
}
