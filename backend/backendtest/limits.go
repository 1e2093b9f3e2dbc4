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

// Prefixes that make a command run as the user nobody, or as root without CAP_SYS_RESOURCE. Every filesystem
// limits both.
var (
	asNobody    = []string{"setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"}
	asPlainRoot = []string{"setpriv", "--bounding-set", "-sys_resource", "--inh-caps", "-sys_resource"}
)

// testWithoutLimits: without limits, the volume context contains enforced=false, and a pool with quota: required
// creates no volume.
func testWithoutLimits(t *testing.T, d *Driver, kind Kind) {
	l := newVolume(t, d, kind, multiWriter)
	l.wantEnforced(t, "false")
	l.stageAndPublish(t)
	write(t, l.data(l.target), pattern(50))
	if s := l.stats(t); s[csi.VolumeUsage_BYTES].GetTotal() < 10*gib {
		t.Errorf("got usage %v of a volume without a limit, want the size of the filesystem", s)
	}
	required := kind.start(t, "20G", func(o *driver.Options) { o.Config.Pools[0].Quota = "required" })
	wantRefused(t, required, kind)
}

// wantRefused fails the test unless a pool that requires limits, and cannot enforce them, refuses to create a
// volume and reports the reason.
func wantRefused(t *testing.T, d *Driver, kind Kind) {
	t.Helper()
	before := d.paths(t)
	_, err := d.Control.CreateVolume(t.Context(), kind.request(t))
	wantCode(t, err, codes.FailedPrecondition, "quota: auto", d.Pool())
	if after := d.paths(t); len(after) != len(before) {
		t.Errorf("the refused create changed the files from %q to %q", before, after)
	}
	if n := capacity(t, d, kind); n != 0 {
		t.Errorf("got a capacity of %d bytes of a pool that creates no volume, want 0", n)
	}
	health, err := d.Node.NodeGetStorageHealth(t.Context(), &csi.NodeGetStorageHealthRequest{})
	if err != nil || len(health.GetBackendHealth()) != 1 || health.GetBackendHealth()[0].GetReason() != "QuotaNotInForce" {
		t.Errorf("NodeGetStorageHealth: got %v, %v; want QuotaNotInForce", health, err)
	}
}

// wantEnforced checks the value of enforced in all volume contexts that the controller returns.
func (l *testVolume) wantEnforced(t *testing.T, want string) {
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
			t.Errorf("got volume context %v, want enforced %s, and the backend and pool of the volume", c, want)
		}
	}
	if len(found) != 2 {
		t.Errorf("ListVolumes contains the volume %d times, want once", len(found)-1)
	}
}

// stats returns the usage of the volume from NodeGetVolumeStats.
func (l *testVolume) stats(t *testing.T) map[csi.VolumeUsage_Unit]*csi.VolumeUsage {
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
	// slack is the part of a volume's size that the filesystem may use itself, in bytes.
	slack = mib
	// block is the unit of quotas in bytes. metadata is the extra space in bytes that a write on btrfs
	// needs: two nodes of its trees, of 16 KiB each.
	block    = 4096
	metadata = 2 * 16 << 10
)

// fillFile appends to a file until a write fails, at the end in single blocks, and returns the size of the file.
// command is the prefix of the command that writes.
func fillFile(t *testing.T, path string, command []string) int64 {
	t.Helper()
	for _, size := range []string{"64k", "4k"} {
		dd := []string{"dd", "if=/dev/zero", "of=" + filepath.Base(path), "bs=" + size, "conv=fsync,notrunc", "oflag=append"}
		out, err := testenv.Output(filepath.Dir(path), slices.Concat(command, dd)...) // with a relative path, because the user nobody cannot open the absolute one
		if err == nil || !strings.Contains(out, "No space left") && !strings.Contains(out, "quota exceeded") {
			t.Fatalf("filling %s: %v\n%s", path, err, out)
		}
	}
	info, err := os.Stat(path)
	must(t, err)
	return info.Size()
}

// wantFull fails the test unless the size got of a file fills a volume.
func wantFull(t *testing.T, got, size int64) {
	t.Helper()
	if got > size || got < size-slack {
		t.Errorf("wrote %d bytes to a volume of %d bytes, want %d to %d", got, size, size-slack, size)
	}
}

// testLimitEnforced: a full volume contains data of its size, does not affect other volumes, and accepts more data
// when it is expanded.
func testLimitEnforced(t *testing.T, d *Driver, kind Kind) {
	for name, command := range map[string][]string{"root": kind.target.Limits.asLimitedRoot(), "unprivileged": asNobody} {
		t.Run(name, func(t *testing.T) { testLimitEnforcedFor(t, d, kind, command) })
	}
}

// asLimitedRoot returns the prefix that makes a command run as a root user that the filesystem limits.
func (limits *Limits) asLimitedRoot() []string {
	if limits.RootExempt {
		return asPlainRoot
	}
	return nil
}

// testLimitEnforcedFor is testLimitEnforced for a user.
func testLimitEnforcedFor(t *testing.T, d *Driver, kind Kind, command []string) {
	const size = 48 * mib
	l, neighbor := newVolumeOfSize(t, d, kind, size), newVolumeOfSize(t, d, kind, size)
	l.wantEnforced(t, "cooperative")
	l.stageAndPublish(t)
	neighbor.stageAndPublish(t)
	file := l.data(l.target)
	wantFull(t, fillFile(t, file, command), size)
	l.wantToTheBlock(t, size)
	l.wantStatfs(t, size)
	write(t, neighbor.data(neighbor.target), pattern(51))
	if s := neighbor.stats(t)[csi.VolumeUsage_BYTES]; s.GetTotal() != size || s.GetAvailable() < size-8*mib {
		t.Errorf("got usage %v of another volume, want it almost empty", s)
	}
	d.Restart(t)
	resp, err := l.expand(t.Context(), 2*size)
	if err != nil || resp.GetCapacityBytes() != 2*size {
		t.Errorf("ControllerExpandVolume: got %v, %v; want %d bytes", resp, err, 2*size)
	}
	wantFull(t, fillFile(t, file, command), 2*size)
	l.wantToTheBlock(t, 2*size)
	l.wantStatfs(t, 2*size)
	l.wantReasons(t, nil, nil)
	wantContent(t, neighbor.data(neighbor.target), pattern(51))
}

// wantToTheBlock fails the test unless the usage of a full volume is less than its size by at most one block, and
// on btrfs the metadata of the refused write.
func (l *testVolume) wantToTheBlock(t *testing.T, size int64) {
	t.Helper()
	left := int64(block)
	if l.d.quotaOf(t, l).Kind == string(quota.Btrfs) {
		left += metadata
	}
	s := l.stats(t)[csi.VolumeUsage_BYTES]
	if s.GetTotal() != size || s.GetUsed() > size || s.GetUsed() <= size-left || s.GetAvailable() != size-s.GetUsed() {
		t.Errorf("got usage %v of a full volume of %d bytes, want less than %d bytes available", s, size, left)
	}
}

// wantStatfs fails the test unless statfs(2) shows the size of a full volume and one inode for each 16 KiB of it, if
// the filesystem supports that.
func (l *testVolume) wantStatfs(t *testing.T, size int64) {
	t.Helper()
	if l.d.quotaOf(t, l).Kind == string(quota.Btrfs) {
		return
	}
	var st syscall.Statfs_t
	must(t, syscall.Statfs(l.target, &st))
	if total := int64(st.Blocks) * st.Bsize; total != size || int64(st.Bavail)*st.Bsize >= block || int64(st.Files) != size/(16<<10) {
		t.Errorf("statfs: got %d bytes, %d free blocks and %d inodes of a full volume of %d bytes, want its size, 0 and %d", total, st.Bavail, st.Files, size, size/(16<<10))
	}
}

// testInodeLimit: the number of inodes of a volume is limited in proportion to its size, if the filesystem counts
// them.
func testInodeLimit(t *testing.T, d *Driver, kind Kind) {
	const size = mib
	l := newVolumeOfSize(t, d, kind, size, "mode", "0777")
	l.stageAndPublish(t)
	u, ok := l.stats(t)[csi.VolumeUsage_INODES]
	if !ok || d.quotaOf(t, l).Kind == string(quota.Btrfs) {
		return
	}
	if u.GetTotal() != 1024 || u.GetUsed() != 1 || u.GetAvailable() != 1023 {
		t.Errorf("got inode usage %v of an empty volume, want 1 of 1024", u)
	}
	made := 0
	script := `exec 2>/dev/null; i=0; while true > f$i; do i=$((i+1)); done; echo $i`
	out, err := testenv.Output(l.target, slices.Concat(asNobody, []string{"sh", "-c", script})...)
	must(t, err)
	if _, err := fmt.Sscan(out, &made); err != nil || made > 1024 || made < 100 {
		t.Errorf("created %d empty files, want 100 to 1024: %v", made, err)
	}
}

// quotaOf returns the limit in the record of a volume.
func (d *Driver) quotaOf(t *testing.T, l *testVolume) volume.Quota {
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

// withQuota calls f with the filesystem of the driver's pool.
func (d *Driver) withQuota(t *testing.T, f func(*quota.FS) error) {
	t.Helper()
	dir, err := os.Open(d.Pool())
	must(t, err)
	defer dir.Close()
	fs, err := quota.Open(dir)
	must(t, err)
	must(t, errors.Join(f(fs), fs.Close()))
}

// testLimitAfterDelete: the limit of a new volume is right while deleted volumes are still being removed.
func testLimitAfterDelete(t *testing.T, d *Driver, kind Kind) {
	const size = 24 * mib
	name := newName(t)
	for range 4 {
		l := newVolumeOfSize(t, d, kind, size)
		named := volumeNamed(t, d, name, kind, l.cap) // has the same name in each round
		l.stageAndPublish(t)
		for i := range 200 {
			must(t, os.WriteFile(filepath.Join(l.target, fmt.Sprint(i)), nil, 0o600))
		}
		fillFile(t, l.data(l.target), asPlainRoot)
		l.unpublishAndUnstage(t)
		remove(t, d, l.id)
		remove(t, d, named)
		next := newVolumeOfSize(t, d, kind, size)
		next.stageAndPublish(t)
		if s := next.stats(t)[csi.VolumeUsage_BYTES]; s.GetTotal() != size || s.GetUsed() > slack {
			t.Errorf("got usage %v of a new volume, want at most %d of %d bytes", s, slack, size)
		}
		wantFull(t, fillFile(t, next.data(next.target), asPlainRoot), size)
		next.unpublishAndUnstage(t)
	}
}

// testHostileTenantUnlimited is testHostileTenant for a pool with quota: off.
func testHostileTenantUnlimited(t *testing.T, _ *Driver, kind Kind) {
	testHostileTenant(t, kind.start(t, "20G", func(o *driver.Options) { o.Config.Pools[0].Quota = "off" }), kind)
}

// testQuotaIDs: volumes that are created at the same time have different quota IDs, which are released when the
// volumes are deleted.
func testQuotaIDs(t *testing.T, _ *Driver, kind Kind) {
	d := kind.start(t, "20G", func(*driver.Options) {})
	ids := createMany(t, d, kind, 32, 8*mib)
	if len(ids) != 32 {
		t.Fatalf("created %d volumes, want 32", len(ids))
	}
	have := map[uint64]string{}
	for _, id := range ids {
		l := &testVolume{d: d, id: id}
		q := d.quotaOf(t, l)
		d.wantID(t, l.directory(), q.ID)
		d.wantID(t, filepath.Dir(l.directory()), 0)
		if other := have[q.ID]; other != "" {
			t.Errorf("volumes %s and %s both have the quota ID %d", other, id, q.ID)
		}
		have[q.ID] = id
	}
	for _, dir := range []string{".", "volumes", ".trivet", ".trivet/trash", ".trivet/tmp"} {
		d.wantID(t, filepath.Join(d.Pool(), dir), 0)
	}
	for _, id := range ids {
		remove(t, d, id)
	}
	await(t, "the quota IDs to be released", func() bool {
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

// wantID fails the test unless a directory has the quota ID want. 0 means that it has none.
func (d *Driver) wantID(t *testing.T, path string, want uint64) {
	t.Helper()
	dir, err := os.Open(path)
	must(t, err)
	defer dir.Close()
	d.withQuota(t, func(fs *quota.FS) error {
		id, err := fs.ID(dir)
		if id != want {
			t.Errorf("got quota ID %d of %s, want %d", id, path, want)
		}
		return err
	})
}

// testForeignUse: the capacity of a pool decreases by the size of its volumes, whatever they use, and by the space
// that files outside the pool use.
func testForeignUse(t *testing.T, _ *Driver, kind Kind) {
	d := kind.start(t, "4G", func(o *driver.Options) { o.Config.Pools[0].Reserve = "0" })
	room := capacity(t, d, kind)
	l := newVolumeOfSize(t, d, kind, gib)
	l.stageAndPublish(t)
	write(t, l.data(l.target), make([]byte, 512*mib))
	d.Restart(t)
	if now := capacity(t, d, kind); now > room-gib+64*mib || now < room-gib-64*mib {
		t.Errorf("got a capacity of %d bytes beside a volume of 1 GiB that is half full, want 1 GiB less than %d", now, room)
	}
	write(t, filepath.Join(filepath.Dir(d.Pool()), "foreign"), make([]byte, 512*mib))
	d.Restart(t)
	if now := capacity(t, d, kind); now > room-gib-448*mib || now < room-gib-576*mib {
		t.Errorf("got a capacity of %d bytes beside the volume and a foreign file of 512 MiB, want 1.5 GiB less than %d", now, room)
	}
}

// testLimitChanged: a limit that another program has changed is reported, and restored by the next stage.
func testLimitChanged(t *testing.T, d *Driver, kind Kind) {
	const size = 32 * mib
	l := newVolumeOfSize(t, d, kind, size)
	l.stageAndPublish(t)
	l.wantReasons(t, nil, nil)
	d.withQuota(t, func(fs *quota.FS) error { return fs.Set(d.quotaOf(t, l).ID, quota.Limit{Bytes: 2 * size}) })
	l.wantReasons(t, []string{"QuotaChanged"}, []string{"QuotaChanged"})
	l.unpublishAndUnstage(t)
	l.stageAndPublish(t)
	l.wantReasons(t, nil, nil)
	wantFull(t, fillFile(t, l.data(l.target), asPlainRoot), size)
}

// testLimitLost: a volume's directory that was replaced has no limit, which is reported. Deleting the volume does
// not remove the limit of the moved directory, which still has the volume's quota ID.
func testLimitLost(t *testing.T, d *Driver, kind Kind) {
	const size = 16 * mib
	l := newVolumeOfSize(t, d, kind, size)
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
	l.stageAndPublish(t)
	l.wantReasons(t, []string{"QuotaLost"}, []string{"QuotaLost"})
	_, err := l.expand(t.Context(), 2*size)
	wantCode(t, err, codes.FailedPrecondition, "copy the data to a new volume")
	l.unpublishAndUnstage(t)
	remove(t, d, l.id)
	d.awaitTrash(t)
	if u := limit(); u.Limit.Bytes != size {
		t.Errorf("got usage and limit %+v of the moved directory, want a limit of %d bytes", u, size)
	}
	must(t, os.RemoveAll(away))
	d.withQuota(t, func(fs *quota.FS) error { // the driver does not release the ID
		return retry.For(t.Context(), time.Minute, func() (bool, error) {
			err := fs.Release(id)
			return errors.Is(err, quota.ErrBusy), err
		})
	})
}

// testOtherQuotaKind: the volumes of a pool that was copied from a filesystem with another kind of quota can be
// used and deleted. The missing limit is reported.
func testOtherQuotaKind(t *testing.T, _ *Driver, kind Kind) {
	d := kind.start(t, "20G", func(*driver.Options) {})
	l := newVolume(t, d, kind, multiWriter)
	// The IDs are in the range that linux/quota uses for the kind.
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
		t.Fatalf("got quota %+v in the record, want %+v", now, other)
	}
	l.stageAndPublish(t)
	l.wantReasons(t, []string{"QuotaNotInForce"}, []string{"QuotaNotInForce"})
	l.unpublishAndUnstage(t)
	remove(t, d, l.id)
	d.awaitTrash(t)
}

// testAdoptedDirectory: an adopted directory has no limit, and its volume context contains enforced=false. A pool with
// quota: required adopts no directory, and a pool with quota: off limits none.
func testAdoptedDirectory(t *testing.T, d *Driver, kind Kind) {
	must(t, os.MkdirAll(filepath.Join(d.Pool(), "limits/there"), 0o755))
	write(t, filepath.Join(d.Pool(), "limits/there/file"), pattern(52))
	l := newVolumeOfClass(t, d, kind, multiWriter, kind.Parameters("subDir", "limits/there"))
	l.wantEnforced(t, "false")
	l.wantReasons(t, []string{"NotMounted"}, nil)
	made := newVolumeOfClass(t, d, kind, multiWriter, kind.Parameters("subDir", "limits/made"))
	made.wantEnforced(t, "cooperative")

	required := kind.start(t, "20G", func(o *driver.Options) { o.Config.Pools[0].Quota = "required" })
	must(t, os.Mkdir(filepath.Join(required.Pool(), "there"), 0o755))
	_, err := required.Control.CreateVolume(t.Context(), kind.request(t, "subDir", "there"))
	wantCode(t, err, codes.FailedPrecondition, "subDir", "there", "required")
	newVolumeOfClass(t, required, kind, multiWriter, kind.Parameters("subDir", "new")).wantEnforced(t, "cooperative")

	off := kind.start(t, "20G", func(o *driver.Options) { o.Config.Pools[0].Quota = "off" })
	newVolume(t, off, kind, multiWriter).wantEnforced(t, "false")
}

// testKeptDataLimited: the directory of a deleted volume that is archived or retained keeps its limit.
func testKeptDataLimited(t *testing.T, d *Driver, kind Kind) {
	const size = 16 * mib
	for _, more := range [][]string{{"onDelete", "archive"}, {"onDelete", "retain"}, {"onDelete", "retain", "subDir", "limits/${pv.metadata.name}", "csi.storage.k8s.io/pv/name", "kept"}} {
		l := newVolumeOfSize(t, d, kind, size, more...)
		id := d.quotaOf(t, l).ID
		write(t, filepath.Join(l.dataDirectory(more), "kept"), pattern(53))
		remove(t, d, l.id)
		d.awaitTrash(t)
		d.withQuota(t, func(fs *quota.FS) error {
			u, err := fs.Usage(id)
			if u.Limit.Bytes != size || u.Bytes == 0 {
				t.Errorf("%v: got usage %+v of the kept directory, want a limit of %d bytes", more, u, size)
			}
			return err
		})
	}
}

// dataDirectory returns the path of the directory of a volume. more are the keys and values of its parameters:
// onDelete, and optionally subDir and the name of the PersistentVolume in it.
func (l *testVolume) dataDirectory(more []string) string {
	if len(more) > 2 {
		return filepath.Join(l.d.Pool(), strings.ReplaceAll(more[3], "${pv.metadata.name}", more[len(more)-1]))
	}
	return l.directory()
}

// testLimitsOff switches limits off while a volume exists. The volume stays usable, the state is reported, and the
// limit is restored when limits are on again.
func testLimitsOff(t *testing.T, _ *Driver, kind Kind) {
	const size = 32 * mib
	for _, setting := range []string{"required", "auto"} {
		t.Run(setting, func(t *testing.T) {
			d := kind.start(t, "20G", func(o *driver.Options) { o.Config.Pools[0].Quota = setting })
			l := newVolumeOfSize(t, d, kind, size)
			l.stageAndPublish(t)
			kind.target.Limits.switchLimits(t, l, kind.target.Limits.Off)
			l.wantReasons(t, []string{"QuotaNotInForce"}, []string{"QuotaNotInForce"})
			l.wantEnforced(t, "cooperative")
			l.unpublishAndUnstage(t)
			l.stageAndPublish(t) // pods can still use the volume
			write(t, l.data(l.target), make([]byte, size+8*mib))
			_, err := l.expand(t.Context(), 2*size)
			wantCode(t, err, codes.FailedPrecondition, "quota")
			if setting == "required" {
				wantRefused(t, d, kind)
			} else {
				newVolume(t, d, kind, multiWriter).wantEnforced(t, "false")
			}
			kind.target.Limits.switchLimits(t, l, kind.target.Limits.On)
			if kind.target.Limits.Remounts {
				l.wantKept(t, size)
			} else {
				l.wantReasons(t, []string{"QuotaChanged"}, []string{"QuotaChanged"})
				l.unpublishAndUnstage(t)
				l.stageAndPublish(t)
			}
			l.wantReasons(t, nil, nil)
		})
	}
}

// switchLimits switches limits off or on, and leaves the volume published. A filesystem can be remounted only
// while the driver is stopped.
func (limits *Limits) switchLimits(t *testing.T, l *testVolume, change func(testing.TB, string)) {
	t.Helper()
	filesystem := filepath.Dir(l.d.Pool())
	if !limits.Remounts {
		change(t, filesystem)
		return
	}
	l.unpublishAndUnstage(t)
	l.d.Stop(t)
	change(t, filesystem)
	l.d.start(t)
	l.stageAndPublish(t)
}

// wantKept fails the test unless a volume that exceeded its size while limits were off reports its usage, accepts
// no writes, and is limited to its size after data was removed.
func (l *testVolume) wantKept(t *testing.T, size int64) {
	t.Helper()
	l.wantReasons(t, nil, nil)
	if s := l.stats(t)[csi.VolumeUsage_BYTES]; s.GetTotal() != size || s.GetUsed() < size+8*mib || s.GetAvailable() != 0 {
		t.Errorf("got usage %v of a volume that exceeds its size of %d bytes, want nothing available", s, size)
	}
	if n := fillFile(t, l.data(l.target), asPlainRoot); n != size+8*mib {
		t.Errorf("the file grew to %d bytes although the volume exceeds its size, want %d", n, size+8*mib)
	}
	must(t, os.Remove(l.data(l.target)))
	wantFull(t, fillFile(t, l.data(l.target), asPlainRoot), size)
}

// testFilesystemMoved: the filesystem of a pool is moved to another node, which has no state of the pool. The
// volumes can be used on that node, and are limited to their size.
func testFilesystemMoved(t *testing.T, _ *Driver, kind Kind) {
	const size, elsewhere = 48 * mib, "node-2.example"
	d := kind.start(t, "20G", func(*driver.Options) {})
	req := kind.request(t)
	req.CapacityRange = &csi.CapacityRange{RequiredBytes: size}
	created, err := d.Control.CreateVolume(t.Context(), req)
	must(t, err)
	v := created.GetVolume()
	l := &testVolume{d: d, kind: kind, cap: kind.Capability(multiWriter), id: v.GetVolumeId(), staging: t.TempDir(), target: filepath.Join(t.TempDir(), "target")}
	write(t, l.data(l.directory()), pattern(54))
	d.Stop(t)
	m := Medium{Config: d.Options.Config.Pools[0], Dir: filepath.Join(remountElsewhere(t, filepath.Dir(d.Pool())), filepath.Base(d.Pool()))}
	m.Config.Directory.Path = m.Dir
	l.d = kind.target.startOn(t, m, func(o *driver.Options) { o.NodeID = elsewhere })
	t.Cleanup(func() { l.cleanUp(t) })
	now, err := l.d.Control.ControllerGetVolume(t.Context(), &csi.ControllerGetVolumeRequest{VolumeId: l.id})
	must(t, err)
	if at := fmt.Sprint(now.GetVolume().GetAccessibleTopology()); now.GetVolume().GetCapacityBytes() != size || !strings.Contains(at, elsewhere) {
		t.Errorf("got volume %v after the move, want the same size and node %s", now, elsewhere)
	}
	l.wantEnforced(t, v.GetVolumeContext()["enforced"])
	must(t, l.publishTo(t.Context(), elsewhere))
	l.stageAndPublish(t)
	wantContent(t, l.data(l.target), pattern(54))
	l.wantReasons(t, nil, nil)
	if !kind.Has(Limited) {
		return
	}
	must(t, os.Remove(l.data(l.target)))
	wantFull(t, fillFile(t, l.data(l.target), asPlainRoot), size)
	if other := newVolumeOfSize(t, l.d, kind, size); l.d.quotaOf(t, other).ID == l.d.quotaOf(t, l).ID {
		t.Errorf("volumes %s and %s have the same quota ID", l.id, other.id)
	}
}

// remountElsewhere unmounts the filesystem of an image, and mounts it at another path, until the test ends.
func remountElsewhere(t *testing.T, from string) (to string) {
	t.Helper()
	show := func(column string) string { return testenv.Run(t, "findmnt", "-n", "-o", column, "--mountpoint", from) }
	options, image := "loop,"+show("FS-OPTIONS"), testenv.Run(t, "losetup", "-n", "-O", "BACK-FILE", show("SOURCE"))
	to = t.TempDir()
	testenv.Run(t, "umount", from)
	testenv.Run(t, "mount", "-o", options, image, to)
	t.Cleanup(func() {
		testenv.Run(t, "umount", to)
		testenv.Run(t, "mount", "-o", options, image, from) // because an earlier cleanup unmounts it there
	})
	return to
}
