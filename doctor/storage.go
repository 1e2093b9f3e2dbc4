package doctor

import (
	"context"

	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// storageChecks checks a pool with its own storage, and each device of the storage.
func storageChecks(ctx context.Context, forms volume.Forms, c pool.Config, stateDir string, serving bool) []Check {
	name := "pool " + c.Name
	records := c.Within(stateDir).Directory.Path
	p, err := pool.OpenReadOnly(ctx, forms, c, stateDir)
	if err != nil {
		return []Check{judgeClosedPool(name, records, err, true)}
	}
	defer p.Close()
	facts, err := readContents(p)
	if err != nil {
		return []Check{failure(name, err.Error(), "check the disk that "+records+" is on (dmesg)")}
	}
	checks := []Check{
		ok(name, "%s, of %s; its records are at %s", facts.uuid, c.Kind(), records),
		judgeStorage(name+", space", p.Storage(), facts.usage),
		judgeVolumes(name+", volumes", facts),
		judgeLeftovers(name+", leftovers", facts, serving),
	}
	for _, d := range p.Storage().Devices() {
		checks = append(checks, judgeDevice(name+", "+d.Path, d))
	}
	return checks
}

func judgeStorage(name string, s pool.Storage, u pool.Usage) Check {
	found, advice := s.Summary(u.Usage)
	if advice != "" {
		return warning(name, found, advice)
	}
	return ok(name, "%s", found)
}

func judgeDevice(name string, d pool.Device) Check {
	seen := volume.FormatSize(d.Size) + ", " + d.State
	if d.Detail != "" {
		seen += ": " + d.Detail
	}
	if d.Advice != "" {
		return warning(name, seen, d.Advice)
	}
	return ok(name, "%s", seen)
}
