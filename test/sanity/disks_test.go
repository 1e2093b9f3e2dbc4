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
	wholeDisks = "disks"
	// disksThere are more than a spec has volumes at a time.
	disksThere = maxVolumes + 2
	// diskSize is exactly enough for a volume of size: a spec wants that and no more.
	diskSize = size + 2*volume.MiB
)

func (k kind) onDisk() kind {
	parameters := map[string]string{volume.ParamBackend: local.Name, volume.ParamPool: wholeDisks}
	if fsType := k.parameters[volume.ParamFSType]; fsType != "" {
		parameters[volume.ParamFSType] = fsType
	}
	k.parameters = parameters
	return k.on(wholeDisks)
}

// disks starts a driver with a pool of disks.
func disks(t *testing.T) suite {
	t.Helper()
	var match []string
	for range disksThere {
		device, _, _ := testenv.Disk(t, diskSize)
		match = append(match, device)
	}
	state := t.TempDir()
	d := backendtest.StartWith(t, driver.Options{
		Endpoint: "unix://" + filepath.Join(state, "csi.sock"), NodeID: backendtest.Node, StateDir: state, Name: "csi.trivet.dev", Version: "test",
		Services: []string{"controller", "node"},
		Config: driver.Config{
			Pools:             []pool.Config{{Name: wholeDisks, Disks: &pool.Disks{Match: match}}},
			MaxVolumesPerNode: maxVolumes,
		},
		Backends: []func(*pool.Set) backend.Backend{loop.New, local.New},
	})
	records := filepath.Join(state, "disks", wholeDisks)
	id := localID(t, records)
	id.Pool = wholeDisks
	return suite{records, id, d.Options.Endpoint, d.Options.Endpoint}
}
