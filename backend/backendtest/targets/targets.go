// Package targets lists every kind of volume that is tested: each backend on each medium. The conformance tests,
// csi-sanity, the crash tests, verification and benchmarks use this list.
package targets

import (
	"fmt"
	"slices"
	"testing"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/backend/disk"
	"github.com/trivet-csi/trivet/backend/local"
	"github.com/trivet-csi/trivet/backend/loop"
	"github.com/trivet-csi/trivet/backend/lvm"
	"github.com/trivet-csi/trivet/backend/nfs"
	"github.com/trivet-csi/trivet/driver"
	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/internal/testenv/nfsd"
	"github.com/trivet-csi/trivet/linux/luks"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/test/sixthkind"
	"github.com/trivet-csi/trivet/volume"
)

// Backends are the backends of All, in that order. The drivers of most tests serve all of them.
var Backends backend.Kinds

func init() { // an initializer of Backends would be an initialization cycle
	for _, target := range All {
		if !slices.Contains(Backends.Names(), target.Backend.Name) {
			Backends = append(Backends, target.Backend)
		}
	}
}

// Features of the volumes of each backend, whatever the medium.
const (
	common      = backendtest.Expand | backendtest.Clones
	images      = common | backendtest.Image | backendtest.Divisible | backendtest.Snapshots | backendtest.ChangedBlocks
	directories = common | backendtest.Placed | backendtest.Divisible | backendtest.Snapshots
	disks       = common | backendtest.WholeDisk | backendtest.NodeLocal
	logical     = backendtest.Expand | backendtest.Logical | backendtest.Inline | backendtest.Divisible | backendtest.NodeLocal
)

// slowGroups is the reason to exclude a row.
const slowGroups = "lvm(8) takes too long in the virtual machine to create some hundred logical volumes"

// All are the targets. The backend of the first is the default of a class without a backend.
var All = []backendtest.Target{
	// The filesystem of an image does not depend on that of its pool, so only one pool has images with each of them.
	localImages("xfs", backendtest.LiveCopies, "ext4", "xfs", "btrfs"),
	localImages("ext4", backendtest.FullCopies, "ext4"),
	localImages("btrfs", backendtest.LiveCopies, "ext4"),
	{
		Name: "images-encrypted", Guest: true, Backend: loop.Kind, Pool: backendtest.DefaultPool, Class: encryptedClass("", backendtest.DefaultPool),
		Features: common | backendtest.Encrypted | backendtest.Divisible | backendtest.NodeLocal | backendtest.Snapshots | backendtest.LiveCopies | backendtest.ChangedBlocks,
		Kinds:    backendtest.Devices("ext4", "xfs"), Medium: backendtest.OnFilesystem(backendtest.Formatted("xfs")),
		Advertised: backendtest.Inline, // inline volumes are not encrypted
	},
	{
		Name: "images-nfs", Guest: true, Backend: loop.Kind, Pool: backendtest.SharedPool, Class: class("", backendtest.SharedPool),
		Features: images | backendtest.Shared | backendtest.LiveCopies, Kinds: backendtest.Devices("ext4", "xfs"),
		Prepare: onExports(), Options: serve,
		Advertised: backendtest.Inline, // inline volumes can only be in node-local pools
	},
	{
		Name: "images-nfs-encrypted", Guest: true, Backend: loop.Kind, Pool: backendtest.SharedPool, Class: encryptedClass("", backendtest.SharedPool),
		Features: common | backendtest.Encrypted | backendtest.Divisible | backendtest.Shared | backendtest.Snapshots | backendtest.LiveCopies | backendtest.ChangedBlocks,
		Kinds:    backendtest.Devices("ext4"), Prepare: onExports(), Options: serve,
		Advertised: backendtest.Inline,
	},
	{
		Name: "nfs", Guest: true, Backend: nfs.Kind, Pool: backendtest.SharedPool, Class: class(nfs.Name, backendtest.SharedPool),
		Features: directories | backendtest.Shared | backendtest.Static, Kinds: backendtest.Directories(),
		Prepare: onExports("noatime"), Options: serve, // otherwise reading a file would change it on the server
		Except: map[string]string{
			"ControllerArguments": "an ID that the driver did not create may be the handle of a static volume",
			"NodeArguments":       "an ID that the driver did not create may be the handle of a static volume",
		},
	},
	localDirectories("unlimited", 0, backendtest.Formatted("ext4"), nil),
	localDirectories("btrfs", backendtest.Subvolumes|backendtest.LiveCopies, testenv.SimpleQuotas, &backendtest.Limits{
		Off: func(tb testing.TB, path string) { tb.Helper(); testenv.SwitchQuotas(tb, path, false) },
		On:  func(tb testing.TB, path string) { tb.Helper(); testenv.SwitchQuotas(tb, path, true) },
	}),
	projectDirectories("xfs", false),
	projectDirectories("ext4", true),
	loopDisks(),
	{
		Name: "sixth", Backend: sixthkind.Kind, Pool: backendtest.DefaultPool, Class: class(sixthkind.Name, backendtest.DefaultPool),
		Features: backendtest.NodeLocal | backendtest.Divisible | backendtest.Expand, Kinds: backendtest.Directories(),
		Medium: backendtest.OnFilesystem(backendtest.Formatted("xfs")), Options: serve,
	},
	realDisks("nvme", "/dev/nvme[0-2]n1"),
	realDisks("scsi", "/dev/sd?"),
	realDisks("virtio", "/dev/vd[b-z]"),
	encryptedDisks(loopDisks()),
	encryptedDisks(realDisks("scsi", "/dev/sd?")),
	{
		Name: "group", Guest: true, Backend: lvm.Kind, Pool: backendtest.GroupPool, Class: class(lvm.Name, backendtest.GroupPool),
		Features: logical, Kinds: backendtest.Devices("ext4", "xfs", "btrfs"), Medium: backendtest.OnGroup, Options: serve,
		Advertised: backendtest.Snapshots, // only volumes in thin pools have snapshots
		Except: map[string]string{
			"Paging":        slowGroups,
			"PromisedSpace": "the pool has no size; row GroupRoom fills the volume group",
		},
	},
	encryptedIn("group", backendtest.OnGroup, 0, backendtest.Snapshots, map[string]string{
		"Paging":           slowGroups,
		"PromisedSpace":    "the pool has no size; row GroupRoom fills the volume group",
		"ForeignData":      "an encrypted volume does not show its extents",
		"ZeroingCancelled": "the extents of an encrypted volume are not zeroed",
	}),
	encryptedIn("thin", backendtest.OnThinPool, backendtest.Thin|backendtest.Clones|backendtest.Snapshots|backendtest.LiveCopies, 0, map[string]string{"Paging": slowGroups}),
	{
		Name: "thin", Guest: true, Backend: lvm.Kind, Pool: backendtest.GroupPool, Class: class(lvm.Name, backendtest.GroupPool),
		Features: logical | backendtest.Thin | backendtest.Clones | backendtest.Snapshots | backendtest.LiveCopies,
		Kinds:    backendtest.Devices("ext4", "xfs", "btrfs"), Medium: backendtest.OnThinPool, Options: serve,
		Except: map[string]string{"Paging": slowGroups},
	},
}

// encryptedIn returns the target of encrypted logical volumes on a medium.
func encryptedIn(name string, medium func(testing.TB, backendtest.Room) backendtest.Medium, features, advertised backendtest.Feature, except map[string]string) backendtest.Target {
	for _, row := range []string{"TakenOver", "TakeoverRefused", "TakeoverInterrupted"} {
		except[row] = "a volume that takes over a logical volume is not encrypted"
	}
	return backendtest.Target{
		Name: name + "-encrypted", Guest: true, Backend: lvm.Kind, Pool: backendtest.GroupPool, Class: encryptedClass(lvm.Name, backendtest.GroupPool),
		Features: backendtest.Expand | backendtest.Logical | backendtest.Encrypted | backendtest.Divisible | backendtest.NodeLocal | features,
		Kinds:    backendtest.Devices("ext4"), Medium: medium, Options: serve,
		Advertised: backendtest.Inline | advertised, // inline volumes are not encrypted
		Except:     except,
	}
}

// loopDisks returns the target of disks that are loop devices.
func loopDisks() backendtest.Target {
	return backendtest.Target{
		Name: "disks", Backend: disk.Kind, Pool: backendtest.DiskPool, Class: class(disk.Name, backendtest.DiskPool),
		Features: disks, Kinds: backendtest.Devices("ext4", "xfs", "btrfs"), Medium: backendtest.OnDisks(backendtest.LoopDisks),
		Growing: backendtest.GrowingLoop, Plug: testenv.PlugIn, Options: serve,
	}
}

// encryptedDisks returns the target of encrypted volumes on the disks of another target.
func encryptedDisks(target backendtest.Target) backendtest.Target {
	target.Name, target.Guest, target.Class = target.Name+"-encrypted", true, encryptedClass(disk.Name, backendtest.DiskPool)
	target.Features |= backendtest.Encrypted
	target.Kinds = backendtest.Devices("ext4", "xfs")
	medium := target.Medium
	target.Medium = func(tb testing.TB, room backendtest.Room) backendtest.Medium {
		tb.Helper()
		room.Each += luks.DataOffset
		return medium(tb, room)
	}
	return target
}

// localImages returns the target of images on a filesystem of the node. copies is LiveCopies if files on the
// filesystem can share blocks, and otherwise FullCopies. With FullCopies a raw device in use cannot be copied,
// and other volumes are frozen during a copy.
func localImages(fsType string, copies backendtest.Feature, contents ...string) backendtest.Target {
	kinds := backendtest.Devices(contents...)
	for i, k := range kinds {
		kinds[i].Features |= backendtest.LiveCopies
		if k.Block() {
			kinds[i].Features = k.Features | copies
		}
	}
	return backendtest.Target{
		Name: "images-" + fsType, Variant: fsType == "btrfs", Backend: loop.Kind, Pool: backendtest.DefaultPool,
		Features: images | backendtest.NodeLocal | backendtest.Inline | copies&backendtest.FullCopies, Kinds: kinds,
		Medium: backendtest.OnFilesystem(backendtest.Formatted(fsType)),
	}
}

// localDirectories returns the target of directories on a filesystem of the node.
func localDirectories(name string, features backendtest.Feature, filesystem func(testing.TB, string) string, limits *backendtest.Limits) backendtest.Target {
	return backendtest.Target{
		Name: "directories-" + name, Backend: local.Kind, Pool: backendtest.DefaultPool, Class: class(local.Name, backendtest.DefaultPool),
		Features: directories | backendtest.NodeLocal | features, Kinds: backendtest.Directories(),
		Medium: backendtest.OnFilesystem(filesystem), Limits: limits, Options: serve,
	}
}

// projectDirectories returns the target of directories with project quotas.
func projectDirectories(fsType string, rootExempt bool) backendtest.Target {
	target := localDirectories(fsType, 0, func(tb testing.TB, size string) string { tb.Helper(); return testenv.ProjectQuotas(tb, fsType, size) }, &backendtest.Limits{
		RootExempt: rootExempt, Remounts: true,
		Off: func(tb testing.TB, path string) { tb.Helper(); testenv.SwitchProjects(tb, path, false) },
		On:  func(tb testing.TB, path string) { tb.Helper(); testenv.SwitchProjects(tb, path, true) },
	})
	target.Guest = true
	return target
}

// onExports returns a Target.Prepare that starts an NFS server. Each medium is a new export of the server.
func onExports(mountOptions ...string) func(testing.TB, *backendtest.Target) {
	return func(tb testing.TB, target *backendtest.Target) {
		tb.Helper()
		target.Medium = OnServer(nfsd.Start(tb, nfsd.Options{MountOptions: mountOptions}), target.Name)
	}
}

// OnServer returns a Target.Medium that creates exports of a server. The pools have the mount options.
func OnServer(server *nfsd.Server, name string, options ...string) func(testing.TB, backendtest.Room) backendtest.Medium {
	exports := 0
	return func(tb testing.TB, _ backendtest.Room) backendtest.Medium {
		tb.Helper()
		exports++
		path := server.Export(tb, fmt.Sprintf("%s-%d", name, exports))
		return backendtest.Medium{
			Config: pool.Config{NFS: &pool.NFS{Server: server.Address(), Export: path, MountOptions: options, Init: true}}, Dir: server.Dir(path),
		}
	}
}

// On returns the kinds of volume that a pool of a kind can contain and that have some features. It uses the first
// such target of each backend.
func On(poolKind pool.Kind, needs backendtest.Feature) (kinds []backendtest.Kind) {
	byKind := map[pool.Kind]backendtest.Feature{pool.KindDirectory: backendtest.NodeLocal | backendtest.Divisible, pool.KindExport: backendtest.Shared, disk.Kind.Media[0]: backendtest.WholeDisk}
	for _, b := range Backends {
		i := slices.IndexFunc(All, func(target backendtest.Target) bool {
			return target.Backend.Name == b.Name && slices.Contains(target.Backend.Media, poolKind) && target.Features.Has(byKind[poolKind]|needs)
		})
		if i >= 0 {
			kinds = append(kinds, All[i].Volumes()...)
		}
	}
	return kinds
}

// serve makes a driver serve all kinds, as the program does, because the parameters of all kinds determine how a
// class is parsed.
func serve(o *driver.Options) { o.Kinds, o.Worker = Backends, backendtest.Worker() }

// ByName returns a target of All.
func ByName(tb testing.TB, name string) backendtest.Target {
	tb.Helper()
	i := slices.IndexFunc(All, func(target backendtest.Target) bool { return target.Name == name })
	if i < 0 {
		tb.Fatalf("there is no target %q", name)
	}
	return All[i]
}

// Volume returns the kind of volume with a name (Kind.Name) of a target. Both must exist.
func Volume(target, name string) backendtest.Kind {
	i := slices.IndexFunc(All, func(t backendtest.Target) bool { return t.Name == target })
	all := All[i].Volumes()
	return all[slices.IndexFunc(all, func(k backendtest.Kind) bool { return k.Name() == name })]
}

// Run runs the conformance tests of targets.
func Run(t *testing.T, names ...string) {
	t.Helper()
	for _, name := range names {
		t.Run(name, func(t *testing.T) { backendtest.Run(t, ByName(t, name)) })
	}
}

// class returns the parameters of a class for a backend and a pool. It omits the defaults.
func class(backend, name string) map[string]string {
	c := map[string]string{}
	if backend != "" {
		c[volume.ParamBackend] = backend
	}
	if name != backendtest.DefaultPool {
		c[volume.ParamPool] = name
	}
	return c
}

// encryptedClass returns the parameters of a class for encrypted volumes; see class.
func encryptedClass(backend, name string) map[string]string {
	c := class(backend, name)
	c[volume.ParamEncryption] = volume.EncryptionLUKS2
	return c
}
