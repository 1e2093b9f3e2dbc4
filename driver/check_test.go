package driver_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/backend/loop"
	"github.com/trivet-csi/trivet/driver"
	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/pool"
)

// TestScheduledCheck: a driver checks the volumes that are due, and the next driver does not check them again.
func TestScheduledCheck(t *testing.T) {
	o := options(t, loop.Kind)
	o.HTTPAddress = backendtest.FreeAddress(t)
	o.Config.Pools[0].Directory.Path = filepath.Join(testenv.Filesystem(t, "xfs", "4G"), "pool")
	o.Config.Pools[0].Check = pool.Weekly
	d := backendtest.StartWith(t, o)
	kind := backendtest.Kind{FSType: "ext4"}
	var records []string
	for _, name := range []string{"recent", "due", "oldest"} {
		v := createNamed(t, d, name, kind, 64)
		id, staging := v.GetVolumeId(), t.TempDir()
		_, err := d.Node.NodeStageVolume(t.Context(), &csi.NodeStageVolumeRequest{
			VolumeId: id, StagingTargetPath: staging, VolumeContext: v.GetVolumeContext(),
			VolumeCapability: kind.Capability(csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER),
		})
		must(t, err)
		records = append(records, filepath.Join(d.Pool(), "volumes", id[strings.LastIndex(id, ":")+1:], "checked"))
		_, err = d.Node.NodeUnstageVolume(t.Context(), &csi.NodeUnstageVolumeRequest{VolumeId: id, StagingTargetPath: staging})
		must(t, err)
	}
	now := time.Now()
	record := func(path string, days int) (at time.Time) {
		at = now.AddDate(0, 0, -days).UTC()
		must(t, os.WriteFile(path, []byte(fmt.Sprintf(`{"at":%q,"damaged":false}`+"\n", at.Format(time.RFC3339))), 0o600))
		return at
	}
	recent := record(records[0], 6)
	record(records[1], 8)
	oldest := record(records[2], 9)
	bin := t.TempDir()
	t.Setenv("PATH", bin+":"+os.Getenv("PATH"))
	must(t, os.WriteFile(filepath.Join(bin, "e2fsck"), []byte("#!/bin/sh\necho error 1; exit 12\n"), 0o755))
	checked := func(damaged int, oldest time.Time) {
		t.Helper()
		await(t, "checks", func() bool {
			_, text := get(t, o.HTTPAddress, "/metrics")
			return strings.Contains(text, fmt.Sprintf(`trivet_checks_total{pool="default",result="damaged"} %d`+"\n", damaged)) &&
				strings.Contains(text, fmt.Sprintf(`trivet_check_oldest_timestamp_seconds{pool="default"} %v`+"\n", float64(oldest.Unix())))
		})
	}
	d.Stop(t)
	d = backendtest.StartWith(t, o)
	checked(2, oldest)
	for i, want := range []bool{false, true, true} {
		b, err := os.ReadFile(records[i])
		must(t, err)
		if got := strings.Contains(string(b), `"damaged":true`); got != want {
			t.Errorf("volume %d has the record %s, want that it was checked: %t", i, b, want)
		}
	}
	d.Stop(t)
	backendtest.StartWith(t, o)
	checked(0, recent)
}

// TestCheck: the results of a check program are returned and counted. A volume can be unstaged and deleted while it is checked. The
// driver ends the check when it stops, and leaves nothing.
func TestCheck(t *testing.T) {
	o := options(t, loop.Kind)
	o.HTTPAddress = backendtest.FreeAddress(t)
	o.Config.Pools[0].Directory.Path = filepath.Join(testenv.Filesystem(t, "xfs", "4G"), "pool")
	d := backendtest.StartWith(t, o)
	kind := backendtest.Kind{FSType: "ext4"}
	v := create(t, d, kind, 64)
	id, staging := v.GetVolumeId(), t.TempDir()
	_, err := d.Node.NodeStageVolume(t.Context(), &csi.NodeStageVolumeRequest{
		VolumeId: id, StagingTargetPath: staging, VolumeContext: v.GetVolumeContext(),
		VolumeCapability: kind.Capability(csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER),
	})
	must(t, err)
	if r := d.Check(t, "loop:default.00000000:missing"); r.Result != driver.CheckFailed || r.Problem == "" {
		t.Errorf("got result %+v of a volume that does not exist, want a problem", r)
	}

	bin := t.TempDir()
	t.Setenv("PATH", bin+":"+os.Getenv("PATH"))
	e2fsck := func(script string) {
		must(t, os.WriteFile(filepath.Join(bin, "e2fsck"), []byte("#!/bin/sh\n"+script+"\n"), 0o755))
	}
	e2fsck("echo error 1; exit 12")
	if r := d.Check(t, id); r.Result != driver.CheckDamaged || r.Errors != "error 1\n" || r.Problem != "" {
		t.Errorf("got result %+v of a damaged filesystem, want its errors", r)
	}
	e2fsck("echo no memory; exit 8")
	if r := d.Check(t, id); r.Result != driver.CheckFailed || !strings.Contains(r.Problem, "no memory") || r.LastResult != driver.CheckDamaged {
		t.Errorf("got result %+v of a program that failed, want its output, and that the filesystem was damaged", r)
	}
	count := `trivet_checks_total{pool="default",result=%q} %d`
	wantMetrics(t, o.HTTPAddress, fmt.Sprintf(count, "clean", 0), fmt.Sprintf(count, "damaged", 1), fmt.Sprintf(count, "failed", 1))

	started := filepath.Join(bin, "started")
	e2fsck(": >" + started + "; exec sleep 1000")
	var others sync.WaitGroup
	others.Go(func() {
		await(t, "the check program", func() bool { _, err := os.Stat(started); return err == nil })
		_, err := d.Node.NodeUnstageVolume(t.Context(), &csi.NodeUnstageVolumeRequest{VolumeId: id, StagingTargetPath: staging})
		if err != nil {
			t.Errorf("unstaging a volume that is being checked: %v", err)
		}
		if _, err := d.Control.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: id}); err != nil {
			t.Errorf("deleting a volume that is being checked: %v", err)
		}
		d.Stop(t)
	})
	if r := d.Check(t, id); r.Result != driver.CheckFailed || !strings.Contains(r.Problem, "the driver stops") {
		t.Errorf("got result %+v of a check that was ended, want that the driver stops", r)
	}
	others.Wait()
	d = backendtest.StartWith(t, o)
	for _, dir := range []string{".trivet/tmp", ".trivet/trash"} {
		await(t, "nothing in "+dir, func() bool {
			entries, err := os.ReadDir(filepath.Join(d.Pool(), dir))
			return err == nil && len(entries) == 0
		})
	}
}
