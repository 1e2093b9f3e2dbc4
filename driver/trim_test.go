package driver_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/backend/loop"
	"github.com/trivet-csi/trivet/driver"
	"github.com/trivet-csi/trivet/pool"
)

// TestScheduledTrim: a driver trims a staged volume that is due, and the next driver does not trim it again. A volume can be
// unstaged at once.
func TestScheduledTrim(t *testing.T) {
	o := options(t, loop.Kind)
	o.HTTPAddress = backendtest.FreeAddress(t)
	o.Config.Pools[0].Trim = pool.Daily
	d := backendtest.StartWith(t, o)
	kind := backendtest.Kind{FSType: "ext4"}
	v := create(t, d, kind, 64)
	staging := t.TempDir()
	_, err := d.Node.NodeStageVolume(t.Context(), &csi.NodeStageVolumeRequest{
		VolumeId: v.GetVolumeId(), StagingTargetPath: staging, VolumeContext: v.GetVolumeContext(),
		VolumeCapability: kind.Capability(csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER),
	})
	must(t, err)
	name := v.GetVolumeId()[strings.LastIndex(v.GetVolumeId(), ":")+1:]
	record := filepath.Join(d.Pool(), "volumes", name, "trimmed")
	old := time.Now().Add(-25*time.Hour).UTC().Format(time.RFC3339) + "\n"
	must(t, os.WriteFile(record, []byte(old), 0o600))
	recorded := func() string {
		b, err := os.ReadFile(record)
		must(t, err)
		return string(b)
	}
	d.Stop(t)
	d = backendtest.StartWith(t, o)
	await(t, "the trim", func() bool { return recorded() != old })
	now := recorded()
	if at, err := time.Parse(time.RFC3339, strings.TrimSpace(now)); err != nil || time.Since(at) > time.Minute {
		t.Errorf("got recorded time %q and error %v, want the time of the trim", now, err)
	}
	wantMetrics(t, o.HTTPAddress, `trivet_trim_bytes_total{pool="`, `trivet_trim_failures_total{pool="`)
	d.Stop(t)
	d = backendtest.StartWith(t, o)
	await(t, "the search of volumes", func() bool {
		_, text := get(t, o.HTTPAddress, "/metrics")
		return strings.Contains(text, "trivet_trim_oldest_timestamp_seconds{")
	})
	if _, text := get(t, o.HTTPAddress, "/metrics"); !strings.Contains(text, `trivet_trim_bytes_total{pool="`+o.Config.Pools[0].Name+`"} 0`) || recorded() != now {
		t.Errorf("got a second trim at %s, want none after a restart", recorded())
	}
	results := d.Trim(t, driver.TrimRequest{Pool: o.Config.Pools[0].Name})
	if len(results) != 1 || results[0].ID != v.GetVolumeId() || results[0].Problem != "" {
		t.Errorf("got results %+v of a trim on demand, want that of the volume", results)
	}
	_, err = d.Node.NodeUnstageVolume(t.Context(), &csi.NodeUnstageVolumeRequest{VolumeId: v.GetVolumeId(), StagingTargetPath: staging})
	must(t, err)
	if results := d.Trim(t, driver.TrimRequest{}); len(results) != 0 {
		t.Errorf("got results %+v without staged volumes, want none", results)
	}
	_, err = d.Control.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: v.GetVolumeId()})
	must(t, err)
}
