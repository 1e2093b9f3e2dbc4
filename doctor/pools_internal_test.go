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
	"github.com/google/uuid"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/backend/backendtest"
	diskbackend "github.com/trivet-csi/trivet/backend/disk"
	"github.com/trivet-csi/trivet/backend/local"
	"github.com/trivet-csi/trivet/driver"
	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/linux/blockdev"
	"github.com/trivet-csi/trivet/linux/quota"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// openPool opens a pool as a driver does. The caller closes it.
func openPool(t *testing.T, c pool.Config, stateDir string) *pool.Pool {
	t.Helper()
	state, err := os.OpenRoot(stateDir)
	must(t, err)
	t.Cleanup(func() { _ = state.Close() })
	p, err := pool.Open(t.Context(), testKinds.Forms(), c, state, nil)
	must(t, err)
	return p
}

// testKinds are a kind of disk images, and the kind of directories on a node.
var testKinds = backend.Kinds{{Name: "loop", Media: []pool.Kind{pool.KindDirectory}}, local.Kind}

// makePool creates a pool as a driver does, with one volume.
func makePool(t *testing.T, c pool.Config, stateDir string) {
	t.Helper()
	p := openPool(t, c, stateDir)
	defer p.Close()
	v := volume.Volume{
		Version: volume.RecordVersion, ID: p.ID("loop", "v"), CoName: "v", Capacity: 1 << 20, Block: true,
		SectorSize: 512, Created: time.Now(),
	}
	must(t, p.Create(t.Context(), v, func(dir *os.Root) error {
		if err := dir.WriteFile(pool.ImageFile, nil, 0o600); err != nil {
			return err
		}
		return os.Truncate(filepath.Join(dir.Name(), pool.ImageFile), v.Capacity)
	}))
}

// checkPool checks one pool. serving is true if a running driver serves the pool.
func checkPool(t *testing.T, c pool.Config, stateDir string, serving bool) []Check {
	t.Helper()
	all := openPools(t.Context(), []pool.Config{c}, Options{Kinds: testKinds, StateDir: stateDir, Patience: time.Minute})
	defer all.close()
	return poolChecks(c, stateDir, all[c.Name], serving)
}

// TestPoolsOfOneFilesystem: the check of space reports what other pools of the filesystem have promised, and a pool
// inside another pool is a failure.
func TestPoolsOfOneFilesystem(t *testing.T) {
	dir, state := t.TempDir(), t.TempDir()
	a := pool.Config{Name: "a", Directory: pool.Directory{Path: filepath.Join(dir, "a")}}
	b := pool.Config{Name: "b", Directory: pool.Directory{Path: filepath.Join(dir, "b")}}
	makePool(t, a, state)
	makePool(t, b, state)
	all := openPools(t.Context(), []pool.Config{a, b}, Options{Kinds: testKinds, StateDir: state, Patience: time.Minute})
	defer all.close()
	for _, c := range []pool.Config{a, b} {
		space := find(t, poolChecks(c, state, all[c.Name], false), "pool "+c.Name+", space")
		expect(t, c.Name, space, OK, "1 MiB for other pools on the same filesystem")
	}
	link := filepath.Join(t.TempDir(), "link")
	must(t, os.Symlink(a.Directory.Path, link))
	b.Directory.Path = filepath.Join(link, "b")
	checks := nestingChecks([]pool.Config{a, b}, state)
	if len(checks) != 1 {
		t.Fatalf("got %d nested pools, want 1: %v", len(checks), checks)
	}
	expect(t, "nested", checks[0], Failure, `pool "b" at `+b.Directory.Path+` is inside pool "a"`)
}

// TestPools: each case creates a pool, changes it or its configuration, and judges one check.
func TestPools(t *testing.T) {
	disk := testenv.Filesystem(t, "xfs", "320M")
	for _, tc := range []struct {
		name   string
		change func(c *pool.Config, stateDir string)
		check  string
		result Result
		says   string
	}{
		{"healthy", func(*pool.Config, string) {}, "pool p", OK, "on xfs with reflink"},
		{"promised space", func(*pool.Config, string) {}, "pool p, space", OK, "1 MiB promised"},
		{"one volume", func(*pool.Config, string) {}, "pool p, volumes", OK, "1"},
		{"no limits", func(*pool.Config, string) {}, "pool p, directories", OK, "directory volumes would have no limit"},
		{"quota: off", func(c *pool.Config, _ string) { c.Quota = "off" }, "pool p, directories", OK, "quota: off"},
		{"quota: required, not supported", func(c *pool.Config, _ string) { c.Quota = "required" }, "pool p, directories", Failure, "XFS"},
		{"reserve larger than the filesystem", func(c *pool.Config, _ string) { c.Reserve = "1Ti" }, "pool p, space", Warning, "reserve 1 TiB"},
		{"maxVolumes reached", func(c *pool.Config, _ string) { c.MaxVolumes = 1 }, "pool p, space", Warning, "maxVolumes"},
		{"no room", func(c *pool.Config, _ string) { c.Size = "1Mi" }, "pool p, space", Warning, "room for 0 B"},
		{"missing parent directory", func(c *pool.Config, _ string) { c.Directory.Path = "/no/such/disk" }, "pool p", Failure, "and its parent directory do not exist"},
		{"not created yet", func(c *pool.Config, state string) {
			c.Directory.Path = filepath.Join(disk, "new")
			must(t, os.Remove(state+"/known-pools/p"))
		}, "pool p", Warning, "new does not exist"},
		{"not mounted, but the UUID is recorded", func(c *pool.Config, _ string) { c.Directory.Path = filepath.Join(disk, "new") }, "pool p", Failure, "mount its disk"},
		{"not mounted, but the UUID is configured", func(c *pool.Config, state string) {
			c.Directory.Path, c.UUID = filepath.Join(disk, "new"), uuid.NewString()
			must(t, os.Remove(state+"/known-pools/p"))
		}, "pool p", Failure, "mount its disk"},
		{"not mounted, but requireMount is set", func(c *pool.Config, state string) {
			c.Directory.Path, c.RequireMount = filepath.Join(disk, "new"), true
			must(t, os.Remove(state+"/known-pools/p"))
		}, "pool p", Failure, "requireMount is set: mount its disk"},
		{"not complete", func(c *pool.Config, _ string) { must(t, os.Remove(c.Directory.Path+"/.trivet/tmp")) }, "pool p", Warning, "the driver completes it"},
		{"path is a file", func(c *pool.Config, _ string) {
			c.Directory.Path = filepath.Join(c.Directory.Path, "pool.json")
		}, "pool p", Failure, "is not a directory"},
		{"path is below a file", func(c *pool.Config, _ string) {
			c.Directory.Path = filepath.Join(c.Directory.Path, "pool.json", "x")
		}, "pool p", Failure, "is not a directory"},
		{"not a mount point", func(c *pool.Config, _ string) { c.RequireMount = true }, "pool p", Failure, "not a mount point"},
		{"marker missing", func(c *pool.Config, _ string) { must(t, os.Remove(c.Directory.Path+"/pool.json")) }, "pool p", Failure, "is its disk mounted?"},
		{"marker damaged", func(c *pool.Config, _ string) {
			must(t, os.WriteFile(c.Directory.Path+"/pool.json", []byte("{"), 0o600))
		}, "pool p", Failure, "is not a pool marker"},
		{"another UUID is recorded", func(_ *pool.Config, state string) {
			must(t, os.WriteFile(state+"/known-pools/p", []byte(uuid.NewString()), 0o600))
		}, "pool p", Failure, "mount the right disk"},
		{"another UUID is configured", func(c *pool.Config, _ string) { c.UUID = uuid.NewString() }, "pool p", Failure, "mount the right disk"},
		{"empty directory", func(c *pool.Config, state string) {
			c.Directory.Path = t.TempDir()
			must(t, os.Remove(state+"/known-pools/p"))
		}, "pool p", Warning, "not a pool yet"},
		{"unreadable record", func(c *pool.Config, _ string) {
			must(t, os.Truncate(c.Directory.Path+"/volumes/v/volume.json", 3))
		}, "pool p, volumes", Failure, `volume "v"`},
		{"data without a record", func(c *pool.Config, _ string) {
			must(t, os.Remove(c.Directory.Path+"/volumes/v/volume.json"))
		}, "pool p, volumes", Failure, "has no volume.json"},
		{"interrupted creation", func(c *pool.Config, _ string) {
			must(t, os.Mkdir(c.Directory.Path+"/.trivet/tmp/x", 0o700))
		}, "pool p, leftovers", Warning, "1 being created, 0 in the trash"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			state, base := t.TempDir(), filepath.Join(disk, strings.ReplaceAll(tc.name, " ", "-"))
			must(t, os.Mkdir(base, 0o700))
			c := pool.Config{Name: "p", Directory: pool.Directory{Path: filepath.Join(base, "pool")}}
			makePool(t, c, state)
			tc.change(&c, state)
			expect(t, tc.name, find(t, checkPool(t, c, state, false), tc.check), tc.result, tc.says)
		})
	}
}

// TestAccess: the check of access reports whether users can enter the pool's directory and, if the pool has directory
// volumes, whether the mount options disable set-user-ID files and device nodes.
func TestAccess(t *testing.T) {
	disk, state := testenv.Filesystem(t, "ext4", "64M"), t.TempDir()
	c := pool.Config{Name: "p", Directory: pool.Directory{Path: disk}}
	makePool(t, c, state)
	access := func(name string, result Result, says string) {
		t.Helper()
		expect(t, name, find(t, checkPool(t, c, state, true), "pool p, access"), result, says)
	}
	access("only an image", OK, "only root")
	makeDirectory(t, c, state)
	access("with a directory volume", Warning, "without nosuid and nodev")
	testenv.Run(t, "mount", "-o", "remount,nosuid", disk)
	access("nosuid", Warning, "without nodev")
	testenv.Run(t, "mount", "-o", "remount,nosuid,nodev", disk)
	access("nosuid and nodev", OK, "only root")
	must(t, os.Chmod(disk, 0o755))
	access("mode 0755", Warning, "mode 0755")
}

// makeDirectory creates a volume of backend local in a pool.
func makeDirectory(t *testing.T, c pool.Config, stateDir string) {
	t.Helper()
	p := openPool(t, c, stateDir)
	defer p.Close()
	v := volume.Volume{
		Version: volume.RecordVersion, ID: p.ID("local", "d"), CoName: "d", Capacity: 1 << 20,
		Directory: &volume.Directory{OnDelete: volume.OnDeleteDelete, Mode: 0o777}, Created: time.Now(),
	}
	must(t, p.CreateDirectory(t.Context(), v, nil, func(*os.File, bool) error { return nil }))
}

// TestReadOnlyPool: a pool on a read-only filesystem is a failure.
func TestReadOnlyPool(t *testing.T) {
	disk, state := testenv.Filesystem(t, "ext4", "64M"), t.TempDir()
	c := pool.Config{Name: "p", Directory: pool.Directory{Path: disk}}
	makePool(t, c, state)
	expect(t, "writable", checkPool(t, c, state, true)[0], OK, "on ext4")
	testenv.Run(t, "mount", "-o", "remount,ro", disk)
	expect(t, "read-only", checkPool(t, c, state, true)[0], Failure, "read-only")
}

// TestReflink: no reflinks are reported for an xfs that was created without them.
func TestReflink(t *testing.T) {
	base, state := t.TempDir(), t.TempDir()
	image, dir := filepath.Join(base, "disk"), filepath.Join(base, "mnt")
	testenv.RequireRoot(t)
	testenv.Run(t, "truncate", "-s", "320M", image)
	testenv.Run(t, "mkfs.xfs", "-q", "-m", "reflink=0", image)
	must(t, os.Mkdir(dir, 0o755))
	testenv.Run(t, "mount", "-o", "loop", image, dir)
	t.Cleanup(func() { testenv.Run(t, "umount", dir) })
	c := pool.Config{Name: "p", Directory: pool.Directory{Path: dir}}
	makePool(t, c, state)
	if check := checkPool(t, c, state, true)[0]; strings.Contains(check.Seen, "reflink") {
		t.Errorf("got %+v, want no reflink", check)
	}
}

// TestState judges state directories with and without recorded pools, and unusable ones.
func TestState(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	must(t, os.WriteFile(file, nil, 0o600))
	must(t, os.Mkdir(filepath.Join(dir, "known-pools"), 0o700))
	must(t, os.WriteFile(filepath.Join(dir, "known-pools", "fast"), []byte("the-uuid"), 0o600))
	expect(t, "with a pool", stateCheck(dir), OK, "fast the-uuid")
	expect(t, "empty", stateCheck(t.TempDir()), OK, "without a recorded pool")
	expect(t, "missing", stateCheck(filepath.Join(dir, "none")), Warning, "does not exist")
	expect(t, "a file", stateCheck(file), Failure, "is not a directory")
	disk := testenv.Filesystem(t, "ext4", "64M", "ro")
	expect(t, "read-only", stateCheck(disk), Failure, "read-only")
}

// TestLimits: the check of directories reports what limits them, and how many have no limit.
func TestLimits(t *testing.T) {
	limited := volume.Volume{Directory: &volume.Directory{Quota: &volume.Quota{Kind: "btrfs-simple", ID: 1}}}
	unlimited := volume.Volume{Directory: &volume.Directory{}}
	off := volume.Errorf(volume.ErrPrecondition, "switched off: switch it on")
	for _, tc := range []struct {
		name, setting string
		facts         poolFacts
		result        Result
		says          string
	}{
		{"limits of xfs", "", poolFacts{limits: quota.XFS}, OK, "changing the file's project"},
		{"limits of ext4", "", poolFacts{limits: quota.Ext4}, OK, "except processes with CAP_SYS_RESOURCE; the owner of a file"},
		{"limits of btrfs", "required", poolFacts{limits: quota.Btrfs, directories: []volume.Volume{limited}}, OK, "df in a pod"},
		{"one of two volumes without a limit", "", poolFacts{limits: quota.XFS, directories: []volume.Volume{limited, unlimited}}, OK, "1 of 2 volumes here have no limit"},
		{"no limits, no volumes", "", poolFacts{noLimits: off}, OK, "switched off"},
		{"no limits, a volume without a limit", "auto", poolFacts{noLimits: off, directories: []volume.Volume{unlimited}}, OK, "1 of 1"},
		{"no limits, but required", "required", poolFacts{noLimits: off}, Failure, "switched off: switch it on"},
		{"no limits, a volume with a limit", "", poolFacts{noLimits: off, directories: []volume.Volume{limited}}, Warning, "switched off"},
	} {
		if c := judgeLimits(tc.name, tc.setting, tc.facts); c.Result != tc.result || !strings.Contains(c.Seen+c.Remedy, tc.says) {
			t.Errorf("%s: got %+v, want result %s with %q", tc.name, c, tc.result, tc.says)
		}
	}
}

const diskSize = 64 * volume.MiB

// disk creates a blank disk. It returns the disk as blockdev.FindDisks finds it, and the disk's image.
func disk(t *testing.T, options ...string) (blockdev.Disk, string) {
	t.Helper()
	device, image, _ := testenv.Disk(t, diskSize, options...)
	found, err := blockdev.FindDisks([]string{device})
	if err != nil || len(found) != 1 {
		t.Fatalf("FindDisks(%s): got %+v, error %v, want one disk", device, found, err)
	}
	return found[0], image
}

// mark marks a disk as claimed by a volume that does not exist.
func mark(t *testing.T, d blockdev.Disk) {
	t.Helper()
	c, err := d.Claim(t.Context())
	must(t, err)
	must(t, c.Mark("lost"))
	must(t, c.Close())
}

// TestDisks: the doctor, the metrics and NodeGetStorageHealth report the same states of disks.
func TestDisks(t *testing.T) {
	free, _ := disk(t)
	used, _ := disk(t)
	testenv.Run(t, "mkfs.ext4", "-q", used.Path)
	orphan, _ := disk(t)
	mark(t, orphan)
	orphan2, _ := disk(t)
	mark(t, orphan2)
	readOnly, _ := disk(t, "-r")
	unreadable, image := disk(t)
	must(t, os.Truncate(image, volume.MiB)) // the loop driver fails I/O beyond the end
	removed, removedImage, _ := testenv.Disk(t, diskSize/2)

	var match []string
	for _, d := range []blockdev.Disk{free, used, orphan, orphan2, readOnly, unreadable} {
		match = append(match, d.Path)
	}
	match = append(match, removed)
	state := t.TempDir()
	d := backendtest.StartWith(t, driver.Options{
		Endpoint: "unix://" + state + "/csi.sock", NodeID: "n", StateDir: state, Name: "csi.trivet.dev", Version: "test", HTTPAddress: backendtest.FreeAddress(t),
		Services: []string{"controller", "node"}, Kinds: backend.Kinds{diskbackend.Kind},
		Config: driver.Config{MaxVolumesPerNode: 1, Pools: []pool.Config{
			{Name: "disks", Section: &diskbackend.Disks{Match: match}}, {Name: "second", Section: &diskbackend.Disks{Match: []string{free.Path}}},
		}},
	})
	deleteWithoutMedium(t, d, removed, removedImage)

	config := filepath.Join(state, "config.yaml")
	must(t, os.WriteFile(config, []byte("pools:\n- {name: disks, disks: {match: ["+strings.Join(match, ", ")+"]}}\n- {name: second, disks: {match: ["+free.Path+"]}}\n"), 0o600))
	checks := Run(t.Context(), Options{Kinds: allKinds, ConfigPath: config, StateDir: state, Endpoint: d.Options.Endpoint, Version: "test", Patience: time.Minute})
	for name, want := range map[string]struct {
		result Result
		says   string
	}{
		"pool disks":                     {OK, "of disks; its records are at " + state + "/disks/disks"},
		"pool disks, space":              {OK, "1 of 7 disks are free, the largest with 62 MiB for a volume"},
		"pool disks, volumes":            {OK, "0"},
		"pool disks, leftovers":          {OK, "1 in the trash"},
		"pool disks, served":             {OK, "open"},
		"pool disks, " + free.Path:       {OK, "64 MiB, free"},
		"pool disks, " + used.Path:       {OK, "64 MiB, not-blank: it is not blank: an ext2, ext3 or ext4"},
		"pool disks, " + orphan.Path:     {Warning, "64 MiB, orphaned: claimed as"},
		"pool disks, " + readOnly.Path:   {OK, "64 MiB, read-only"},
		"pool disks, " + unreadable.Path: {Warning, "64 MiB, unreadable"},
		"pool disks, " + removed:         {OK, "no-medium"},
		"pool second, space":             {Warning, "none of the disks is free"},
		"pool second, " + free.Path:      {Warning, `64 MiB, other-pool: pools "disks" and "second" both match the disk`},
	} {
		expect(t, name, find(t, checks, name), want.result, want.says)
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
		t.Errorf("storage health: got conditions %q, want %q", health, want)
	}
	for _, d := range []blockdev.Disk{orphan, orphan2} {
		if !strings.Contains(health["DiskOrphaned"], d.Path) {
			t.Errorf("DiskOrphaned: got %q, want it to name %s", health["DiskOrphaned"], d.Path)
		}
	}
}

// deleteWithoutMedium creates a volume and deletes it after its disk has lost its medium. The loop device stays
// bound, because another process could otherwise bind it to another image, which would become a disk of the pool.
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

// storageHealth returns the storage conditions of the node, by reason.
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

// TestNoDisks: a pool of disks that no driver has created yet, and one that matches no disk, are warnings.
func TestNoDisks(t *testing.T) {
	state := t.TempDir()
	c := pool.Config{Name: "disks", Section: &diskbackend.Disks{Match: []string{"/dev/no-such-disk*"}}}
	expect(t, "not created yet", storageChecks(t.Context(), allKinds.Forms(), c, state, false)[0], Warning, "does not exist")
	root, err := os.OpenRoot(state)
	must(t, err)
	defer root.Close()
	p, err := pool.Open(t.Context(), allKinds.Forms(), c, root, nil)
	must(t, err)
	p.Close()
	expect(t, "no match", storageChecks(t.Context(), allKinds.Forms(), c, state, false)[1], Warning, "no disk matches")
	link := filepath.Join(t.TempDir(), "disk")
	must(t, os.Symlink("/no-such-directory/disk", link))
	c.Section = &diskbackend.Disks{Match: []string{link}}
	expect(t, "link to another directory", storageChecks(t.Context(), allKinds.Forms(), c, state, false)[1], Warning, link+" is a link")
}
