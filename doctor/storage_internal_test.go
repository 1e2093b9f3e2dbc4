package doctor

import (
	"io"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/backend/backendtest"
	diskbackend "github.com/trivet-csi/trivet/backend/disk"
	"github.com/trivet-csi/trivet/driver"
	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/linux/blockdev"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

const diskSize = 64 * volume.MiB

// disk makes a blank disk, and returns it as the driver finds it.
func disk(t *testing.T, options ...string) (blockdev.Disk, string) {
	t.Helper()
	device, image, _ := testenv.Disk(t, diskSize, options...)
	found, err := blockdev.FindDisks([]string{device})
	if err != nil || len(found) != 1 {
		t.Fatalf("%s is %+v, %v", device, found, err)
	}
	return found[0], image
}

func mark(t *testing.T, d blockdev.Disk) {
	t.Helper()
	c, err := d.Claim(t.Context())
	must(t, err)
	must(t, c.Mark("lost"))
	must(t, c.Close())
}

// TestDisks: what the disks of a pool are is told alike by the doctor, in the metrics and
// in the health of the node's storage.
func TestDisks(t *testing.T) {
	free, _ := disk(t)
	used, _ := disk(t)
	testenv.Run(t, "mkfs.ext4", "-q", used.Path)
	orphan, _ := disk(t)
	mark(t, orphan)
	another, _ := disk(t)
	mark(t, another)
	readOnly, _ := disk(t, "-r")
	unreadable, image := disk(t)
	must(t, os.Truncate(image, volume.MiB)) // the loop driver has all fail beyond
	gone, medium, _ := testenv.Disk(t, diskSize/2)

	var match []string
	for _, d := range []blockdev.Disk{free, used, orphan, another, readOnly, unreadable} {
		match = append(match, d.Path)
	}
	match = append(match, gone)
	state := t.TempDir()
	d := backendtest.StartWith(t, driver.Options{
		Endpoint: "unix://" + state + "/csi.sock", NodeID: "n", StateDir: state, Name: "csi.trivet.dev", Version: "test", HTTPAddress: backendtest.FreeAddress(t),
		Services: []string{"controller", "node"}, Kinds: backend.Kinds{diskbackend.Kind},
		Config: driver.Config{MaxVolumesPerNode: 1, Pools: []pool.Config{
			{Name: "disks", Section: &diskbackend.Disks{Match: match}}, {Name: "second", Section: &diskbackend.Disks{Match: []string{free.Path}}},
		}},
	})
	deleteWithoutMedium(t, d, gone, medium)

	config := filepath.Join(state, "config.yaml")
	must(t, os.WriteFile(config, []byte("pools:\n- {name: disks, disks: {match: ["+strings.Join(match, ", ")+"]}}\n- {name: second, disks: {match: ["+free.Path+"]}}\n"), 0o600))
	checks := map[string]Check{}
	for _, c := range Run(t.Context(), Options{Kinds: allKinds, ConfigPath: config, StateDir: state, Endpoint: d.Options.Endpoint, Version: "test", Patience: time.Minute}) {
		checks[c.Name] = c
	}
	for name, want := range map[string]struct {
		result Result
		says   string
	}{
		"pool disks":                     {OK, "of disks; its records are at " + state + "/disks/disks"},
		"pool disks, space":              {OK, "1 of 7 disks are free, the largest with 62 MiB for a volume"},
		"pool disks, volumes":            {OK, "0, with 0 attached"},
		"pool disks, leftovers":          {OK, "1 in the trash"},
		"pool disks, served":             {OK, "open"},
		"pool disks, " + free.Path:       {OK, "64 MiB, free"},
		"pool disks, " + used.Path:       {OK, "64 MiB, not-blank: it is not blank: an ext2, ext3 or ext4"},
		"pool disks, " + orphan.Path:     {Warning, "64 MiB, orphaned: claimed as"},
		"pool disks, " + readOnly.Path:   {OK, "64 MiB, read-only"},
		"pool disks, " + unreadable.Path: {Warning, "64 MiB, unreadable"},
		"pool disks, " + gone:            {OK, "no-medium"},
		"pool second, space":             {Warning, "none of the disks is free"},
		"pool second, " + free.Path:      {Warning, `64 MiB, other-pool: pools "disks" and "second" both match it`},
	} {
		expect(t, name, checks[name], want.result, want.says)
	}

	page := metricsOf(t, d)
	for _, want := range []string{
		`pool="disks",state="free"} 1`, `pool="disks",state="not-blank"} 1`, `pool="disks",state="orphaned"} 2`, `pool="disks",state="read-only"} 1`,
		`pool="disks",state="unreadable"} 1`, `pool="second",state="other-pool"} 1`,
	} {
		if !strings.Contains(page, "\ntrivet_disks{"+want+"\n") {
			t.Errorf("/metrics lacks trivet_disks{%s", want)
		}
	}

	if want := "\ntrivet_pool_unwiped_bytes{pool=\"disks\"} 0\n"; !strings.Contains(page, want) {
		t.Errorf("/metrics lacks %s", want)
	}

	health := storageHealth(t, d)
	if want := []string{"DiskInTwoPools", "DiskNotWiped", "DiskOrphaned", "DiskUnreadable"}; !slices.Equal(slices.Sorted(maps.Keys(health)), want) {
		t.Errorf("the health of the node's storage is %q, want %q", health, want)
	}
	for _, d := range []blockdev.Disk{orphan, another} {
		if !strings.Contains(health["DiskOrphaned"], d.Path) {
			t.Errorf("%s is not among those of DiskOrphaned: %s", d.Path, health["DiskOrphaned"])
		}
	}
}

// deleteWithoutMedium deletes a volume after its disk lost its medium. The disk stays bound to
// its device number: another process that gets the number would make it a disk of the pool.
func deleteWithoutMedium(t *testing.T, d *backendtest.Driver, device, image string) {
	t.Helper()
	resp, err := d.Control.CreateVolume(t.Context(), &csi.CreateVolumeRequest{
		Name: "v", Parameters: map[string]string{volume.ParamBackend: diskbackend.Name, volume.ParamPool: "disks"},
		VolumeCapabilities: []*csi.VolumeCapability{backendtest.Kind{}.Capability(csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER)},
	})
	must(t, err)
	must(t, os.Truncate(image, 0))
	testenv.Run(t, "losetup", "--set-capacity", device)
	_, err = d.Control.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: resp.GetVolume().GetVolumeId()})
	must(t, err)
	for end := time.Now().Add(10 * time.Second); storageHealth(t, d)["DiskNotWiped"] == ""; {
		if time.Now().After(end) {
			t.Fatal("storage health does not report a deleted volume whose disk cannot be wiped")
		}
		time.Sleep(time.Millisecond)
	}
}

// storageHealth is what the node finds wrong with its storage, by reason.
func storageHealth(t *testing.T, d *backendtest.Driver) map[string]string {
	t.Helper()
	resp, err := d.Node.NodeGetStorageHealth(t.Context(), &csi.NodeGetStorageHealthRequest{})
	must(t, err)
	found := map[string]string{}
	for _, b := range resp.GetBackendHealth() {
		found[b.GetReason()] = b.GetMessage()
	}
	return found
}

func metricsOf(t *testing.T, d *backendtest.Driver) string {
	t.Helper()
	resp, err := http.Get("http://" + d.Options.HTTPAddress + "/metrics")
	must(t, err)
	defer resp.Body.Close()
	page, err := io.ReadAll(resp.Body)
	must(t, err)
	return string(page)
}

// TestNoDisks: a pool that matches nothing, and one that no driver has made yet.
func TestNoDisks(t *testing.T) {
	state := t.TempDir()
	c := pool.Config{Name: "disks", Section: &diskbackend.Disks{Match: []string{"/dev/no-such-disk*"}}}
	expect(t, "not made yet", storageChecks(t.Context(), allKinds.Forms(), c, state, false)[0], Warning, "does not exist")
	root, err := os.OpenRoot(state)
	must(t, err)
	defer root.Close()
	p, err := pool.Open(t.Context(), allKinds.Forms(), c, root, nil)
	must(t, err)
	p.Close()
	expect(t, "no match", storageChecks(t.Context(), allKinds.Forms(), c, state, false)[1], Warning, "no disk matches")
}
