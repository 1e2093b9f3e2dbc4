package dm

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/trivet-csi/trivet/internal/testenv"
)

// withVolume is the metadata of a group with a logical volume trivet.a, whose physical volume also has that name.
const (
	volumeUUID = "GkRFcc-D7a6-wfx4-UajG-yT7j-ABjK-076S0L"
	withVolume = "vg0 {\nid = \"" + vgUUID + "\"\nphysical_volumes {\n\ntrivet.a {\nid = \"JsnWpV-nQwa-543P-gdyT-KozC-zUeH-G4MeVo\"\n}\n}\n\n" +
		"logical_volumes {\n\ntrivetxa {\nid = \"x\"\n}\n\ntrivet.a {\nid = \"" + volumeUUID + "\"\nstatus = [\"READ\"]\n}\n}\n}\n\x00"
)

// TestCreated: the UUID of a new logical volume is read from a physical volume. A command reports it if no physical volume
// has it.
func TestCreated(t *testing.T) {
	testenv.RequireRoot(t)
	dir := t.TempDir()
	g := Group{Name: "vg0", UUID: vgUUID, Devices: []string{filepath.Join(dir, "missing"), filepath.Join(dir, "pv")}}
	script := "#!/bin/sh\ncat <<'END'\n" + reported + "END\n"
	if err := errors.Join(os.WriteFile(filepath.Join(dir, "lvm"), []byte(script), 0o700), os.WriteFile(g.Devices[1], device(1, headerSize, withVolume), 0o600)); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
	for _, tc := range []struct {
		name, uuid string
		err        error
	}{
		{"trivet.a", volumeUUID, nil},
		{"trivet_abc", "ccRkFK-D7a6-wfx4-UajG-yT7j-ABjK-076S0L", nil}, // only in the report
		{"trivet.b", "", ErrMissing},
	} {
		if id, err := g.created(t.Context(), tc.name); id.Volume != tc.uuid || !errors.Is(err, tc.err) {
			t.Errorf("%s: got %+v, %v, want %s, %v", tc.name, id, err, tc.uuid, tc.err)
		}
	}
	another := strings.Replace(withVolume, vgUUID, "QAbhEu-2yfv-wyTi-Ahuk-6fqy-jzl2-svOdfY", 1)
	if err := os.WriteFile(g.Devices[1], device(1, headerSize, another), 0o600); err != nil {
		t.Fatal(err)
	}
	if id, err := g.created(t.Context(), "trivet.a"); !errors.Is(err, ErrMissing) {
		t.Errorf("in another group: got %+v, %v, want ErrMissing", id, err)
	}
}
