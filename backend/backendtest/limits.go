package backendtest

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/trivet-csi/trivet/driver"
	"github.com/trivet-csi/trivet/internal/retry"
	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/linux/quota"
	"github.com/trivet-csi/trivet/volume"
)

const mib = int64(1) << 20

// The user that writes: the beginning of a command that runs as nobody, or as a root user that
// the filesystem limits.
var (
	asNobody    = []string{"setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"}
	asPlainRoot = []string{"setpriv", "--bounding-set", "-sys_resource", "--inh-caps", "-sys_resource"}
)

// testUnlimited: the volume context says that nothing limits the volume. A pool with quota:
// required creates no volume.
func testUnlimited(t *testing.T, d *Driver, kind Kind) {
	l := newLife(t, d, kind, multiWriter)
	l.wantEnforced(t, "false")
	l.up(t)
	write(t, l.data(l.target), pattern(50))
	if s := l.stats(t); s[csi.VolumeUsage_BYTES].GetTotal() < 10*gib {
		t.Errorf("without a limit it has %v", s)
	}
	required := kind.start(t, "20G", func(o *driver.Options) { o.Config.Pools[0].Quota = "required" })
	wantRefused(t, required, kind)
}

// wantRefused fails the test unless the pool refuses to create a volume without limits, with
// the reason.
func wantRefused(t *testing.T, d *Driver, kind Kind) {
	t.Helper()
	before := d.tree(t)
	_, err := d.Control.CreateVolume(t.Context(), kind.request(t))
	wantCode(t, err, codes.FailedPrecondition, "quota: auto", d.Pool())
	if after := d.tree(t); len(after) != len(before) {
		t.Errorf("the refused volume left %q, before there was %q", after, before)
	}
	if n := capacity(t, d, kind); n != 0 {
		t.Errorf("a pool that creates no volume reports room for %d bytes", n)
	}
	health, err := d.Node.NodeGetStorageHealth(t.Context(), &csi.NodeGetStorageHealthRequest{})
	if err != nil || len(health.GetBackendHealth()) != 1 || health.GetBackendHealth()[0].GetReason() != "QuotaNotInForce" {
		t.Errorf("NodeGetStorageHealth: %v, %v", health, err)
	}
}

// wantEnforced checks every answer that has the volume's context.
func (l *life) wantEnforced(t *testing.T, want string) {
	t.Helper()
	v, err := l.d.Control.ControllerGetVolume(t.Context(), &csi.ControllerGetVolumeRequest{VolumeId: l.id})
	must(t, err)
	found := []*csi.Volume{v.GetVolume()}
	list, err := l.d.Control.ListVolumes(t.Context(), &csi.ListVolumesRequest{})
	must(t, err)
	for _, e := range list.GetEntries() {
		if e.GetVolume().GetVolumeId() == l.id {
			found = append(found, e.GetVolume())
		}
	}
	for _, v := range found {
		if c := v.GetVolumeContext(); c["enforced"] != want || c["backend"] != l.kind.target.Class["backend"] || c["pool"] != l.kind.target.Pool {
			t.Errorf("the context is %v, want enforced %s", c, want)
		}
	}
	if len(found) != 2 {
		t.Errorf("the volume is listed %d times", len(found)-1)
	}
}

func (l *life) stats(t *testing.T) map[csi.VolumeUsage_Unit]*csi.VolumeUsage {
	t.Helper()
	resp, err := l.d.Node.NodeGetVolumeStats(t.Context(), &csi.NodeGetVolumeStatsRequest{VolumeId: l.id, VolumePath: l.target})
	must(t, err)
	byUnit := map[csi.VolumeUsage_Unit]*csi.VolumeUsage{}
	for _, u := range resp.GetUsage() {
		byUnit[u.GetUnit()] = u
	}
	return byUnit
}

const (
	// slack is what a filesystem may use of a volume's size for itself.
	slack = mib
	// block is the unit that quotas count. metadata is the extra space of a write on btrfs:
	// nodes of 16 KiB.
	block    = 4096
	metadata = 2 * 16 << 10
)

// fill writes a file until a write is refused, at the end in single blocks, and returns its
// size.
func fill(t *testing.T, path string, as []string) int64 {
	t.Helper()
	for _, size := range []string{"64k", "4k"} {
		dd := []string{"dd", "if=/dev/zero", "of=" + filepath.Base(path), "bs=" + size, "conv=fsync,notrunc", "oflag=append"}
		out, err := testenv.Output(filepath.Dir(path), slices.Concat(as, dd)...) // the user nobody cannot open the path
		if err == nil || !strings.Contains(out, "No space left") && !strings.Contains(out, "quota exceeded") {
			t.Fatalf("filling %s: %v\n%s", path, err, out)
		}
	}
	info, err := os.Stat(path)
	must(t, err)
	return info.Size()
}

func wantFull(t *testing.T, got, size int64) {
	t.Helper()
	if got > size || got < size-slack {
		t.Errorf("%d bytes were written to a volume of %d", got, size)
	}
}

// testFull: a volume holds its size and no more. Another volume is not affected. An expanded
// volume holds more.
func testFull(t *testing.T, d *Driver, kind Kind) {
	for name, as := range map[string][]string{"root": kind.target.Limits.root(), "unprivileged": asNobody} {
		t.Run(name, func(t *testing.T) { testFullAs(t, d, kind, as) })
	}
}

// root is the beginning of a command of a root user that the filesystem limits.
func (limits *Limits) root() []string {
	if limits.RootExempt {
		return asPlainRoot
	}
	return nil
}

func testFullAs(t *testing.T, d *Driver, kind Kind, as []string) {
	const size = 48 * mib
	l, neighbour := newSized(t, d, kind, size), newSized(t, d, kind, size)
	l.wantEnforced(t, "cooperative")
	l.up(t)
	neighbour.up(t)
	file := l.data(l.target)
	wantFull(t, fill(t, file, as), size)
	l.wantToTheBlock(t, size)
	l.wantStatfs(t, size)
	write(t, neighbour.data(neighbour.target), pattern(51))
	if s := neighbour.stats(t)[csi.VolumeUsage_BYTES]; s.GetTotal() != size || s.GetAvailable() < size-8*mib {
		t.Errorf("the neighbor reports %v", s)
	}
	d.Restart(t)
	resp, err := l.expand(t.Context(), 2*size)
	if err != nil || resp.GetCapacityBytes() != 2*size {
		t.Errorf("ControllerExpandVolume: %v, %v", resp, err)
	}
	wantFull(t, fill(t, file, as), 2*size)
	l.wantToTheBlock(t, 2*size)
	l.wantStatfs(t, 2*size)
	l.wantReasons(t, nil, nil)
	wantContent(t, neighbour.data(neighbour.target), pattern(51))
}

// wantToTheBlock: the usage of a full volume is its size, less at most one block, and on btrfs
// the metadata of the refused write.
func (l *life) wantToTheBlock(t *testing.T, size int64) {
	t.Helper()
	left := int64(block)
	if l.d.quotaOf(t, l).Kind == string(quota.Btrfs) {
		left += metadata
	}
	s := l.stats(t)[csi.VolumeUsage_BYTES]
	if s.GetTotal() != size || s.GetUsed() > size || s.GetUsed() <= size-left || s.GetAvailable() != size-s.GetUsed() {
		t.Errorf("a full volume of %d bytes reports %v", size, s)
	}
}

// wantStatfs: df in a pod shows the size of the volume, where the filesystem supports that.
func (l *life) wantStatfs(t *testing.T, size int64) {
	t.Helper()
	if l.d.quotaOf(t, l).Kind == string(quota.Btrfs) {
		return
	}
	var st syscall.Statfs_t
	must(t, syscall.Statfs(l.target, &st))
	if total := int64(st.Blocks) * st.Bsize; total != size || int64(st.Bavail)*st.Bsize >= block || int64(st.Files) != size/(16<<10) {
		t.Errorf("a full volume of %d bytes shows %d, %d blocks free, and %d inodes", size, total, st.Bavail, st.Files)
	}
}

// testInodes: the number of inodes of a volume is proportional to its size, where the
// filesystem counts them.
func testInodes(t *testing.T, d *Driver, kind Kind) {
	const size = mib
	l := newSized(t, d, kind, size, "mode", "0777")
	l.up(t)
	u, ok := l.stats(t)[csi.VolumeUsage_INODES]
	if !ok || d.quotaOf(t, l).Kind == string(quota.Btrfs) {
		return
	}
	if u.GetTotal() != 1024 || u.GetUsed() != 1 || u.GetAvailable() != 1023 {
		t.Errorf("an empty volume has %v", u)
	}
	made := 0
	script := `exec 2>/dev/null; i=0; while true > f$i; do i=$((i+1)); done; echo $i`
	out, err := testenv.Output(l.target, slices.Concat(asNobody, []string{"sh", "-c", script})...)
	must(t, err)
	if _, err := fmt.Sscan(out, &made); err != nil || made > 1024 || made < 100 {
		t.Errorf("%d empty files were created: %v", made, err)
	}
}

// quotaOf is the limit in the record of a volume.
func (d *Driver) quotaOf(t *testing.T, l *life) volume.Quota {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(d.Pool(), "volumes", l.name(), "volume.json"))
	must(t, err)
	var v struct {
		Directory struct{ Quota *volume.Quota }
	}
	must(t, json.Unmarshal(b, &v))
	if v.Directory.Quota == nil {
		t.Fatalf("%s has no quota: %s", l.id, b)
	}
	return *v.Directory.Quota
}

// withQuota runs f with the filesystem that the driver's pool is on.
func (d *Driver) withQuota(t *testing.T, f func(*quota.FS) error) {
	t.Helper()
	dir, err := os.Open(d.Pool())
	must(t, err)
	defer dir.Close()
	fs, err := quota.Open(dir)
	must(t, err)
	must(t, errors.Join(f(fs), fs.Close()))
}

// testNext: a volume holds exactly its own size while deleted ones are being removed.
func testNext(t *testing.T, d *Driver, kind Kind) {
	const size = 24 * mib
	name := newName(t)
	for range 4 {
		l := newSized(t, d, kind, size)
		named := volumeNamed(t, d, name, kind, l.cap)
		l.up(t)
		for i := range 200 {
			must(t, os.WriteFile(filepath.Join(l.target, fmt.Sprint(i)), nil, 0o600))
		}
		fill(t, l.data(l.target), asPlainRoot)
		l.down(t)
		remove(t, d, l.id)
		remove(t, d, named)
		next := newSized(t, d, kind, size)
		next.up(t)
		if s := next.stats(t)[csi.VolumeUsage_BYTES]; s.GetTotal() != size || s.GetUsed() > slack {
			t.Errorf("a new volume has %v", s)
		}
		wantFull(t, fill(t, next.data(next.target), asPlainRoot), size)
		next.down(t)
	}
}

// testTenantUnlimited is testTenant for a pool that sets no limits.
func testTenantUnlimited(t *testing.T, _ *Driver, kind Kind) {
	testTenant(t, kind.start(t, "20G", func(o *driver.Options) { o.Config.Pools[0].Quota = "off" }), kind)
}

// testIDs: volumes that are created at the same time never share an ID.
func testIDs(t *testing.T, _ *Driver, kind Kind) {
	d := kind.start(t, "20G", func(*driver.Options) {})
	ids := createMany(t, d, kind, 32, 8*mib)
	if len(ids) != 32 {
		t.Fatalf("%d of 32 volumes were created", len(ids))
	}
	have := map[uint64]string{}
	for _, id := range ids {
		l := &life{d: d, id: id}
		q := d.quotaOf(t, l)
		d.wantID(t, l.directory(), q.ID)
		d.wantID(t, filepath.Dir(l.directory()), 0)
		if other := have[q.ID]; other != "" {
			t.Errorf("%s and %s have the ID %d", other, id, q.ID)
		}
		have[q.ID] = id
	}
	for _, dir := range []string{".", "volumes", ".trivet", ".trivet/trash", ".trivet/tmp"} {
		d.wantID(t, filepath.Join(d.Pool(), dir), 0)
	}
	for _, id := range ids {
		remove(t, d, id)
	}
	await(t, "the IDs to be free", func() bool {
		n := 0
		d.withQuota(t, func(fs *quota.FS) error {
			for id := range have {
				u, err := fs.Usage(id)
				if err != nil {
					return err
				}
				if u != (quota.Usage{}) {
					n++
				}
			}
			return nil
		})
		return n == 0
	})
}

// wantID fails the test unless a directory has an ID; 0: none.
func (d *Driver) wantID(t *testing.T, path string, want uint64) {
	t.Helper()
	dir, err := os.Open(path)
	must(t, err)
	defer dir.Close()
	d.withQuota(t, func(fs *quota.FS) error {
		id, err := fs.ID(dir)
		if id != want {
			t.Errorf("%s carries the ID %d, want %d", path, id, want)
		}
		return err
	})
}

// testForeign: the space that volumes use is not counted as foreign use.
func testForeign(t *testing.T, _ *Driver, kind Kind) {
	d := kind.start(t, "4G", func(o *driver.Options) { o.Config.Pools[0].Reserve = "0" })
	room := capacity(t, d, kind)
	l := newSized(t, d, kind, gib)
	l.up(t)
	write(t, l.data(l.target), make([]byte, 512*mib))
	d.Restart(t)
	if now := capacity(t, d, kind); now > room-gib+64*mib || now < room-gib-64*mib {
		t.Errorf("of %d bytes %d are left beside a volume of 1 GiB that is half full", room, now)
	}
	write(t, filepath.Join(filepath.Dir(d.Pool()), "theirs"), make([]byte, 512*mib))
	d.Restart(t)
	if now := capacity(t, d, kind); now > room-gib-448*mib || now < room-gib-576*mib {
		t.Errorf("of %d bytes %d are left beside that and a file of 512 MiB", room, now)
	}
}

// testChanged: a changed limit is reported and restored.
func testChanged(t *testing.T, d *Driver, kind Kind) {
	const size = 32 * mib
	l := newSized(t, d, kind, size)
	l.up(t)
	l.wantReasons(t, nil, nil)
	d.withQuota(t, func(fs *quota.FS) error { return fs.Set(d.quotaOf(t, l).ID, quota.Limit{Bytes: 2 * size}) })
	l.wantReasons(t, []string{"QuotaChanged"}, []string{"QuotaChanged"})
	l.down(t)
	l.up(t)
	l.wantReasons(t, nil, nil)
	wantFull(t, fill(t, l.data(l.target), asPlainRoot), size)
}

// testCopied: a copied directory has no limit. Its ID stays unchanged, because it may belong
// to another directory.
func testCopied(t *testing.T, d *Driver, kind Kind) {
	const size = 16 * mib
	l := newSized(t, d, kind, size)
	id := d.quotaOf(t, l).ID
	limit := func() (u quota.Usage) {
		d.withQuota(t, func(fs *quota.FS) (err error) {
			u, err = fs.Usage(id)
			return err
		})
		return u
	}
	away := filepath.Join(d.Pool(), "away")
	must(t, os.Rename(l.directory(), away))
	must(t, os.Mkdir(l.directory(), 0o777))
	l.up(t)
	l.wantReasons(t, []string{"QuotaLost"}, []string{"QuotaLost"})
	_, err := l.expand(t.Context(), 2*size)
	wantCode(t, err, codes.FailedPrecondition, "copy the data to a new volume")
	l.down(t)
	remove(t, d, l.id)
	d.awaitTrash(t)
	if u := limit(); u.Limit.Bytes != size {
		t.Errorf("what has the ID is limited as %+v", u)
	}
	must(t, os.RemoveAll(away))
	d.withQuota(t, func(fs *quota.FS) error {
		return retry.For(t.Context(), time.Minute, func() (bool, error) {
			err := fs.Release(id)
			return errors.Is(err, quota.ErrBusy), err
		})
	})
}

// testOtherKind: a pool that was copied from a filesystem with other limits is opened, and its
// volumes can be used and deleted.
func testOtherKind(t *testing.T, _ *Driver, kind Kind) {
	d := kind.start(t, "20G", func(*driver.Options) {})
	l := newLife(t, d, kind, multiWriter)
	have, other := d.quotaOf(t, l), volume.Quota{Kind: string(quota.Btrfs), ID: 257}
	if have.Kind == other.Kind {
		other = volume.Quota{Kind: string(quota.XFS), ID: 1 << 24}
	}
	b, err := os.ReadFile(l.record())
	must(t, err)
	var v map[string]any
	must(t, json.Unmarshal(b, &v))
	v["directory"].(map[string]any)["quota"] = other
	b, err = json.Marshal(v)
	must(t, err)
	must(t, os.WriteFile(l.record(), b, 0o600))
	d.Restart(t)
	if now := d.quotaOf(t, l); now != other {
		t.Fatalf("the record has %+v", now)
	}
	l.up(t)
	l.wantReasons(t, []string{"QuotaNotInForce"}, []string{"QuotaNotInForce"})
	l.down(t)
	remove(t, d, l.id)
	d.awaitTrash(t)
}

// testAdopted: an adopted directory has no limit, and the driver reports that.
func testAdopted(t *testing.T, d *Driver, kind Kind) {
	must(t, os.MkdirAll(filepath.Join(d.Pool(), "limits/there"), 0o755))
	write(t, filepath.Join(d.Pool(), "limits/there/file"), pattern(52))
	l := newLifeWith(t, d, kind, multiWriter, kind.Parameters("subDir", "limits/there"))
	l.wantEnforced(t, "false")
	l.wantReasons(t, []string{"NotMounted"}, nil)
	made := newLifeWith(t, d, kind, multiWriter, kind.Parameters("subDir", "limits/made"))
	made.wantEnforced(t, "cooperative")

	required := kind.start(t, "20G", func(o *driver.Options) { o.Config.Pools[0].Quota = "required" })
	must(t, os.Mkdir(filepath.Join(required.Pool(), "there"), 0o755))
	_, err := required.Control.CreateVolume(t.Context(), kind.request(t, "subDir", "there"))
	wantCode(t, err, codes.FailedPrecondition, "subDir", "there", "required")
	newLifeWith(t, required, kind, multiWriter, kind.Parameters("subDir", "new")).wantEnforced(t, "cooperative")

	off := kind.start(t, "20G", func(o *driver.Options) { o.Config.Pools[0].Quota = "off" })
	newLife(t, off, kind, multiWriter).wantEnforced(t, "false")
}

// testKept: the data that a deleted volume keeps stays limited.
func testKept(t *testing.T, d *Driver, kind Kind) {
	const size = 16 * mib
	for _, more := range [][]string{{"onDelete", "archive"}, {"onDelete", "retain"}, {"onDelete", "retain", "subDir", "limits/${pv.metadata.name}", "csi.storage.k8s.io/pv/name", "kept"}} {
		l := newSized(t, d, kind, size, more...)
		id := d.quotaOf(t, l).ID
		write(t, filepath.Join(l.place(more), "kept"), pattern(53))
		remove(t, d, l.id)
		d.awaitTrash(t)
		d.withQuota(t, func(fs *quota.FS) error {
			u, err := fs.Usage(id)
			if u.Limit.Bytes != size || u.Bytes == 0 {
				t.Errorf("%v: the kept directory counts as %+v", more, u)
			}
			return err
		})
	}
}

func (l *life) place(more []string) string {
	if len(more) > 2 {
		return filepath.Join(l.d.Pool(), strings.ReplaceAll(more[3], "${pv.metadata.name}", more[len(more)-1]))
	}
	return l.directory()
}

// testOff switches limits off while a driver runs.
func testOff(t *testing.T, _ *Driver, kind Kind) {
	const size = 32 * mib
	for _, setting := range []string{"required", "auto"} {
		t.Run(setting, func(t *testing.T) {
			d := kind.start(t, "20G", func(o *driver.Options) { o.Config.Pools[0].Quota = setting })
			l := newSized(t, d, kind, size)
			l.up(t)
			kind.target.Limits.turn(t, l, kind.target.Limits.Off)
			l.wantReasons(t, []string{"QuotaNotInForce"}, []string{"QuotaNotInForce"})
			l.wantEnforced(t, "cooperative")
			l.down(t)
			l.up(t) // pods need it all the same
			write(t, l.data(l.target), make([]byte, size+8*mib))
			_, err := l.expand(t.Context(), 2*size)
			wantCode(t, err, codes.FailedPrecondition, "quota")
			if setting == "required" {
				wantRefused(t, d, kind)
			} else {
				newLife(t, d, kind, multiWriter).wantEnforced(t, "false")
			}
			kind.target.Limits.turn(t, l, kind.target.Limits.On)
			if kind.target.Limits.Remounts {
				l.wantKept(t, size)
			} else {
				l.wantReasons(t, []string{"QuotaChanged"}, []string{"QuotaChanged"})
				l.down(t)
				l.up(t)
			}
			l.wantReasons(t, nil, nil)
		})
	}
}

// turn switches limits off or on while a volume is published. A filesystem is mounted again
// only without a driver.
func (limits *Limits) turn(t *testing.T, l *life, to func(testing.TB, string)) {
	t.Helper()
	filesystem := filepath.Dir(l.d.Pool())
	if !limits.Remounts {
		to(t, filesystem)
		return
	}
	l.down(t)
	l.d.Stop(t)
	to(t, filesystem)
	l.d.start(t)
	l.up(t)
}

// wantKept: a volume that exceeded its size while nothing limited it counts with its usage,
// accepts no writes, and is limited to its size when it has less again.
func (l *life) wantKept(t *testing.T, size int64) {
	t.Helper()
	l.wantReasons(t, nil, nil)
	if s := l.stats(t)[csi.VolumeUsage_BYTES]; s.GetTotal() != size || s.GetUsed() < size+8*mib || s.GetAvailable() != 0 {
		t.Errorf("with more in it than its size it says %v", s)
	}
	if n := fill(t, l.data(l.target), asPlainRoot); n != size+8*mib {
		t.Errorf("more was written to it, %d bytes in all", n)
	}
	must(t, os.Remove(l.data(l.target)))
	wantFull(t, fill(t, l.data(l.target), asPlainRoot), size)
}

// testMoved: a disk is moved to another node, which has no state of it. Its volumes can be
// used there and are limited to their size.
func testMoved(t *testing.T, _ *Driver, kind Kind) {
	const size, elsewhere = 48 * mib, "node-2.example"
	d := kind.start(t, "20G", func(*driver.Options) {})
	req := kind.request(t)
	req.CapacityRange = &csi.CapacityRange{RequiredBytes: size}
	made, err := d.Control.CreateVolume(t.Context(), req)
	must(t, err)
	v := made.GetVolume()
	l := &life{d: d, kind: kind, cap: kind.Capability(multiWriter), id: v.GetVolumeId(), staging: t.TempDir(), target: filepath.Join(t.TempDir(), "target")}
	write(t, l.data(l.directory()), pattern(54))
	d.Stop(t)
	m := Medium{Config: d.Options.Config.Pools[0], Dir: filepath.Join(carry(t, filepath.Dir(d.Pool())), filepath.Base(d.Pool()))}
	m.Config.Directory.Path = m.Dir
	l.d = kind.target.startOn(t, m, func(o *driver.Options) { o.NodeID = elsewhere })
	t.Cleanup(func() { l.end(t) })
	now, err := l.d.Control.ControllerGetVolume(t.Context(), &csi.ControllerGetVolumeRequest{VolumeId: l.id})
	must(t, err)
	if at := fmt.Sprint(now.GetVolume().GetAccessibleTopology()); now.GetVolume().GetCapacityBytes() != size || !strings.Contains(at, elsewhere) {
		t.Errorf("moved, it is %v", now)
	}
	l.wantEnforced(t, v.GetVolumeContext()["enforced"])
	must(t, l.publishTo(t.Context(), elsewhere))
	l.up(t)
	wantContent(t, l.data(l.target), pattern(54))
	l.wantReasons(t, nil, nil)
	if !kind.Has(Limited) {
		return
	}
	must(t, os.Remove(l.data(l.target)))
	wantFull(t, fill(t, l.data(l.target), asPlainRoot), size)
	if other := newSized(t, l.d, kind, size); l.d.quotaOf(t, other).ID == l.d.quotaOf(t, l).ID {
		t.Errorf("%s and %s have one ID", l.id, other.id)
	}
}

// carry unmounts a filesystem of an image, and mounts it elsewhere.
func carry(t *testing.T, from string) (to string) {
	t.Helper()
	look := func(column string) string { return testenv.Run(t, "findmnt", "-n", "-o", column, "--mountpoint", from) }
	options, image := "loop,"+look("FS-OPTIONS"), testenv.Run(t, "losetup", "-n", "-O", "BACK-FILE", look("SOURCE"))
	to = t.TempDir()
	testenv.Run(t, "umount", from)
	testenv.Run(t, "mount", "-o", options, image, to)
	t.Cleanup(func() {
		testenv.Run(t, "umount", to)
		testenv.Run(t, "mount", "-o", options, image, from) // for who unmounts it
	})
	return to
}
