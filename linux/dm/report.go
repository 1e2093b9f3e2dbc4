package dm

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// Report is the state of a volume group.
type Report struct {
	// ExtentSize is in bytes. Extents and Free are numbers of extents.
	ExtentSize, Extents, Free int64
	// Exported means that the group was exported (vgexport(8)), so that it cannot be used.
	Exported bool
	Physical []PhysicalVolume
	Volumes  []LogicalVolume
}

// PhysicalVolume is a physical volume of a group.
type PhysicalVolume struct {
	// Path is the device node, or another text if the device is missing.
	Path    string
	UUID    string
	Size    int64 // in bytes
	Missing bool
}

// LogicalVolume is a logical volume of a group.
type LogicalVolume struct {
	ID   VolumeID
	Name string
	Size int64 // in bytes
	Tags []string
	// Partial means that a physical volume with a part of the data is missing.
	Partial bool
	// Pool is the name of the thin pool with the data of a thin volume; empty for any other volume. IsPool means that the
	// volume is a thin pool.
	Pool   string
	IsPool bool
	// Layout describes the segments, such as "linear", and Roles what the volume is for others, such as "thickorigin".
	Layout string
	Roles  []string
	// ReadOnly means that the volume refuses writes.
	ReadOnly bool
}

// HasTag reports whether the logical volume has a tag.
func (v LogicalVolume) HasTag(tag string) bool { return slices.Contains(v.Tags, tag) }

// Volume finds a logical volume by its UUID.
func (r Report) Volume(id VolumeID) (LogicalVolume, bool) {
	return r.find(func(v LogicalVolume) bool { return v.ID == id })
}

// Named finds a logical volume by its name.
func (r Report) Named(name string) (LogicalVolume, bool) {
	return r.find(func(v LogicalVolume) bool { return v.Name == name })
}

func (r Report) find(match func(LogicalVolume) bool) (LogicalVolume, bool) {
	i := slices.IndexFunc(r.Volumes, match)
	if i < 0 {
		return LogicalVolume{}, false
	}
	return r.Volumes[i], true
}

// jsonReport is the output of the command fullreport. All values are texts.
type jsonReport struct {
	Report []struct {
		VG []struct {
			UUID     string `json:"vg_uuid"`
			Size     string `json:"vg_extent_size"`
			Extents  string `json:"vg_extent_count"`
			Free     string `json:"vg_free_count"`
			Exported string `json:"vg_exported"`
		} `json:"vg"`
		PV []struct {
			Name    string `json:"pv_name"`
			UUID    string `json:"pv_uuid"`
			Size    string `json:"pv_size"`
			Missing string `json:"pv_missing"`
		} `json:"pv"`
		LV []struct {
			UUID        string `json:"lv_uuid"`
			Name        string `json:"lv_name"`
			Size        string `json:"lv_size"`
			Tags        string `json:"lv_tags"`
			Health      string `json:"lv_health_status"`
			Pool        string `json:"pool_lv"`
			Layout      string `json:"lv_layout"`
			Roles       string `json:"lv_role"`
			Permissions string `json:"lv_permissions"`
		} `json:"lv"`
	} `json:"report"`
}

// Report reads the state of the group.
func (g Group) Report(ctx context.Context) (Report, error) {
	out, err := g.run(ctx, "fullreport", "--units", "b", "--nosuffix", "--binary",
		"--configreport", "vg", "-o", "vg_uuid,vg_extent_size,vg_extent_count,vg_free_count,vg_exported",
		"--configreport", "pv", "-o", "pv_name,pv_uuid,pv_size,pv_missing",
		"--configreport", "lv", "-o", "lv_uuid,lv_name,lv_size,lv_tags,lv_health_status,pool_lv,lv_layout,lv_role,lv_permissions",
		"--configreport", "pvseg", "-o", "pvseg_start", "-S", "pvseg_size=0",
		"--configreport", "seg", "-o", "segtype", "-S", "seg_size=0", g.Name)
	if err != nil {
		return Report{}, err
	}
	return g.parseReport(out)
}

// parseRanges parses the output of the command lvs with the column seg_pe_ranges, which has a row for each segment.
func parseRanges(out string) (ranges []string, err error) {
	var all struct {
		Report []struct {
			LV []struct {
				Ranges string `json:"seg_pe_ranges"`
			} `json:"lv"`
		} `json:"report"`
	}
	if err := json.Unmarshal([]byte(out), &all); err != nil {
		return nil, fmt.Errorf("parsing the extents of a logical volume: %w", err)
	}
	for _, report := range all.Report {
		for _, segment := range report.LV {
			ranges = append(ranges, strings.Fields(segment.Ranges)...)
		}
	}
	if len(ranges) == 0 {
		return nil, fmt.Errorf("the extents of a logical volume: %w", ErrMissing)
	}
	return ranges, nil
}

// parseReport parses the output of the command fullreport.
func (g Group) parseReport(out string) (r Report, err error) {
	var all jsonReport
	if err := json.Unmarshal([]byte(out), &all); err != nil {
		return r, fmt.Errorf("parsing the report of volume group %s: %w", g.Name, err)
	}
	if len(all.Report) != 1 || len(all.Report[0].VG) != 1 || all.Report[0].VG[0].UUID != g.UUID {
		return r, fmt.Errorf("the report of volume group %s does not contain the group with the UUID %s", g.Name, g.UUID)
	}
	number := func(s string) int64 {
		n, parseErr := strconv.ParseUint(s, 10, 63) // all numbers are at least 0
		if parseErr != nil && err == nil {
			err = fmt.Errorf("parsing the report of volume group %s: %w", g.Name, parseErr)
		}
		return int64(n)
	}
	one := all.Report[0]
	vg := one.VG[0]
	r.ExtentSize, r.Extents, r.Free, r.Exported = number(vg.Size), number(vg.Extents), number(vg.Free), vg.Exported == "1"
	for _, p := range one.PV {
		r.Physical = append(r.Physical, PhysicalVolume{Path: p.Name, UUID: p.UUID, Size: number(p.Size), Missing: p.Missing == "1"})
	}
	for _, v := range one.LV {
		r.Volumes = append(r.Volumes, LogicalVolume{
			ID: VolumeID{g.UUID, v.UUID}, Name: v.Name, Size: number(v.Size), Tags: strings.Split(v.Tags, ","), Partial: v.Health == "partial",
			Pool: v.Pool, IsPool: v.Layout == "thin,pool", Layout: v.Layout, Roles: strings.Split(v.Roles, ","), ReadOnly: strings.HasPrefix(v.Permissions, "read-only"),
		})
	}
	if err == nil && r.ExtentSize == 0 {
		err = fmt.Errorf("the report of volume group %s contains extents of 0 bytes", g.Name)
	}
	return r, err
}
