package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/trivet-csi/trivet/backend/backendtest/targets"
	"github.com/trivet-csi/trivet/linux/luks"
	"github.com/trivet-csi/trivet/test/markdown"
	"github.com/trivet-csi/trivet/test/measure"
	"github.com/trivet-csi/trivet/volume"
)

// The volume groups of the driver and of the floors, and the name of the thin pool in each.
const (
	driverGroup = "bench-driver"
	floorGroup  = "bench-floor"
	thinPool    = "thin"
)

// floorPrograms is the name of the floor that also starts programs that the driver does not start.
const floorPrograms = "floor-programs"

// onGroups runs a measurement with a new volume group on each of two disks. The testbed is a filesystem in the group of
// the floors, because the driver also has its records in its group.
func onGroups(ctx context.Context, disks []string, run func(*measure.Testbed)) (err error) {
	if len(disks) != 2 {
		return errors.New("--groups: expected the paths of two unused disks, separated by a comma")
	}
	for i, group := range []string{driverGroup, floorGroup} {
		if err := measure.Command(ctx, "lvm", "vgcreate", "--metadatasize", "64m", group, disks[i]); err != nil {
			return err
		}
		defer func() {
			ctx := context.WithoutCancel(ctx)
			err = errors.Join(err, measure.Command(ctx, "lvm", "vgremove", "--force", "--yes", group), measure.Command(ctx, "lvm", "pvremove", disks[i]))
		}()
		if err := measure.Command(ctx, "lvm", "lvcreate", "--type", "thin-pool", "--extents", "25%FREE", "--name", thinPool, group); err != nil {
			return err
		}
	}
	files := "/dev/" + floorGroup + "/files"
	if err := measure.Command(ctx, "lvm", "lvcreate", "--yes", "--size", "512m", "--name", filepath.Base(files), floorGroup); err != nil {
		return err
	}
	if err := measure.Command(ctx, "mkfs.ext4", "-q", files); err != nil {
		return err
	}
	return measure.OnDevice(ctx, files, run)
}

// groupKind is a kind of logical volumes with ext4 that is measured.
type groupKind struct {
	title  string
	target string // of package targets
	calls  []call
}

var (
	removeRestored = call{"delete restored", func(ctx context.Context, c *client, v *vol) error { return deleteVolume(ctx, c, v.restored) }}
	stageAgain     = call{"stage again", stageVolume}
	unstageAgain   = call{"unstage again", unstageVolume}
)

// The kinds of logical volumes that are measured.
var (
	thickKind = groupKind{"Thick logical volumes", "group", life}
	thinKind  = groupKind{"Thin logical volumes", "thin", []call{
		create, controllerPublish, stage, publish, stats,
		{snapshot.name, snapshotVolume},
		{restore.name, restoreVolume},
		removeRestored,
		{dropSnapshot.name, dropSnapshotOfVolume},
		unpublish, unstage, controllerUnpublish, remove,
	}}
	encryptedKind = groupKind{"Encrypted thick logical volumes", "group-encrypted", []call{
		create, controllerPublish, stage, unstage, stageAgain, unstageAgain, controllerUnpublish, remove,
	}}
)

// snapshotVolume makes a snapshot of a volume.
func snapshotVolume(ctx context.Context, c *client, v *vol) error {
	v.snapshot = &vol{name: v.name + "-copy", source: v.id}
	return createSnapshot(ctx, c, v.snapshot)
}

// restoreVolume creates a volume from the snapshot of a volume.
func restoreVolume(ctx context.Context, c *client, v *vol) error {
	v.restored = &vol{name: v.name + "-restored", class: v.class, content: contentOfSnapshot(v.snapshot.id)}
	return createVolume(ctx, c, v.restored)
}

func dropSnapshotOfVolume(ctx context.Context, c *client, v *vol) error {
	return deleteSnapshot(ctx, c, v.snapshot)
}

func (k groupKind) thin() bool      { return k.target == "thin" }
func (k groupKind) encrypted() bool { return k.target == "group-encrypted" }

// startDriver starts the driver with a pool in its group. A later start finds the pool of the first one.
func (k groupKind) startDriver(ctx context.Context, g *testbed, o options) *contender {
	pool := "volumeGroup: " + driverGroup
	if k.thin() {
		pool += ", thinPool: " + thinPool
	}
	of := classOf(targets.Volume(k.target, "ext4"), manySize)
	if k.encrypted() {
		of.secrets = map[string]string{volume.SecretPassphrase: "a passphrase of the benchmark"}
	}
	s := g.launchTrivetWith(o.binary, trivet, "lvm: {"+pool+"}")
	return &contender{server: s, clients: s.connect(ctx, manyCallers), class: of, calls: k.calls, trash: filepath.Join(g.state(trivet), "lvm", poolName, ".trivet/trash")}
}

// floors returns the floors of the kind.
func (k groupKind) floors() (kinds []floorKind) {
	flags := []string{"--group", floorGroup}
	if k.thin() {
		flags = append(flags, "--thin-pool", thinPool)
	}
	if k.encrypted() {
		flags = append(flags, "--encrypted")
	}
	for _, kind := range []floorKind{{name: floorName}, {floorDurable, []string{"--durable"}, nil}, {floorPrograms, []string{"--programs"}, nil}} {
		kinds = append(kinds, floorKind{kind.name, slices.Concat(flags, kind.flags, []string{"--prefix", kind.name + "."}), k.calls})
	}
	return kinds
}

// groupResult contains the times of the calls for a kind of logical volumes.
type groupResult struct {
	*lifeResult
	kind groupKind
	// programs contains the programs that the driver starts, by the name of the call.
	programs map[string]string
}

// measureGroup measures the calls for a kind of logical volumes beside the floors.
func measureGroup(ctx context.Context, g *testbed, o options, k groupKind) *groupResult {
	r := &groupResult{&lifeResult{samples: samples{}, calls: k.calls, callers: []int{1}, volumes: o.volumes, passes: 2 * o.rounds}, k, countPrograms(ctx, g, o, k)}
	driver := k.startDriver(ctx, g, o)
	contenders := append(startFloors(ctx, g, driver.class, k.floors()), driver)
	r.measure(ctx, g, contenders)
	stopAll(contenders)
	return r
}

// countPrograms returns the programs that the driver starts for each call for one volume, with what it does in the
// background after the answer. The driver finds scripts instead of the programs, which record their starts.
func countPrograms(ctx context.Context, g *testbed, o options, k groupKind) map[string]string {
	dir, path := g.directory("programs"), os.Getenv("PATH")
	log := filepath.Join(dir, "log")
	programs := []string{"lvm", luks.Program, "mkfs.ext4"}
	for _, name := range programs {
		script := fmt.Sprintf("#!/bin/sh\necho %s >>%s\nexec %s \"$@\"\n", name, log, measure.Get(exec.LookPath(name)))
		measure.Must(os.WriteFile(filepath.Join(dir, name), []byte(script), 0o700))
	}
	measure.Must(os.Setenv("PATH", dir+":"+path))
	driver := k.startDriver(ctx, g, o)
	measure.Must(os.Setenv("PATH", path))
	started, vols := map[string]string{}, newVolumes(g.kubelet(trivet), "count", 1, driver.class)
	for _, one := range k.calls {
		measure.Must(os.WriteFile(log, nil, 0o600))
		forAll(ctx, driver.clients[:1], one, vols)
		driver.quiet(ctx)
		lines := string(measure.Get(os.ReadFile(log)))
		var counts []string
		for _, name := range programs {
			if n := strings.Count(lines, name+"\n"); n > 0 {
				counts = append(counts, fmt.Sprintf("%d %s", n, name))
			}
		}
		started[one.name] = strings.Join(counts, ", ")
	}
	removeStaging(vols)
	driver.stop()
	return started
}

// String compares the calls with the floors.
func (r *groupResult) String() string {
	t := markdown.Table{{"call", "p50", "p99", "floor p50", "p99", "p50 ratio", "floor + fsyncs p50", "p50 ratio", "floor + programs p50", "p50 ratio", "programs"}}
	for _, one := range r.calls {
		own := r.samples.of(trivet, one.name, 1)
		row := append([]string{one.name}, own.milliCells()...)
		for _, name := range []string{floorName, floorDurable, floorPrograms} {
			floor := r.samples.of(name, one.name, 1)
			cells := floor.milliCells()
			if name != floorName {
				cells = cells[:1]
			}
			row = slices.Concat(row, cells, []string{times(own.slower(floor))})
		}
		t.Row(append(row, r.programs[one.name])...)
	}
	return fmt.Sprintf("### %s\n\n%d volumes of %s ext4, %d passes, servers in turns; times in ms.\n", r.kind.title, r.volumes, mebibytes(manySize), r.passes) +
		"\"floor\" starts each command of lvm(8), mkfs.ext4 and cryptsetup(8) only once; \"floor + fsyncs\" also writes records, and removes the tag of unused volumes in stage; \"floor + programs\" also starts mount(8), umount(8) and cryptsetup close. " +
		"\"programs\" are those of the driver, also after the answer.\n\n" + t.Text(true) + "\n" + r.goals()
}

// milliCells returns p50 and p99 in ms.
func (s *sample) milliCells() []string {
	ms := func(percentile int) string { return fmt.Sprintf("%.1f", float64(s.At(percentile))/1e6) }
	return []string{ms(50), ms(99)}
}

// goals returns a table of the goals and the results.
func (r *groupResult) goals() string {
	t := markdown.Table{{"goal", "result"}}
	var with []string
	for _, one := range r.calls {
		switch one.name {
		case controllerPublish.name, publish.name, stats.name, unpublish.name, controllerUnpublish.name:
			if r.programs[one.name] != "" {
				with = append(with, one.name)
			}
		case remove.name, removeRestored.name, dropSnapshot.name: // in the background
		default:
			t.Row(one.name+": at most 1.3 × the floor + fsyncs", times(r.samples.of(trivet, one.name, 1).slower(r.samples.of(floorDurable, one.name, 1)))+" ×")
		}
	}
	t.Row("no process in controller-publish, publish, stats, unpublish, controller-unpublish", cmp.Or(strings.Join(with, ", "), "none"))
	return t.Text(false)
}
