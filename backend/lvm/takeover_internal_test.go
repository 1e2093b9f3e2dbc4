package lvm

import (
	"errors"
	"strings"
	"testing"

	"github.com/trivet-csi/trivet/linux/dm"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// TestUsable: only a logical volume like those that the driver creates can be taken over.
func TestUsable(t *testing.T) {
	thick := dm.LogicalVolume{Name: "lv", Layout: "linear", Roles: []string{"public"}, Tags: []string{""}}
	thin := dm.LogicalVolume{Name: "lv", Layout: "thin,sparse", Pool: "pool0", Roles: []string{"public"}, Tags: []string{""}}
	roles := func(lv dm.LogicalVolume, roles ...string) dm.LogicalVolume { lv.Roles = roles; return lv }
	tagged := func(tag string) dm.LogicalVolume { lv := thick; lv.Tags = []string{"other", tag}; return lv }
	for name, tc := range map[string]struct {
		lv   dm.LogicalVolume
		thin string
		want error
		says string
	}{
		"thick":                        {thick, "", nil, ""},
		"thin":                         {thin, "pool0", nil, ""},
		"thin snapshot":                {roles(thin, "public", "snapshot", "thinsnapshot", "origin", "multithinorigin"), "pool0", nil, ""},
		"orphaned":                     {tagged("trivet.pool.fast"), "", nil, ""},
		"of another pool":              {tagged("trivet.pool.other"), "", volume.ErrPrecondition, "trivet.pool.other"},
		"never used":                   {tagged("trivet.unused"), "", volume.ErrPrecondition, "trivet.unused"},
		"growth":                       {tagged("trivet.growth"), "", volume.ErrPrecondition, "trivet.growth"},
		"records":                      {tagged("trivet.records"), "", volume.ErrPrecondition, "trivet.records"},
		"thin in a thick pool":         {thin, "", volume.ErrInvalid, "lvm.thinPool: pool0"},
		"in another thin pool":         {thin, "pool1", volume.ErrInvalid, "vg0/pool1"},
		"thick in a thin pool":         {thick, "pool0", volume.ErrInvalid, "vg0/pool0"},
		"a thin pool":                  {dm.LogicalVolume{Name: "lv", Layout: "thin,pool", IsPool: true}, "pool0", volume.ErrInvalid, "is a thin pool"},
		"raid":                         {dm.LogicalVolume{Name: "lv", Layout: "raid,raid1", Roles: []string{"public"}}, "", volume.ErrPrecondition, "is raid,raid1"},
		"a snapshot that is not thin":  {roles(thick, "public", "snapshot", "thicksnapshot"), "", volume.ErrPrecondition, "thicksnapshot"},
		"the origin of one":            {roles(thick, "public", "origin", "thickorigin"), "", volume.ErrPrecondition, "thickorigin"},
		"the thin origin of one":       {roles(thin, "public", "origin", "thickorigin"), "pool0", volume.ErrPrecondition, "thickorigin"},
		"the origin of thin volumes":   {roles(thick, "public", "origin", "extthinorigin"), "", volume.ErrPrecondition, "extthinorigin"},
		"read-only":                    {func() dm.LogicalVolume { lv := thick; lv.ReadOnly = true; return lv }(), "", volume.ErrPrecondition, "--permission rw vg0/lv"},
		"with another name":            {dm.LogicalVolume{Name: "other"}, "", volume.ErrExhausted, "no such logical volume"},
		"of a group without some disk": {thick, "", volume.ErrPrecondition, "attach its disk"},
	} {
		s := &storage{cfg: pool.Config{Name: "fast"}, name: "vg0", thin: tc.thin}
		r := dm.Report{Volumes: []dm.LogicalVolume{tc.lv}, Physical: []dm.PhysicalVolume{{Missing: strings.Contains(tc.says, "attach")}}}
		lv, err := s.findUsable(r, "lv")
		if !errors.Is(err, tc.want) || err != nil && (!strings.Contains(err.Error(), tc.says) || !strings.HasPrefix(err.Error(), `parameter logicalVolume="lv": `)) || err == nil && lv.Name != "lv" {
			t.Errorf("a logical volume that is %s: got %v, want %v with %q", name, err, tc.want, tc.says)
		}
	}
}

// TestOwner: a logical volume belongs to the record with its UUID or with the GUID in its tag.
func TestOwner(t *testing.T) {
	const otherGUID, otherLV = "1a1b2c3d-0123-4567-89ab-0123456789ab", "dcRkFK-D7a6-wfx4-UajG-yT7j-ABjK-076S0L"
	of := func(lv string) dm.VolumeID { return dm.VolumeID{Group: frozenGroup, Volume: lv} }
	record := volume.Volume{
		ID:      volume.ID{Backend: Name, Pool: "fast", PoolUUID: "0a1b2c3d", Name: "v"},
		Section: &section{identity: identity{GUID: frozenGUID, Group: frozenGroup, Volume: frozenLV}},
	}
	volumes := inventory{volumes: map[string]pool.Recorded{frozenGUID: {Volume: record}}}
	snapshots := inventory{snapshots: map[string]string{frozenGUID: frozenLV}}
	for name, tc := range map[string]struct {
		known inventory
		lv    dm.LogicalVolume
		want  string
	}{
		"UUID of a volume":   {volumes, dm.LogicalVolume{ID: of(frozenLV)}, "volume lvm:fast.0a1b2c3d:v"},
		"GUID of a volume":   {volumes, dm.LogicalVolume{ID: of(otherLV), Tags: []string{guidTag + frozenGUID}}, "volume lvm:fast.0a1b2c3d:v"},
		"UUID of a snapshot": {snapshots, dm.LogicalVolume{ID: of(frozenLV)}, "a snapshot"},
		"GUID of a snapshot": {snapshots, dm.LogicalVolume{ID: of(otherLV), Tags: []string{guidTag + frozenGUID}}, "a snapshot"},
		"lost GUID":          {volumes, dm.LogicalVolume{ID: of(otherLV), Tags: []string{guidTag + otherGUID}}, ""},
	} {
		if got := tc.known.owner(tc.lv); got != tc.want {
			t.Errorf("%s: got owner %q, want %q", name, got, tc.want)
		}
	}
}
