package backend

import (
	"testing"

	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/test/frozen"
	"github.com/trivet-csi/trivet/volume"
)

// TestFrozenMapped: the mapped device of the previous driver is found by its name.
func TestFrozenMapped(t *testing.T) {
	d := &Devices{Pools: Pools{Set: &pool.Set{}}}
	frozen.Bytes(t, "mapped.txt", []byte(d.mappedName(volume.ID{Backend: "loop", Pool: "ssd", PoolUUID: "0a1b2c3d", Name: "pvc-1"})+"\n"))
}

// TestCapacityWithoutHeader: the header of an encrypted volume is not available for data.
func TestCapacityWithoutHeader(t *testing.T) {
	encrypted := volume.Parameters{Values: map[string]string{volume.ParamEncryption: volume.EncryptionLUKS2}}
	for _, tc := range []struct {
		p          volume.Parameters
		have, want Capacity
	}{
		{volume.Parameters{}, Capacity{Available: 1 << 30, Max: 1 << 29, Min: 4096}, Capacity{Available: 1 << 30, Max: 1 << 29, Min: 4096}},
		{encrypted, Capacity{Available: 1 << 30, Max: 1 << 29, Min: 4096}, Capacity{Available: 1<<30 - 16<<20, Max: 1<<29 - 16<<20, Min: 4096}},
		{encrypted, Capacity{Available: 1 << 20, Max: 1 << 20, Min: 4096}, Capacity{Min: 4096}},
	} {
		if got := WithoutHeader(tc.have, tc.p); got != tc.want {
			t.Errorf("got %+v, want %+v", got, tc.want)
		}
	}
}
