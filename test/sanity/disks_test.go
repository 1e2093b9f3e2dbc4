package sanity

import (
	"path/filepath"
	"testing"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/backend/local"
	"github.com/trivet-csi/trivet/backend/loop"
	"github.com/trivet-csi/trivet/driver"
	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

const (
	// wholeDisks begins the grounds of disks.
	wholeDisks = "disks"
	// disksThere are more than a spec has volumes at a time.
	disksThere = maxVolumes + 2
	// diskSize is exactly enough for a volume of size: a spec wants that and no more.
	diskSize = size + 2*volume.MiB
)

// onDisk is a kind of volume that is a whole disk, of a pool that is called as its ground.
func (k kind) onDisk(ground string) kind {
	parameters := map[string]string{volume.ParamBackend: local.Name, volume.ParamPool: ground}
	if fsType := k.parameters[volume.ParamFSType]; fsType != "" {
		parameters[volume.ParamFSType] = fsType
	}
	k.parameters = parameters
	return k.on(ground)
}

// loopDisks makes the disks of a ground, and returns what matches them.
func loopDisks(t *testing.T) []string {
	t.Helper()
	var match []string
	for range disksThere {
		device, _, _ := testenv.Disk(t, diskSize)
		match = append(match, device)
	}
	return match
}

// disks starts one driver with a pool of disks for each ground, of those that match.
func disks(t *testing.T, match map[string][]string) map[string]suite {
	t.Helper()
	state := t.TempDir()
	o := driver.Options{
		Endpoint: "unix://" + filepath.Join(state, "csi.sock"), NodeID: backendtest.Node, StateDir: state, Name: "csi.trivet.dev", Version: "test",
		Services: []string{"controller", "node"},
		Config:   driver.Config{MaxVolumesPerNode: maxVolumes},
		Backends: []func(*pool.Set) backend.Backend{loop.New, local.New},
	}
	for ground, globs := range match {
		o.Config.Pools = append(o.Config.Pools, pool.Config{Name: ground, Disks: &pool.Disks{Match: globs}})
	}
	d := backendtest.StartWith(t, o)
	suites := map[string]suite{}
	for ground := range match {
		records := filepath.Join(state, "disks", ground)
		id := localID(t, records)
		id.Pool = ground
		suites[ground] = suite{records, id, d.Options.Endpoint, d.Options.Endpoint}
	}
	return suites
}
