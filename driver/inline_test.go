package driver_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/backend/loop"
	"github.com/trivet-csi/trivet/driver"
	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

const (
	mib = int64(1) << 20
	gib = mib << 10
)

// inlineDriver starts a driver with two pools: inline, of 1 GiB, for inline volumes, and other, which
// allows none.
func inlineDriver(t *testing.T, change ...func(*driver.Options)) *backendtest.Driver {
	t.Helper()
	o := options(t, loop.Kind)
	disk := testenv.Filesystem(t, "xfs", "4G")
	o.Config.EphemeralMemory = "16Mi"
	o.Config.Pools = []pool.Config{
		{Name: "other", Directory: pool.Directory{Path: filepath.Join(disk, "other")}},
		{Name: "inline", Directory: pool.Directory{Path: filepath.Join(disk, "inline")}, Size: "1Gi", Reserve: "0%", Ephemeral: true},
	}
	for _, c := range change {
		c(&o)
	}
	d := backendtest.StartWith(t, o)
	t.Cleanup(func() { awaitEmptyPools(t, d) })
	return d
}

// inlinePool returns the directory of the pool for inline volumes.
func inlinePool(d *backendtest.Driver) string { return d.Options.Config.Pools[1].Directory.Path }

// awaitEmptyPools waits until the pools are empty.
func awaitEmptyPools(t *testing.T, d *backendtest.Driver) {
	t.Helper()
	await(t, "the pools to be empty", func() bool {
		var left []string
		for _, c := range d.Options.Config.Pools {
			for _, folder := range []string{"volumes", ".trivet/tmp", ".trivet/trash"} {
				found, err := filepath.Glob(filepath.Join(c.Directory.Path, folder, "*"))
				must(t, err)
				left = append(left, found...)
			}
		}
		return len(left) == 0
	})
}

// inlineVolume is the volume of a pod, as a kubelet requests it.
type inlineVolume struct {
	d          *backendtest.Driver
	id         string
	target     string
	attributes map[string]string
	capability *csi.VolumeCapability
	readOnly   bool
}

// newInline returns an inline volume that is not published yet. The volume is unpublished when the test ends.
func newInline(t *testing.T, d *backendtest.Driver, attributes map[string]string) *inlineVolume {
	t.Helper()
	dir := t.TempDir()
	sum := sha256.Sum256([]byte(dir))
	v := &inlineVolume{
		d: d, id: "csi-" + hex.EncodeToString(sum[:]), target: filepath.Join(dir, "mount"), attributes: attributes,
		capability: backendtest.Kind{FSType: "ext4"}.Capability(csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER),
	}
	v.capability.GetMount().FsType = ""
	t.Cleanup(func() {
		if err := v.unpublish(context.Background()); err != nil {
			t.Errorf("NodeUnpublishVolume at the end of the test: %v", err)
		}
	})
	return v
}

// publish calls NodePublishVolume with the volume context that a kubelet sends.
func (v *inlineVolume) publish(ctx context.Context) error {
	volumeContext := map[string]string{
		"csi.storage.k8s.io/ephemeral": "true", "csi.storage.k8s.io/pod.name": "web", "csi.storage.k8s.io/pod.namespace": "shop",
		"csi.storage.k8s.io/pod.uid": "0b5ad54e", "csi.storage.k8s.io/serviceAccount.name": "default",
	}
	maps.Copy(volumeContext, v.attributes)
	_, err := v.d.Node.NodePublishVolume(ctx, &csi.NodePublishVolumeRequest{
		VolumeId: v.id, TargetPath: v.target, VolumeCapability: v.capability, VolumeContext: volumeContext, Readonly: v.readOnly,
	})
	return err
}

func (v *inlineVolume) unpublish(ctx context.Context) error {
	_, err := v.d.Node.NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{VolumeId: v.id, TargetPath: v.target})
	return err
}

// stats returns the usage of the volume, by unit.
func (v *inlineVolume) stats(ctx context.Context) (map[csi.VolumeUsage_Unit]*csi.VolumeUsage, error) {
	resp, err := v.d.Node.NodeGetVolumeStats(ctx, &csi.NodeGetVolumeStatsRequest{VolumeId: v.id, VolumePath: v.target})
	usage := map[csi.VolumeUsage_Unit]*csi.VolumeUsage{}
	for _, u := range resp.GetUsage() {
		usage[u.GetUnit()] = u
	}
	return usage, err
}

// file returns the path of a file in the volume.
func (v *inlineVolume) file() string { return filepath.Join(v.target, "file") }

// mounts returns the mounts at the target.
func (v *inlineVolume) mounts(t *testing.T) []*mount.Entry {
	t.Helper()
	found, err := mount.Table(func(e *mount.Entry) bool { return e.Mountpoint == v.target })
	must(t, err)
	return found
}

// wantCode fails the test unless an error has a code and contains the texts.
func wantCode(t *testing.T, err error, code codes.Code, says ...string) {
	t.Helper()
	missing := func(text string) bool { return !strings.Contains(status.Convert(err).Message(), text) }
	if status.Code(err) != code || slices.ContainsFunc(says, missing) {
		t.Errorf("got %v, want %s with %q", err, code, says)
	}
}

// wantMissing fails the test unless a path does not exist.
func wantMissing(t *testing.T, path string) {
	t.Helper()
	if _, err := os.Lstat(path); !os.IsNotExist(err) {
		t.Errorf("%s: got error %v, want that it does not exist", path, err)
	}
}

// fillDisk writes to a file until its filesystem is full, and returns the number of written bytes.
func fillDisk(t *testing.T, path string) (n int64) {
	t.Helper()
	f, err := os.Create(path)
	must(t, err)
	defer f.Close()
	b := bytes.Repeat([]byte("x"), 64<<10)
	for {
		written, err := f.Write(b)
		n += int64(written)
		if err == nil && n%mib == 0 {
			err = f.Sync()
		}
		if errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) {
			return n
		}
		must(t, err)
	}
}

// TestInlineLifecycle publishes and unpublishes inline volumes of each filesystem type and in memory. It repeats
// calls, restarts the driver, and checks that the size is enforced.
func TestInlineLifecycle(t *testing.T) {
	d := inlineDriver(t)
	for _, tc := range []struct {
		name       string
		attributes map[string]string
		fsType     string
		atLeast    int64 // bytes that can be written
	}{
		{"default", map[string]string{"size": "64Mi"}, "ext4", 52 * mib},
		{"xfs", map[string]string{"size": "300Mi", "fsType": "xfs", "pool": "inline"}, "xfs", 200 * mib},
		{"btrfs", map[string]string{"size": "320Mi", "fsType": "btrfs"}, "btrfs", 40 * mib},
		{"memory", map[string]string{"size": "8Mi", "medium": "memory"}, "tmpfs", 8*mib - 4096},
	} {
		t.Run(tc.name, func(t *testing.T) {
			v := newInline(t, d, tc.attributes)
			must(t, v.publish(t.Context()))
			must(t, v.publish(t.Context()))
			mounts := v.mounts(t)
			if len(mounts) != 1 || mounts[0].FSType != tc.fsType {
				t.Fatalf("got mounts %+v, want one of type %s", mounts, tc.fsType)
			}
			must(t, os.WriteFile(v.file(), []byte("precious"), 0o600))

			d.Restart(t)
			must(t, v.publish(t.Context())) // as after a restart of the kubelet
			if b, err := os.ReadFile(v.file()); err != nil || string(b) != "precious" {
				t.Errorf("file after a restart of the driver: got %q, error %v, want precious", b, err)
			}

			size, err := volume.ParseSize(tc.attributes["size"])
			must(t, err)
			if n := fillDisk(t, filepath.Join(v.target, "filler")); n > size || n < tc.atLeast {
				t.Errorf("wrote %d bytes to a volume of %d bytes, want at least %d", n, size, tc.atLeast)
			}
			usage, err := v.stats(t.Context())
			if bytes := usage[csi.VolumeUsage_BYTES]; err != nil || bytes.GetTotal() > size || bytes.GetUsed() < tc.atLeast {
				t.Errorf("stats: got %v, error %v, want a total of at most %d and a usage of at least %d bytes", usage, err, size, tc.atLeast)
			}

			must(t, v.unpublish(t.Context()))
			wantMissing(t, v.target)
			must(t, v.unpublish(t.Context()))
			_, err = v.stats(t.Context())
			wantCode(t, err, codes.NotFound)
			awaitEmptyPools(t, d)
		})
	}
}

// TestInlineIsNotPersistent: only NodePublishVolume and NodeUnpublishVolume create, use and delete inline volumes.
// Calls for persistent volumes do not find them, neither by the ID of the kubelet nor by the ID in the record.
func TestInlineIsNotPersistent(t *testing.T) {
	d := inlineDriver(t)
	v := newInline(t, d, map[string]string{"size": "64Mi"})
	must(t, v.publish(t.Context()))

	record, err := os.ReadFile(filepath.Join(inlinePool(d), "volumes", v.id, "volume.json"))
	must(t, err)
	r, err := d.Options.Kinds.Forms().ParseVolume(record)
	want := volume.Ephemeral{Target: v.target, Pod: volume.Pod{Namespace: "shop", Name: "web", UID: "0b5ad54e"}}
	if err != nil || r.Ephemeral == nil || *r.Ephemeral != want {
		t.Fatalf("got record %s, error %v, want it to contain %+v", record, err, want)
	}

	listed, err := d.Control.ListVolumes(t.Context(), &csi.ListVolumesRequest{})
	if err != nil || len(listed.GetEntries()) > 0 {
		t.Errorf("ListVolumes: got %v, error %v, want no volumes", listed, err)
	}
	for _, id := range []string{v.id, r.ID.String()} {
		_, err := d.Control.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: id})
		must(t, err)
		_, err = d.Control.ControllerGetVolume(t.Context(), &csi.ControllerGetVolumeRequest{VolumeId: id})
		wantCode(t, err, codes.NotFound, "was not created by this driver")
		_, err = d.Control.ControllerPublishVolume(t.Context(), &csi.ControllerPublishVolumeRequest{VolumeId: id, NodeId: d.Options.NodeID, VolumeCapability: v.capability})
		wantCode(t, err, codes.NotFound, "was not created by this driver")
		_, err = d.Control.ControllerExpandVolume(t.Context(), &csi.ControllerExpandVolumeRequest{VolumeId: id, CapacityRange: &csi.CapacityRange{RequiredBytes: gib}})
		wantCode(t, err, codes.NotFound, "was not created by this driver")
		_, err = d.Node.NodeStageVolume(t.Context(), &csi.NodeStageVolumeRequest{VolumeId: id, StagingTargetPath: t.TempDir(), VolumeCapability: v.capability})
		wantCode(t, err, codes.NotFound, "was not created by this driver")
	}
	created, err := d.Control.CreateVolume(t.Context(), &csi.CreateVolumeRequest{
		Name: v.id, CapacityRange: &csi.CapacityRange{RequiredBytes: 32 * mib}, VolumeCapabilities: []*csi.VolumeCapability{v.capability}, Parameters: map[string]string{"pool": "inline"},
	})
	must(t, err)
	_, err = d.Control.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: created.GetVolume().GetVolumeId()})
	must(t, err)
	must(t, os.WriteFile(v.file(), []byte("still there"), 0o600))
}

// TestInlineRefuses: volumes with invalid or hostile attributes are refused, and leave no files.
func TestInlineRefuses(t *testing.T) {
	d := inlineDriver(t)
	used := t.TempDir() // its parent directory is not empty
	for _, tc := range []struct {
		name       string
		attributes map[string]string
		change     func(*inlineVolume)
		code       codes.Code
		says       string
	}{
		{"no size", nil, nil, codes.InvalidArgument, "volume_context.size is missing"},
		{"an NFS server", map[string]string{"size": "64Mi", "server": "127.0.0.1", "share": "/"}, nil, codes.InvalidArgument, `"server" is unknown`},
		{"an NFS server without a size", map[string]string{"server": "127.0.0.1", "share": "/"}, nil, codes.InvalidArgument, `"server" is unknown`},
		{"mount options", map[string]string{"size": "64Mi", "mountOptions": "errors=panic"}, nil, codes.InvalidArgument, "is unknown"},
		{"a pool that allows no inline volumes", map[string]string{"size": "64Mi", "pool": "other"}, nil, codes.InvalidArgument, `volume_context.pool="other": this node has no such pool for inline volumes: name one of inline`},
		{"a pool that does not exist", map[string]string{"size": "64Mi", "pool": "nowhere"}, nil, codes.InvalidArgument, `volume_context.pool="nowhere": this node has no such pool for inline volumes: name one of inline`},
		{"a backend", map[string]string{"size": "64Mi", "backend": "local"}, nil, codes.InvalidArgument, `"backend" is unknown`},
		{"too small", map[string]string{"size": "1"}, nil, codes.OutOfRange, "the smallest volume with ext4"},
		{"a size of 2^63-1 bytes", map[string]string{"size": "9223372036854775807"}, nil, codes.OutOfRange, "larger than any volume"},
		{"larger than the pool", map[string]string{"size": "2Gi"}, nil, codes.ResourceExhausted, `pool "inline" has room for`},
		{"more memory than allowed", map[string]string{"size": "17Mi", "medium": "memory"}, nil, codes.InvalidArgument, "has at most 16 MiB on this node"},
		{"mount options in a size", map[string]string{"size": "1Mi,mode=4777", "medium": "memory"}, nil, codes.InvalidArgument, "size="},
		{"an ID that is a path", map[string]string{"size": "64Mi"}, func(v *inlineVolume) { v.id = "../../etc" }, codes.InvalidArgument, "volume_id"},
		{"an ID of a persistent volume", map[string]string{"size": "64Mi"}, func(v *inlineVolume) { v.id = "loop:inline.01234567:v" }, codes.InvalidArgument, "volume_id"},
		{"no target", map[string]string{"size": "64Mi"}, func(v *inlineVolume) { v.target = "" }, codes.InvalidArgument, "target_path is missing"},
		{"a target with ..", map[string]string{"size": "64Mi"}, func(v *inlineVolume) { v.target += "/../x" }, codes.InvalidArgument, "target_path"},
		{"a target without a parent", map[string]string{"size": "64Mi"}, func(v *inlineVolume) { v.target += "/x/y" }, codes.FailedPrecondition, "target_path"},
		{"a target that is not empty", map[string]string{"size": "64Mi"}, func(v *inlineVolume) { v.target = filepath.Dir(used) }, codes.FailedPrecondition, "target_path"},
		{"memory at a target that is not empty", map[string]string{"size": "1Mi", "medium": "memory"}, func(v *inlineVolume) { v.target = filepath.Dir(used) }, codes.FailedPrecondition, "target_path"},
		{"a raw device", map[string]string{"size": "64Mi"}, func(v *inlineVolume) {
			v.capability = backendtest.Kind{}.Capability(csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER)
		}, codes.InvalidArgument, "raw device"},
		{"mount flags", map[string]string{"size": "64Mi"}, func(v *inlineVolume) {
			v.capability = backendtest.Kind{FSType: "ext4"}.Capability(csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER, "errors=panic")
		}, codes.InvalidArgument, "mount_flags"},
		{"an access mode for many nodes", map[string]string{"size": "64Mi"}, func(v *inlineVolume) {
			v.capability = backendtest.Kind{FSType: "ext4"}.Capability(csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER)
		}, codes.InvalidArgument, "access mode"},
		{"memory with an access mode for many nodes", map[string]string{"size": "1Mi", "medium": "memory"}, func(v *inlineVolume) {
			v.capability.AccessMode.Mode = csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER
		}, codes.InvalidArgument, "access mode"},
		{"two filesystem types", map[string]string{"size": "300Mi", "fsType": "xfs"}, func(v *inlineVolume) { v.capability.GetMount().FsType = "ext4" }, codes.InvalidArgument, "give one of them"},
		{"memory with a filesystem type", map[string]string{"size": "1Mi", "medium": "memory"}, func(v *inlineVolume) { v.capability.GetMount().FsType = "ext4" }, codes.InvalidArgument, "fs_type"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			v := newInline(t, d, tc.attributes)
			good := *v
			if tc.change != nil {
				tc.change(v)
			}
			wantCode(t, v.publish(t.Context()), tc.code, tc.says)
			*v = good
			wantMissing(t, v.target)
			awaitEmptyPools(t, d)
		})
	}
}

// TestInlineOff: without ephemeral and ephemeralMemory in the configuration, inline volumes are refused.
func TestInlineOff(t *testing.T) {
	d := inlineDriver(t, func(o *driver.Options) { o.Config.Pools[1].Ephemeral, o.Config.EphemeralMemory = false, "" })
	wantCode(t, newInline(t, d, map[string]string{"size": "64Mi"}).publish(t.Context()), codes.InvalidArgument, "set ephemeral: true")
	wantCode(t, newInline(t, d, map[string]string{"size": "1Mi", "medium": "memory"}).publish(t.Context()), codes.InvalidArgument, "set ephemeralMemory")
}

// TestInlinePromises: inline volumes count towards the size and the maxVolumes of a pool.
func TestInlinePromises(t *testing.T) {
	d := inlineDriver(t, func(o *driver.Options) { o.Config.Pools[1].MaxVolumes = 2 })
	one, two, three := newInline(t, d, map[string]string{"size": "600Mi"}), newInline(t, d, map[string]string{"size": "600Mi"}), newInline(t, d, map[string]string{"size": "64Mi"})
	must(t, one.publish(t.Context()))
	wantCode(t, two.publish(t.Context()), codes.ResourceExhausted, "has room for")
	two.attributes = map[string]string{"size": "64Mi"}
	must(t, two.publish(t.Context()))
	wantCode(t, three.publish(t.Context()), codes.ResourceExhausted, "has its maxVolumes of 2")
	d.Restart(t)
	wantCode(t, three.publish(t.Context()), codes.ResourceExhausted, "has its maxVolumes of 2")
	must(t, one.unpublish(t.Context()))
	must(t, three.publish(t.Context()))
	if usage, err := two.stats(t.Context()); err != nil || usage[csi.VolumeUsage_BYTES].GetTotal() == 0 {
		t.Errorf("stats of the second volume: got %v, error %v, want a total", usage, err)
	}
}

// TestInlineReadOnly: a read-only volume cannot be written, and cannot be published again in another way.
func TestInlineReadOnly(t *testing.T) {
	d := inlineDriver(t)
	for _, attributes := range []map[string]string{{"size": "64Mi"}, {"size": "300Mi", "fsType": "xfs"}, {"size": "1Mi", "medium": "memory"}} {
		v := newInline(t, d, attributes)
		v.readOnly = true
		must(t, v.publish(t.Context()))
		must(t, v.publish(t.Context()))
		if err := os.WriteFile(v.file(), nil, 0o600); !errors.Is(err, syscall.EROFS) {
			t.Errorf("%v: writing to a read-only volume: got error %v, want EROFS", attributes, err)
		}
		v.readOnly = false
		wantCode(t, v.publish(t.Context()), codes.AlreadyExists, "readonly false")
		v.attributes = maps.Clone(attributes)
		v.readOnly, v.attributes["size"] = true, "2Mi"
		if attributes["medium"] == "" {
			v.attributes["size"] = "400Mi"
		}
		wantCode(t, v.publish(t.Context()), codes.AlreadyExists)
		if len(v.mounts(t)) != 1 {
			t.Errorf("%v: got mounts %v, want one", attributes, v.mounts(t))
		}
	}
}

// TestInlineAfterReboot: a restarted driver removes the volumes that are not mounted any more, as after a
// restart of the node, even if their pods start again. Mounted volumes stay.
func TestInlineAfterReboot(t *testing.T) {
	d := inlineDriver(t)
	orphaned, republished, mounted := newInline(t, d, map[string]string{"size": "64Mi"}), newInline(t, d, map[string]string{"size": "64Mi"}), newInline(t, d, map[string]string{"size": "64Mi"})
	for _, v := range []*inlineVolume{orphaned, republished, mounted} {
		must(t, v.publish(t.Context()))
		must(t, os.WriteFile(v.file(), []byte("old"), 0o600))
	}
	d.Stop(t)
	testenv.Run(t, "umount", orphaned.target)
	testenv.Run(t, "umount", republished.target)
	d.Restart(t)
	must(t, republished.publish(t.Context())) // possibly before the driver has cleaned up
	wantMissing(t, republished.file())
	await(t, "removal of the volume of a pod that does not start again", func() bool {
		_, err := os.Lstat(filepath.Join(inlinePool(d), "volumes", orphaned.id))
		return os.IsNotExist(err)
	})
	if b, err := os.ReadFile(mounted.file()); err != nil || string(b) != "old" {
		t.Errorf("file in the mounted volume: got %q, error %v, want old", b, err)
	}
	must(t, orphaned.unpublish(t.Context())) // the target exists, so the kubelet unpublishes the volume
	wantMissing(t, orphaned.target)
}

// TestInlineForeignMount: publishing and unpublishing leave the mount of another volume at the target.
func TestInlineForeignMount(t *testing.T) {
	d := inlineDriver(t)
	other := newInline(t, d, map[string]string{"size": "1Mi", "medium": "memory"})
	must(t, other.publish(t.Context()))
	for _, attributes := range []map[string]string{{"size": "64Mi"}, {"size": "1Mi", "medium": "memory"}} {
		v := newInline(t, d, attributes)
		own := v.target
		v.target = other.target
		wantCode(t, v.publish(t.Context()), codes.AlreadyExists, "something other than inline volume")
		wantCode(t, v.unpublish(t.Context()), codes.FailedPrecondition, "it stays mounted")
		v.target = own
		must(t, v.publish(t.Context()))
		v.target = other.target
		wantCode(t, v.unpublish(t.Context()), codes.FailedPrecondition, "it stays mounted")
		v.target = own
		if len(v.mounts(t)) != 1 {
			t.Errorf("%v: got mounts %v at the volume's own target, want one", attributes, v.mounts(t))
		}
	}
	if len(other.mounts(t)) != 1 {
		t.Errorf("got mounts %v at the target of the other volume, want one", other.mounts(t))
	}

	// A volume that is mounted at its own target is not removed by a call with another target.
	v := newInline(t, d, map[string]string{"size": "64Mi"})
	must(t, v.publish(t.Context()))
	own := v.target
	v.target += "-other"
	wantCode(t, v.unpublish(t.Context()), codes.FailedPrecondition, "still mounted at "+own)
	v.target = own
}

// TestInlineMissing: unpublishing a volume that does not exist succeeds.
func TestInlineMissing(t *testing.T) {
	d := inlineDriver(t)
	v := newInline(t, d, nil)
	must(t, v.unpublish(t.Context()))
	must(t, os.Mkdir(v.target, 0o750))
	must(t, v.unpublish(t.Context()))
	wantMissing(t, v.target)
	_, err := v.stats(t.Context())
	wantCode(t, err, codes.NotFound)
}

// TestInlineBusy: a volume with an open file can be unpublished only after the file is closed.
func TestInlineBusy(t *testing.T) {
	d := inlineDriver(t)
	for _, attributes := range []map[string]string{{"size": "64Mi"}, {"size": "1Mi", "medium": "memory"}} {
		v := newInline(t, d, attributes)
		must(t, v.publish(t.Context()))
		f, err := os.Create(v.file())
		must(t, err)
		wantCode(t, v.unpublish(t.Context()), codes.FailedPrecondition, "some process uses it")
		must(t, f.Close())
		must(t, v.unpublish(t.Context()))
	}
}

// TestInlineClosedPool: a pool that is not open does not affect inline volumes in other pools or in memory.
func TestInlineClosedPool(t *testing.T) {
	disk := t.TempDir()
	mounted := false
	t.Cleanup(func() {
		if mounted {
			testenv.Run(t, "umount", disk)
		}
	})
	d := inlineDriver(t, func(o *driver.Options) {
		o.Config.Pools = append(o.Config.Pools, pool.Config{Name: "away", RequireMount: true, Ephemeral: true, Directory: pool.Directory{Path: disk}})
	})
	for _, attributes := range []map[string]string{{"size": "64Mi"}, {"size": "1Mi", "medium": "memory"}} {
		v := newInline(t, d, attributes)
		must(t, v.publish(t.Context()))
		must(t, v.publish(t.Context()))
		must(t, v.unpublish(t.Context()))
		must(t, os.Mkdir(v.target, 0o750))
		must(t, v.unpublish(t.Context())) // the kubelet repeats a call whose response it lost
		wantMissing(t, v.target)
	}
	v := newInline(t, d, map[string]string{"size": "64Mi", "pool": "away"})
	wantCode(t, v.publish(t.Context()), codes.Unavailable, "requireMount")
	must(t, v.unpublish(t.Context()))
	testenv.Run(t, "mount", "-t", "tmpfs", "none", disk)
	mounted = true
	await(t, "the pool to be opened", func() bool { return v.publish(t.Context()) == nil })
	must(t, v.unpublish(t.Context()))
}

// TestInlineLeftInClosedPool: a volume that is unpublished while its pool is not open is removed when the pool
// is opened.
func TestInlineLeftInClosedPool(t *testing.T) {
	d := inlineDriver(t, func(o *driver.Options) {
		o.Config.Pools[1].Directory.Path = testenv.Filesystem(t, "xfs", "1G")
		o.Config.Pools[1].RequireMount = true
	})
	disk := inlinePool(d)
	device := testenv.Run(t, "findmnt", "-n", "-o", "SOURCE", disk)
	removed := newInline(t, d, map[string]string{"size": "64Mi"})
	must(t, removed.publish(t.Context()))
	d.Stop(t) // the state after a restart of the node without the disk
	testenv.Run(t, "umount", removed.target)
	hidden := t.TempDir()
	testenv.Run(t, "mount", device, hidden)
	testenv.Run(t, "umount", disk)
	away := true
	back := func() {
		if away {
			testenv.Run(t, "mount", device, disk)
			testenv.Run(t, "umount", hidden)
		}
		away = false
	}
	t.Cleanup(back)
	d.Restart(t)
	must(t, removed.unpublish(t.Context()))
	_, err := os.Stat(filepath.Join(hidden, "volumes", removed.id))
	must(t, err)
	back()
	await(t, "removal of the volume", func() bool {
		_, err := os.Stat(filepath.Join(disk, "volumes", removed.id))
		return os.IsNotExist(err)
	})
}

// TestInlinePods: pods that start concurrently have separate volumes.
func TestInlinePods(t *testing.T) {
	d := inlineDriver(t)
	const pods, rounds = 8, 3
	var volumes []*inlineVolume
	for i := range pods {
		attributes := map[string]string{"size": "32Mi"}
		if i%4 == 3 {
			attributes["medium"], attributes["size"] = "memory", "1Mi"
		}
		volumes = append(volumes, newInline(t, d, attributes))
	}
	var all sync.WaitGroup
	for _, v := range volumes {
		all.Go(func() {
			for range rounds {
				if err := v.useOnce(t.Context()); err != nil {
					t.Errorf("%s: %v", v.id, err)
				}
			}
		})
	}
	all.Wait()
}

// useOnce publishes the volume, creates a file in it and unpublishes it. It fails if the file exists.
func (v *inlineVolume) useOnce(ctx context.Context) error {
	if err := v.publish(ctx); err != nil {
		return err
	}
	syscall.ForkLock.RLock() // a file that a started process inherits keeps the mount busy
	f, err := os.OpenFile(v.file(), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err == nil {
		_, err = f.WriteString(v.id)
		err = errors.Join(err, f.Close())
	}
	syscall.ForkLock.RUnlock()
	return errors.Join(err, v.unpublish(ctx))
}

// TestInlineReconfigured: existing volumes remain usable after a change of the configuration.
func TestInlineReconfigured(t *testing.T) {
	d := inlineDriver(t)
	v, m := newInline(t, d, map[string]string{"size": "64Mi"}), newInline(t, d, map[string]string{"size": "8Mi", "medium": "memory"})
	must(t, v.publish(t.Context()))
	must(t, m.publish(t.Context()))
	for name, change := range map[string]func(c *driver.Config){
		"another pool first": func(c *driver.Config) {
			first := pool.Config{Name: "first", Ephemeral: true, Directory: pool.Directory{Path: filepath.Join(filepath.Dir(inlinePool(d)), "first")}}
			c.Pools = append([]pool.Config{first}, c.Pools...)
		},
		"inline volumes disabled for the pool": func(c *driver.Config) { c.Pools[1].Ephemeral = false },
		"less memory":                          func(c *driver.Config) { c.EphemeralMemory = "4Mi" },
		"no memory":                            func(c *driver.Config) { c.EphemeralMemory = "" },
	} {
		t.Run(name, func(t *testing.T) {
			before := d.Options.Config
			d.Stop(t)
			d.Options.Config.Pools = slices.Clone(before.Pools)
			change(&d.Options.Config)
			d.Restart(t)
			must(t, v.publish(t.Context()))
			must(t, m.publish(t.Context()))
			for _, v := range []*inlineVolume{v, m} {
				if len(v.mounts(t)) != 1 {
					t.Errorf("%v: got mounts %v, want one", v.attributes, v.mounts(t))
				}
			}
			d.Stop(t)
			d.Options.Config = before
			d.Restart(t)
		})
	}
	v.attributes = map[string]string{"size": "64Mi", "pool": "other"}
	wantCode(t, v.publish(t.Context()), codes.AlreadyExists, `volume_context.pool="other"`)
}

// TestInlineDamaged: a volume whose record is unreadable can be unpublished, so that its pod terminates. The data
// stays for an administrator.
func TestInlineDamaged(t *testing.T) {
	d := inlineDriver(t)
	v := newInline(t, d, map[string]string{"size": "64Mi"})
	must(t, v.publish(t.Context()))
	record := filepath.Join(inlinePool(d), "volumes", v.id, "volume.json")
	good, err := os.ReadFile(record)
	must(t, err)
	must(t, os.WriteFile(record, []byte("{"), 0o600))
	d.Restart(t)
	wantCode(t, v.publish(t.Context()), codes.DataLoss, "record")
	for range 2 {
		must(t, v.unpublish(t.Context()))
	}
	wantMissing(t, v.target)
	_, err = os.Stat(filepath.Join(filepath.Dir(record), "image"))
	must(t, err)
	must(t, os.WriteFile(record, good, 0o600))
}

// TestInlineHealth: NodeGetVolumeHealth reports a published inline volume, and fails for an unpublished one.
func TestInlineHealth(t *testing.T) {
	d := inlineDriver(t)
	for _, attributes := range []map[string]string{{"size": "64Mi"}, {"size": "1Mi", "medium": "memory"}} {
		v := newInline(t, d, attributes)
		must(t, v.publish(t.Context()))
		req := &csi.NodeGetVolumeHealthRequest{VolumeId: v.id, VolumePublishPath: v.target}
		h, err := d.Node.NodeGetVolumeHealth(t.Context(), req)
		if err != nil || h.GetVolumeHealth().GetVolumeId() != v.id || len(h.GetVolumeHealth().GetHealthStatuses()) > 0 {
			t.Errorf("%v: got %v, error %v, want health of %s without a problem", attributes, h, err, v.id)
		}
		must(t, v.unpublish(t.Context()))
		_, err = d.Node.NodeGetVolumeHealth(t.Context(), req)
		wantCode(t, err, codes.NotFound)
	}
}
