package driver_test

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
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

// TestScheduledCheck: a driver checks the volumes that are due, and the next driver does not check them again. A volume whose last
// result cannot be read does not prevent the checks of the others.
func TestScheduledCheck(t *testing.T) {
	o := options(t, loop.Kind)
	o.HTTPAddress = backendtest.FreeAddress(t)
	o.Config.Pools[0].Directory.Path = filepath.Join(testenv.Filesystem(t, "xfs", "4G"), "pool")
	o.Config.Pools[0].Check = pool.Weekly
	d := backendtest.StartWith(t, o)
	kind := backendtest.Kind{FSType: "ext4"}
	unreadable := createNamed(t, d, "unreadable", kind, 64).GetVolumeId()
	recordOf := func(id string) string {
		return filepath.Join(d.Pool(), "volumes", id[strings.LastIndex(id, ":")+1:], "checked")
	}
	must(t, os.Mkdir(recordOf(unreadable), 0o700))
	var records []string
	for _, name := range []string{"recent", "due", "oldest"} {
		v := createNamed(t, d, name, kind, 64)
		id, staging := v.GetVolumeId(), t.TempDir()
		_, err := d.Node.NodeStageVolume(t.Context(), &csi.NodeStageVolumeRequest{
			VolumeId: id, StagingTargetPath: staging, VolumeContext: v.GetVolumeContext(),
			VolumeCapability: kind.Capability(csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER),
		})
		must(t, err)
		records = append(records, recordOf(id))
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
	record(records[2], 9)
	bin := t.TempDir()
	t.Setenv("PATH", bin+":"+os.Getenv("PATH"))
	must(t, os.WriteFile(filepath.Join(bin, "e2fsck"), []byte("#!/bin/sh\necho error 1; exit 12\n"), 0o755))
	checked := func(damaged int, metrics ...string) {
		t.Helper()
		metrics = append(metrics, fmt.Sprintf(`trivet_checks_total{pool="default",result="damaged"} %d`, damaged))
		await(t, "checks", func() bool {
			_, text := get(t, o.HTTPAddress, "/metrics")
			return !slices.ContainsFunc(metrics, func(m string) bool { return !strings.Contains(text, m+"\n") })
		})
	}
	read := func() (all []string) {
		for _, record := range records {
			b, err := os.ReadFile(record)
			must(t, err)
			all = append(all, string(b))
		}
		return all
	}
	d.Stop(t)
	d = backendtest.StartWith(t, o)
	checked(2, fmt.Sprintf(`trivet_check_oldest_timestamp_seconds{pool="default"} %v`, float64(recent.Unix())))
	first := read()
	for i, want := range []bool{false, true, true} {
		if got := strings.Contains(first[i], `"damaged":true`); got != want {
			t.Errorf("volume %d has the record %s, want that it was checked: %t", i, first[i], want)
		}
	}
	d.Stop(t)
	record(records[0], -1) // a time in the future does not count, and is the last one in the order
	backendtest.StartWith(t, o)
	await(t, "the last check", func() bool { return strings.Contains(read()[0], `"damaged":true`) })
	checked(1)
	if got := read(); !slices.Equal(got[1:], first[1:]) {
		t.Errorf("the next driver has changed the records %q to %q", first[1:], got[1:])
	}
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
		if r := d.Check(t, id); r.Result != driver.CheckFailed || !strings.Contains(r.Problem, "is being checked by another call") {
			t.Errorf("got result %+v of a second check at the same time, want that the volume is being checked", r)
		}
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
