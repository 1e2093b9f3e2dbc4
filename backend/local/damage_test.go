//go:build vm

package local_test

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/backend/local"
	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// TestDamagedQuotas: the quota files are damaged while the filesystem is not mounted. No volume
// without a limit is created, health reports the damage, and a repair restores everything.
func TestDamagedQuotas(t *testing.T) {
	for name, tc := range map[string]struct {
		fsType string
		damage func(t *testing.T, image string, id uint64)
		repair string
		mounts bool   // whether the damaged filesystem can be mounted
		reason string // of the reported condition
		// code and says are the code and the text in the error of creating another volume.
		code codes.Code
		says string
	}{
		"xfs record":  {"xfs", damageRecord, "xfs_repair -f $0", true, "QuotaUnreadable", codes.OK, ""},
		"xfs file":    {"xfs", damageInode, "xfs_repair -f $0", true, "QuotaNotInForce", codes.FailedPrecondition, "xfs_repair"},
		"ext4 tree":   {"ext4", damageTree, "e2fsck -f -y $0; e2fsck -f -n $0", true, "QuotaUnreadable", codes.FailedPrecondition, "e2fsck -f"},
		"ext4 header": {"ext4", damageHeader, "e2fsck -f -y $0; tune2fs -Q ^prjquota $0 && tune2fs -Q prjquota $0", false, "PoolUnavailable", codes.Unavailable, "is its disk mounted?"},
	} {
		t.Run(name, func(t *testing.T) {
			g := newDamaged(t, tc.fsType)
			g.changeImage(t, func() { tc.damage(t, g.image, g.id) }, tc.mounts)
			g.wantReason(t, tc.reason)
			before := g.names(t)
			err := g.create(t, "other")
			if status.Code(err) != tc.code || err != nil && !strings.Contains(err.Error(), tc.says) {
				t.Errorf("creating another volume: got %v, want %v with %q", err, tc.code, tc.says)
			}
			if after := g.names(t); err != nil && !slices.Equal(after, before) {
				t.Errorf("the refused create changed the folders from %q to %q", before, after)
			}
			g.changeImage(t, func() { testenv.Run(t, "sh", "-c", tc.repair, g.image) }, true)
			g.restage(t) // restores the limits that the repair has removed
			g.wantReason(t, "")
			if err := g.create(t, "third"); err != nil {
				t.Error(err)
			}
		})
	}
}

// damaged is a driver whose pool requires limits, and a volume of it.
type damaged struct {
	*backendtest.Driver
	at, image string // mount point and image of the filesystem
	volume    volume.ID
	id        uint64 // project ID of the volume
	mounted   bool
}

// newDamaged starts the driver, and creates the volume. Nothing is damaged yet.
func newDamaged(t *testing.T, fsType string) *damaged {
	t.Helper()
	g := &damaged{at: testenv.ProjectQuotas(t, fsType, "2G"), mounted: true}
	g.image = testenv.ImageOf(g.at)
	g.Driver = backendtest.Start(t, g.at, local.Kind)
	g.Options.Config.Pools[0].Quota = pool.QuotaRequired
	g.Restart(t)
	if err := g.create(t, "first"); err != nil {
		t.Fatal(err)
	}
	records, err := filepath.Glob(filepath.Join(g.at, "pool/volumes/*/volume.json"))
	if err != nil || len(records) != 1 {
		t.Fatalf("got records %q, %v; want one", records, err)
	}
	b, err := os.ReadFile(records[0])
	if err != nil {
		t.Fatal(err)
	}
	v, err := backend.Kinds{local.Kind}.Forms().ParseVolume(b)
	if err != nil {
		t.Fatal(err)
	}
	g.volume, g.id = v.ID, v.Directory.Quota.ID
	return g
}

func capability() *csi.VolumeCapability {
	return backendtest.Directories()[0].Capability(csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER)
}

func (g *damaged) create(t *testing.T, name string) error {
	t.Helper()
	_, err := g.Control.CreateVolume(t.Context(), &csi.CreateVolumeRequest{
		Name: name, CapacityRange: &csi.CapacityRange{RequiredBytes: 16 << 20},
		VolumeCapabilities: []*csi.VolumeCapability{capability()}, Parameters: map[string]string{"backend": "local"},
	})
	return err
}

// changeImage changes the image while it is not mounted, and restarts the driver. mounts tells whether the
// changed image can be mounted.
func (g *damaged) changeImage(t *testing.T, change func(), mounts bool) {
	t.Helper()
	g.Stop(t)
	if g.mounted {
		testenv.Run(t, "umount", g.at)
	}
	change()
	out, err := testenv.Output("", "mount", "-o", "loop,prjquota", g.image, g.at)
	if g.mounted = err == nil; g.mounted != mounts {
		t.Fatalf("mount: got %v, want success: %t\n%s", err, mounts, out)
	}
	g.Restart(t)
}

// wantReason fails the test unless the conditions of the pool and the volume have only this reason. An empty
// reason stands for no conditions. The health of a volume is unavailable while its pool is not open.
func (g *damaged) wantReason(t *testing.T, want string) {
	t.Helper()
	storage, err := g.Node.NodeGetStorageHealth(t.Context(), &csi.NodeGetStorageHealthRequest{})
	if err != nil {
		t.Fatal(err)
	}
	var have []string
	for _, c := range storage.GetBackendHealth() {
		have = append(have, c.GetReason())
	}
	own, err := g.Control.ControllerGetVolumeHealth(t.Context(), &csi.ControllerGetVolumeHealthRequest{VolumeId: g.volume.String()})
	if err != nil && status.Code(err) != codes.Unavailable {
		t.Fatal(err)
	}
	for _, c := range own.GetVolumeHealth().GetHealthStatuses() {
		have = append(have, c.GetReason())
	}
	slices.Sort(have)
	if got := strings.Join(slices.Compact(have), " "); got != want {
		t.Errorf("got health of the pool %v, of the volume %v; want reason %q", storage, own, want)
	}
}

// names returns the names of the volumes' folders. It fails the test if the pool is not mounted and its
// directory is not empty.
func (g *damaged) names(t *testing.T) (names []string) {
	t.Helper()
	dir := filepath.Join(g.at, "pool")
	if g.mounted {
		dir = filepath.Join(dir, "volumes")
	}
	entries, err := os.ReadDir(dir)
	if err != nil || !g.mounted && len(entries) > 0 {
		t.Errorf("got files %v in %s, %v; want none", entries, dir, err)
	}
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

// restage stages and unstages the volume.
func (g *damaged) restage(t *testing.T) {
	t.Helper()
	id, staging := g.volume.String(), t.TempDir()
	if _, err := g.Node.NodeStageVolume(t.Context(), &csi.NodeStageVolumeRequest{VolumeId: id, StagingTargetPath: staging, VolumeCapability: capability()}); err != nil {
		t.Fatal(err)
	}
	if _, err := g.Node.NodeUnstageVolume(t.Context(), &csi.NodeUnstageVolumeRequest{VolumeId: id, StagingTargetPath: staging}); err != nil {
		t.Error(err)
	}
}

// damageRecord damages the quota record of one project of xfs (xfs_db(8)).
func damageRecord(t *testing.T, image string, id uint64) {
	t.Helper()
	testenv.Run(t, "xfs_db", "-x", "-c", "dquot -p "+strconv.FormatUint(id, 10), "-c", "write -d diskdq.magic 0", image)
}

// damageInode makes the checksum of the inode of the quota file of xfs wrong. More damage would make
// adjacent inodes unreadable.
func damageInode(t *testing.T, image string, _ uint64) {
	t.Helper()
	testenv.Run(t, "xfs_db", "-x", "-c", "inode "+word(t, `pquotino = (\d+)`, "xfs_db", "-c", "sb 0", "-c", "p pquotino", image), "-c", "write -c core.uid 1", image)
}

// The quota file of ext4 has blocks of 1 KiB: a header, then the root of a tree of records
// (fs/quota/quota_tree.c in the kernel). An entry of the root is for all IDs with the same highest byte,
// which is not 0 in the IDs of volumes.
const (
	quotaBlock = 1024
	treeEntry  = 4
)

// damageTree overwrites the root of the tree, except its first entry.
func damageTree(t *testing.T, image string, _ uint64) {
	t.Helper()
	overwrite(t, image, quotaBlock+treeEntry, quotaBlock-treeEntry)
}

// damageHeader overwrites the magic number of the quota file.
func damageHeader(t *testing.T, image string, _ uint64) {
	t.Helper()
	overwrite(t, image, 0, treeEntry)
}

// overwrite writes n bytes 0xff at an offset of the quota file of an ext4 with blocks of 4 KiB.
func overwrite(t *testing.T, image string, at, n int64) {
	t.Helper()
	inode := word(t, `Project quota inode: *(\d+)`, "dumpe2fs", "-h", image)
	block, err := strconv.ParseInt(word(t, `(?m)^(\d+)`, "debugfs", "-R", "blocks <"+inode+">", image), 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(image, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.WriteAt(slices.Repeat([]byte{0xff}, int(n)), block*4096+at); err != nil {
		t.Fatal(err)
	}
	if err := f.Sync(); err != nil {
		t.Fatal(err)
	}
}

// word returns the first group of a pattern in the output of a program.
func word(t *testing.T, pattern string, command ...string) string {
	t.Helper()
	out := testenv.Run(t, command[0], command[1:]...)
	found := regexp.MustCompile(pattern).FindStringSubmatch(out)
	if found == nil {
		t.Fatalf("%q prints %s", command, out)
	}
	return found[1]
}
