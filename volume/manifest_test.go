package volume_test

import (
	"encoding/json"
	"errors"
	"testing"

	"github.com/trivet-csi/trivet/volume"
)

// TestManifest: the description that another node sends is refused if it is impossible, or if it claims a volume of another pool.
func TestManifest(t *testing.T) {
	source := volume.Source{Snapshot: true, ID: volume.ID{Backend: "loop", Pool: "p", PoolUUID: "01234567", Name: "s"}}
	for text, valid := range map[string]bool{
		`{"identity": "x", "sizeBytes": 1048576, "block": true, "sectorSize": 512}`:                                      true,
		`{"identity": "x", "sizeBytes": 1048576, "block": true, "sectorSize": 512, "lineage": "loop:p.01234567:v"}`:      true,
		`{"identity": "x", "sizeBytes": 1048576, "block": true, "sectorSize": 512, "lineage": "loop:p.76543210:v"}`:      false,
		`{"identity": "x", "sizeBytes": 1048576, "block": true, "sectorSize": 512, "lineage": "disk:p.01234567:v"}`:      false,
		`{"identity": "x", "sizeBytes": 1048576, "block": true, "sectorSize": 512, "lineage": "loop:p:v"}`:               false,
		`{"identity": "", "sizeBytes": 1048576, "block": true, "sectorSize": 512}`:                                       false,
		`{"identity": "x", "sizeBytes": 0, "block": true, "sectorSize": 512}`:                                            false,
		`{"identity": "x", "sizeBytes": 1048576, "block": true, "fsType": "ext4", "sectorSize": 512}`:                    false,
		`{"identity": "x", "sizeBytes": 1048576, "fsType": "vfat", "sectorSize": 512}`:                                   false,
		`{"identity": "x", "sizeBytes": 1048576, "fsType": "xfs", "formatted": true, "sectorSize": 512, "bytes": 4096}`:  true,
		`{"identity": "x", "sizeBytes": 1048576, "fsType": "xfs", "formatted": true, "sectorSize": 1024, "bytes": 4096}`: false,
	} {
		var m volume.Manifest
		if err := json.Unmarshal([]byte(text), &m); err != nil {
			t.Fatal(err)
		}
		if err := m.Check(source); valid != (err == nil) || err != nil && !errors.Is(err, volume.ErrDamaged) {
			t.Errorf("%s: got %v, want valid: %t", text, err, valid)
		}
	}
}
