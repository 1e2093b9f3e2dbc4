package dm

import (
	"slices"
	"strings"
	"testing"
)

// reported is the output of the command of Report for a group with one logical volume, of LVM 2.03.16.
const reported = `  {
      "report": [
          {
              "vg": [
                  {"vg_uuid":"PAbhEu-2yfv-wyTi-Ahuk-6fqy-jzl2-svOdfY", "vg_extent_size":"4194304", "vg_extent_count":"511", "vg_free_count":"479", "vg_exported":"0"}
              ]
              ,
              "pv": [
                  {"pv_name":"/dev/vdb", "pv_uuid":"JsnWpV-nQwa-543P-gdyT-KozC-zUeH-G4MeVo", "pv_size":"2143289344", "pv_missing":"0"}
              ]
              ,
              "lv": [
                  {"lv_uuid":"ccRkFK-D7a6-wfx4-UajG-yT7j-ABjK-076S0L", "lv_name":"trivet_abc", "lv_size":"134217728", "lv_tags":"trivet,trivet.pool=1234-56", "lv_health_status":"", "pool_lv":"pool0", "lv_layout":"thin,sparse", "lv_role":"public,snapshot,thinsnapshot", "lv_permissions":"read-only"}
              ]
              ,
              "pvseg": [
              ]
              ,
              "seg": [
              ]
          }
      ]
  }
`

// TestParseReport parses a report of lvm(8).
func TestParseReport(t *testing.T) {
	g := Group{Name: "vg0", UUID: vgUUID}
	r, err := g.parseReport(reported)
	if err != nil || r.ExtentSize != 4<<20 || r.Extents != 511 || r.Free != 479 || r.Exported || len(r.Physical) != 1 || r.Physical[0].Missing {
		t.Errorf("got %+v, %v", r, err)
	}
	lv, ok := r.Named("trivet_abc")
	if !ok || lv.Size != 128<<20 || !lv.HasTag("trivet") || lv.HasTag("pool") || lv.Partial || lv.Pool != "pool0" || lv.IsPool || lv.Layout != "thin,sparse" || !lv.ReadOnly || !slices.Contains(lv.Roles, "thinsnapshot") {
		t.Errorf("got logical volume %+v", lv)
	}
	if same, ok := r.Volume(lv.ID); !ok || same.Name != lv.Name {
		t.Errorf("Volume: got %+v, %t", same, ok)
	}
	for name, out := range map[string]string{
		"no JSON": "x", "no group": `{"report":[]}`, "another group": strings.ReplaceAll(reported, "PAbhEu", "QAbhEu"), "no number": strings.ReplaceAll(reported, `"511"`, `""`),
		"negative number": strings.ReplaceAll(reported, `"511"`, `"-1"`), "no extents": strings.ReplaceAll(reported, `"4194304"`, `"0"`),
	} {
		if _, err := g.parseReport(out); err == nil {
			t.Errorf("%s: got no error", name)
		}
	}
}

// FuzzParseReport: a report is refused, or is that of the group, with extents of at least one byte and no negative number.
func FuzzParseReport(f *testing.F) {
	f.Add(reported)
	f.Add(`{"report":[{"vg":[{"vg_uuid":"` + vgUUID + `","vg_extent_size":"0","vg_extent_count":"-1","vg_free_count":"1"}]}]}`)
	f.Fuzz(func(t *testing.T, out string) {
		r, err := Group{Name: "vg0", UUID: vgUUID}.parseReport(out)
		if err != nil {
			return
		}
		numbers := []int64{r.ExtentSize - 1, r.Extents, r.Free}
		for _, p := range r.Physical {
			numbers = append(numbers, p.Size)
		}
		for _, v := range r.Volumes {
			numbers = append(numbers, v.Size)
			if v.ID.Group != vgUUID {
				t.Errorf("got a logical volume of group %q", v.ID.Group)
			}
		}
		if slices.Min(numbers) < 0 {
			t.Errorf("accepted %+v", r)
		}
	})
}

// TestKernelUUID: the kernel's UUID of a device identifies its logical volume. Devices of parts of a logical volume, which
// have a suffix, and devices of other programs are not logical volumes.
func TestKernelUUID(t *testing.T) {
	id := VolumeID{vgUUID, "ccRkFK-D7a6-wfx4-UajG-yT7j-ABjK-076S0L"}
	if got, ok := parseKernelUUID(id.kernelUUID()); !ok || got != id {
		t.Errorf("got %v, %t, want %v", got, ok, id)
	}
	for _, other := range []string{"", "LVM-", id.kernelUUID() + "-tpool", "LVM-" + strings.Repeat("-", 64), "CRYPT-LUKS2-0123", "mpath-3600"} {
		if _, ok := parseKernelUUID(other); ok {
			t.Errorf("%q is a logical volume, want not", other)
		}
	}
	if got := deviceName("vg-a", "trivet.b-c"); got != "vg--a-trivet.b--c" {
		t.Errorf("got device name %q", got)
	}
}

// FuzzKernelUUID: a kernel's UUID is refused, or it is the UUID of the returned logical volume.
func FuzzKernelUUID(f *testing.F) {
	f.Add(VolumeID{vgUUID, "ccRkFK-D7a6-wfx4-UajG-yT7j-ABjK-076S0L"}.kernelUUID())
	f.Add("LVM-" + strings.Repeat("-", 64))
	f.Fuzz(func(t *testing.T, s string) {
		if id, ok := parseKernelUUID(s); ok && id.kernelUUID() != s {
			t.Errorf("%q was parsed to %v, whose UUID is %q", s, id, id.kernelUUID())
		}
	})
}

// TestRanges: the ranges of all segments are returned. A report without a volume is an error.
func TestRanges(t *testing.T) {
	out := `{"report":[{"lv":[{"seg_pe_ranges":"/dev/vdb:0-3"},{"seg_pe_ranges":"/dev/vdc:7-7"}]}]}`
	if got, err := parseRanges(out); err != nil || !slices.Equal(got, []string{"/dev/vdb:0-3", "/dev/vdc:7-7"}) {
		t.Errorf("got %q, %v, want the ranges of both segments", got, err)
	}
	for _, out := range []string{`{"report":[{"lv":[]}]}`, "", "x"} {
		if got, err := parseRanges(out); err == nil {
			t.Errorf("%q: got %q, want an error", out, got)
		}
	}
}

// FuzzParseRanges: an output is refused, or contains a range. Without one, lvextend(8) would use any free extents.
func FuzzParseRanges(f *testing.F) {
	f.Add(`{"report":[{"lv":[{"seg_pe_ranges":"/dev/vdb:0-3"},{"seg_pe_ranges":" "}]}]}`)
	f.Fuzz(func(t *testing.T, out string) {
		if ranges, err := parseRanges(out); err == nil && (len(ranges) == 0 || slices.Contains(ranges, "")) {
			t.Errorf("got ranges %q", ranges)
		}
	})
}
