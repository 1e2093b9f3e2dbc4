// Package targets lists every kind of volume that the tests cover: each backend on each
// medium. Conformance, csi-sanity, crash tests, verification and benchmarks read this list,
// so a new kind is one entry here.
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
	"github.com/trivet-csi/trivet/backend/nfs"
	"github.com/trivet-csi/trivet/driver"
	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/internal/testenv/nfsd"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/test/sixthkind"
	"github.com/trivet-csi/trivet/volume"
)

// Backends are the kinds of All, in that order. Every driver of the tests serves them.
var Backends backend.Kinds

func init() { // in a declaration, Backends and All would depend on each other
	for _, target := range All {
		if !slices.Contains(Backends.Names(), target.Backend.Name) {
			Backends = append(Backends, target.Backend)
		}
	}
}

// Powers of the volumes of a backend on every medium.
const (
	common      = backendtest.Expand | backendtest.Clones
	images      = common | backendtest.Image | backendtest.Divisible | backendtest.Snapshots | backendtest.ChangedBlocks
	directories = common | backendtest.Placed | backendtest.Divisible | backendtest.Snapshots
	disks       = common | backendtest.WholeDisk | backendtest.NodeLocal
)

// All are the targets. Those with Guest need the kernel of a virtual machine of test/vm. The first
// backend is the default of classes.
var All = []backendtest.Target{
	localImages("xfs", backendtest.LiveCopies),
	localImages("ext4", backendtest.FullCopies),
	localImages("btrfs", backendtest.LiveCopies),
	{
		Name: "images-nfs", Guest: true, Backend: loop.Kind, Pool: backendtest.SharedPool, Class: class("", backendtest.SharedPool),
		Powers: images | backendtest.Shared | backendtest.LiveCopies, Kinds: backendtest.Devices("ext4", "xfs"),
		Prepare: onExports(), Options: serve,
		Advertised: backendtest.Inline, // inline volumes are in pools of the node
	},
	{
		Name: "nfs", Guest: true, Backend: nfs.Kind, Pool: backendtest.SharedPool, Class: class(nfs.Name, backendtest.SharedPool),
		Powers: directories | backendtest.Shared | backendtest.Static, Kinds: backendtest.Directories(),
		Prepare: onExports("noatime"), Options: serve, // the server would change files that are only read
		Except: map[string]string{
			"ControllerArguments": "an ID of another form may be the handle of a static volume",
			"NodeArguments":       "an ID of another form may be the handle of a static volume",
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
		Powers: backendtest.NodeLocal | backendtest.Divisible | backendtest.Expand, Kinds: backendtest.Directories(),
		Medium: backendtest.OnFilesystem(backendtest.Formatted("xfs")), Options: serve,
	},
	realDisks("nvme", "/dev/nvme[0-2]n1"),
	realDisks("scsi", "/dev/sd?"),
	realDisks("virtio", "/dev/vd[b-z]"),
}

// loopDisks are disks of files.
func loopDisks() backendtest.Target {
	return backendtest.Target{
		Name: "disks", Backend: disk.Kind, Pool: backendtest.DiskPool, Class: class(disk.Name, backendtest.DiskPool),
		Powers: disks, Kinds: backendtest.Devices("ext4", "xfs", "btrfs"), Medium: backendtest.OnDisks(backendtest.LoopDisks),
		Growing: backendtest.GrowingLoop, Plug: testenv.PlugIn, Options: serve,
	}
}

// localImages are images on a filesystem of the node. Copies of a raw device that is in use
// need a filesystem that shares blocks; filesystems are frozen where a copy takes time.
func localImages(fsType string, copies backendtest.Power) backendtest.Target {
	kinds := backendtest.Devices("ext4", "xfs", "btrfs")
	for i, k := range kinds {
		kinds[i].Powers |= backendtest.LiveCopies
		if k.Block() {
			kinds[i].Powers = k.Powers | copies
		}
	}
	return backendtest.Target{
		Name: "images-" + fsType, Backend: loop.Kind, Pool: backendtest.DefaultPool,
		Powers: images | backendtest.NodeLocal | backendtest.Inline | copies&backendtest.FullCopies, Kinds: kinds,
		Medium: backendtest.OnFilesystem(backendtest.Formatted(fsType)),
	}
}

func localDirectories(name string, powers backendtest.Power, filesystem func(testing.TB, string) string, limits *backendtest.Limits) backendtest.Target {
	return backendtest.Target{
		Name: "directories-" + name, Backend: local.Kind, Pool: backendtest.DefaultPool, Class: class(local.Name, backendtest.DefaultPool),
		Powers: directories | backendtest.NodeLocal | powers, Kinds: backendtest.Directories(),
		Medium: backendtest.OnFilesystem(filesystem), Limits: limits, Options: serve,
	}
}

func projectDirectories(fsType string, rootExempt bool) backendtest.Target {
	target := localDirectories(fsType, 0, func(tb testing.TB, size string) string { tb.Helper(); return testenv.ProjectQuotas(tb, fsType, size) }, &backendtest.Limits{
		RootExempt: rootExempt, Remounts: true,
		Off: func(tb testing.TB, path string) { tb.Helper(); testenv.SwitchProjects(tb, path, false) },
		On:  func(tb testing.TB, path string) { tb.Helper(); testenv.SwitchProjects(tb, path, true) },
	})
	target.Guest = true
	return target
}

// onExports starts an NFS server. Each medium is a new export of it.
func onExports(mountOptions ...string) func(testing.TB, *backendtest.Target) {
	return func(tb testing.TB, target *backendtest.Target) {
		tb.Helper()
		target.Medium = OnServer(nfsd.Start(tb, nfsd.Options{MountOptions: mountOptions}), target.Name)
	}
}

// OnServer makes media that are exports of a server. Drivers mount them with options.
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

// On returns every kind of volume with some powers that a pool on a medium contains.
func On(medium pool.Kind, needs backendtest.Power) (kinds []backendtest.Kind) {
	powers := map[pool.Kind]backendtest.Power{pool.KindDirectory: backendtest.NodeLocal | backendtest.Divisible, pool.KindExport: backendtest.Shared, disk.Kind.Media[0]: backendtest.WholeDisk}
	for _, b := range Backends {
		i := slices.IndexFunc(All, func(target backendtest.Target) bool {
			return target.Backend.Name == b.Name && target.Powers.Has(powers[medium]|needs)
		})
		if i >= 0 {
			kinds = append(kinds, All[i].Volumes()...)
		}
	}
	return kinds
}

// serve makes a driver serve every kind, as the program does: what a class may contain
// depends on all kinds.
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

// Volume returns the kind of volume of a target that has a name (Kind.Name). Both must exist.
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
