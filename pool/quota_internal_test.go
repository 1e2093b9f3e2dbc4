package pool

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sync/errgroup"

	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/linux/quota"
	"github.com/trivet-csi/trivet/pool/beneath"
	"github.com/trivet-csi/trivet/volume"
)

// place is the directory of a pool, and the state directory of its node.
type place struct {
	at    string
	state *os.Root
}

// newPlace is the place of a pool on a disk.
func newPlace(t *testing.T, disk string) place {
	t.Helper()
	return place{at: filepath.Join(disk, "pool"), state: stateRoot(t)}
}

func (l place) open(t *testing.T) *Pool {
	t.Helper()
	p, err := Open(t.Context(), Forms, Config{Name: "p", Reserve: "0%", Directory: Directory{Path: l.at}}, l.state, nil)
	must(t, err)
	t.Cleanup(p.Close)
	return p
}

// awaitTrash waits until the trash is empty.
func (l place) awaitTrash(t *testing.T) {
	t.Helper()
	await(t, "the trash to be emptied", func() bool {
		left, err := os.ReadDir(filepath.Join(l.at, trashDir))
		must(t, err)
		return len(left) == 0
	})
}

// directoryVolume is the record of a directory volume in a node-local pool.
func directoryVolume(p *Pool, name string, size int64) volume.Volume {
	v := sharedVolume(p, name)
	v.ID, v.Capacity = p.ID("local", name), size
	return v
}

// dataOf is the path of a volume's data.
func (l place) dataOf(v volume.Volume) string { return filepath.Join(l.at, DirectoryPath(v)) }

// write writes a file of zeros, durably.
func write(t *testing.T, path string, size int64) {
	t.Helper()
	f, err := os.Create(path)
	must(t, err)
	_, err = f.Write(make([]byte, size))
	must(t, errors.Join(err, f.Sync(), f.Close()))
}

// deeply is a depth of nested directories that exceeds the number of directories that the removal of a
// tree holds open.
const deeply = 70

// TestDeepRecord: the driver does not take a file that a tenant has written for the record of an entry of
// the trash. A mount prevents the removal of the entry.
func TestDeepRecord(t *testing.T) {
	l := newPlace(t, testenv.Filesystem(t, "ext4", "256M"))
	p := l.open(t)
	v := directoryVolume(p, "v", 1<<20)
	must(t, p.CreateDirectory(t.Context(), v, nil, nothing))
	forged := directoryVolume(p, "forged", 1<<60)
	forged.Directory.Quota = &volume.Quota{Kind: string(quota.Ext4), ID: 42}
	record, err := forged.MarshalRecord()
	must(t, err)
	deep := l.dataOf(v)
	for range deeply {
		deep = filepath.Join(deep, "d")
		must(t, os.Mkdir(deep, 0o755))
		must(t, os.WriteFile(filepath.Join(deep, recordFile), record, 0o600))
		must(t, os.WriteFile(filepath.Join(deep, quotaFile), []byte("42"), 0o600))
	}
	testenv.Run(t, "mount", "-t", "tmpfs", "none", deep) // so no directory above can be removed
	mounted := func() string {                           // the mount moves to the trash with the directory
		return strings.TrimSpace(testenv.Run(t, "sh", "-c", "findmnt -rn -o TARGET | grep "+l.at))
	}
	t.Cleanup(func() { testenv.Run(t, "umount", mounted()) })
	must(t, p.Remove(t.Context(), v))
	await(t, "the records in the trash to be removed", func() bool {
		dirs, err := filepath.Glob(filepath.Join(l.at, trashDir, "*", DataDir, "d", "d"))
		must(t, err)
		records, err := filepath.Glob(filepath.Join(l.at, trashDir, "*", DataDir, "d", recordFile))
		must(t, err)
		return len(dirs) == 1 && len(records) == 0
	})
	p.Close()
	p = l.open(t)
	trashed, err := beneath.Names(p.trash, ".")
	must(t, err)
	if len(trashed) != 1 {
		t.Errorf("the trash contains %q, want one entry", trashed)
	}
	for _, name := range trashed {
		if r := p.Trash.entryReservation(name); r.Bytes > 1<<20 {
			t.Errorf("reservation of %s: got %+v, want at most 1 MiB", name, r)
		}
	}
	if u, err := p.Usage(); err != nil || u.Promised > 1<<20 {
		t.Errorf("usage: got %+v, %v; want at most 1 MiB promised", u, err)
	}
}

// TestKilledInQuotaFile: the quota ID of an entry of the trash is released, even if the driver was killed
// after it created the file for the ID and before it wrote the ID.
func TestKilledInQuotaFile(t *testing.T) {
	l := newPlace(t, testenv.SimpleQuotas(t, "512M"))
	l.open(t).Close()
	entry := filepath.Join(l.at, trashDir, "killed")
	must(t, os.Mkdir(entry, 0o700))
	folder, err := os.Open(entry)
	must(t, err)
	defer folder.Close()
	fs, err := quota.Open(folder)
	must(t, err)
	defer func() { must(t, fs.Close()) }()
	must(t, fs.MakeDir(folder, DataDir))
	data, err := os.Open(filepath.Join(entry, DataDir))
	must(t, err)
	id, err := fs.Allocate(data, quota.Limit{Bytes: 1 << 20}, func(uint64) bool { return false })
	must(t, errors.Join(err, data.Close()))
	must(t, os.WriteFile(filepath.Join(entry, quotaFile), nil, 0o600))
	l.open(t)
	await(t, "the entry to be removed", func() bool {
		_, err := os.Lstat(entry)
		return os.IsNotExist(err)
	})
	if u, err := fs.Usage(id); err != nil || u.Limit.Bytes != 0 {
		t.Errorf("qgroup 1/%d: got %+v, %v; want no limit", id, u, err)
	}
}

// TestForeignBesideLimited: the usage of a new volume does not count as foreign use, and the ledger
// has its quota ID.
func TestForeignBesideLimited(t *testing.T) {
	l := newPlace(t, testenv.SimpleQuotas(t, "1G"))
	p := l.open(t)
	v := directoryVolume(p, "v", 256<<20)
	must(t, p.CreateDirectory(t.Context(), v, nil, nothing))
	write(t, filepath.Join(l.dataOf(v), "file"), 64<<20)
	write(t, filepath.Join(l.at, "..", "foreign"), 64<<20)
	must(t, p.accounts.measure())
	u, err := p.Usage()
	must(t, err)
	if foreign := u.Total - u.Reserve - u.Promised - u.Room; foreign < 64<<20 || foreign > 80<<20 {
		t.Errorf("got foreign use of %d bytes, want about 64 MiB", foreign)
	}
	if !p.ledger.HasQuota(v.Directory.Quota.ID) {
		t.Errorf("the ledger does not have quota ID %d", v.Directory.Quota.ID)
	}
}

// TestGrowDirectory: Relimit, which sets limits again when a snapshot is made or removed, does not
// reset the limit of a directory that grows meanwhile.
func TestGrowDirectory(t *testing.T) {
	p := newPlace(t, testenv.SimpleQuotas(t, "1G")).open(t)
	v := directoryVolume(p, "v", 1<<20)
	must(t, p.CreateDirectory(t.Context(), v, nil, nothing))
	var relimits errgroup.Group
	grown := make(chan struct{})
	relimits.Go(func() error {
		for {
			select {
			case <-grown:
				return nil
			default:
			}
			if err := p.Quotas.Relimit(v.ID); err != nil {
				return err
			}
		}
	})
	for range 50 {
		larger := v.Capacity + 1<<20
		must(t, p.GrowDirectory(t.Context(), v, larger))
		v.Capacity = larger
		if err := p.Quotas.Check(v); err != nil {
			t.Error(err)
		}
	}
	close(grown)
	must(t, relimits.Wait())
}

// TestOtherKind: if a record contains another kind of quota than the filesystem has, as in a copied
// pool, the quota ID of the record is neither read nor released.
func TestOtherKind(t *testing.T) {
	l := newPlace(t, testenv.SimpleQuotas(t, "1G"))
	p := l.open(t)
	v := directoryVolume(p, "v", 64<<20)
	must(t, p.CreateDirectory(t.Context(), v, nil, nothing))
	id := v.Directory.Quota.ID
	v.Directory.Quota = &volume.Quota{Kind: string(quota.XFS), ID: id}
	must(t, p.rewrite(v))
	p.Close()
	p = l.open(t)
	if used, err := p.accounts.Used(); err != nil || used != v.Capacity {
		t.Errorf("usage of the volume: got %d bytes, %v; want its capacity %d", used, err, v.Capacity)
	}
	must(t, p.Remove(t.Context(), v))
	l.awaitTrash(t)
	must(t, p.Quotas.withQuota(func(fs *quota.FS) error {
		u, err := fs.Usage(id)
		if u.Limit.Bytes != v.Capacity {
			t.Errorf("ID %d after the delete: got %+v, want its limit unchanged", id, u)
		}
		return err
	}))
}

// TestForeignQgroups: a create does not use or remove the qgroups of other programs.
func TestForeignQgroups(t *testing.T) {
	disk := testenv.SimpleQuotas(t, "512M")
	l := newPlace(t, disk)
	p := l.open(t)
	const first, n = 256, 2 * allocateTries // a create uses the ID of a new subvolume, and the first one has 256
	for i := range n {
		testenv.Run(t, "btrfs", "qgroup", "create", fmt.Sprint("1/", first+i), disk)
	}
	if err := p.CreateDirectory(t.Context(), directoryVolume(p, "v", 64<<20), nil, nothing); err == nil {
		t.Fatal("the create succeeded, although other programs have all IDs that it tries")
	}
	l.awaitTrash(t)
	groups := filepath.Join("/sys/fs/btrfs", strings.TrimSpace(testenv.Run(t, "findmnt", "-n", "-o", "UUID", disk)), "qgroups")
	for i := range n {
		if _, err := os.Stat(filepath.Join(groups, fmt.Sprint("1_", first+i))); err != nil {
			t.Error(err)
		}
	}
}

// TestImmutableDirectory: a directory that its tenant has made immutable is removed.
func TestImmutableDirectory(t *testing.T) {
	for fsType, filesystem := range map[string]func(testing.TB, string) string{
		"ext4":              func(tb testing.TB, size string) string { return testenv.Filesystem(tb, "ext4", size) },
		"btrfs":             func(tb testing.TB, size string) string { return testenv.Filesystem(tb, "btrfs", size) },
		"btrfs with quotas": testenv.SimpleQuotas,
	} {
		t.Run(fsType, func(t *testing.T) {
			l := newPlace(t, filesystem(t, "256M"))
			p := l.open(t)
			for _, subDir := range []string{"", "team/x"} {
				v := directoryVolume(p, "v", 1<<20)
				v.Directory.SubDir = subDir
				must(t, p.CreateDirectory(t.Context(), v, nil, nothing))
				write(t, filepath.Join(l.dataOf(v), "file"), 1)
				testenv.Run(t, "chattr", "+i", l.dataOf(v))
				must(t, p.Remove(t.Context(), v))
				l.awaitTrash(t)
			}
		})
	}
}

// TestSubvolumesOfTenants: subvolumes in a directory without a limit are removed, even if they are
// read-only or contain deeply nested directories.
func TestSubvolumesOfTenants(t *testing.T) {
	l := newPlace(t, testenv.Filesystem(t, "btrfs", "256M"))
	p := l.open(t)
	v := directoryVolume(p, "v", 1<<20)
	must(t, p.CreateDirectory(t.Context(), v, nil, nothing))
	layer := filepath.Join(l.dataOf(v), "layer")
	testenv.Run(t, "btrfs", "-q", "subvolume", "create", layer)
	deep := filepath.Join(layer, strings.Repeat("d/", deeply))
	must(t, os.MkdirAll(deep, 0o755))
	write(t, filepath.Join(deep, "file"), 1)
	testenv.Run(t, "btrfs", "-q", "subvolume", "snapshot", "-r", layer, filepath.Join(layer, "d/d/snapshot"))
	immutable := filepath.Join(filepath.Dir(l.dataOf(v)), "0", DataDir) // a path as in a snapshot
	must(t, os.Mkdir(filepath.Dir(immutable), 0o755))
	testenv.Run(t, "btrfs", "-q", "subvolume", "create", immutable)
	write(t, filepath.Join(immutable, "file"), 2)
	testenv.Run(t, "chattr", "+i", immutable)
	testenv.Run(t, "btrfs", "property", "set", immutable, "ro", "true")
	must(t, p.Remove(t.Context(), v))
	l.awaitTrash(t)
}
