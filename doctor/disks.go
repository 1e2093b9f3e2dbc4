package doctor

import (
	"context"

	"github.com/trivet-csi/trivet/blockdev"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// diskChecks look at a pool of disks, and at each disk that it matches.
func diskChecks(ctx context.Context, c pool.Config, stateDir string, serving bool) []Check {
	name := "pool " + c.Name
	records := pool.RecordsOfDisks(c, stateDir)
	p, err := pool.Look(ctx, c, stateDir)
	if err != nil {
		return []Check{judgeClosedPool(name, records, err, true)}
	}
	defer p.Close()
	facts, err := readContents(p)
	if err != nil {
		return []Check{failure(name, err.Error(), "check the disk that "+records+" is on (dmesg)")}
	}
	checks := []Check{
		ok(name, "%s, of disks; its records are at %s", facts.uuid, records),
		judgeFreeDisks(name+", space", p.DiskStates(), facts.usage),
		judgeVolumes(name+", volumes", facts),
		judgeLeftovers(name+", leftovers", facts, serving),
	}
	for _, s := range p.DiskStates() {
		checks = append(checks, judgeDisk(name+", "+s.Disk.Path, s))
	}
	return checks
}

func judgeFreeDisks(name string, all []pool.DiskState, u pool.Usage) Check {
	free := 0
	for _, s := range all {
		if s.State == blockdev.DiskFree {
			free++
		}
	}
	if len(all) == 0 {
		return warning(name, "no disk matches", "correct disks.match in the configuration; in a container, mount the host's /dev")
	}
	const seen = "%d of %d disks are free, the largest with %s for a volume"
	if free == 0 {
		return warning(name, "none of the disks is free", "no volume fits any more: delete some, or add disks; each disk is listed with what it is")
	}
	return ok(name, seen, free, len(all), volume.FormatSize(u.Largest))
}

func judgeDisk(name string, s pool.DiskState) Check {
	seen := volume.FormatSize(s.Disk.Size) + ", " + string(s.State)
	if s.Detail != "" {
		seen += ": " + s.Detail
	}
	switch s.State {
	case pool.DiskOrphaned:
		return warning(name, seen, "it is never given to another volume as it is")
	case pool.DiskOtherPool:
		return warning(name, seen, "change disks.match of one of the two pools")
	case blockdev.DiskUnreadable:
		return warning(name, seen, "see the kernel's log, and the disk's own (smartctl)")
	default:
		return ok(name, "%s", seen)
	}
}
