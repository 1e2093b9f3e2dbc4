package disk

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/linux/blockdev"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// openDisks opens a pool of disks with a state directory.
func openDisks(t *testing.T, dir string, match ...string) *pool.Pool {
	t.Helper()
	root, err := os.OpenRoot(dir)
	must(t, err)
	p, err := pool.Open(t.Context(), forms, pool.Config{Name: "disks", Section: &Disks{Match: match}}, root, nil)
	must(t, err)
	t.Cleanup(p.Close)
	return p
}

// makeDisk creates a volume on a free disk whose size is in the range r.
func makeDisk(t *testing.T, p *pool.Pool, name string, r volume.Range) (volume.Volume, error) {
	t.Helper()
	c, err := claimDisk(t.Context(), p, room{Range: r, min: volume.MiB})
	if err != nil {
		return volume.Volume{}, err
	}
	v := volume.Volume{
		Version: volume.RecordVersion, ID: p.ID(Name, name), CoName: name, Capacity: c.Disk.Room(),
		Block: true, SectorSize: 512, Section: &section{GUID: c.GUID.String(), Identity: c.Disk.Identity, Wipe: wipeDiscard},
	}
	return v, create(t.Context(), p, v, c, nil)
}

// stateOf returns the state of a disk at the last scan; zero if the pool does not match the disk.
func stateOf(p *pool.Pool, device string) diskState {
	for _, s := range storageOf(p).states() {
		if s.disk.Path == device {
			return s
		}
	}
	return diskState{}
}

// awaitDisk waits until a disk has the state want.
func awaitDisk(t *testing.T, p *pool.Pool, device string, want blockdev.Reason) {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); stateOf(p, device).reason != want; {
		if time.Now().After(end) {
			t.Fatalf("timed out: disk %s is %+v, want %s", device, stateOf(p, device), want)
		}
		time.Sleep(time.Millisecond)
	}
}

// TestDiskChoice: the smallest blank disk in the range is claimed, and the disk of a deleted volume
// is free after it is wiped.
func TestDiskChoice(t *testing.T) {
	large, _, _ := testenv.Disk(t, 128<<20)
	small, _, _ := testenv.Disk(t, 64<<20)
	used, _, _ := testenv.Disk(t, 32<<20)
	testenv.Run(t, "mkfs.ext4", "-q", used)
	p := openDisks(t, t.TempDir(), large, small, used, small) // a disk that two globs match counts once
	if n := len(storageOf(p).states()); n != 3 {
		t.Errorf("got %d disks, want 3", n)
	}
	u, err := p.Usage()
	must(t, err)
	if want := int64(64-2+128-2) << 20; u.Room != want || u.Largest != 126<<20 || u.Promised != 0 {
		t.Errorf("got usage %+v, want %d bytes of room", u, want)
	}
	v, err := makeDisk(t, p, "one", volume.Range{})
	must(t, err)
	if s := stateOf(p, small); s.reason != blockdev.DiskClaimed || s.detail != "volume one" || v.Capacity != 62<<20 {
		t.Errorf("got disk %+v and volume %+v, want the claimed disk %s", s, v, small)
	}
	if s := stateOf(p, used); s.reason != blockdev.DiskNotBlank || !strings.Contains(s.detail, "ext4") {
		t.Errorf("got %+v, want a disk that is not blank because of ext4", s)
	}
	for _, r := range []volume.Range{{Required: 127 << 20}, {Required: 63 << 20, Limit: 100 << 20}} {
		if _, err := makeDisk(t, p, "two", r); !errors.Is(err, volume.ErrExhausted) {
			t.Errorf("create with %+v: got %v, want ErrExhausted", r, err)
		}
	}
	if u, err = p.Usage(); err != nil || u.Room != 126<<20 || u.Promised != 62<<20 || u.Volumes != 1 {
		t.Errorf("got usage %+v, %v; want one volume of 62 MiB and 126 MiB of room", u, err)
	}
	d, m, err := storageOf(p).locate(v)
	if err != nil || d.Path != small || m.Name != "one" {
		t.Errorf("locate: got %+v, %+v, %v; want disk %s of volume one", d, m, err, small)
	}
	must(t, p.Remove(t.Context(), v))
	awaitDisk(t, p, small, blockdev.DiskFree)
}

// TestWipeResumed: the state of the disk shows the progress of a wipe, and the next driver continues at that
// offset.
func TestWipeResumed(t *testing.T) {
	const size, wiped = 256 << 20, 128 << 20
	device, image, _ := testenv.Disk(t, size)
	dir := t.TempDir()
	p := openDisks(t, dir, device)
	v, err := makeDisk(t, p, "one", volume.Range{})
	must(t, err)
	p.Close()
	f, err := os.OpenFile(image, os.O_RDWR, 0)
	must(t, err)
	defer f.Close()
	for _, at := range []int64{wiped - 32<<20, wiped + 32<<20} {
		_, err = f.WriteAt([]byte("data"), at)
		must(t, err)
	}
	records := filepath.Join(dir, "disks/disks")
	entry := filepath.Join(records, ".trivet/trash", v.ID.Name+".00000000")
	must(t, os.Rename(filepath.Join(records, "volumes", v.ID.Name), entry))
	must(t, os.WriteFile(entry+"/wiping", []byte(strconv.Itoa(wiped)), 0o600))

	readOnly, err := pool.OpenReadOnly(t.Context(), forms, pool.Config{Name: "disks", Section: &Disks{Match: []string{device}}}, dir)
	must(t, err)
	if s := stateOf(readOnly, device); s.reason != diskWiping || s.wiped != wiped || !strings.Contains(s.detail, "50%") {
		t.Errorf("got %+v, want a disk that is wiped to 50%%", s)
	}
	readOnly.Close()
	awaitDisk(t, openDisks(t, dir, device), device, blockdev.DiskFree)
	// The bytes before the recorded offset are not wiped again.
	for at, want := range map[int64]string{wiped - 32<<20: "data", wiped + 32<<20: "\x00\x00\x00\x00"} {
		have := make([]byte, 4)
		_, err = f.ReadAt(have, at)
		must(t, err)
		if string(have) != want {
			t.Errorf("at byte %d: got %q, want %q", at, have, want)
		}
	}
}

// TestDiskOrphan: a disk that has a mark and no record is reported as orphaned, and not claimed. The advice
// clears the disk, unless it is mounted.
func TestDiskOrphan(t *testing.T) {
	device, _, _ := testenv.Disk(t, 64<<20)
	p := openDisks(t, t.TempDir(), device)
	_, err := makeDisk(t, p, "lost", volume.Range{})
	must(t, err)
	p.Close()
	again := openDisks(t, t.TempDir(), device) // the state directory was lost
	if s := stateOf(again, device); s.reason != diskOrphaned || !strings.Contains(s.detail, "lost") {
		t.Errorf("got %+v, want an orphaned disk of volume lost", s)
	}
	if _, err := makeDisk(t, again, "other", volume.Range{}); !errors.Is(err, volume.ErrExhausted) {
		t.Errorf("create: got %v, want ErrExhausted", err)
	}
	_, advice, _ := strings.Cut(stateOf(again, device).detail, "no other driver uses the disk: ")
	if strings.Contains(advice, "force") || !strings.Contains(advice, "partx -d") {
		t.Errorf("got advice %q, want partx -d and no force", advice)
	}
	dir := t.TempDir()
	testenv.Run(t, "mkfs.ext4", "-q", device+"p1")
	testenv.Run(t, "mount", device+"p1", dir)
	if out, err := testenv.Output("", "sh", "-c", advice); err == nil {
		t.Errorf("a mounted disk was cleared: %s", out)
	}
	testenv.Run(t, "umount", dir)
	testenv.Run(t, "sh", "-c", advice)
	_, err = makeDisk(t, again, "other", volume.Range{})
	must(t, err)
}

// TestUnreadableRecord: while a record cannot be read, no disk is reported as orphaned, and no command that
// clears a disk is shown, whatever the state and pool of the record's volume.
func TestUnreadableRecord(t *testing.T) {
	device, _, _ := testenv.Disk(t, 64<<20)
	damage := func(t *testing.T, folder string) {
		must(t, os.WriteFile(filepath.Join(folder, "volume.json"), []byte(`{"version":2,"later":true}`), 0o600))
	}
	dir := t.TempDir()
	p := openDisks(t, dir, device)
	v, err := makeDisk(t, p, "live", volume.Range{})
	must(t, err)
	p.Close()
	records := filepath.Join(dir, "disks/disks")
	record := filepath.Join(records, "volumes", v.ID.Name, "volume.json")
	readable, err := os.ReadFile(record)
	must(t, err)
	for name, tc := range map[string]struct {
		folder string
		damage func(t *testing.T, folder string)
		says   string
	}{
		"existing volume": {"disks/volumes/live", damage, "version 2"},
		"missing record":  {"disks/volumes/live", func(t *testing.T, folder string) { must(t, os.Remove(filepath.Join(folder, "volume.json"))) }, "no such file"},
		"being created":   {"disks/.trivet/tmp/live", damage, "version 2"},
		"in the trash":    {"disks/.trivet/trash/live.1", damage, "version 2"},
		"another pool":    {"other/volumes/live", damage, "version 2"},
	} {
		t.Run(name, func(t *testing.T) {
			state := t.TempDir()
			must(t, os.CopyFS(filepath.Join(state, "disks/disks"), os.DirFS(records)))
			folder := filepath.Join(state, "disks", tc.folder)
			must(t, os.RemoveAll(filepath.Join(state, "disks/disks/volumes/live")))
			must(t, os.CopyFS(folder, os.DirFS(filepath.Join(records, "volumes/live"))))
			tc.damage(t, folder)
			c := pool.Config{Name: "disks", Section: &Disks{Match: []string{device}}}
			read, err := pool.OpenReadOnly(t.Context(), forms, c, state)
			must(t, err)
			defer read.Close()
			s := stateOf(read, device)
			if s.reason != blockdev.DiskClaimed || !strings.Contains(s.detail, tc.says) || strings.Contains(s.detail, "wipefs") {
				t.Errorf("got %+v, want a claimed disk with %q and without wipefs", s, tc.says)
			}
			if found := poolConditions(read); len(found) > 0 {
				t.Errorf("got conditions %+v, want none", found)
			}
			must(t, os.WriteFile(filepath.Join(folder, "volume.json"), readable, 0o600))
			must(t, read.Storage().Scan())
			if s := stateOf(read, device); s.reason == diskOrphaned {
				t.Errorf("after the record was restored: got %+v, want a disk that is not orphaned", s)
			}
		})
	}
}

// openSet opens pools of disks in this order, and returns a function that returns one of them by name.
func openSet(t *testing.T, dir string, configs ...pool.Config) func(name string) *pool.Pool {
	t.Helper()
	root, err := os.OpenRoot(dir)
	must(t, err)
	set := pool.NewSet(forms, configs, root)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() { defer close(ended); set.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-ended })
	must(t, set.AwaitReady(t.Context()))
	return func(name string) *pool.Pool {
		t.Helper()
		p, err := set.Named(name)
		must(t, err)
		return p
	}
}

// poolOf is the configuration of a pool of disks.
func poolOf(name string, match ...string) pool.Config {
	return pool.Config{Name: name, Section: &Disks{Match: match}}
}

// TestDiskTwoPools: a disk that two pools match belongs to the first pool.
func TestDiskTwoPools(t *testing.T) {
	device, _, _ := testenv.Disk(t, 64<<20)
	named := openSet(t, t.TempDir(), poolOf("first", device), poolOf("second", device))
	second := named("second")
	if s := stateOf(second, device); s.reason != diskOtherPool || !strings.Contains(s.detail, `"first"`) || !strings.Contains(s.detail, `"second"`) {
		t.Errorf("got %+v, want a disk of pool first", s)
	}
	if _, err := makeDisk(t, second, "v", volume.Range{}); !errors.Is(err, volume.ErrExhausted) {
		t.Errorf("create in the second pool: got %v, want ErrExhausted", err)
	}
	_, err := makeDisk(t, named("first"), "v", volume.Range{})
	must(t, err)
}

// TestDiskElsewhere: a disk with a volume of another pool, or of this pool under an older name, is
// never reported as orphaned, whichever pools match it.
func TestDiskElsewhere(t *testing.T) {
	device, _, _ := testenv.Disk(t, 64<<20)
	dir := t.TempDir()
	p := openDisks(t, dir, device)
	_, err := makeDisk(t, p, "live", volume.Range{})
	must(t, err)
	p.Close()
	named := openSet(t, dir, poolOf("wider", device, "/dev/loop-control"), poolOf("disks", device))
	for name, want := range map[string]blockdev.Reason{"wider": diskOtherPool, "disks": blockdev.DiskClaimed} {
		if s := stateOf(named(name), device); s.reason != want || !strings.Contains(s.detail, "live") {
			t.Errorf("in pool %s: got %+v, want %s", name, s, want)
		}
	}
	renamed := openSet(t, dir, poolOf("renamed", device))("renamed")
	if s := stateOf(renamed, device); s.reason != diskOtherPool || !strings.Contains(s.detail, `pool "disks"`) || strings.Contains(s.detail, "wipefs") {
		t.Errorf("in the renamed pool: got %+v, want a disk of pool disks", s)
	}
}

// TestDiskRefuses: a disk that reads as blank and cannot be written is not claimed again until the next
// scan, and the failed create leaves no files.
func TestDiskRefuses(t *testing.T) {
	full := testenv.Filesystem(t, "ext4", "32M")
	image := filepath.Join(full, "disk") // a sparse file, to which nothing can be written on a full filesystem
	must(t, os.WriteFile(image, nil, 0o600))
	must(t, os.Truncate(image, 64<<20))
	bad := testenv.PlugIn(t, image)
	testenv.Run(t, "sh", "-c", "cd "+full+"; cat /dev/zero >a; sync a; dd if=/dev/zero of=b bs=4096 oflag=direct || true")
	good, _, _ := testenv.Disk(t, 128<<20)
	dir := t.TempDir()
	p := openDisks(t, dir, bad, good)
	if _, err := makeDisk(t, p, "v", volume.Range{}); !errors.Is(err, blockdev.ErrDiskRefuses) {
		t.Errorf("create on a disk that cannot be written: got %v, want ErrDiskRefuses", err)
	}
	if s := stateOf(p, bad); s.reason != blockdev.DiskUnreadable || !strings.Contains(s.detail, "cannot be written") {
		t.Errorf("got %+v, want a disk that cannot be written", s)
	}
	v, err := makeDisk(t, p, "v", volume.Range{})
	if err != nil || v.Capacity != 126<<20 {
		t.Errorf("create: got %d bytes, %v; want 126 MiB", v.Capacity, err)
	}
	awaitEmpty(t, filepath.Join(dir, "disks/disks/.trivet/trash"))
}

// awaitEmpty waits until a directory is empty.
func awaitEmpty(t *testing.T, dir string) {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
		left, err := os.ReadDir(dir)
		must(t, err)
		if len(left) == 0 {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("timed out: %s contains %v, want no files", dir, left)
		}
	}
}

// TestDiskCanceled: a canceled claim fails with the error of the context, not with ErrExhausted.
func TestDiskCanceled(t *testing.T) {
	device, _, _ := testenv.Disk(t, 64<<20)
	p := openDisks(t, t.TempDir(), device)
	held, err := os.OpenFile(device, os.O_RDWR|os.O_EXCL, 0)
	must(t, err)
	soon, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	_, err = claimDisk(soon, p, room{min: 1})
	must(t, held.Close())
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("while another program holds the disk: got %v, want DeadlineExceeded", err)
	}
	c, err := claimDisk(t.Context(), p, room{min: 1})
	must(t, err)
	if _, err := claimDisk(soon, p, room{min: 1}); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("while another call claims a disk: got %v, want DeadlineExceeded", err)
	}
	must(t, c.Close())
}

// TestDiskFailedCreate: a disk that was marked by a create that failed is not orphaned, and the next create
// waits until the mark is removed.
func TestDiskFailedCreate(t *testing.T) {
	first, _, _ := testenv.Disk(t, 64<<20)
	second, _, _ := testenv.Disk(t, 128<<20)
	p := openDisks(t, t.TempDir(), first, second)
	_, err := makeDisk(t, p, "v", volume.Range{})
	must(t, err)
	if _, err := makeDisk(t, p, "v", volume.Range{}); err == nil {
		t.Error("the second create with the same name succeeded, want an error")
	}
	if s := stateOf(p, second); s.reason != diskWiping && s.reason != blockdev.DiskFree {
		t.Errorf("got %+v, want a disk that is free or being wiped", s)
	}
	v, err := makeDisk(t, p, "w", volume.Range{})
	if err != nil || v.Capacity != 126<<20 {
		t.Errorf("create: got %d bytes, %v; want 126 MiB", v.Capacity, err)
	}
}

// awaitStuck waits for an error of removing a deleted volume.
func awaitStuck(t *testing.T, p *pool.Pool) string {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); len(p.Trash.Errors()) == 0; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("timed out waiting for an error of the trash")
		}
	}
	return p.Trash.Errors()[0].Error()
}

// TestDiskRepurposed: if another program uses the disk now, it is not wiped when its old volume is deleted,
// and the trash reports an error.
func TestDiskRepurposed(t *testing.T) {
	// boot tells whether the other program has also written a boot record with a partition table.
	for name, boot := range map[string]bool{"filesystem": false, "boot record": true} {
		t.Run(name, func(t *testing.T) {
			device, image, _ := testenv.Disk(t, 64<<20)
			dir := t.TempDir()
			p := openDisks(t, dir, device)
			v, err := makeDisk(t, p, "v", volume.Range{})
			must(t, err)
			testenv.Run(t, "wipefs", "-q", "-a", device)
			if boot {
				entry := [64]byte{4: 0x83, 9: 8, 14: 8} // from sector 2048 on
				f, err := os.OpenFile(device, os.O_WRONLY, 0)
				must(t, err)
				_, err = f.WriteAt(append(entry[:], 0x55, 0xaa), 446)
				must(t, errors.Join(err, f.Close()))
			}
			testenv.Run(t, "mkfs.ext4", "-q", device+"p1")
			_, err = storageOf(p).locateForChange(v)
			if want := map[bool]error{false: volume.ErrDamaged, true: volume.ErrUnavailable}[boot]; !errors.Is(err, want) {
				t.Errorf("locateForChange: got %v, want %v", err, want)
			}
			must(t, p.Remove(t.Context(), v))
			if stuck := awaitStuck(t, p); !strings.Contains(stuck, filepath.Join(dir, "disks/disks/.trivet/trash/v.")) {
				t.Errorf("got %q, want an error that names the folder in the trash", stuck)
			}
			testenv.Run(t, "e2fsck", "-fn", image+"?offset=1048576")
		})
	}
}

// TestDiskRestored: a disk with data is not wiped if a restored state directory records the disk as unused.
func TestDiskRestored(t *testing.T) {
	device, _, _ := testenv.Disk(t, 64<<20)
	dir := t.TempDir()
	p := openDisks(t, dir, device)
	v, err := makeDisk(t, p, "v", volume.Range{})
	must(t, err)
	d, err := storageOf(p).locateForChange(v)
	must(t, err)
	must(t, d.SetUsed(t.Context(), sectionOf(v).GUID))
	p.Close()
	base := filepath.Join(dir, "disks/disks")
	must(t, os.Rename(base+"/volumes/v", base+"/.trivet/tmp/v"))
	p = openDisks(t, dir, device)
	if stuck := awaitStuck(t, p); !strings.Contains(stuck, "backup") {
		t.Errorf("got %q, want an error that mentions the backup", stuck)
	}
	if m, err := d.Mark(); err != nil || !m.Complete || m.Damaged || m.GUID.String() != sectionOf(v).GUID {
		t.Errorf("got mark %+v, %v; want the unchanged mark", m, err)
	}
}

// TestDiskTorn: a partially written record, which has no disk, is removed.
func TestDiskTorn(t *testing.T) {
	device, _, _ := testenv.Disk(t, 64<<20)
	dir := t.TempDir()
	openDisks(t, dir, device).Close()
	tmp := filepath.Join(dir, "disks/disks/.trivet/tmp")
	must(t, os.Mkdir(filepath.Join(tmp, "v"), 0o700))
	must(t, os.WriteFile(filepath.Join(tmp, "v/volume.json.tmp"), []byte("{"), 0o600))
	p := openDisks(t, dir, device)
	awaitEmpty(t, tmp)
	awaitEmpty(t, filepath.Join(dir, "disks/disks/.trivet/trash"))
	_, err := makeDisk(t, p, "v", volume.Range{})
	must(t, err)
}

// TestDiskPulledInTrash: a deleted volume whose disk is missing stays in the trash, and a later driver wipes
// the disk when it is attached again.
func TestDiskPulledInTrash(t *testing.T) {
	device, image, pull := testenv.Disk(t, 64<<20)
	dir, link := t.TempDir(), filepath.Join(t.TempDir(), "disk")
	must(t, os.Symlink(device, link))
	p := openDisks(t, dir, link)
	v, err := makeDisk(t, p, "v", volume.Range{})
	must(t, err)
	pull()
	must(t, p.Remove(t.Context(), v))
	if stuck := awaitStuck(t, p); !strings.Contains(stuck, sectionOf(v).GUID) || !strings.Contains(stuck, "insert its unchanged disk") {
		t.Errorf("got %q, want an error with the GUID and the remedy", stuck)
	}
	p.Close()
	must(t, os.Remove(link))
	must(t, os.Symlink(testenv.PlugIn(t, image), link))
	p = openDisks(t, dir, link)
	awaitDisk(t, p, link, blockdev.DiskFree)
}

// TestDiskMarkWithoutVolume: after a create that did not complete, the next start removes the mark of the
// disk, whichever parts of the mark were written, even if the disk is attached only later.
func TestDiskMarkWithoutVolume(t *testing.T) {
	const sector, size = 512, 64 << 20
	// The mark consists of a protective boot record, the header of the partition table, its first entry,
	// the rest of its entries, and the second copy of entries and header at the end of the disk.
	type span struct{ from, to int64 }
	boot, header := span{0, sector}, span{sector, 2 * sector}
	first, rest, second := span{2 * sector, 3 * sector}, span{3 * sector, 34 * sector}, span{size - 33*sector, size}
	for _, tc := range []struct {
		name    string
		missing []span // parts of the mark that were not written
		late    bool   // the disk is attached after the start
	}{
		{"nothing written", []span{boot, header, first, rest, second}, false},
		{"only the partition entry", []span{boot, header, rest, second}, false},
		{"only the backup table", []span{boot, header, rest}, false},
		{"half of the backup table", []span{boot, header, rest, {size - sector, size}}, false},
		{"no boot record", []span{boot}, false},
		{"complete", nil, false},
		{"only the partition entry, disk attached later", []span{boot, header, rest, second}, true},
		{"complete, disk attached later", nil, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			device, image, pull := testenv.Disk(t, size)
			dir, link := t.TempDir(), filepath.Join(t.TempDir(), "disk")
			must(t, os.Symlink(device, link))
			p := openDisks(t, dir, link)
			v, err := makeDisk(t, p, "v", volume.Range{})
			must(t, err)
			p.Close()
			base := filepath.Join(dir, "disks/disks")
			must(t, os.Rename(base+"/volumes/v", base+"/.trivet/tmp/v"))
			testenv.Run(t, "delpart", device, "1")
			f, err := os.OpenFile(device, os.O_WRONLY, 0)
			must(t, err)
			for _, s := range tc.missing {
				_, err := f.WriteAt(make([]byte, s.to-s.from), s.from)
				must(t, err)
			}
			must(t, errors.Join(f.Sync(), f.Close()))
			if tc.late {
				pull()
			}
			p = openDisks(t, dir, link)
			if tc.late {
				awaitStuck(t, p)
				must(t, os.Remove(link))
				must(t, os.Symlink(testenv.PlugIn(t, image), link))
			}
			awaitEmpty(t, base+"/.trivet/trash")
			if _, err := p.Lookup("v"); !errors.Is(err, volume.ErrNotFound) {
				t.Errorf("Lookup: got %v, want ErrNotFound", err)
			}
			_, err = makeDisk(t, p, v.CoName, volume.Range{})
			must(t, err)
		})
	}
}

// TestDisksConfig: invalid settings of a pool of disks are refused.
func TestDisksConfig(t *testing.T) {
	for name, tc := range map[string]struct {
		c    pool.Config
		says string
	}{
		"valid":        {pool.Config{Name: "d", Section: &Disks{Match: []string{"/dev/disk/by-id/nvme-*"}}}, ""},
		"no glob":      {pool.Config{Name: "d", Section: &Disks{}}, "disks.match is empty"},
		"invalid glob": {pool.Config{Name: "d", Section: &Disks{Match: []string{"/dev/[a"}}}, `disks.match "/dev/[a"`},
		"not in /dev":  {pool.Config{Name: "d", Section: &Disks{Match: []string{"nvme*"}}}, `disks.match "nvme*"`},
		"directory":    {pool.Config{Name: "d", Section: &Disks{Match: []string{"/dev/sd*"}}, Directory: pool.Directory{Path: "/p"}}, "beside"},
		"overcommit":   {pool.Config{Name: "d", Section: &Disks{Match: []string{"/dev/sd*"}}, Overcommit: 2}, "overcommit"},
		"quota":        {pool.Config{Name: "d", Section: &Disks{Match: []string{"/dev/sd*"}}, Quota: pool.QuotaAuto}, "quota"},
		"no section":   {pool.Config{Name: "d"}, "directory.path"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := tc.c.Validate()
			if (err == nil) != (tc.says == "") || err != nil && !strings.Contains(err.Error(), tc.says) {
				t.Errorf("got %v, want %q in the error", err, tc.says)
			}
		})
	}
}
